"""Random modules trained in random ways, against DistributedDataParallel: ``python tests/fuzz/run.py --cases 5000``.

Prints the outcomes of the cases, and each failing case made smaller. ``--seed N`` judges one case alone. ``--sharded``
trains random parameters with a sharded optimizer, against one that is not sharded. ``--ranks-that-differ`` gives two
ranks programs that differ in one thing, and prints what happens for each thing.
"""

import argparse
import os
import queue
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuzz.differences import ENDED, HANG
from fuzz.differing import DifferingRecipe, differing_recipe_of, is_kept, judge_differing
from fuzz.recipe import Recipe, recipe_of
from fuzz.sharded import judge_sharded, sharded_recipe_of
from fuzz.verdict import CASES_IN_A_CALL, FAILED, OUTCOMES, Judge, Verdict, judge_all, judge_on, shrink
from rank_pool import RankPool
from tqdm import tqdm

CASES_IN_A_REPORT = 200
ONE_IN_INDUCTOR = 50
NUM_POOLS = 4  #: that run ranks that differ at the same time, since many cases wait for a timeout
DIFFERING_CASES_IN_A_CALL = 12  # all of which could wait within the time that a `RankPool` gives to a call


def recipe_in_run(seed: int, with_inductor: bool, most_blocks: int) -> Recipe:
    if with_inductor and seed % ONE_IN_INDUCTOR == 0:
        return recipe_of(seed, ("inductor",), most_blocks=most_blocks)
    return recipe_of(seed, most_blocks=most_blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="judge this case alone")
    parser.add_argument("--most-blocks", type=int, default=5, help="of a module, each with those in it")
    parser.add_argument("--no-inductor", action="store_true", help=f"else one case in {ONE_IN_INDUCTOR} is inductor's")
    parser.add_argument("--sharded", action="store_true", help="sharded optimizers instead of random modules")
    parser.add_argument("--ranks-that-differ", action="store_true", help="two programs instead of one")
    options = parser.parse_args(arguments)
    first, cases = (options.first_seed, options.cases) if options.seed is None else (options.seed, 1)
    seeds = range(first, first + cases)
    if options.ranks_that_differ:
        return run_differing(seeds)
    pool = RankPool(2)

    def judge(recipes: Sequence[Any]) -> list[Verdict]:
        return judge_on(pool, recipes, judge_sharded if options.sharded else judge_all)

    def recipe_in(seed: int) -> Any:
        if options.sharded:
            return sharded_recipe_of(seed)
        return recipe_in_run(seed, not options.no_inductor, options.most_blocks)

    counts: Counter[str] = Counter()
    with tqdm(total=len(seeds), disable=None) as bar:
        for start in range(0, len(seeds), CASES_IN_A_CALL):
            some = seeds[start : start + CASES_IN_A_CALL]
            recipes = [recipe_in(seed) for seed in some]
            for seed, recipe, verdict in zip(some, recipes, judge(recipes), strict=True):
                counts[verdict.outcome] += 1
                if verdict.outcome == FAILED:
                    _report(seed, recipe, verdict, judge, bar)
            bar.update(len(some))
            if (start + len(some)) % CASES_IN_A_REPORT == 0 or some.stop == seeds.stop:
                so_far = ", ".join(f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES)
                bar.write(f"seeds {first} to {some.stop - 1}: {so_far}")
                sys.stdout.flush()
    pool.close()
    return 1 if counts[FAILED] else 0


def _report(seed: int, recipe: Any, verdict: Verdict, judge: Judge, bar: tqdm) -> None:
    bar.write(f"seed {seed}: {recipe}\n  {verdict.detail}")
    recipe, verdict = shrink(recipe, judge)
    bar.write(f"  smaller: {recipe}\n  {verdict.detail}")
    sys.stdout.flush()


# Many cases of ranks that differ, on several pools at once.


def judge_differing_on(pool: RankPool, recipes: Sequence[DifferingRecipe]) -> list[Verdict]:
    """Verdicts of the cases, also of one that ends a rank's process or keeps it for minutes."""
    verdicts = []
    for verdict in judge_on(pool, recipes, judge_differing):
        if verdict.outcome == FAILED:
            verdict = Verdict(HANG if "gave no answer" in verdict.detail else ENDED, verdict.detail)
        verdicts.append(verdict)
    return verdicts


def run_differing(seeds: Sequence[int]) -> int:
    """Judge the cases of these seeds; print those that break a promise of docs/divergence.md, and what happens."""
    pools: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
    for _ in range(NUM_POOLS):
        pools.put(RankPool(2))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    broken: list[tuple[int, DifferingRecipe]] = []

    def judge(recipes: Sequence[DifferingRecipe]) -> list[Verdict]:
        pool = pools.get()
        try:
            return judge_differing_on(pool, recipes)
        finally:
            pools.put(pool)

    chunks = [seeds[at : at + DIFFERING_CASES_IN_A_CALL] for at in range(0, len(seeds), DIFFERING_CASES_IN_A_CALL)]
    with ThreadPoolExecutor(NUM_POOLS) as executor, tqdm(total=len(seeds), disable=None) as bar:
        judged = executor.map(lambda chunk: judge([*map(differing_recipe_of, chunk)]), chunks)
        for chunk, verdicts in zip(chunks, judged, strict=True):
            for seed, verdict in zip(chunk, verdicts, strict=True):
                recipe = differing_recipe_of(seed)
                counts[recipe.kind][verdict.outcome] += 1
                if not is_kept(recipe, verdict):
                    broken.append((seed, recipe))
                    bar.write(f"seed {seed}: {recipe}\n  {verdict.outcome}: {verdict.detail}")
            bar.update(len(chunk))
    for seed, recipe in broken:
        smallest, verdict = shrink(recipe, judge, at_once=4, limit_s=60.0)
        print(f"seed {seed}, smaller: {smallest}\n  {verdict.outcome}: {verdict.detail}", flush=True)
    while not pools.empty():
        pools.get().close()
    for kind, outcomes in counts.items():
        print(f"{kind}: {', '.join(f'{outcome} {count}' for outcome, count in outcomes.items())}")
    print(f"{len(seeds)} cases, {len(broken)} of which break a promise")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
