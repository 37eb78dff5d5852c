"""Hugging Face Trainer with ddp_compile, compared with its own DistributedDataParallel on the same data."""

import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import call
from in_ci import only
from rank_pool import Ranks

MISSING = [name for name in ("accelerate", "transformers", "peft") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")


WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "static graph": {"ddp_find_unused_parameters": False, "ddp_static_graph": True},
    "reentrant checkpoints": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "checkpoints and bf16": {"gradient_checkpointing": True, "bf16": True},
}


def assert_close(history: list[Any], expected: list[Any]) -> None:
    """The same was logged at the same steps, and is equal to rounding."""
    assert [log[:2] for log in history] == [log[:2] for log in expected]
    assert [log[2] for log in history] == pytest.approx([log[2] for log in expected], rel=1e-5)


@pytest.mark.parametrize(("way", "compiled"), only([("checkpoints and bf16", False)], product(WAYS, [False, True])))
def test_training_is_that_of_ddp(way: str, compiled: bool, tmp_path: Path, ranks: Ranks) -> None:
    settings = {"folder": str(tmp_path), "settings": WAYS[way]}
    for ours, ddp in ranks(2).run(call, "trainer_ranks.train_both", **settings, compiled=compiled):
        assert len(ours) == 6 * 2 + 2 + 1
        assert ours[-1][2] == next(loss for _, name, loss in ours if name == "eval_loss")
        assert_close(ours, ddp)


REDUCES_EACH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}

#: Ways to train over 9 steps with uneven numbers of tokens, and how often Trainer still has to gather them.
UNEVEN: dict[str, tuple[int, dict[str, Any]]] = {
    "model's loss": (1, {}),
    "compute_loss_func": (1, {"loss": "summed"}),
    "without accumulation": (1, {"settings": {"gradient_accumulation_steps": 1}}),
    "data that end": (9, {"ends": True}),  # in the last step of an epoch, and in the first of the next one
    "micro-batches reduced": (9, {"settings": REDUCES_EACH}),
    "delayed gradients": (9, {"delays": True}),
    "loss that ignores it": (9, {"loss": "ignores"}),
    "auxiliary loss": (9, {"loss": "auxiliary"}),
    "own training_step": (9, {"trainer_class": "Doubling"}),
    "gather_counts": (9, {"gathers": True}),
    "number not used": (0, {"loss": "unused"}),
    "means of ranks": (0, {"settings": {"average_tokens_across_devices": False}}),
}


@pytest.mark.parametrize("name", only(["data that end", "auxiliary loss"], UNEVEN))
def test_mean_over_tokens_is_that_of_ddp(name: str, tmp_path: Path, ranks: Ranks) -> None:
    num_gathers, way = UNEVEN[name]
    for ours, ddp in ranks(2).run(call, "trainer_ranks.train_uneven", str(tmp_path), **way):
        assert_close(ours[0], ddp[0])
        torch.testing.assert_close(ours[1], ddp[1], rtol=1e-5, atol=1e-6)
        assert ours[2] == num_gathers
        assert (ddp[2] >= 9) == (num_gathers > 0)


def test_a_checkpoint_goes_on_as_without_a_stop(tmp_path: Path, ranks: Ranks) -> None:
    for whole, ours, ddp in ranks(2).run(call, "trainer_ranks.resume_both", str(tmp_path)):
        assert len(whole) == 6 * 2 + 2
        assert ours == whole
        assert_close(ddp, whole)


@pytest.mark.parametrize(
    "program",
    [
        *("train_twice_and_generate", "train_again_with_a_term", "add_a_term_later", "search"),
        *("train_and_delete_adapters", "add_adapters_late"),
    ],
)
def test_other_programs(program: str, tmp_path: Path, ranks: Ranks) -> None:
    """The docstring of each says what it asserts on both ranks."""
    ranks(2).run(call, f"trainer_ranks.{program}", str(tmp_path))


def test_the_example_trains(tmp_path: Path, ranks: Ranks) -> None:
    printed, _ = ranks(2).run(call, "trainer_ranks.run_example", str(tmp_path))
    first, last = (float(loss) for loss in re.findall(r"'eval_loss': '(\S+)'", printed))
    assert last < first
    assert {folder.name for folder in tmp_path.iterdir()} >= {"checkpoint-3", "checkpoint-6"}
