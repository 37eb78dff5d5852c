"""Training on a CUDA device with buckets launched inside the compiled backward, with CUDA graphs and without."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device_tensors import on_gpu
from residual_layers import ONE_LAYER_MIB, WIDTH, ResidualLayers
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_compile import ReplicationError, ddp_compile

pytestmark = [*on_gpu, pytest.mark.inductor]


@pytest.fixture
def nccl_group(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank, with the backends that torch chooses by default on a GPU."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gradients_are_those_of_the_plain_module(mode: str, split: str, nccl_group: None) -> None:
    torch.manual_seed(0)
    reference = ResidualLayers().cuda()
    model = ddp_compile(copy.deepcopy(reference), bucket_cap_mb=ONE_LAYER_MIB, split=split, mode=mode)
    model.register_comm_hook(None, allreduce_hook)  # with a hook, buckets are sent on a single rank as well
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    for _ in range(6):  # CUDA graphs are warmed up, recorded and replayed
        x = torch.randn(8, WIDTH, device="cuda")
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
    assert sum(bucket.was_launched_early for bucket in model._ddp_compile_state.reducer.buckets) == (
        0 if split == "forward" else 5
    )


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_host_never_waits_in_a_backward(settings: dict[str, bool], split: str, nccl_group: None) -> None:
    """Except once in iterations that learn, 1, 2, 4 and 8, to read whether values were equal."""
    model = ddp_compile(ResidualLayers().cuda(), bucket_cap_mb=ONE_LAYER_MIB, split=split, **settings)
    model.register_comm_hook(None, allreduce_hook)
    for iteration in range(1, 8):
        loss = model(torch.randn(8, WIDTH, device="cuda")).square().sum()
        torch.cuda.set_sync_debug_mode("error" if iteration in (3, 5, 6, 7) else "default")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_captured_forward_is_refused(nccl_group: None) -> None:
    model = ddp_compile(ResidualLayers().cuda(), backend="eager")
    x = torch.randn(8, WIDTH, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ReplicationError, match="while work for cuda:0 is being captured"), torch.cuda.graph(graph):
        model(x)
    model(x).square().sum().backward()
