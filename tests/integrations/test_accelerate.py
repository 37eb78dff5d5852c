"""Hugging Face Accelerate with ddp_compile, compared with its own DistributedDataParallel on the same data."""

import math
import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hugging_face import call
from in_ci import only
from rank_pool import Ranks

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


def assert_close(steps: list[Any], expected: list[Any]) -> None:
    """Losses and norms are equal to rounding."""
    assert len(steps) == len(expected)
    for step, other in zip(steps, expected, strict=True):
        assert tuple(step) == pytest.approx(tuple(other), rel=2e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("precision", "compiled"), only([("no", False), ("bf16", True)], product(["no", "bf16"], [False, True]))
)
def test_training_is_that_of_ddp(precision: str, compiled: bool, ranks: Ranks) -> None:
    settings = {"mixed_precision": precision, "gradient_accumulation_steps": 2}
    for ours, ddp, explained in ranks(2).run(call, "accelerate_ranks.train_both", settings, compiled=compiled):
        assert [step.norm > 0.05 for step in ours] == [False, True, False, True, True], "clipped, but in between"
        assert_close(ours, ddp)
        assert ("graph 0: 2 buckets, 2 partitions" in explained) == compiled, explained


def test_a_scaler_skips_what_it_skips_with_ddp(ranks: Ranks) -> None:
    settings = {"scaled": True, "gradient_accumulation_steps": 2}
    for ours, ddp, _ in ranks(2).run(call, "accelerate_ranks.train_both", settings):
        norms = [step.norm for step in ours if step.norm != 0]
        assert not math.isfinite(norms[0]) and math.isfinite(norms[-1])
        assert_close(ours, ddp)


@pytest.mark.parametrize("precision", only(["no"], ["no", "bf16"]))
def test_a_saved_state_goes_on_as_without_a_stop(precision: str, tmp_path: Path, ranks: Ranks) -> None:
    settings = {"mixed_precision": precision, "gradient_accumulation_steps": 2}
    for steps in ranks(2).run(call, "accelerate_ranks.stop_and_go_on", str(tmp_path), settings):
        assert len(steps["without a stop"]) == 3
        assert steps["with ddp_compile"] == steps["without a stop"]
        assert_close(steps["with DistributedDataParallel"], steps["without a stop"])


@pytest.mark.parametrize(
    "program",
    [
        *("count_both", "look_at_models", "shard_and_go_on", "join_both", "prepare_again", "read_handler"),
        *("trigger_sync", "accumulate_with_names_itself", "refuse_all"),
    ],
)
def test_other_programs(program: str, tmp_path: Path, ranks: Ranks) -> None:
    """The docstring of each says what it asserts on both ranks."""
    ranks(2).run(call, f"accelerate_ranks.{program}", str(tmp_path))


def test_the_example_trains(ranks: Ranks) -> None:
    printed, of_other = ranks(2).run(call, "accelerate_ranks.run_example")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert of_other == ""
