"""``torch.distributed.autograd`` keeps gradients in its context: unreduced gradients there do not go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from process_copies import run_in_copy
from torch import nn
from torch.distributed import rpc

from ddp_compile import ddp_compile
from ddp_compile.errors import ReplicationError


def train_in_a_context(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "group"), 1), rank=0, world_size=1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'rpc'}")
    rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
    plain = nn.Linear(3, 2)
    model = ddp_compile(nn.Linear(3, 2), backend="eager")
    model.load_state_dict(plain.state_dict())
    x = torch.ones(4, 3)
    plain(x).sum().backward()
    model(x).sum().backward()  # RPC alone changes nothing
    assert torch.equal(model.weight.grad, plain.weight.grad)
    with dist_autograd.context() as context:
        with pytest.raises(ReplicationError, match=r"rank 0: a forward was called inside torch\.distributed\.autograd"):
            model(x)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        with model.no_sync():  # the way out
            dist_autograd.backward(context, [model(x).sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[model.weight], plain.weight.grad)
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    rpc.shutdown()
    dist.destroy_process_group()


@pytest.mark.skipif(not rpc.is_available(), reason="a torch without RPC has no distributed autograd")
def test_forward_in_a_context(tmp_path: Path) -> None:
    ended = run_in_copy(train_in_a_context, tmp_path)
    assert ended.exit_code == 0, ended.stderr
