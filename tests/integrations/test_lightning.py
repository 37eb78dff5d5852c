"""Training by Lightning with `DDPCompileStrategy`, on two ranks, compared with Lightning's own strategy "ddp"."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hugging_face import call
from in_ci import only
from rank_pool import Ranks

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")


AUTOMATIC = [
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    {},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    {"precision": "64-true", "accumulate_grad_batches": 4},
]


@pytest.mark.parametrize("settings", only(AUTOMATIC[:1], AUTOMATIC), ids=str)
def test_training_is_that_of_ddp_and_compiled(settings: dict[str, Any], ranks: Ranks) -> None:
    limit = 2e-2 if settings.get("precision") == "bf16-mixed" else 1e-5
    for found in ranks(2).run(call, "lightning_ranks.differences", "Net", {}, {}, compiled=True, **settings):
        assert max(found["differences"].values()) < limit, found
        assert found["kinds"] == ({"_Steps"}, {"DistributedDataParallel"})
        # Metrics count their calls, and are left to Python; so is what logs.
        methods = ["forward", "update", "compute", "reset", "log", "log_dict", "optimizers", "lr_schedulers"]
        assert sorted(found["untraced"][0]) == sorted(methods) and not found["untraced"][1]
        (((num_buckets, num_partitions),), num_evaluation_graphs) = found["graphs"]
        assert num_partitions == num_buckets > 1 and num_evaluation_graphs == 1
        assert found["is plain"]


# With "Copies", copies of metrics and of the module are copies.
@pytest.mark.parametrize(("make", "settings"), [("Net", AUTOMATIC[3]), ("Copies", {})], ids=["bf16", "copies"])
def test_eager_training_is_that_of_ddp(make: str, settings: dict[str, Any], ranks: Ranks) -> None:
    for found in ranks(2).run(call, "lightning_ranks.differences", make, {}, {}, **settings):
        assert max(found["differences"].values()) < 1e-5 and found["is plain"], found


def test_manual_optimization_is_that_of_ddp(ranks: Ranks) -> None:
    # With manual optimization Lightning's "ddp" broadcasts buffers before the first step alone.
    settings = {"find_unused_parameters": True, "broadcast_buffers": False}
    for found in ranks(2).run(call, "lightning_ranks.differences", "Adversaries", settings, settings):
        assert max(found["differences"].values()) < 1e-5, found
        assert found["warnings"] == []  # that its steps run eagerly is documented
        assert found["kinds"] == ({"_Steps"}, {"DistributedDataParallel"})


@pytest.mark.parametrize(
    "program",
    [
        *("count_both", "resume", "name_parameters", "hooked", "make_wrong_strategies", "refuse_modules"),
        "raise_in_a_step",
    ],
)
def test_other_programs(program: str, ranks: Ranks, tmp_path: Path) -> None:
    """The name or docstring of each says what it asserts on both ranks."""
    ranks(2).run(call, f"lightning_ranks.{program}", tmp_path)


@pytest.mark.parametrize("compiled", only([False], [False, True]))
def test_the_example_trains_and_goes_on(compiled: bool, ranks: Ranks, tmp_path: Path) -> None:
    common = ["--points", "800", "--backend", "aot_eager", "--accumulate", "2", "--out-dir", str(tmp_path)]
    ranks(2).run(call, "hugging_face.run_example", "train_lightning.py", "--epochs", "1", *common, compiled=compiled)
    resume = ["--epochs", "3", "--resume", str(tmp_path / "last.ckpt")]
    first, second = ranks(2).run(
        call, "hugging_face.run_example", "train_lightning.py", *resume, *common, compiled=compiled
    )
    assert "accuracy after 3 epochs: 0." in first and "accuracy" not in second
