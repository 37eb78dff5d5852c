"""Training on the pretend accelerator, beside one process, CPU ranks, or DistributedDataParallel on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_places import PLACEMENTS, placed
from device_programs import PROGRAMS, perform
from device_ranks import DeviceRanks, needs_pinned_torch
from in_ci import only
from ways_to_train import NUM_STEPS, WAYS, Trained, train

pytestmark = needs_pinned_torch

# The most demanding placement. "default stream" is what most people have.
HARDEST = "side stream, device not set"
#: The device has no sparse tensors.
WAYS_OF_THE_DEVICE = [name for name in WAYS if name != "sparse_regulariser"]


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[DeviceRanks]:
    ranks = DeviceRanks(has_stream_interface=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def ranks_without_stream_interface() -> Iterator[DeviceRanks]:
    ranks = DeviceRanks(has_stream_interface=False)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("name", "placement"),
    only(
        [("backward split", "default stream"), ("normalized", HARDEST), ("sharded, read on another stream", HARDEST)],
        ((name, placement) for placement in PLACEMENTS for name in PROGRAMS),
    ),
)
def test_parameters_are_as_expected(device_ranks: DeviceRanks, name: str, placement: str) -> None:
    for difference in device_ranks.run(perform, name, placement):
        assert difference <= PROGRAMS[name].tolerance


def train_in_way(name: str, placement: str, split: str) -> Trained:
    with placed(PLACEMENTS[placement]) as where:
        return train(name, device=str(where.device), split=split)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS_OF_THE_DEVICE)
@pytest.mark.parametrize("placement", ["default stream", HARDEST])
def test_gradients_are_exact_and_buckets_are_launched_early(
    device_ranks: DeviceRanks, way: str, placement: str
) -> None:
    for trained in device_ranks.run(train_in_way, way, placement, "backward"):
        assert trained.worst <= WAYS[way].tolerance
        assert trained.num_early[-1] == WAYS[way].num_early


# A graph that is cut takes "losses_one_by_one" for a gradient that arrives twice.
@pytest.mark.long
@pytest.mark.parametrize("way", [way for way in WAYS_OF_THE_DEVICE if way != "losses_one_by_one"])
def test_gradients_are_exact_if_graphs_are_cut(device_ranks: DeviceRanks, way: str) -> None:
    for trained in device_ranks.run(train_in_way, way, HARDEST, "forward"):
        assert trained.worst <= WAYS[way].tolerance
        assert trained.num_early == (0,) * NUM_STEPS


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_streams_are_reached_by_torch_accelerator_alone(ranks_without_stream_interface: DeviceRanks, name: str) -> None:
    """``torch.acc`` has no streams and events of its own, as torch's reference device has none."""
    for difference in ranks_without_stream_interface.run(perform, name, "side stream"):
        assert difference <= PROGRAMS[name].tolerance
