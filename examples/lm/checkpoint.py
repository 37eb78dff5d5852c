"""Checkpoints from which a run continues as if it had never stopped."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.algorithms import AsyncModelAverageAlgorithm
from lm.data import ResumableSampler
from lm.world import World


@dataclass
class Progress:
    """How far training has come.

    Args:
        step: Optimizer steps done.
        losses: Training loss of each step in nats per byte, averaged over the bytes of all ranks.
        held_out: Held-out loss in nats per byte by the step at which it was measured.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


@dataclass
class TrainingState:
    """Everything that determines the next steps.

    Args:
        model: The result of ``ddp_compile``, which is the user's own module. So its state dict has the plain names,
            without the prefix ``module.``, and loads into a model that was never distributed.
        optimizers: Its optimizers.
        sampler: Decides which training data come next.
        progress: What has been done so far.
        settings: Settings that must not change within a run, because the data would come in another order.
    """

    model: Any
    optimizers: list[torch.optim.Optimizer]
    sampler: ResumableSampler
    progress: Progress
    settings: dict[str, Any]

    def agree(self) -> None:
        """If a thread averages the parameters, stop it with equal ones. Every rank has to call this."""
        if isinstance(algorithm := self.model.comm_algorithm, AsyncModelAverageAlgorithm):
            algorithm.abort()

    def save(self, path: Path, world: World) -> None:
        """Write the state atomically: one file from rank 0, or one from each rank if their parameters differ.

        Every rank has to call this.
        """
        self.agree()
        generators: list[dict[str, Tensor]] | None = [{} for _ in range(world.size)] if world.is_main else None
        dist.gather_object(_generator_states(world.device), generators)
        # If they are sharded, the ranks put their states together here.
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        if world.is_main or self._ranks_differ:
            self._write(_path_on(world.rank, path), optimizers, generators)
        if isinstance(algorithm := self.model.comm_algorithm, AsyncModelAverageAlgorithm):
            algorithm.resume()

    @property
    def _ranks_differ(self) -> bool:
        return self.model.comm_algorithm.traits.payload != "gradients"

    def _write(self, path: Path, optimizers: list[dict[str, Any]], generators: list[dict[str, Tensor]] | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            torch.save(
                {
                    "model": self.model.state_dict(),
                    "optimizers": optimizers,
                    "algorithm": self.model.comm_algorithm.state_dict(),
                    "sampler": self.sampler.state_dict(),
                    "progress": asdict(self.progress),
                    "generators": generators,
                    "settings": self.settings,
                },
                file,
            )
            # The new name must not reach the disk before the contents do.
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def load(self, path: Path, world: World) -> None:
        """Load the state from a file that every rank can read, and from the rank's own file if parameters differ.

        Raises:
            ValueError: The file is of a run with other settings.
        """
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if saved["settings"] != self.settings:
            raise ValueError(f"{path} is of a run with {saved['settings']}, but this one has {self.settings}")
        own = torch.load(_path_on(world.rank, path), map_location="cpu") if self._ranks_differ else saved
        self.model.load_state_dict(own["model"])
        for optimizer, state in zip(self.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.model.comm_algorithm.load_state_dict(own["algorithm"])
        self.sampler.load_state_dict(saved["sampler"])
        self.progress = Progress(**saved["progress"])
        _set_generator_states(saved["generators"][world.rank])


def _path_on(rank: int, path: Path) -> Path:
    """The file of a rank's own state; rank 0's is ``path`` itself."""
    return path.with_name(f"{path.name}.rank{rank}") if rank else path


def _generator_states(device: torch.device) -> dict[str, Tensor]:
    """States of this process's random generators, uint8 tensors by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generator_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
