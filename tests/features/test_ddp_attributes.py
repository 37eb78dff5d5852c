"""Attributes and methods of a DistributedDataParallel that code uses, on the module itself."""

import copy
from typing import Any

import pytest
import torch
from small_net import Net, replicated
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")


def test_require_backward_grad_sync() -> None:
    seen: list[list[bool]] = []
    for model in (replicated(), nn.parallel.DistributedDataParallel(Net())):
        values = [model.require_backward_grad_sync]
        with model.no_sync():
            values.append(model.require_backward_grad_sync)
            model.require_backward_grad_sync = True
            values.append(model.require_backward_grad_sync)
        values.append(model.require_backward_grad_sync)
        model.require_backward_grad_sync = False
        with model.no_sync():
            pass
        values.append(model.require_backward_grad_sync)
        seen.append(values)
    assert seen[0] == seen[1] == [True, False, True, True, False]


MISSING = [
    "module", "broadcast_buffers", "scatter", "gather", "to_kwargs", "will_sync_module_buffers",
    "_update_process_group", "_get_ddp_logging_data", "_register_builtin_comm_hook", "_set_static_graph",
]  # fmt: skip


@pytest.mark.parametrize("name", MISSING)
def test_methods_that_are_not_here(name: str) -> None:
    # Code that uses hasattr() to find and unwrap wrappers leaves the module unchanged.
    assert hasattr(nn.parallel.DistributedDataParallel(Net()), name)
    with pytest.raises(AttributeError, match=f"'Net' object has no attribute '{name}'"):
        getattr(replicated(), name)


READ_OFF_DDP = [
    "process_group", "device", "device_type", "parameters_to_ignore", "bucket_bytes_cap", "gradient_as_bucket_view",
    "find_unused_parameters", "skip_all_reduce_unused_params", "static_graph",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:skip_all_reduce")
@pytest.mark.parametrize("settings", [{}, {"static_graph": True, "find_unused_parameters": False}])
def test_attributes_of_ddp(settings: dict[str, Any]) -> None:
    settings = {"bucket_cap_mb": 3, "gradient_as_bucket_view": True, **settings}
    model = replicated(**settings)
    wrapper = nn.parallel.DistributedDataParallel(Net(), **settings)
    for name in READ_OFF_DDP:
        assert getattr(model, name) == getattr(wrapper, name), name
    assert model.bucket_bytes_cap_list == [2**20, 3 * 2**20]
    assert not model.lazy_bucket_allocation and model.device_mesh is None
    mesh = init_device_mesh("cpu", (1,))
    assert ddp_compile(Net(), device_mesh=mesh, backend="eager").device_mesh is mesh
    assert not hasattr(model.unwrap(), "process_group")


class WithNamesOfItsOwn(nn.Module):
    device = "a constant of the class"

    def __init__(self) -> None:
        super().__init__()
        self.process_group = "an attribute"
        self.static_graph = nn.Linear(2, 2)
        self.register_buffer("device_type", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.static_graph(x) * self.device_type


def test_names_of_the_module() -> None:
    module = WithNamesOfItsOwn()
    layer = module.static_graph
    model = ddp_compile(module, backend="eager", fullgraph=True)
    assert (model.device, model.process_group) == ("a constant of the class", "an attribute")
    assert model.static_graph is layer and torch.equal(model.device_type, torch.ones(1))
    model(torch.ones(1, 2)).sum().backward()
    model.find_unused_parameters = "given later"
    assert model.find_unused_parameters == "given later" and copy.deepcopy(model).find_unused_parameters
    assert "bucket_bytes_cap" not in vars(model) and not hasattr(copy.deepcopy(model), "bucket_bytes_cap")


def test_finalize_backward() -> None:
    model = replicated()
    assert not model.require_manual_backward_finalization and not model.should_finalize_after_backward
    with pytest.raises(RuntimeError, match=r"rank 0: .*backwards finalize by default; set model.require_manual"):
        model.finalize_backward()
    model(torch.ones(2, 6)).sum().backward()
    model.require_manual_backward_finalization = True
    assert model.require_manual_backward_finalization and model.should_finalize_after_backward
    with pytest.raises(RuntimeError, match=r"no reduced backward has come .*outside no_sync"):
        model.finalize_backward()
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"finalization = False was set while .*; set it before a forward"):
        model.require_manual_backward_finalization = False
    model.finalize_backward()
    model.require_manual_backward_finalization = False
    model(torch.ones(2, 6)).sum().backward()
    model(torch.ones(2, 6)).sum().backward()


def test_finalize_inside_a_backward() -> None:
    model = replicated()
    model.require_manual_backward_finalization = True
    x = torch.ones(2, 6, requires_grad=True)
    x.register_hook(lambda _: model.finalize_backward())
    loss = model(x).sum()
    model.first.weight.register_hook(lambda _: None)
    with pytest.raises(RuntimeError, match=r"call it (once )?after"):
        loss.backward()
