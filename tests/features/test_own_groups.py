"""Our own process groups if the default group has a bound device, from ``init_process_group(device_id=...)``.

A gloo group takes a bound CUDA device on any machine, and hands it on to new groups as an NCCL group does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ddp_compile.runtime.comm.process_groups import group_of, own_group

CPU, BOUND = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def bound_default_group(single_rank_group: None) -> Iterator[dist.ProcessGroup]:
    default = dist.group.WORLD
    assert default is not None
    default.bound_device_id = BOUND
    yield default


@pytest.fixture
def split_sources(monkeypatch: pytest.MonkeyPatch) -> list[dist.ProcessGroup]:
    """The groups from which torch would have split the communicators of new ones."""
    asked: list[dist.ProcessGroup] = []
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", lambda group, *_: asked.append(group))
    return asked


def test_groups_are_not_bound(bound_default_group: dist.ProcessGroup, split_sources: list[dist.ProcessGroup]) -> None:
    named = group_of([0], bound_default_group, CPU, "agreed_on")
    drawn = own_group(bound_default_group, CPU)
    assert [group.bound_device_id for group in (named, drawn)] == [None, None]
    assert split_sources == []
    assert bound_default_group.bound_device_id == BOUND


def test_default_group_after_an_error(bound_default_group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="world size"):
        group_of([0, -1], bound_default_group, CPU, "agreed_on")
    assert bound_default_group.bound_device_id == BOUND
