"""Random modules trained in random ways, against DistributedDataParallel: ``python tests/fuzz/run.py --cases 5000``.

Prints what the cases came to, and each failing case made smaller. ``--seed N`` judges one case alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fuzz.recipe import Recipe, recipe_of
from fuzz.shrink import shrink
from fuzz.verdict import CASES_IN_A_CALL, FAILED, OUTCOMES, Verdict, judge_on
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
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they are")
    options = parser.parse_args(arguments)
    first, cases = (options.first_seed, options.cases) if options.seed is None else (options.seed, 1)
    seeds = range(first, first + cases)
    pool = RankPool(2)
    counts: Counter[str] = Counter()
    with tqdm(total=len(seeds), disable=None) as bar:
        for start in range(0, len(seeds), CASES_IN_A_CALL):
            some = seeds[start : start + CASES_IN_A_CALL]
            recipes = [recipe_in_run(seed, not options.no_inductor, options.most_blocks) for seed in some]
            for seed, recipe, verdict in zip(some, recipes, judge_on(pool, recipes), strict=True):
                counts[verdict.outcome] += 1
                if verdict.outcome == FAILED:
                    _report(seed, recipe, verdict, pool, not options.no_shrink, bar)
            bar.update(len(some))
            if (start + len(some)) % CASES_IN_A_REPORT == 0 or some.stop == seeds.stop:
                so_far = ", ".join(f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES)
                bar.write(f"seeds {first} to {some.stop - 1}: {so_far}")
                sys.stdout.flush()
    pool.close()
    return 1 if counts[FAILED] else 0


def _report(seed: int, recipe: Recipe, verdict: Verdict, pool: RankPool, shrinks: bool, bar: tqdm) -> None:
    bar.write(f"seed {seed}: {recipe}\n  {verdict.detail}")
    if shrinks:
        recipe, verdict = shrink(recipe, lambda recipes: judge_on(pool, recipes))
        bar.write(f"  smaller: {recipe}\n  {verdict.detail}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
