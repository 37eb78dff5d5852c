"""Random modules trained in random ways, compared with DistributedDataParallel; and what the fuzzer itself promises."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from fuzz.blocks import FUNCTIONS, HOLDERS, LEAVES, Block
from fuzz.differences import EXACT, HANG, NAMED, SILENT, UNNAMED, WAITED
from fuzz.differing import DifferingRecipe, expected, is_kept, judge_differing, verdict_of
from fuzz.recipe import OUTPUTS, RARE, UNUSED, UNUSUAL_CALLS, Recipe, recipe_of
from fuzz.sharded import ShardedRecipe, judge_sharded, sharded_recipe_of
from fuzz.training import ACTIONS
from fuzz.verdict import FAILED, GOES_ON, PASSED, judge_on
from rank_pool import Ranks

NUM_CASES_IN_CI = 2  # and thousands in `make test-long`
MOST_BLOCKS_IN_CI = 3  # takes half of the time of 5: a third of a second on both cores
SMALLER = f"python tests/fuzz/run.py --no-inductor --most-blocks {MOST_BLOCKS_IN_CI}"


def test_random_modules_train_as_with_ddp(ranks: Ranks) -> None:
    seeds = range(NUM_CASES_IN_CI)
    recipes = [recipe_of(seed, most_blocks=MOST_BLOCKS_IN_CI) for seed in seeds]
    verdicts = judge_on(ranks(2), recipes)
    failed = [
        f"seed {seed}: {recipe}\n  {verdict.detail}\n  smaller: {SMALLER} --seed {seed}"
        for seed, recipe, verdict in zip(seeds, recipes, verdicts, strict=True)
        if verdict.outcome == FAILED
    ]
    assert not failed, "\n".join(failed)
    # Cases that compare nothing must stay few.
    assert Counter(verdict.outcome for verdict in verdicts)[PASSED] >= NUM_CASES_IN_CI // 2


@pytest.mark.long
@pytest.mark.parametrize(("even", "odd"), [("forward", "backward"), ("backward", "forward")])
def test_rare_kinds_train_as_with_ddp(ranks: Ranks, even: str, odd: str) -> None:
    recipes = []
    for kind, split in zip(RARE, itertools.cycle((even, odd)), strict=False):
        blocks = (Block("keep"), Block(kind, (Block("linear"),) if kind in HOLDERS else ()), Block("add_kept"))
        program = ("train", "step", "train") if kind == "sizes" else ("train",)
        recipes.append(Recipe(blocks, program, split=split, cap_mib=0.0001, rows_vary=kind == "sizes"))
    verdicts = judge_on(ranks(2), recipes)
    # DistributedDataParallel raises if eager code calls torch.cond, which Dynamo compiles.
    failed = [(r, v) for r, v in zip(recipes, verdicts, strict=True) if v.outcome not in (PASSED, GOES_ON)]
    assert not failed, failed


def of_each_kind() -> dict[str, list[Recipe]]:
    """A recipe for each kind of block, output and action, with another split in turn."""
    with_inductor = Recipe(backend="inductor", cap_mib=0.0001, program=("train", "step", "train"))
    blocks: dict[str, list[Recipe]] = {}
    for name, kinds in (("functions", FUNCTIONS), ("leaves", LEAVES), ("holders", HOLDERS)):
        inner = (Block("linear"),) if kinds is HOLDERS else ()
        blocks[name] = [
            replace(with_inductor, blocks=(Block(kind, inner),), find_unused=kind in UNUSED) for kind in kinds
        ]
    recipes = {
        **blocks,
        "outputs": [replace(with_inductor, outputs=outputs) for outputs in OUTPUTS],
        "objects": [
            replace(with_inductor, outputs="object", **{each: True}) for each in ("find_unused", "static_graph")
        ],
        "actions": [replace(with_inductor, program=("train", action, "train")) for action in ACTIONS],
        "first": [replace(with_inductor, program=(action, "step", "train")) for action in UNUSUAL_CALLS],
    }
    splits = itertools.cycle(("auto", "forward", "backward"))
    return {name: [replace(recipe, split=next(splits)) for recipe in each] for name, each in recipes.items()}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kinds", of_each_kind())
def test_each_kind_trains_with_inductor(ranks: Ranks, kinds: str) -> None:
    recipes = of_each_kind()[kinds]
    for some in (recipes[at : at + 8] for at in range(0, len(recipes), 8)):
        verdicts = judge_on(ranks(2), some)
        failed = [(recipe, v.detail) for recipe, v in zip(some, verdicts, strict=True) if v.outcome == FAILED]
        assert not failed, failed


NUM_SHARDED_CASES_IN_CI = 3
CLIPPED = ShardedRecipe(
    parameters=(((33,), "float32", False), ((17, 9), "float32", True)),
    program=("train", "clip 1", "clip 2", "train", "clip 3", "clip inf", "step"),
    cap_mib=1e-5,
    two_groups=True,
)
# What torch casts when it is loaded, and parameters without elements, in low precision.
LOADED = ShardedRecipe(
    parameters=(((33,), "bfloat16", False), ((0, 3), "bfloat16", False)),
    program=("load", "accumulate", "clip inf", "step", "zero"),
    optimizer="asgd",
)


def test_sharded_optimizers_step_bit_for_bit(ranks: Ranks) -> None:
    recipes = [LOADED, CLIPPED, *map(sharded_recipe_of, range(NUM_SHARDED_CASES_IN_CI))]
    verdicts = judge_on(ranks(2), recipes, judge_sharded)
    failed = [(recipe, v.detail) for recipe, v in zip(recipes, verdicts, strict=True) if v.outcome != PASSED]
    assert not failed, failed


DIFFERING_IN_CI = (
    DifferingRecipe("step inside no_sync", at=1, program=("train",) * 3),
    # Between two agreement points.
    DifferingRecipe("step inside no_sync", at=2, program=("train",) * 4, find_unused=True),
    # A forward that raised must not make the accumulation after it be reduced.
    DifferingRecipe("forward raises, caught", at=1, program=("train", "train", "accumulate", "train")),
    *(
        DifferingRecipe(kind, at=1, program=("train", "accumulate", "train"), model=model)
        for kind, model in (("accumulates", "norm"), ("evaluates", "norm"), ("two forwards", "mlp"))
    ),
    DifferingRecipe("backward left out", at=1, program=("train",) * 3),
    DifferingRecipe("backward twice", at=1, program=("train",) * 5),
    DifferingRecipe("evaluation mode", at=1, program=("train",) * 2, model="norm"),
    DifferingRecipe("bucket cap", program=("train", "train")),
    DifferingRecipe("order of models, once", at=1, program=("train",) * 4),
    DifferingRecipe("optimizer step left out", at=1, program=("train",) * 4),
)


def test_ranks_that_differ_are_exact_or_named(ranks: Ranks) -> None:
    verdicts = judge_on(ranks(2), DIFFERING_IN_CI, judge_differing)
    broken = [(r, v) for r, v in zip(DIFFERING_IN_CI, verdicts, strict=True) if not is_kept(r, v)]
    assert not broken, broken


def test_what_ranks_saw_is_judged() -> None:
    harmless, differs = DifferingRecipe("evaluates"), DifferingRecipe("step inside no_sync")
    right = expected(harmless)
    wrong = [right[0], right[1]._replace(state=[2 * tensor for tensor in right[1].state])]
    named, unnamed = (right[0]._replace(error=error) for error in ("no_sync on rank 1", "something"))
    assert [
        verdict_of(recipe, seen).outcome
        for recipe, seen in (
            (harmless, right),
            (harmless, wrong),
            (differs, right),
            (differs, [named, named]),
            (differs, [named, right[1]]),
            (differs, [named, unnamed]),
            (differs, [named, named._replace(waited_s=60.0)]),
        )
    ] == [EXACT, SILENT, SILENT, NAMED, WAITED, UNNAMED, HANG]
