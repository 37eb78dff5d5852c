"""One recipe trained in two or more ways, the verdict on the differences, and failing recipes made smaller."""

import dataclasses
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.distributed as dist
from beside import gathered
from fuzz.recipe import HAVE_BUFFERS, Recipe, smaller
from fuzz.training import MeanOfRanks, MeanOfRanksWithCopies, Observation, Training
from rank_pool import RankFailure, RankPool
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import DDPCompileError, ddp_compile

Wrap = Callable[[nn.Module, Recipe, dist.ProcessGroup], Any]
Judge = Callable[[Sequence[Any]], "list[Verdict]"]

GROUP_TIMEOUT_S = 30.0
# Within the time that a `RankPool` gives to a call; ranks of their own for each call take seconds to start.
CASES_IN_A_CALL = 40
# Relative to the largest value of a tensor, and absolute.
TOLERANCES = {"float32": (1e-4, 1e-5), "float64": (1e-9, 1e-10)}

PASSED = "passed"
BOTH_RAISE = "both raise"
GOES_ON = "only DDP raises"
TORCHS_OWN = "torch's own"
REFUSED = "documented refusal"
FAILED = "failed"
# The outcome of a case is that of its worst rank.
OUTCOMES = (PASSED, BOTH_RAISE, GOES_ON, TORCHS_OWN, REFUSED, FAILED)

#: Documented errors of ddp_compile in cases in which DistributedDataParallel continues, by a part of their message.
DOCUMENTED_REFUSALS: dict[str, str] = {
    "the buckets cannot be launched again, because the comm hook": "a hook that changes gradients comes later",
    "the buckets cannot be launched again, because static_graph": "the same, with gradients that have moved",
}


class Verdict(NamedTuple):
    outcome: str  # one of `OUTCOMES`
    detail: str  # the first difference on the worst rank, with that rank

    def symptom(self) -> tuple[str, ...]:
        """Must stay the same while a case is made smaller: the outcome, and the errors or the kind of value."""
        return (
            self.outcome,
            *(re.findall(r"raised '(\w+)|(gradient|forward|buffer|None)", self.detail)[:1] or [()])[0],
        )


def with_ddp(net: nn.Module, recipe: Recipe, group: dist.ProcessGroup) -> nn.Module:
    # Its views cannot be detached, ours can.
    settings = _settings(recipe, group, recipe.view and "detach_grads" not in recipe.program)
    return _with_comm_hook(DistributedDataParallel(net, **settings), recipe, group)


def with_ours(net: nn.Module, recipe: Recipe, group: dist.ProcessGroup) -> nn.Module:
    settings = _settings(recipe, group, recipe.view)
    return _with_comm_hook(ddp_compile(net, split=recipe.split, backend=recipe.backend, **settings), recipe, group)


def _settings(recipe: Recipe, group: dist.ProcessGroup, view: bool) -> dict[str, Any]:
    return {
        "process_group": group,
        "bucket_cap_mb": recipe.cap_mib,
        "gradient_as_bucket_view": view,
        "find_unused_parameters": recipe.find_unused,
        "static_graph": recipe.static_graph,
    }


def with_compiled_ddp(net: nn.Module, recipe: Recipe, group: dist.ProcessGroup) -> nn.Module:
    # Dynamo's DDPOptimizer asserts that buckets are larger than the first, of 1 MiB.
    model = with_ddp(net, dataclasses.replace(recipe, cap_mib=25.0), group)
    model.compile(backend=recipe.backend)
    return model


def with_mean_of_compiled(net: nn.Module, recipe: Recipe, group: dist.ProcessGroup) -> nn.Module:
    net.compile(backend=recipe.backend)
    return MeanOfRanks(net, recipe, group)


def _with_comm_hook(model: Any, recipe: Recipe, group: dist.ProcessGroup) -> Any:
    if recipe.comm_hook:
        model.register_comm_hook(group, {"allreduce": allreduce_hook, "halves": halves_hook}[recipe.comm_hook])
    return model


def halves_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Half of the mean, so that a hook that is not called is found."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] * (0.5 / group.size()))


def reference_of(recipe: Recipe) -> Wrap:
    """DistributedDataParallel, or the mean over the ranks if ddp_compile is documented to do better."""
    program = set(recipe.program)
    has_buffers = set(HAVE_BUFFERS) & recipe.kinds()
    better = (
        # DistributedDataParallel leaves the second backward of a forward on its rank,
        {"repeat", "halves"} & program
        # takes an output that has no part in the loss for a used one,
        or "first_half" in program
        # broadcasts buffers before some forwards that are not for training, and not before others that are,
        or (has_buffers and {"evaluate", "evaluate_on_rank_0"} & program)
        # broadcasts them, or reduces, in a step that is not to be reduced, and cannot begin with it,
        or "micro" in program
        # does not reduce the first one of a static graph whose outputs are in a dataclass.
        or (recipe.static_graph and recipe.outputs == "dataclass")
        # and finds no tensors in objects.
        or ((recipe.find_unused or recipe.static_graph) and recipe.outputs == "object")
    )
    return MeanOfRanks if better else with_ddp


