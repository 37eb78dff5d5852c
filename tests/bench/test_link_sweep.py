"""What ``measure_link`` finds on real transfers; tests/multiproc/test_automatic_plan.py tests how it is kept."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks

from ddp_compile.runtime.comm.link_sweep import measure_link

pytestmark = pytest.mark.alone


@on_ranks(2)
def test_a_link_is_measured_alike_on_every_rank_and_once_for_a_group() -> None:
    group = dist.new_group()
    began = time.perf_counter()
    link = measure_link(group, torch.device("cpu"))
    assert time.perf_counter() - began < 10  # about 1 s
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, link)
    assert everyone[0] == everyone[1] and link.latency_s > 0 and link.s_per_byte > 0
    if dist.get_rank() == 0:  # alone, so nothing is sent
        assert measure_link(group, torch.device("cpu")) is link
    dist.barrier()
