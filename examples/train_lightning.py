"""Train a classifier of spirals with Lightning and ddp_compile, one process for each device or two on the CPU.

    python examples/train_lightning.py --epochs 20

Lightning starts the processes. The only line that differs from a script for ``strategy="ddp"`` is the strategy's.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_compile.integrations.lightning import DDPCompileStrategy


class Classifier(LightningModule):
    """Classifies points by the arm of a spiral.

    Args:
        arms: Number of classes.
        width: Width of the hidden layers.
        lr: Learning rate.
    """

    def __init__(self, arms: int = 3, width: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        hidden = [nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, arms))

    def forward(self, points: Tensor) -> Tensor:
        """Logits of points of shape (n, 2)."""
        logits: Tensor = self.layers(points)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        points, arms = batch
        loss = cross_entropy(self(points), arms)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        points, arms = batch
        correct = (self(points).argmax(1) == arms).float().mean()
        self.log("accuracy", correct, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def spirals(points: int, arms: int, seed: int) -> TensorDataset:
    """Points of shape (points, 2) with some noise, and the arm of each."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(arms, (points,), generator=generator)
    radius = torch.rand(points, generator=generator)
    angle = 2 * math.pi * (radius + arm / arms) + 0.1 * torch.randn(points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier of spirals with Lightning and ddp_compile.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--points", type=int, default=6000, help="points to train on")
    parser.add_argument("--batch-size", type=int, default=100, help="points of one rank in one backward")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards of one step")
    parser.add_argument("--precision", default="32-true", help='as Lightning names it, "bf16-mixed" for example')
    parser.add_argument("--backend", default="inductor", help="compiler, as torch.compile names it")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--out-dir", type=Path, default=Path("runs/train_lightning"))
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    args = parser.parse_args()

    seed_everything(0)
    loaders: list[DataLoader[Any]] = [
        DataLoader(spirals(points, 3, seed), args.batch_size, shuffle=seed == 0, drop_last=True)
        for seed, points in enumerate((args.points, 1000))
    ]
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy=DDPCompileStrategy(backend=args.backend),
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.out_dir, filename="last", enable_version_counter=False)],
        logger=False,
        log_every_n_steps=1,
    )
    trainer.fit(Classifier(), *loaders, ckpt_path=args.resume)
    if trainer.is_global_zero:
        print(f"accuracy after {trainer.current_epoch} epochs: {trainer.callback_metrics['accuracy'].item():.3f}")


if __name__ == "__main__":
    main()
