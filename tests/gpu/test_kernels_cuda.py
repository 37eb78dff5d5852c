"""The CUDA kernels on a device: arithmetic against float64, streams, threads, graphs, operators, large buffers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from device_tensors import POISON, on_gpu, rounded_product, values_of
from kernel_values import DTYPES, same_bits
from torch import Tensor

from ddp_compile import kernels
from ddp_compile.kernels.cuda import module

pytestmark = on_gpu

OPS = torch.ops.ddp_compile
CUDA = "cuda"

# Keeps the stream busy for a few milliseconds, in which later work can be seen undone.
BUSY_SIZE = 4096


def keep_busy() -> Tensor:
    """Queue some milliseconds of work on the current stream."""
    matrix = torch.full((BUSY_SIZE, BUSY_SIZE), 1e-4, device=CUDA)
    for _ in range(4):
        matrix = matrix @ matrix
    return matrix


def test_kernels_are_used() -> None:
    """Nothing below may pass because torch does the work."""
    _, of_cuda = kernels.status()
    assert of_cuda.implementation == "cuda", of_cuda.reason
    assert torch.cuda.get_device_name() in of_cuda.reason and "sm_" in of_cuda.reason


def test_mixed_dtypes_and_layouts() -> None:
    tensors = [values_of(50 + 37 * i, DTYPES[i % 3], i) for i in range(20)]
    tensors += [values_of(600, torch.float32).view(20, 30).t(), values_of(9, torch.float32).double()]
    flat = torch.full((sum(tensor.numel() for tensor in tensors),), POISON, device=CUDA)
    plan = kernels.FlattenPlan.for_bucket(tensors, flat)
    assert plan.implementation == "cuda"
    # A gradient of other strides than its place has, and one of float64, are moved by torch.
    given = [*tensors[:20], tensors[20].contiguous(), tensors[21]]
    plan.flatten(given, 0.5)
    assert all(torch.equal(v, t.float() * 0.5) for v, t in zip(plan.views, given, strict=True))
    back = [torch.full_like(tensor, POISON) for tensor in given]
    plan.unflatten(back, 2.0)
    for result, view in zip(back, plan.views, strict=True):
        torch.testing.assert_close(result.double(), (view * 2).to(result.dtype).double(), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_tensors_in_place_are_scaled(scale: float) -> None:
    flat = values_of(100_003, torch.float32)
    expected = rounded_product(flat, scale, torch.float32)
    plan = kernels.FlattenPlan.for_bucket(list(flat.split(999)), flat)
    plan.flatten(plan.views, scale)
    assert same_bits(flat, expected)


def test_work_is_done_on_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    tensors = [torch.zeros(100_000, device=CUDA) for _ in range(30)]
    flats = [torch.zeros(3_000_000, device=CUDA) for _ in range(2)]
    plans = [kernels.FlattenPlan.for_bucket(tensors, flat) for flat in flats]
    with torch.cuda.stream(stream):
        keep_busy()  # what it needs is allocated now, which can wait for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        keep_busy()
        for tensor in tensors:
            tensor.fill_(3.0)
        plans[0].flatten(tensors, 0.5)
    # The other stream does not wait: it finds the tensors as they were.
    plans[1].flatten(tensors, 0.5)
    unchanged = flats[1].clone()
    before_the_end = not stream.query()
    torch.cuda.synchronize()
    assert before_the_end, "the work that should have kept the stream busy was too short for this test"
    assert (unchanged == 0).all()
    assert (flats[0] == 1.5).all()


def test_two_threads_with_streams_of_their_own() -> None:
    def is_right(seed: int) -> bool:
        # A new thread has no CUDA context until something makes one current: our launch has to.
        tensors, flat = inputs[seed]
        with torch.cuda.stream(streams[seed]):
            for _ in range(50):
                kernels.flatten_scale(tensors, flat, 0.5)
                kernels.unflatten(flat, tensors, 2.0)
        streams[seed].synchronize()
        return same_bits(flat, expected[seed])

    inputs = [
        (
            [values_of(1000 + i, torch.float32, 100 * seed + i, special=[1.0]) for i in range(100)],
            torch.empty(104_950, device=CUDA),
        )
        for seed in range(2)
    ]
    expected = [torch.cat(tensors) * 0.5 for tensors, _ in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(is_right, range(2))) == [True, True]


def everything(tensors: list[Tensor], plan: kernels.FlattenPlan, x: Tensor) -> tuple[Tensor, Tensor]:
    """One call of each kernel, of the functions that make plans and throw them away too."""
    plan.flatten(tensors, 0.5)
    back = [torch.empty_like(tensor) for tensor in tensors]
    kernels.unflatten(plan.flat, back, 2.0)
    rows = kernels.minmax_u8_compress(plan.flat, 3)
    kernels.minmax_u8_decompress(rows, x)
    kernels.average_into(x, plan.flat, x.clone(), 2.0)
    return torch.cat(back), x


@pytest.mark.parametrize("loaded", [True, False])
def test_cuda_graph_replays_other_values(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    numels = [100 * i + 1 for i in range(40)]
    tensors = [torch.ones(numel, device=CUDA) for numel in numels]
    flat, x = torch.empty(sum(numels), device=CUDA), torch.empty(sum(numels), device=CUDA)
    plan = kernels.FlattenPlan.for_bucket(tensors, flat)
    if loaded:
        everything(tensors, plan, x)
    else:
        # As in a process whose first use is the capture: every kernel is loaded during the capture.
        monkeypatch.setattr(module, "_devices", {})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = everything(tensors, plan, x)
    del plan  # the graph has copies of its tables
    for seed in range(3):
        for i, tensor in enumerate(tensors):
            tensor.copy_(values_of(len(tensor), torch.float32, seed * 100 + i))
        graph.replay()
        replayed = [flat.clone(), *(result.clone() for result in results)]
        fresh = kernels.FlattenPlan.for_bucket(tensors, torch.empty_like(flat))
        expected = everything(tensors, fresh, torch.empty_like(x))
        for a, b in zip(replayed, (fresh.flat, *expected), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def sample() -> tuple[list[Tensor], Tensor]:
    return [torch.randn(3, 4, device=CUDA), torch.randn(5, device=CUDA)], torch.zeros(20, device=CUDA)


def test_opcheck_of_every_operator() -> None:
    x, total, copy = (torch.randn(33, device=CUDA) for _ in range(3))
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (OPS.flatten_scale, (*sample(), 0.5, None)),
        (OPS.unflatten, (*sample()[::-1], 0.5, [1, 14])),
        (OPS.minmax_u8_compress, (x, 2, 1)),
        (OPS.minmax_u8_decompress, (torch.zeros(2, 32, dtype=torch.uint8, device=CUDA), x, True)),
        (OPS.average_into, (x, total, copy, 2.0)),
    ]
    for op, arguments in calls:
        results = torch.library.opcheck(op.default, arguments)
        assert set(results.values()) == {"SUCCESS"}, op


@pytest.mark.parametrize("numel", [25 * 2**18 + 3, 2**24])
def test_codec_of_one_large_chunk(numel: int) -> None:
    values = values_of(numel, torch.float32, special=[-12.5, 3.0])
    out = torch.full_like(values, POISON)
    rows = kernels.minmax_u8_compress(values)
    kernels.minmax_u8_decompress(rows, out)
    step = (values.max().double() - values.min().double()) / 255
    # Half a step, and the rounding of the result to float32.
    assert ((out.double() - values.double()).abs() <= step / 2 * (1 + 1e-9) + out.double().abs() * 2.0**-24).all()
    assert torch.equal(rows.cpu(), kernels.minmax_u8_compress(values.cpu()))


def test_more_elements_than_32_bits_count() -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    numel = 2**32 + 8195
    if free_bytes < 32e9:
        pytest.skip("needs 32 GB of free memory on the device")
    tensors = [
        torch.full((numel,), 2.0, dtype=torch.bfloat16, device=CUDA),
        torch.ones(5, dtype=torch.bfloat16, device=CUDA),
    ]
    tensors[0][-1] = 3.0
    flat = torch.zeros(numel + 5, dtype=torch.bfloat16, device=CUDA)
    kernels.flatten_scale(tensors, flat, 0.5)
    assert flat[-7:].tolist() == [1.0, 1.5] + [0.5] * 5
    assert bool((flat[: numel - 1].view(torch.int16) == flat[0].view(torch.int16)).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_each_device_has_its_own_kernels() -> None:
    for ordinal in (1, 0):
        device = torch.device("cuda", ordinal)
        tensors, flat = [torch.ones(7, device=device), torch.ones(5, device=device)], torch.zeros(12, device=device)
        kernels.flatten_scale(tensors, flat, 0.5)  # whichever device is current
        assert flat.tolist() == [0.5] * 12
    assert torch.cuda.current_device() == 0
