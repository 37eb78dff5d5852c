"""Training by Lightning with `DDPCompileStrategy`, on two ranks, compared with Lightning's own strategy "ddp"."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hugging_face import call
from in_ci import only
from rank_pool import Ranks

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")


def test_import_leaves_lightning_out() -> None:
    assert "ddp_compile.api" in sys.modules
    assert not {"lightning", "ddp_compile.integrations.lightning"} & sys.modules.keys()


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


BF16 = {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1}


# With "Copies", copies of metrics and of the module are copies.
@pytest.mark.parametrize(("make", "settings"), [("Net", BF16), ("Copies", {})], ids=["bf16", "copies"])
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


def test_mean_over_tokens_is_that_of_one_process(ranks: Ranks) -> None:
    for ours, expected in ranks(2).run(call, "lightning_ranks.count_both"):
        assert ours == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_is_one_without_a_stop(ranks: Ranks, tmp_path: Path) -> None:
    for is_equal, is_plain, difference in ranks(2).run(call, "lightning_ranks.resume", tmp_path):
        assert is_equal and is_plain and difference < 1e-6


def test_parameters_to_ignore_by_name(ranks: Ranks) -> None:
    for names in ranks(2).run(call, "lightning_ranks.reduced_names", ["head.bias"]):
        assert "module.body.0.weight" in names and "module.head.bias" not in names


def test_comm_hook_of_the_strategy(ranks: Ranks) -> None:
    for num_calls, is_finite in ranks(2).run(call, "lightning_ranks.hooked"):
        assert num_calls == 12 and is_finite


def test_communication_is_logged_each_step(ranks: Ranks) -> None:
    for rank, (logged, has_let_go, error) in enumerate(ranks(2).run(call, "lightning_ranks.logged_communication")):
        assert has_let_go
        times = [each["communication/step_ms"] for each in logged if "communication/exposed_ms" in each]
        assert len(times) == 6 and all(time > 0 for time in times)  # 12 batches, two for each step
        assert f"rank {rank}" in error and "strategy=DDPCompileStrategy()" in error


def test_refused_modules(ranks: Ranks) -> None:
    assert ranks(2).run(call, "lightning_ranks.refused_otherwise") == [[], []]


def test_refused_arguments_and_versions(ranks: Ranks) -> None:
    for misspelled, not_taken, too_old in ranks(2).run(call, "lightning_ranks.errors_of_strategies"):
        assert misspelled.endswith("did you mean find_unused_parameters?")
        assert "use torch.autocast" in not_taken
        assert "needs Lightning 2.5 or newer, but this is 2.4.0.post0; run pip" in too_old


def test_after_an_error_the_module_is_plain_again(ranks: Ranks) -> None:
    assert ranks(2).run(call, "lightning_ranks.is_plain_after_an_error") == [True, True]


@pytest.mark.parametrize("compiled", only([False], [False, True]))
def test_the_example_trains_and_goes_on(compiled: bool, ranks: Ranks, tmp_path: Path) -> None:
    common = ["--points", "800", "--backend", "aot_eager", "--accumulate", "2", "--out-dir", str(tmp_path)]
    ranks(2).run(call, "hugging_face.run_example", "train_lightning.py", "--epochs", "1", *common, compiled=compiled)
    resume = ["--epochs", "3", "--resume", str(tmp_path / "last.ckpt")]
    first, second = ranks(2).run(
        call, "hugging_face.run_example", "train_lightning.py", *resume, *common, compiled=compiled
    )
    assert "accuracy after 3 epochs: 0." in first and "accuracy" not in second
