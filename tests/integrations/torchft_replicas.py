"""A rank of a replica of torchft, for test_torchft.py. It writes down what every step has done."""

import pickle
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from process_copies import begin_copy
from torch import Tensor, nn

from ddp_compile import ddp_compile, no_sync
from ddp_compile.integrations.torchft import ManagedAllReduce

WIDTH, ROWS, LR = 8, 4, 0.05
STEP_S = 0.02  #: so that a replica alone does not run away


class Step(NamedTuple):
    number: int
    num_participants: int
    takes_part: bool
    gradients: list[Tensor]
    parameters: list[Tensor]  #: after it


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)


def loss_of(net: nn.Module, replica: int, rank: int, step: int) -> Tensor:
    """Of the batch of a replica's rank in a step."""
    torch.manual_seed(1000 * step + 10 * replica + rank)
    return net(torch.randn(ROWS, WIDTH)).square().mean()


def steps_in(log: Path) -> list[Step]:
    """What a replica has written so far; a record that is being written is left out."""
    steps = []
    if log.exists():
        with log.open("rb") as file:
            while True:
                try:
                    steps.append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    return steps
    return steps


class Start(NamedTuple):
    """What a rank of a replica is told when it starts; ``life`` counts the starts of its replica."""

    replica: int
    life: int
    rank: int
    num_ranks: int
    lighthouse: str
    folder: Path
    settings: dict[str, Any]  #: of the manager

    def file(self, kind: str) -> Path:
        return self.folder / f"{kind}_{self.replica}_{self.life}_{self.rank}"


def run_rank(path: list[str], start: Start) -> None:
    """Train as one rank of a replica until the file ``stop`` names a step that has been committed."""
    begin_copy(path)
    try:
        of_replica = dist.FileStore(str(start.folder / f"store_{start.replica}_{start.life}"), start.num_ranks)
        dist.init_process_group("gloo", store=of_replica, rank=start.rank, world_size=start.num_ranks)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
        dist.broadcast_object_list(port, src=0)
        net = make_net(seed=start.life)
        optimizer = make_optimizer(net)
        with make_manager(start, port[0], net, optimizer) as manager:
            algorithm = ManagedAllReduce(manager)
            model = ddp_compile(net, algorithm=algorithm, backend="aot_eager", bucket_cap_mb=0.0005)
            if start.life > 0:  # compiled before it joins, so that the others need not wait for that
                with no_sync(model):
                    loss_of(model, start.replica, start.rank, 0).backward()
            start.file("ready").touch()
            while not (start.folder / "go").exists():  # in the first step the lighthouse knows of both
                time.sleep(STEP_S)
            train(model, optimizer, manager, start)
    except BaseException:
        start.file("error").write_text(traceback.format_exc())
        raise


@contextmanager
def make_manager(start: Start, port: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """A torchft.Manager of one rank of a replica."""
    from torchft import Manager, ProcessGroupGloo

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    timeout = timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        rank=start.rank,
        world_size=start.num_ranks,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=start.lighthouse,
        replica_id=f"replica_{start.replica}",
        hostname="localhost",
        **start.settings,
    )
    try:
        yield manager
    finally:
        manager.shutdown()


def train(model: Any, optimizer: torch.optim.Optimizer, manager: Any, start: Start) -> None:
    stop = start.folder / "stop"
    with start.file("steps").open("wb", buffering=0) as log:
        while not stop.exists() or manager.current_step() < int(stop.read_text()):
            time.sleep(STEP_S)
            optimizer.zero_grad()
            manager.start_quorum()
            loss_of(model, start.replica, start.rank, manager.current_step()).backward()
            number, num, takes_part = manager.current_step(), manager.num_participants(), manager.is_participating()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            if manager.should_commit():
                optimizer.step()
                parameters = [parameter.detach().clone() for parameter in model.parameters()]
                log.write(pickle.dumps(Step(number, num, takes_part, gradients, parameters)))
