"""Plans in files: a model reduces by them, and refuses those of other models."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_compile import BucketPlan, ddp_compile, shard_optimizer

pytestmark = pytest.mark.usefixtures("single_rank_group")


def model_of(width: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def replicated(module: nn.Module, **settings: Any) -> Any:
    return ddp_compile(module, backend="eager", **settings)


def trained(module: nn.Module, **settings: Any) -> Any:
    model: Any = ddp_compile(module, backend="aot_eager", **settings)
    for _ in range(3):
        model(torch.ones(2, model[0].in_features)).sum().backward()
    return model


def test_saved_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved = trained(model_of(), bucket_cap_mb=400 / 2**20, first_bucket_cap_mb=1.0).bucket_plan
    assert len(saved.buckets) == 2
    saved.save(path)
    assert BucketPlan.load(path) == saved and not list(tmp_path.glob("*.tmp"))
    plan = trained(model_of(), bucket_plan=path).bucket_plan
    assert plan == saved
    with torch.compiler.set_stance("force_eager"):  # all buckets would be packed anew
        assert trained(model_of(), bucket_plan=str(path)).bucket_plan == saved


def test_saved_plan_with_owners(tmp_path: Path) -> None:
    replicated(model_of()).bucket_plan.save(tmp_path / "plan")
    model = replicated(model_of(), bucket_plan=tmp_path / "plan")
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    optimizers = torch.optim.Muon(matrices), torch.optim.SGD(vectors)
    shard_optimizer(list(optimizers), model)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert {g.owner for bucket in model.bucket_plan.buckets for g in bucket.gradients} == {None, 0}


def without_bias() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8, bias=i != 1) for i in range(4)))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            lambda: model_of(4),
            "0.weight: float32, 64 elements, on cpu in the plan, float32, 16 elements, on cpu in the model;"
            " 0.bias: float32, 8 elements, on cpu in the plan, float32, 4 elements, on cpu in the model",
        ),
        (lambda: model_of(4), "; and 3 more differences. Pass a plan that was saved with this model, or leave"),
        (without_bias, "1.bias: float32, 8 elements, on cpu in the plan, missing in the model. Pass"),
        (lambda: model_of().bfloat16(), "0.weight: float32, 64 elements, on cpu in the plan, bfloat16, 64 elements"),
        (lambda: nn.Sequential(*model_of(), nn.Linear(8, 1)), "4.weight: missing in the plan, float32, 8 elements"),
    ],
)
def test_plan_of_another_model(module: Any, said: str, tmp_path: Path) -> None:
    replicated(model_of()).bucket_plan.save(tmp_path / "plan")
    with pytest.raises(ValueError) as raised:
        replicated(module(), bucket_plan=tmp_path / "plan")
    assert str(raised.value).startswith(f"rank 0: bucket_plan='{tmp_path}/plan' is the plan of another model: ")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("saved", "loaded"), [(None, torch.float32), (torch.float32, None)], ids=["saved without", "saved with"]
)
def test_plan_with_another_reduce_dtype(saved: torch.dtype | None, loaded: torch.dtype | None, tmp_path: Path) -> None:
    replicated(model_of().bfloat16(), reduce_dtype=saved).bucket_plan.save(tmp_path / "plan")
    said = f"plan' was saved with reduce_dtype={saved}, and this model has reduce_dtype={loaded}; pass"
    with pytest.raises(ValueError, match=re.escape(f"{said} reduce_dtype={saved}, or leave bucket_plan out")):
        replicated(model_of().bfloat16(), bucket_plan=tmp_path / "plan", reduce_dtype=loaded)
    replicated(model_of().bfloat16(), bucket_plan=tmp_path / "plan", reduce_dtype=saved)
    # Of a float32 model it is the plan of another model: the buckets of both are of float32.
    with pytest.raises(ValueError, match=r"plan of another model: 0\.weight: bfloat16, 64 elements"):
        replicated(model_of(), bucket_plan=tmp_path / "plan", reduce_dtype=loaded)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be loaded: [Errno 2] No such file or directory"),
        ("{}", "cannot be loaded: bucket plan is malformed: plan lacks"),
        ("no json", "cannot be loaded: bucket plan is malformed: Expecting value"),
    ],
)
def test_files_without_a_plan(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "plan").write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"rank 0: bucket plan '{tmp_path}/plan' {said}")):
        replicated(model_of(), bucket_plan=tmp_path / "plan")


def test_plan_and_capacity() -> None:
    with pytest.raises(ValueError, match=r"rank 0: bucket_cap_mb=25 and bucket_plan='plan' each say .*; pass one of"):
        replicated(model_of(), bucket_cap_mb=25, bucket_plan="plan")
