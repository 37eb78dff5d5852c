"""Writes docs/feature_compatibility.md from the table in `ddp_compile.features.compatibility`.

Run ``python tests/parity/write_features_page.py``; `tests/unit/test_docs.py` compares the page with the table.
"""

import textwrap
from pathlib import Path

from ddp_compile.features.compatibility import EXCLUSIONS, Feature

PAGE = Path(__file__).resolve().parents[2] / "docs" / "feature_compatibility.md"

HEAD = """\
# Which features exclude each other

Each line is a ReplicationError as soon as the second of the two features is switched on. All other pairs of these
features work together: `tests/features/test_feature_pairs.py` tries every pair. `find_unused_parameters=True` has no
effect with `static_graph=True`, which is a warning. What an algorithm takes, such as sparse gradients, DTensors and
dtypes, is on another page: [algorithms.md](algorithms.md#an-algorithm-of-your-own).

`python tests/parity/write_features_page.py` writes this page from `ddp_compile/features/compatibility.py`; do not edit
it.

| feature | not with | because | way out |
|---|---|---|---|
"""

TAIL = """
`AsyncModelAverage()` averages parameters, and an algorithm that averages parameters is one other than
`GradientAllReduce()`: it is excluded where these are.

Also refused, though not in this table: `check_replicas="repair"` with `shard_optimizer()`, `bucket_cap_mb=` with
`bucket_plan=`, `measure()` with `AsyncModelAverage()`, `reproducible=True` with `hierarchical=True`, and
`split="backward"` with compiled autograd.
"""


def format_page() -> str:
    rows = [
        f"| {e.feature.value} | {'; '.join(other.value for other in e.others)} | {e.reason} | {e.way_out} |\n"
        for e in EXCLUSIONS
    ]
    bound = {feature for e in EXCLUSIONS for feature in (e.feature, *e.others)}
    free = ", ".join(feature.value for feature in Feature if feature not in bound)
    return f"{HEAD}{''.join(rows)}\n{textwrap.fill(f'These exclude nothing: {free}.', 120)}\n{TAIL}"


if __name__ == "__main__":
    PAGE.write_text(format_page())
