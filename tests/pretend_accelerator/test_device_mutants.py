"""Without one of these waits, events or reports of used memory, training on the pretend accelerator comes to nothing.

`tests/races` proves that each such place of the sources is needed. These are those whose absence shows in parameters
in each run; that of others does by chance, or never.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_mutants import Site, is_noticed, sites_of
from device_ranks import DeviceRanks, needs_pinned_torch

pytestmark = needs_pinned_torch

CHAIN = "runtime/algorithms/collective_chain.py"
#: By the program that notices it.
NOTICED = {
    "wire dtype": [
        Site("record", CHAIN, "CollectiveChain.launch"),
        Site("wait", CHAIN, "CollectiveChain.launch"),
        Site("record", CHAIN, "_Chain._start_next"),
        Site("wait", CHAIN, "_Chain.wait"),
        Site("wait for work", CHAIN, "_Chain.go_on"),
    ],
    "local SGD": [Site("wait for work", "runtime/algorithms/flat_parameters.py", "average_over")],
    "forward split": [Site("wait for work", "runtime/buckets/bucket.py", "Bucket.wait")],
}
PLACEMENT = "side stream"


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[DeviceRanks]:
    ranks = DeviceRanks(has_stream_interface=True)
    yield ranks
    ranks.close()


@pytest.mark.long
@pytest.mark.parametrize(("name", "site"), [(name, site) for name in NOTICED for site in NOTICED[name]], ids=str)
def test_parameters_are_wrong_without(device_ranks: DeviceRanks, name: str, site: Site) -> None:
    assert site in set().union(*device_ranks.run(sites_of, name, PLACEMENT)), "the program does not come to this place"
    assert any(device_ranks.run(is_noticed, name, PLACEMENT, site))
