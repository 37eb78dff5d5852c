"""A replica of torchft in a process of its own, for test_torchft.py. It writes down what every step has done."""

from __future__ import annotations

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
    """A step of one replica that was committed."""

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


def loss_of(net: nn.Module, replica: int, step: int) -> Tensor:
    """Of the replica's batch in a step."""
    torch.manual_seed(1000 * step + replica)
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


def run_replica(
    path: list[str],
    replica: int,
    life: int,
    lighthouse: str,
    folder: Path,
    settings: dict[str, Any],
    bucket_cap_mb: float,
) -> None:
    """Train as one replica until the file ``stop`` names a step that has been committed."""
    begin_copy(path)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        net = make_net(seed=10 * replica + life)
        optimizer = make_optimizer(net)
        with make_manager(replica, lighthouse, store.port, settings, net, optimizer) as manager:
            algorithm = ManagedAllReduce(manager)
            model = ddp_compile(net, algorithm=algorithm, backend="aot_eager", bucket_cap_mb=bucket_cap_mb)
            if life > 0:  # compiled before it joins, so that the others need not wait for that
                with no_sync(model):
                    loss_of(model, replica, 0).backward()
            (folder / f"ready_{replica}_{life}").touch()
            while not (folder / "go").exists():  # in the first step the lighthouse knows of both
                time.sleep(STEP_S)
            train(model, optimizer, manager, replica, folder / f"replica_{replica}_{life}", folder / "stop")
    except BaseException:
        (folder / f"error_{replica}_{life}").write_text(traceback.format_exc())
        raise


@contextmanager
def make_manager(
    replica: int,
    lighthouse: str,
    store_port: int,
    settings: dict[str, Any],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Iterator[Any]:
    """A torchft.Manager of a replica of one rank."""
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
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store_port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="localhost",
        **settings,
    )
    try:
        yield manager
    finally:
        manager.shutdown()


def train(model: Any, optimizer: torch.optim.Optimizer, manager: Any, replica: int, log_path: Path, stop: Path) -> None:
    with log_path.open("wb", buffering=0) as log:
        while not stop.exists() or manager.current_step() < int(stop.read_text()):
            time.sleep(STEP_S)
            optimizer.zero_grad()
            manager.start_quorum()
            loss_of(model, replica, manager.current_step()).backward()
            number, num, takes_part = manager.current_step(), manager.num_participants(), manager.is_participating()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            if manager.should_commit():
                optimizer.step()
                parameters = [parameter.detach().clone() for parameter in model.parameters()]
                log.write(pickle.dumps(Step(number, num, takes_part, gradients, parameters)))
