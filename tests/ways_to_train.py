"""Ways to train: one table of models and steps that `train` compares with eager DistributedDataParallel."""

import contextlib
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from beside import Step, beside_plain, one_backward, pair, train_beside
from models import Mlp, largest, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NUM_STEPS = 6
#: The fifth step, in which something comes that was not there in the steps before.
APPEARS_AT = 4


def inner_weight(model: nn.Module) -> Tensor:
    """Of the second layer: the bucket of the first one is ready when the backward ends, and not before."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return weights[min(1, len(weights) - 1)]


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * inner_weight(model).square().sum()


def only_then(step_of: Step, begins: int = APPEARS_AT, ranks: Container[int] = (0, 1)) -> Step:
    """``step_of`` from one step on and on these ranks; otherwise one backward."""

    def step(model: Any, x: Tensor, number: int) -> None:
        (step_of if number >= begins and dist.get_rank() in ranks else one_backward)(model, x, number)

    return step


def with_hook(register: Callable[[Tensor], object], begins: int = APPEARS_AT, ranks: Container[int] = (0, 1)) -> Step:
    """One backward; before that of step ``begins`` a hook is registered."""

    def step(model: Any, x: Tensor, number: int) -> None:
        if number == begins and dist.get_rank() in ranks:
            register(inner_weight(model))
        one_backward(model, x)

    return step


def halve(gradient: Tensor) -> None:
    gradient.div_(2)


def halve_data(gradient: Tensor) -> None:
    gradient.data.div_(2)  # which shows neither in the address nor in the version


def halve_after_accumulation(parameter: Tensor) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: halve(p.grad))


def node_of(parameter: Any) -> Any:
    """Kept alive, which nothing else does in a plain module."""
    parameter.node = torch.autograd.graph.get_gradient_edge(parameter).node
    return parameter.node


def shrink_after_the_node(parameter: Tensor) -> None:
    def hook(_inputs: object, _outputs: object) -> None:
        parameter.grad.mul_(0.4 * (dist.get_rank() + 1))

    node_of(parameter).register_hook(hook)


def shrink_data_before_the_node(parameter: Tensor) -> None:
    node_of(parameter).register_prehook(lambda gradients: halve_data(gradients[0]))


def clamp_after_accumulation(parameter: Tensor) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def clamp_more_and_more(model: Any, x: Tensor, step: int) -> None:
    if step in (0, 2):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clamp_after_accumulation)
    one_backward(model, x)


def regulariser_built_before(model: Any, x: Tensor, step: int) -> None:
    extra = penalty(model)
    (extra + loss_of(model(x))).backward()


def regulariser_last(model: Any, x: Tensor, step: int) -> None:
    one_backward(model, x)
    penalty(model).backward()


def two_forwards(model: Any, x: Tensor, step: int) -> None:
    (loss_of(model(x)) + loss_of(model(2 * x))).backward()


def two_forwards_and_backwards(model: Any, x: Tensor, step: int) -> None:
    for loss in [loss_of(model(x)), loss_of(model(2 * x))]:
        loss.backward()


def accumulate(how: str = "", numbers: tuple[int, ...] = (3,)) -> Step:
    """Several backwards, all but the last one local: in ``no_sync``, or because the ``attribute`` says so."""

    def step(model: Any, x: Tensor, number: int) -> None:
        num_backwards = numbers[number % len(numbers)]
        for i in range(1, num_backwards + 1):
            if how == "attribute":
                model.require_backward_grad_sync = i == num_backwards
            with model.no_sync() if how == "no_sync" and i < num_backwards else contextlib.nullcontext():
                one_backward(model, i * x)

    return step


def before(step_of: Step, is_local: bool) -> Step:
    """Another backward comes before ``step_of``."""

    def step(model: Any, x: Tensor, number: int) -> None:
        with model.no_sync() if is_local else contextlib.nullcontext():
            one_backward(model, 2 * x)
        step_of(model, x, number)

    return step


def changed_in_between(change: Callable[[Tensor], object], stride: int = 1) -> Step:
    """Two backwards; after the first one somebody changes the gradients of every ``stride``-th parameter."""

    def step(model: Any, x: Tensor, number: int) -> None:
        one_backward(model, x)
        for parameter in list(model.parameters())[::stride]:
            change(parameter)
        one_backward(model, x)

    return step


def forward_inside_no_sync(model: Any, x: Tensor, step: int) -> None:
    output = model(x)
    with model.no_sync():
        model(2 * x)
    loss_of(output).backward()


def graph_kept(model: Any, x: Tensor, step: int) -> None:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def losses_one_by_one(model: Any, x: Tensor, step: int) -> None:
    early, late = model(x)
    loss_of(early).backward(retain_graph=True)
    loss_of(late).backward()


def sparse_regulariser(model: Any, x: Tensor, step: int) -> None:
    nn.functional.embedding(torch.tensor([1, 2], device=x.device), model.weight, sparse=True).sum().backward()
    one_backward(model, x)


def under_autocast(model: Any, x: Tensor, step: int) -> None:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = loss_of(model(x))
    loss.backward()


def backward_in_inference_mode(model: Any, x: Tensor, step: int) -> None:
    loss = loss_of(model(x))
    with torch.inference_mode():
        loss.backward()


def unscaled_and_clipped(model: Any, x: Tensor, step: int) -> None:
    (1024 * loss_of(model(x))).backward()
    for parameter in model.parameters():
        parameter.grad.div_(1024)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


class TwoOutputs(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        early = torch.tanh(self.layers[0](x))
        x = early
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return early, x


class UsedTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.layers[0](super().forward(x))))


class Shared(nn.Module):
    """One gradient for two parameters, and the tangent itself as a third one's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right, self.last = (nn.Parameter(torch.randn(6, width)) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x + self.left + self.right) @ self.weight) + self.last