class Groups:
    """The process group of the cases, replaced after a case has raised on any rank.

    When a rank raises, launches of other ranks may still be under way. Old groups are kept, since freeing one while a
    work ends in its thread can deadlock: the thread waits for the interpreter's lock.
    """

    def __init__(self) -> None:
        self.current = self._new()

    def renew_after(self, raised: bool) -> None:
        if any(gathered(raised)):
            self.current = self._new()

    @staticmethod
    def _new() -> dist.ProcessGroup:
        group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        assert group is not None
        return group


def trace(recipe: Recipe, wrap: Wrap, groups: Groups) -> list[Observation]:
    """What can be seen after each action; ends with the action that raised."""
    torch._dynamo.reset()
    # As documented, and as under torch.compile: a graph that is kept for a second backward needs its buffers.
    torch._functorch.config.donated_buffer = not {"retain", "repeat", "halves"} & set(recipe.program)
    seen: list[Observation] = []
    try:
        training = Training(recipe, wrap, groups.current)
        seen.extend(training.do(action) for action in recipe.program)
    except Exception as error:
        seen.append({"raised": f"{type(error).__name__}: {error}", "named": isinstance(error, DDPCompileError)})
    groups.renew_after("raised" in seen[-1])
    return seen


def difference(recipe: Recipe, ours: Sequence[Observation], theirs: Sequence[Observation]) -> str | None:
    """The first difference in words, or None."""
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        where = f"{position} {recipe.program[position] if position < len(recipe.program) else 'end'}"
        if "raised" in mine or "raised" in other:
            errors = [str(each.get("raised", "nothing")) for each in (mine, other)]
            if errors[0].split(":")[0] != errors[1].split(":")[0]:
                return f"{where}: raised {errors[0]!r} in place of {errors[1]!r}"
            return None
        for name, value in other.items():
            if (found := _difference_of_values(mine.get(name), value, recipe)) is not None:
                return f"{where}: {name} {found}"
    return None


def _difference_of_values(ours: Tensor | None, theirs: Tensor | None, recipe: Recipe) -> str | None:
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return None if ours is theirs else difference_of_kinds(ours, theirs)
    relative, absolute = TOLERANCES[recipe.dtype]
    largest = theirs.abs().max().item() if theirs.numel() else 0.0
    if torch.allclose(ours, theirs, rtol=0, atol=absolute + relative * largest, equal_nan=True):
        return None
    return f"is {_few(ours)}, and should be {_few(theirs)}"


def difference_of_kinds(ours: Tensor | None, theirs: Tensor | None) -> str:
    kinds = ["None" if each is None else f"{each.dtype} of {tuple(each.shape)}" for each in (ours, theirs)]
    return f"is {kinds[0]}, and should be {kinds[1]}"


def _few(tensor: Tensor) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in tensor.flatten()[:4].tolist()) + "]"


def judge(recipe: Recipe, groups: Groups) -> Verdict:
    """The case's verdict, the same on every rank; called on all ranks at once."""
    reference, ours = trace(recipe, reference_of(recipe), groups), trace(recipe, with_ours, groups)
    worst = worst_of(_compare(recipe, ours, reference))
    if worst.outcome not in (FAILED, GOES_ON):
        return worst
    if _agree(_refused_otherwise_than_ddp(ours, trace(recipe, with_ddp, groups))):
        return worst._replace(outcome=BOTH_RAISE)
    for plain in PLAIN_WAYS:
        theirs = trace(recipe, plain, groups)
        if _agree(difference(recipe, ours, theirs)) or _agree(_not_raised_alike(recipe, ours, theirs, reference)):
            return worst if worst.outcome == GOES_ON else worst._replace(outcome=TORCHS_OWN)
    if worst.outcome == GOES_ON:
        return Verdict(FAILED, f"goes on with values that nothing else computes; {worst.detail}")
    return worst


#: A case passes if ours equals one of these, because DistributedDataParallel is not the mean over the ranks or refuses
#: something reasonable, or because plain ``torch.compile`` gives the same result.
PLAIN_WAYS: tuple[Wrap, ...] = (MeanOfRanks, MeanOfRanksWithCopies, with_mean_of_compiled, with_compiled_ddp)


