"""torch's flight recorder names buckets, and models that are dropped leave nothing in it that could hang."""

import gc
import pickle
import sys
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import CodeType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import on_ranks

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import AlgorithmConfig, ByteGrad, GradientAllReduce
from ddp_compile.runtime.sharded.transfers import ShardTransfers

WIDTH, CAP_MB = 16, 0.001
NUM_KEPT = 2000  #: entries in the recorder


def entries() -> list[dict[str, Any]]:
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]


def bucket_of(entry: dict[str, Any]) -> str | None:
    """The innermost frame that names a bucket."""
    names = [frame["name"] for frame in entry["frames"] if frame["name"].startswith("bucket_")]
    return names[0] if names else None


def names_in(model: Any) -> list[str]:
    return [f"bucket_{i}_of_plan_{model.bucket_plan.digest}" for i in range(len(model.bucket_plan.buckets))]


# A bucket of ByteGrad takes two collectives.
@pytest.mark.parametrize(("algorithm", "num_sent"), [(GradientAllReduce(), 1), (ByteGrad(), 2)])
@on_ranks(2, eagerly=True)
def test_recorded_collectives(algorithm: AlgorithmConfig, num_sent: int) -> None:
    model = ddp_compile(Mlp(WIDTH, 4), bucket_cap_mb=CAP_MB, algorithm=algorithm)
    for _ in range(3):  # the third iteration is the first one of the last plan without messages between the ranks
        last = max((entry["record_id"] for entry in entries()), default=-1)
        loss_of(model(torch.randn(4, WIDTH))).backward()
    named = [bucket_of(entry) for entry in entries() if entry["record_id"] > last]
    assert len(model.bucket_plan.buckets) > 2
    assert sorted(named, key=str) == sorted(names_in(model) * num_sent)


@on_ranks(2, eagerly=True)
def test_collectives_of_sharded_optimizers() -> None:
    """The recorder has no messages of gloo's from rank to rank, but those of NCCL."""
    found: dict[str, list[str]] = {"reduce_scatter": [], "all_gather": []}

    def noting(name: str, send: Any) -> Any:
        def call(*arguments: Any) -> Any:
            frames = [frame.name for frame in traceback.extract_stack() if frame.name.startswith("bucket_")]
            found[name] += frames[-1:]
            return send(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        model = ddp_compile(Mlp(WIDTH, 4), bucket_cap_mb=CAP_MB)
        optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loss_of(model(torch.randn(4, WIDTH))).backward()
        for name in found:
            patch.setattr(ShardTransfers, name, noting(name, getattr(ShardTransfers, name)))
        optimizer.step()
        model.zero_grad()
        loss_of(model(torch.randn(4, WIDTH))).backward()
    # Steps go through the parameters in the order of the forward.
    assert found == {"reduce_scatter": names_in(model), "all_gather": names_in(model)[::-1]}


def train_and_drop(callback: Callable[[weakref.ref[CodeType]], object]) -> list[weakref.ref[CodeType]]:
    """References, with this callback, to the code of the frames that named the buckets of a model."""
    references: list[weakref.ref[CodeType]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        frame = sys._getframe()
        while not frame.f_code.co_name.startswith("bucket_"):
            assert frame.f_back is not None
            frame = frame.f_back
        references.append(weakref.ref(frame.f_code, callback))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model = ddp_compile(Mlp(WIDTH, 4), bucket_cap_mb=CAP_MB)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        loss_of(model(torch.randn(4, WIDTH))).backward()
    return references


@on_ranks(2, eagerly=True)
def test_code_outlives_the_recorder() -> None:
    """Its death there would run callbacks inside a lock of torch's."""
    died: list[weakref.ref[CodeType]] = []
    references = train_and_drop(died.append)
    gc.collect()
    assert len(references) > 4 and any(bucket_of(entry) for entry in entries())
    # Until nothing else is left in the recorder; the stack that is replaced last dies with the next record.
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    for _ in range(NUM_KEPT + 1):
        alone.allreduce([torch.zeros(1)]).wait()
    assert not any(bucket_of(entry) for entry in entries()), "the recorder still holds the stacks"
    assert died == [] and all(reference() is not None for reference in references)
