"""Fixtures that several kinds of tests share."""

import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: two threads a rank on two cores stall each other for milliseconds at every barrier.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor would start an interpreter in each process to see whether vector instructions work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
import torch.distributed as dist
from _pytest.runner import pytest_runtest_protocol
from cheap_compiles import make_compiles_cheap
from one_stack import on_one_stack
from rank_pool import RankPool, Ranks, collect_process_groups, destroy_process_groups

from ddp_compile import ddp_compile

torch.set_num_threads(1)
make_compiles_cheap()
on_one_stack(pytest_runtest_protocol)
# torch prints every graph for its trace if that has a handler, and pytest adds one to loggers that do not propagate.
logging.getLogger("torch.__trace").propagate = True

# A shell without job control starts what it puts in the background with Ctrl-C ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Where ``make test-long`` looks for tests marked alone; ``make test`` looks in the first one.
ALONE_IN = ("bench", "faults")
#: What was collected, before what is not asked for is left out.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two rules for tests whose violation would go unnoticed, or would not show its reason.

    make looks for tests marked ``alone`` in few folders, since importing all tests takes seconds. An identifier with an
    address differs in each process, and then pytest-xdist refuses to run any test.
    """
    config.stash[COLLECTED] = list(items)
    alone = [item for item in items if item.get_closest_marker("alone")]
    folders = {item: ALONE_IN if item.get_closest_marker("long") else ALONE_IN[:1] for item in alone}
    elsewhere = [item.nodeid for item, names in folders.items() if item.path.parent.name not in names]
    if elsewhere:
        raise pytest.UsageError(
            f"make runs tests marked alone in tests/{ALONE_IN[0]} only, and if they are long in"
            f" tests/{ALONE_IN[1]}, not these: {elsewhere}"
        )
    unstable = [item.nodeid for item in items if re.search(r"\bat 0x[0-9a-f]+", item.nodeid)]
    if unstable:
        raise pytest.UsageError(f"parametrize(ids=...) has to name these tests, they contain addresses: {unstable}")


@pytest.fixture(scope="session", autouse=True)
def shared_inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One inductor cache for the whole run, empty at its start, so that no earlier run can hide a wrong cache key."""
    own = tmp_path_factory.getbasetemp()
    # Processes of pytest-xdist have folders of their own in that of the run.
    path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "inductor_cache"
    path.mkdir(exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    yield path


@pytest.fixture
def single_rank_group(tmp_path: Path) -> Iterator[None]:
    """A gloo process group with this process as its only rank, and fresh Dynamo caches."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    destroy_process_groups()
    collect_process_groups()


@pytest.fixture(params=[pytest.param("forward", marks=pytest.mark.long), "backward"], scope="module")
def split(request: pytest.FixtureRequest) -> str:
    """Each way to launch buckets during a compiled backward, for tests with the same results in both.

    In CI only the backward split, whose first iterations leave buckets to their hooks, as the forward split always
    does. Tests of errors that cuts themselves could cause name both splits.
    """
    way: str = request.param
    return way


@pytest.fixture
def each_split(split: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every call of `ddp_compile` that names no ``split`` has this one, in the ranks of a `RankPool` as well."""
    defaults = ddp_compile.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "split", split)
    return split


@pytest.fixture(scope="session")
def rank_pools(shared_inductor_cache: Path) -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(rank_pools: dict[int, RankPool]) -> Ranks:
    """``ranks(2)`` is a pool of two processes in a gloo group; see `tests.rank_pool`."""

    def pool_of(world_size: int) -> RankPool:
        return rank_pools.setdefault(world_size, RankPool(world_size))

    return pool_of