def _not_raised_alike(
    recipe: Recipe, ours: Sequence[Observation], theirs: Sequence[Observation], reference: Sequence[Observation]
) -> str | None:
    """None if both raise the same in the same action, and ours equals the reference until then."""
    errors = [str(each[-1].get("raised", "nothing")).split(":")[0] for each in (ours, theirs)]
    if errors[0] != errors[1] or "raised" not in ours[-1] or len(ours) != len(theirs):
        return f"{errors[0]!r} in place of {errors[1]!r}"
    return difference(recipe, ours[:-1], reference)


def _refused_otherwise_than_ddp(ours: Sequence[Observation], theirs: Sequence[Observation]) -> str | None:
    """None if ours refuses by name what DistributedDataParallel refuses in the same action or an earlier one.

    The reference may differ, since ddp_compile is better than DistributedDataParallel in another respect.
    """
    is_refused = "raised" in ours[-1] and ours[-1]["named"]
    return None if is_refused and "raised" in theirs[-1] and len(theirs) <= len(ours) else "not refused by both"


def _agree(found: str | None) -> bool:
    return all(each is None for each in gathered(found))


def _compare(recipe: Recipe, ours: Sequence[Observation], reference: Sequence[Observation]) -> Verdict:
    if "raised" in reference[-1]:
        if "raised" in ours[-1]:
            return Verdict(BOTH_RAISE, str(ours[-1]["raised"]))
        return Verdict(GOES_ON, str(reference[-1]["raised"]))
    found = difference(recipe, ours, reference)
    if found is None:
        return Verdict(PASSED, "")
    documented = ours[-1].get("named") and any(re.search(e, ours[-1]["raised"]) for e in DOCUMENTED_REFUSALS)
    return Verdict(REFUSED if documented else FAILED, found)


def worst_of(mine: Verdict) -> Verdict:
    """The worst verdict of all ranks; called on all ranks at once."""
    verdicts = gathered(mine)
    rank = max(range(len(verdicts)), key=lambda rank: OUTCOMES.index(verdicts[rank].outcome))
    outcome, detail = verdicts[rank]
    return Verdict(outcome, f"rank {rank}: {detail}" if detail else "")


def judge_all(recipes: Sequence[Recipe]) -> list[Verdict]:
    with quiet():
        groups = Groups()
        return [judge(recipe, groups) for recipe in recipes]


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings and ddp_compile's log, which thousands of trainings would fill."""
    log = logging.getLogger("ddp_compile")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def judge_on(pool: RankPool, recipes: Sequence[Any], judge_all: Judge = judge_all) -> list[Verdict]:
    """Verdicts of the recipes. A recipe that ends a rank's process, or keeps it for minutes, is a separate failure.

    If that happens to several in turn but to none of them alone, a warning says so, since it may be a race.

    Each call has ranks of its own: a case that raises leaves a process group behind that may have works under way.
    """
    try:
        results = pool.run_expecting_failures(judge_all, recipes, timeout_s=300.0)
        broken = next((result for result in results if isinstance(result, RankFailure)), None)
    except AssertionError as error:
        results, broken = [], RankFailure("AssertionError", str(error), "")
    finally:
        pool.close()
    if broken is None:
        verdicts: list[Verdict] = results[0]
        return verdicts
    if len(recipes) > 1:
        verdicts = [verdict for recipe in recipes for verdict in judge_on(pool, [recipe], judge_all)]
        if all(verdict.outcome != FAILED for verdict in verdicts):
            warnings.warn(f"only together: {broken.kind}: {broken.message}\n{broken.traceback}", stacklevel=2)
        return verdicts
    return [Verdict(FAILED, f"{broken.kind}: {broken.message}\n{broken.traceback}")]


def shrink(recipe: Any, judge: Judge, at_once: int = 8, limit_s: float = 300.0) -> tuple[Any, Verdict]:
    """The smallest recipe that still fails with the same symptom, found by leaving one thing out at a time, greedily.

    After ``limit_s`` it returns the smallest so far, since a candidate whose ranks wait for each other in vain takes a
    timeout.
    """
    (verdict,) = judge([recipe])
    symptom = verdict.symptom()
    end = time.monotonic() + limit_s
    while True:
        candidates = list(dict.fromkeys(smaller(recipe)))
        for start in range(0, len(candidates), at_once):
            if time.monotonic() > end:
                return recipe, verdict
            some = candidates[start : start + at_once]
            kept = next(((r, v) for r, v in zip(some, judge(some), strict=True) if v.symptom() == symptom), None)
            if kept is not None:
                recipe, verdict = kept
                break
        else:
            return recipe, verdict