class Table(nn.Module):
    """A table that the model uses whole, and a regulariser by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return torch.tanh(self.layers[2](x @ self.weight.t() @ self.weight))


class Checkpoints(Mlp):
    """A reentrant checkpoint for each layer. Graph breaks let them open passes inside the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        return x


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(33, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 3))


class Way(NamedTuple):
    step: Step = one_backward
    #: Buckets launched inside compiled backwards in the last step under ``split="backward"``: three of an `Mlp` of four
    #: layers, since the last one is ready when the backward ends.
    num_early: int = 3
    make: Callable[[], nn.Module] = lambda: Mlp(33, 4)
    is_ddps: bool = True  #: DistributedDataParallel can do it; otherwise the plain model's mean is the reference
    tolerance: float = 0.0  #: of a gradient's relative difference


#: For `Way.num_early`: a bucket that was launched too early was launched again, and waits for its hooks from then on.
ONE_WAITS = 2
#: Two backwards in a step.
TWICE = 6
#: A sum of the iteration before and of this one rounds otherwise than the sum of both.
BESIDE_PLAIN = {"is_ddps": False, "tolerance": 1e-6}
WAYS = {
    "plain": Way(),
    "regulariser_built_before": Way(regulariser_built_before, ONE_WAITS),
    "regulariser_last": Way(regulariser_last),
    "contributor_that_appears": Way(only_then(regulariser_built_before), ONE_WAITS),
    "contributor_that_appears_on_one_rank": Way(only_then(regulariser_built_before, ranks=[1]), ONE_WAITS),
    "sparse_regulariser": Way(only_then(sparse_regulariser), 1, lambda: Table(33), **BESIDE_PLAIN),
    "two_forwards": Way(two_forwards, 0),
    # A bias before BatchNorm has a gradient of zero but for rounding, which regrouping changes.
    "two_forwards_with_batch_norm": Way(two_forwards, 0, with_batch_norm, tolerance=1e-5),
    "two_forwards_and_backwards": Way(two_forwards_and_backwards, TWICE, **BESIDE_PLAIN),
    "forward_inside_no_sync": Way(forward_inside_no_sync),
    "accumulate": Way(accumulate(), 9),
    "accumulate_in_no_sync": Way(accumulate("no_sync")),
    "accumulate_by_attribute": Way(accumulate("attribute")),
    "accumulate_any_number": Way(accumulate("no_sync", (1, 2, 5, 1, 9))),
    "gradients_detached_in_between": Way(changed_in_between(lambda p: p.grad.detach_().mul_(0.5)), TWICE),
    "gradients_replaced_in_between": Way(changed_in_between(lambda p: setattr(p, "grad", 0.5 * p.grad)), TWICE),
    # A bucket finds some of its gradients gone and others where they were.
    "gradients_freed_in_between": Way(changed_in_between(lambda p: setattr(p, "grad", None), stride=2), TWICE),
    "gradients_zeroed_in_between": Way(changed_in_between(lambda p: p.grad.zero_()), TWICE),
    "tensor_hook_on_data_on_one_rank": Way(with_hook(lambda p: p.register_hook(halve_data), ranks=[1]), ONE_WAITS),
    # For DistributedDataParallel's mean a hook after the node that comes after the wrapping is too late.
    "hook_after_the_node": Way(with_hook(shrink_after_the_node), ONE_WAITS, **BESIDE_PLAIN),
    "hook_before_the_node_on_data_on_one_rank": Way(
        with_hook(shrink_data_before_the_node, ranks=[1]), ONE_WAITS, **BESIDE_PLAIN
    ),
    "hook_while_accumulating": Way(before(with_hook(halve_after_accumulation), True), ONE_WAITS),
    "hooks_on_all_parameters_twice": Way(clamp_more_and_more, 0),
    "graph_kept": Way(graph_kept, TWICE, **BESIDE_PLAIN),
    "losses_one_by_one": Way(losses_one_by_one, TWICE, lambda: TwoOutputs(33, 4), **BESIDE_PLAIN),
    "under_autocast": Way(under_autocast),
    "backward_in_inference_mode": Way(backward_in_inference_mode, 0),
    "unscaled_and_clipped": Way(unscaled_and_clipped),
    "module_used_twice": Way(make=lambda: UsedTwice(33, 4)),
    "shared_gradients": Way(num_early=1, make=lambda: Shared(33)),
    "reentrant_checkpoints": Way(num_early=0, make=lambda: Checkpoints(33, 4)),
}


