"""Many cases of ranks that differ, on several pools at once, and the table of their verdicts."""

from __future__ import annotations

import queue
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fuzz.differences import ENDED, HANG, KINDS
from fuzz.differing import (
    DIFFERING_OUTCOMES,
    DifferingRecipe,
    differing_recipe_of,
    is_kept,
    judge_differing,
)
from fuzz.shrink import shrink
from fuzz.verdict import FAILED, Verdict, judge_on
from rank_pool import RankPool
from tqdm import tqdm

NUM_POOLS = 4  #: that run at the same time, since many cases wait for a timeout
CASES_IN_A_CALL = 12  # all of which could wait within the time that a `RankPool` gives to a call


def judge_differing_on(pool: RankPool, recipes: Sequence[DifferingRecipe]) -> list[Verdict]:
    """Verdicts of the cases, also of one that ends a rank's process or keeps it for minutes."""
    verdicts = []
    for verdict in judge_on(pool, recipes, judge_differing):
        if verdict.outcome == FAILED:
            verdict = Verdict(HANG if "gave no answer" in verdict.detail else ENDED, verdict.detail)
        verdicts.append(verdict)
    return verdicts


def run_differing(seeds: Sequence[int], shrinks: bool) -> int:
    """Judge the cases of these seeds, print those that break a promise, and the table for docs/divergence.md."""
    pools: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
    for _ in range(NUM_POOLS):
        pools.put(RankPool(2))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    broken: list[tuple[int, DifferingRecipe, Verdict]] = []

    def judge(recipes: Sequence[DifferingRecipe]) -> list[Verdict]:
        pool = pools.get()
        try:
            return judge_differing_on(pool, recipes)
        finally:
            pools.put(pool)

    chunks = [seeds[start : start + CASES_IN_A_CALL] for start in range(0, len(seeds), CASES_IN_A_CALL)]
    with ThreadPoolExecutor(NUM_POOLS) as executor, tqdm(total=len(seeds), disable=None) as bar:
        judged = executor.map(lambda chunk: judge([*map(differing_recipe_of, chunk)]), chunks)
        for chunk, verdicts in zip(chunks, judged, strict=True):
            for seed, verdict in zip(chunk, verdicts, strict=True):
                recipe = differing_recipe_of(seed)
                counts[recipe.kind][verdict.outcome] += 1
                if not is_kept(recipe, verdict):
                    broken.append((seed, recipe, verdict))
                    bar.write(f"seed {seed}: {recipe}\n  {verdict.outcome}: {verdict.detail}")
            bar.update(len(chunk))
    for seed, recipe, _ in broken if shrinks else []:
        smallest, verdict = shrink(recipe, judge, at_once=4, limit_s=60.0)
        print(f"seed {seed}, smaller: {smallest}\n  {verdict.outcome}: {verdict.detail}", flush=True)
    while not pools.empty():
        pools.get().close()
    print(table_of(counts))
    print(f"{len(seeds)} cases, {len(broken)} of which break a promise")
    return 1 if broken else 0


def table_of(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The kinds with the same outcomes in one row, in Markdown."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind in filter(counts.__contains__, KINDS):
        outcomes = tuple(each for each in DIFFERING_OUTCOMES if counts[kind][each])
        kinds.setdefault(outcomes, []).append(f"{kind} ({'/'.join(str(counts[kind][each]) for each in outcomes)})")
    rows = [f"| {' or '.join(outcomes)} | {', '.join(names)} |" for outcomes, names in kinds.items()]
    return "\n".join(["| what happens | rank 1 alone differs in (cases) |", "|---|---|", *rows])
