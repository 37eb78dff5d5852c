"""Random modules trained in random ways, against DistributedDataParallel: ``python tests/fuzz/run.py --cases 5000``.

Prints the outcomes of the cases, and each failing case made smaller. ``--seed N`` judges one case alone. ``--sharded``
trains random parameters with a sharded optimizer, against one that is not sharded. ``--ranks-that-differ`` gives two
ranks programs that differ in one thing, and prints the table of docs/divergence.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuzz.differing_run import run_differing
from fuzz.recipe import Recipe, recipe_of
from fuzz.sharded import judge_sharded, sharded_recipe_of
from fuzz.shrink import Judge, shrink
from fuzz.verdict import CASES_IN_A_CALL, FAILED, OUTCOMES, Verdict, judge_all, judge_on
from rank_pool import RankPool
from tqdm import tqdm

CASES_IN_A_REPORT = 200
ONE_IN_INDUCTOR = 50


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
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they are")
    options = parser.parse_args(arguments)
    first, cases = (options.first_seed, options.cases) if options.seed is None else (options.seed, 1)
    seeds = range(first, first + cases)
    if options.ranks_that_differ:
        return run_differing(seeds, not options.no_shrink)
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
                    _report(seed, recipe, verdict, None if options.no_shrink else judge, bar)
            bar.update(len(some))
            if (start + len(some)) % CASES_IN_A_REPORT == 0 or some.stop == seeds.stop:
                so_far = ", ".join(f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES)
                bar.write(f"seeds {first} to {some.stop - 1}: {so_far}")
                sys.stdout.flush()
    pool.close()
    return 1 if counts[FAILED] else 0


def _report(seed: int, recipe: Any, verdict: Verdict, judge: Judge | None, bar: tqdm) -> None:
    bar.write(f"seed {seed}: {recipe}\n  {verdict.detail}")
    if judge is not None:
        recipe, verdict = shrink(recipe, judge)
        bar.write(f"  smaller: {recipe}\n  {verdict.detail}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