class Trained(NamedTuple):
    worst: float  #: largest relative difference of any gradient to the reference, bit for bit equal if 0
    num_early: tuple[int, ...]  #: buckets launched inside compiled backwards, for each step


def note_launches(model: Any, note: Callable[[Any], Any]) -> list[Any]:
    """A list to which ``note(bucket)``, unless None, is appended when a bucket is launched."""
    noted, launch = [], model.comm_algorithm.launch

    def noting(bucket: Any, is_last: bool) -> Any:
        if (found := note(bucket)) is not None:
            noted.append(found)
        return launch(bucket, is_last)

    model.comm_algorithm.launch = noting
    return noted


def count_early(model: Any) -> list[int]:
    """A list to which the number of each bucket is appended that is launched inside a compiled backward."""

    def index_if_early(bucket: Any) -> int | None:
        node = torch._C._current_autograd_node()
        return bucket.spec.index if node is not None and node.name() == "CompiledFunctionBackward" else None

    return note_launches(model, index_if_early)


def train(
    name: str,
    backend: str = "aot_eager",
    by_hand: bool = False,
    set_to_none: bool = True,
    donated_buffer: bool = False,
    device: str = "cpu",
    **settings: Any,
) -> Trained:
    """Train in one of the `WAYS`; ``by_hand``, backwards are finalized after they have returned."""
    step_of, _, make, is_ddps, _ = WAYS[name]
    settings = {"bucket_cap_mb": 0.003, "backend": backend, **settings}
    models = (pair if is_ddps else beside_plain)(make, device=device, **settings)
    ours = models[0]
    ours.require_manual_backward_finalization = by_hand
    launched, num_early = count_early(ours), []

    def counted(model: Any, x: Tensor, step: int) -> None:
        launched.clear()
        with torch._functorch.config.patch(donated_buffer=donated_buffer):
            step_of(model, x, step)
        if model is ours:
            num_early.append(len(launched))
            if by_hand:
                model.finalize_backward()

    worst = largest(train_beside(models, counted, NUM_STEPS, width=33, rows=6, set_to_none=set_to_none, lr=0.1))
    return Trained(worst, tuple(num_early))
