"""A replica of torchft in a process of its own, for test_torchft.py. It writes down what every step has done."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from process_copies import begin_copy
from torch import Tensor, nn

from ddp_compile import ddp_compile
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
    path: list[str], replica: int, life: int, lighthouse: str, folder: Path, settings: dict[str, Any], width: int
) -> None:
    """Train until the file ``stop`` names the last step."""
    begin_copy(path)
    from torchft import Manager, ProcessGroupGloo

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    net = make_net(seed=10 * replica + life)
    if width != WIDTH:
        net.append(nn.Linear(WIDTH, width))
    optimizer = make_optimizer(net)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="localhost",
        **settings,
    )
    model: Any = ddp_compile(net, algorithm=ManagedAllReduce(manager), backend="aot_eager", bucket_cap_mb=0.0005)
    stop = folder / "stop"
    with (folder / f"replica_{replica}_{life}").open("wb", buffering=0) as log:
        while not stop.exists() or manager.current_step() < int(stop.read_text()):
            time.sleep(STEP_S)
            manager.start_quorum()
            optimizer.zero_grad()
            step = manager.current_step()
            loss_of(model, replica, step).backward()
            step = manager.current_step()
            takes_part, num = manager.is_participating(), manager.num_participants()
            gradients = [parameter.grad.clone() for parameter in net.parameters()]
            if manager.should_commit():
                optimizer.step()
                parameters = [parameter.detach().clone() for parameter in net.parameters()]
                log.write(pickle.dumps(Step(step, num, takes_part, gradients, parameters)))
    manager.shutdown()
    dist.destroy_process_group()
