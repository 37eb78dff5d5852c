"""Train a byte-level GPT on the sources of Python's standard library with ``ddp_compile``.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py

Read `Trainer` from top to bottom: apart from one line, ``model = ddp_compile(model)``, it is an ordinary training loop.
With CUDA each process uses a GPU and NCCL; otherwise the processes share the CPU and use gloo.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer
from lm.algorithms import NAMES, algorithm_named, q_adam_like
from lm.checkpoint import Progress, TrainingState
from lm.compare import compare
from lm.data import ResumableSampler, held_out_batches, load_samples, training_batches
from lm.model import GPT, GPTConfig, next_byte_loss
from lm.report import TrainingLog, write_report
from lm.world import World, join_world


class Trainer:
    """One run: everything that it needs, and the training loop."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args = args
        self.world = world

        samples, self.held_out = load_samples(args.text_mb, args.context, args.padded)
        sampler = ResumableSampler(samples, seed=args.seed, drop_last=True)
        self.batches = training_batches(samples, sampler, args.batch_size, world.device)

        model = make_model(args, world)
        # Every rank continues with rank 0's parameters, whatever it started with.
        self.optimizers = make_optimizers(model, args)
        if args.algorithm == "qadam":
            self.optimizers = [q_adam_like(self.optimizers[0], warmup_steps=max(1, args.steps // 5))]
        model = ddp_compile(
            model,
            bucket_cap_mb=args.bucket_cap_mb,
            split=args.split,
            backend=args.backend,
            algorithm=algorithm_named(args.algorithm, self.optimizers[0]),
        )
        if args.sharded:
            shard_optimizer(self.optimizers, model)
        self.model = model

        names = "seed batch_size context padded average accumulate text_mb algorithm optimizer"
        settings = {name: getattr(args, name) for name in names.split()} | {"ranks": world.size}
        self.state = TrainingState(model, self.optimizers, sampler, Progress(), settings)
        if args.resume:
            self.state.load(args.resume, world)
            world.say(f"Resuming {args.resume} after step {self.state.progress.step}")

    def run(self) -> None:
        """Train up to ``args.steps``, and measure the held-out loss before the first step and after the last one."""
        args, progress, world = self.args, self.state.progress, self.world
        if progress.step == 0:
            world.say("Measuring the held-out loss; this and the first step compile, which takes a while")
            self.evaluate()
        first_step = progress.step
        tokens_per_step = args.batch_size * args.context * args.accumulate * world.size
        with TrainingLog(progress, args.steps, tokens_per_step, world) as log:
            for step in range(first_step, args.steps):
                log.add(self.train_step(step))
                save = progress.step % args.checkpoint_every == 0 or progress.step == args.steps
                if save or step == first_step or progress.step % args.log_every == 0:
                    log.flush()
                if step == first_step:
                    # The buckets are known once the first step has compiled.
                    log.write(self.model.bucket_plan.format_table())
                if save:
                    self.state.save(Path(str(args.checkpoint).replace("{step}", str(progress.step))), world)
        self.state.agree()
        self.evaluate()
        world.say(f"median: {log.speed()}")

    def train_step(self, step: int) -> Tensor:
        """Forward, backward and update number ``step``.

        Returns:
            This rank's summed loss, and over how many bytes, ``(2,)``, without a graph.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.args.steps, self.args.warmup, self.args.lr)
        totals = []
        for part in range(1, self.args.accumulate + 1):
            # Only the last backward of a step sends gradients; the others add to them on this rank.
            last = part == self.args.accumulate
            with nullcontext() if last else self.model.no_sync():
                loss, count = next_byte_loss(self.model, *next(self.batches))
                if self.args.average == "tokens":
                    # The gradients' sum is divided by the bytes of all micro-batches and ranks.
                    self.model.normalize_by(count)
                    loss.backward()
                else:
                    (loss / count / self.args.accumulate).backward()
            totals.append(torch.stack([loss.detach(), count]))
        # Unless the algorithm averages parameters, the gradients are now the same on every rank: their mean. With
        # --sharded a rank has only its part of them; the model clips by the norm of all parts.
        self.model.clip_grad_norm_(max_norm=1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return torch.stack(totals).sum(0)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Measure the held-out loss, averaged over the bytes of all ranks, and record it."""
        args, world = self.args, self.world
        self.model.eval()
        batches = held_out_batches(self.held_out, args.batch_size, args.eval_batches, world.device)
        totals = torch.stack([torch.stack(next_byte_loss(self.model, *batch)) for batch in batches])
        self.model.train()
        loss, count = world.mean(totals.sum(0))
        self.state.progress.held_out[self.state.progress.step] = (loss / count).item()


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up to ``peak`` over ``warmup`` steps, then a cosine down to a tenth of it at ``steps``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_model(args: argparse.Namespace, world: World) -> GPT:
    torch.manual_seed(args.seed)
    model = GPT(GPTConfig(layers=args.layers, heads=args.heads, width=args.width, context=args.context))
    world.say(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {world.size} x {world.device.type}"
    )
    return model.to(world.device)


def make_optimizers(model: nn.Module, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices of the blocks, and AdamW for embeddings, head, norms and biases."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_of_muon = args.optimizer == "muon" and "blocks." in name and parameter.ndim == 2
        (matrices if is_of_muon else others).append(parameter)
    adamw = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if not matrices:
        return [adamw]
    # Updates as large as AdamW's, so that one learning rate suits both.
    muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]  # sharded, the embedding travels while Muon steps


def usable_backend(requested: str, world: World) -> str:
    """The requested backend; if inductor lacks a C++ compiler, prints a line and returns "aot_eager".

    On the CPU, inductor generates C++, and uses the compiler in CXX or the platform's usual one.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if requested == "inductor" and world.device.type == "cpu" and shutil.which(compiler) is None:
        world.say(
            f'There is no C++ compiler "{compiler}" (set CXX to name one): using backend "aot_eager", no inductor'
        )
        return "aot_eager"
    return requested


def train(args: argparse.Namespace, world: World) -> None:
    start = time.perf_counter()
    trainer = Trainer(args, world)
    trainer.run()
    progress = trainer.state.progress
    (first, before), *_, (last, after) = progress.held_out.items()
    world.say(f"held-out loss in nats per byte: {before:.4f} at step {first}, {after:.4f} at step {last}")
    if world.is_main:
        for path in write_report(args.out_dir, progress, vars(args) | {"ranks": world.size}):
            print(f"wrote {path}")
    world.say(f"total: {time.perf_counter() - start:.0f} s")


def compare_with_ddp(args: argparse.Namespace, world: World) -> None:
    samples, _ = load_samples(args.text_mb, args.context, args.padded)
    sampler = ResumableSampler(samples, seed=args.seed, drop_last=True)
    compare(
        make_model(args, world),
        lambda model: make_optimizers(model, args),
        training_batches(samples, sampler, args.batch_size, world.device),
        world,
        bucket_cap_mb=args.bucket_cap_mb,
        split=args.split,
        backend=args.backend,
        steps=args.compare,
        sharded=args.sharded,
    )


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on Python's standard library with ddp_compile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive_int, default=6, help="transformer blocks")
    model.add_argument("--heads", type=positive_int, default=6, help="attention heads of a block")
    model.add_argument("--width", type=positive_int, default=384, help="size of the residual stream")
    model.add_argument("--context", type=positive_int, default=128, help="bytes of a sample")
    add_training_arguments(parser.add_argument_group("training"))
    add_ddp_compile_arguments(parser.add_argument_group("ddp_compile"))
    add_file_arguments(parser.add_argument_group("files and measurements"))
    args = parser.parse_args()
    if args.compare == 1:
        parser.error("--compare needs at least 2 steps, to give a spread")
    if args.algorithm == "qadam" and args.optimizer == "muon":
        parser.error("--algorithm qadam has an optimizer of its own; leave out --optimizer muon")
    if args.algorithm != "all-reduce" and args.sharded:
        parser.error(f"--sharded reduces gradients in its own way; leave out --algorithm {args.algorithm}")
    args.average = args.average or ("tokens" if args.padded and not args.compare else "ranks")
    if args.compare and args.average == "tokens":
        parser.error("--compare has the mean over ranks, as DistributedDataParallel does; leave out --average tokens")
    args.checkpoint = args.checkpoint or args.out_dir / "checkpoint.pt"
    return args


def add_training_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch-size", type=positive_int, default=4, help="samples of one rank in one backward")
    group.add_argument("--padded", action="store_true", help="documents of uneven lengths, padded to --context bytes")
    group.add_argument(
        "--average",
        choices=("tokens", "ranks"),
        help="which mean the gradients are: over the bytes of all ranks, with model.normalize_by; or over the ranks'"
        " own means, as with DistributedDataParallel (default: tokens with --padded, otherwise ranks)",
    )
    group.add_argument("--accumulate", type=positive_int, default=1, help="backwards of one step")
    group.add_argument("--steps", type=positive_int, default=120, help="optimizer steps")
    group.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="muon: for the blocks' matrices, and AdamW beside it",
    )
    group.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    group.add_argument("--warmup", type=positive_int, default=10, help="steps to the peak learning rate")
    group.add_argument("--seed", type=int, default=0, help="of the parameters and of the order of the data")
    group.add_argument("--text-mb", type=float, default=16.0, help="most megabytes of text to train on")


def add_ddp_compile_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--bucket-cap-mb", type=float, default=25.0, help="capacity of a bucket in MiB")
    group.add_argument(
        "--split", choices=("auto", "forward", "none"), default="auto", help="how graphs are cut at bucket borders"
    )
    group.add_argument("--backend", default="inductor", help="compiler, as torch.compile names it")
    group.add_argument("--algorithm", choices=NAMES, default="all-reduce", help="how the ranks communicate")
    group.add_argument(
        "--sharded", action="store_true", help="each rank keeps the optimizers' states of its part of the parameters"
    )
    group.add_argument(
        "--compare",
        type=positive_int,
        nargs="?",
        const=20,
        metavar="STEPS",
        help="do not train; time STEPS steps (20) in turns with torch.compile(DistributedDataParallel(model))",
    )


def add_file_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out-dir", type=Path, default=Path("runs/train_lm"), help="for the loss curve and numbers")
    group.add_argument(
        "--checkpoint",
        type=Path,
        help="file to write, OUT_DIR/checkpoint.pt if not given; {step} in it becomes the step",
    )
    group.add_argument("--checkpoint-every", type=positive_int, default=40, help="steps between checkpoints")
    group.add_argument("--resume", type=Path, help="checkpoint to resume from")
    group.add_argument("--log-every", type=positive_int, default=5, help="steps between readings of the loss")
    group.add_argument("--eval-batches", type=positive_int, default=16, help="batches of a rank for the held-out loss")


def main() -> None:
    args = parse_args()
    with join_world() as world:
        # TF32 matrix products if the device has them.
        torch.set_float32_matmul_precision("high")
        args.backend = usable_backend(args.backend, world)
        if args.compare:
            compare_with_ddp(args, world)
        else:
            train(args, world)


if __name__ == "__main__":
    main()
