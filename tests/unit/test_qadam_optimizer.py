"""`ddp_compile.optim.QAdam` as an optimizer, without other ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ddp_compile.optim import QAdam


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup_steps": 0}, r"QAdam\(warmup_steps=0\): pass a number of steps from 1 on"),
        ({"warmup_steps": 1.5}, r"QAdam\(warmup_steps=1\.5\)"),
        ({"lr": -1.0}, r"QAdam\(lr=-1\.0\): pass 0 or more"),
        ({"eps": -1.0}, r"QAdam\(eps=-1\.0\): pass 0 or more"),
        ({"weight_decay": -1.0}, r"QAdam\(weight_decay=-1\.0\): pass 0 or more"),
        ({"betas": (0.9, 1.0)}, r"QAdam\(betas=\(0\.9, 1\.0\)\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], said: str) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=said):
        QAdam(module.parameters(), **settings)
    with pytest.raises(ValueError, match=said if "warmup_steps" not in settings else "all groups"):
        QAdam([{"params": [module.weight], **settings}, {"params": [module.bias]}])


def alone(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], num_steps: int) -> None:
    """Steps without any other rank, some without a gradient for some parameter."""
    for step in range(num_steps):
        torch.manual_seed(step)
        for i, parameter in enumerate(parameters):
            parameter.grad = None if (i == 1 and step % 2) else torch.randn(parameter.shape, dtype=parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_in_warm_up_it_is_adam_in_every_bit(adam: type[torch.optim.Adam]) -> None:
    dtypes = (torch.float32, torch.float32, torch.bfloat16)
    ours, theirs = ([nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in dtypes] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-6}
    optimizer = QAdam(ours, **settings, warmup_steps=6, decoupled_weight_decay=adam is torch.optim.AdamW)
    alone(optimizer, ours, 6)
    alone(adam(theirs, **settings, foreach=True), theirs, 6)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_what_has_no_variance_stays_where_it_is() -> None:
    parameter, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = QAdam([parameter, late], lr=0.1, warmup_steps=2)
    for gradient in ([1.0, 0.0, 0.0], [1.0, 0.0, 2.0], [1e-3, 1e-3, 1e-3]):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert (parameter.detach() != before).tolist() == [True, False, True]
    late.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"step 4 of QAdam\(warmup_steps=2\).*parameter 1 of group 0, of shape"):
        optimizer.step()
    assert optimizer.num_steps == 3
    with pytest.raises(ValueError, match="after 3 steps: warm-up ended with step 2"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_groups_and_states_are_those_of_any_optimizer() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = QAdam(parameters[:1], warmup_steps=3)
    alone(optimizer, parameters[:1], 1)
    optimizer.add_param_group({"params": parameters[1:], "betas": (0.5, 0.6)})
    assert [group["num_steps"] for group in optimizer.param_groups] == [1, 1]
    copied = copy.deepcopy(optimizer)
    assert copied.num_steps == 1 and copied.param_groups[1]["betas"] == (0.5, 0.6)
    with pytest.raises(ValueError, match="group 0 has no num_steps, warmup_steps"):
        optimizer.load_state_dict(torch.optim.Adam(parameters).state_dict())
    parameters[0].grad = torch.eye(3)[0].to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0, of shape.* has a sparse gradient"):
        optimizer.step()
