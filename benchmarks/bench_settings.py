"""Costs and gains of some settings: lazily allocated buckets, backwards finalized by hand, lower precision.

    python benchmarks/bench_settings.py [--model gpt-medium] [--rate 5.3e9] [--rounds 20] [--output FILE.csv]
        [--variants "default;sharded"]

Like bench_simulated_link.py: one rank on a simulated link, whole steps with AdamW, each setting in its own process and
in turns. In addition to the milliseconds, it prints the most bytes that are live at the same time in a step, and the
loss after the warm-up steps.

"other work" is a product of matrices that takes a tenth of a step, like an optimizer step over sparse parameters: after
the backward, or between the backward and ``finalize_backward()``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from bench_simulated_link import NUM_WARM, add_arguments, compare, measure, report
from torch import nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.profiling import peak_live_bytes
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group
from ddp_compile.bench.training import Training
from ddp_compile.bench.workloads import make_workload
from ddp_compile.comm_hooks import bf16_compress_hook

DEFAULT = "default"
WIDTH_OF_OTHER_WORK = 1100


class Variant(NamedTuple):
    """One configuration of a training.

    Args:
        settings: Of `ddp_compile`.
        autocast: Whether the forward runs in bfloat16 under autocast.
        compresses: Whether gradients are sent in bfloat16.
        works: Whether there is other work after the backward.
        finalizes: Whether this work comes before ``finalize_backward()``.
        sharded: Whether the optimizer is sharded.
        bfloat16: Whether parameters are in bfloat16; a sharded optimizer then steps master weights.
    """

    settings: dict[str, Any] = {}  # noqa: RUF012 - only read
    autocast: bool = False
    compresses: bool = False
    works: bool = False
    finalizes: bool = False
    sharded: bool = False
    bfloat16: bool = False


VARIANTS = {
    DEFAULT: Variant(),
    "lazy_bucket_allocation": Variant({"lazy_bucket_allocation": True}),
    "static_graph": Variant({"static_graph": True, "split": "backward"}),
    "other work after the backward": Variant(works=True),
    "other work, then finalize_backward": Variant(works=True, finalizes=True),
    "autocast": Variant(autocast=True),
    "autocast, bf16_compress_hook": Variant(autocast=True, compresses=True),
    "sharded": Variant(sharded=True),
    "sharded, autocast": Variant(sharded=True, autocast=True),
    "sharded, bfloat16 with master weights": Variant(sharded=True, bfloat16=True),
}


def make_training(name: str, arguments: argparse.Namespace) -> Training:
    variant = VARIANTS[name]
    settings = WorkloadSettings(model=arguments.model, optimizer="adamw", device="cpu")
    torch.manual_seed(0)
    workload = make_workload(settings)
    if variant.bfloat16:
        workload.model.to(torch.bfloat16)
    model: Any = ddp_compile(workload.model, bucket_cap_mb=arguments.bucket_cap_mb, **variant.settings)
    if variant.compresses:
        model.register_comm_hook(None, bf16_compress_hook)
    built = Implementation(forward=under_autocast(model) if variant.autocast else model)
    if variant.sharded:
        shard = partial(shard_optimizer, model=model, master_weights=variant.bfloat16)
        built = dataclasses.replace(built, prepare_optimizers=shard)
    training = Training(built, workload.model, workload, settings, 0, 1)
    model.require_manual_backward_finalization = variant.finalizes
    if variant.works:
        work_before_steps(model, training, variant.finalizes)
    return training


def under_autocast(model: nn.Module) -> Callable[[Any], Any]:
    def forward(inputs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs)

    return forward


def work_before_steps(model: Any, training: Training, finalizes: bool) -> None:
    other = torch.randn(WIDTH_OF_OTHER_WORK, WIDTH_OF_OTHER_WORK)

    def work(*_: object) -> None:
        torch.mm(other, other)
        if finalizes:
            model.finalize_backward()

    training.optimizers[0].register_step_pre_hook(work)


def show_memory_and_loss(name: str, arguments: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(arguments.threads)
    init_simulated_process_group(LinkModel.from_rate(arguments.rate, arguments.ranks), torch.device("cpu"))
    training = make_training(name, arguments)
    for _ in range(NUM_WARM):
        training.step()
    assert training.loss is not None
    loss = float(training.loss.detach())
    parameters = [p for each in training.optimizers for group in each.param_groups for p in group["params"]]
    queue.put((peak_live_bytes(training, parameters), loss))


def memory_and_loss(arguments: argparse.Namespace) -> dict[str, tuple[int, float]]:
    context = mp.get_context("spawn")
    found = {}
    for name in arguments.variants.split(";"):
        queue = context.Queue()
        process = context.Process(target=show_memory_and_loss, args=(name, arguments, queue))
        process.start()
        found[name] = queue.get()
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by semicolons")
    arguments = parser.parse_args()
    names = arguments.variants.split(";")
    rows = compare(measure(make_training, names, arguments), names[0])
    shown = memory_and_loss(arguments)
    for row in rows:
        peak, loss = shown[str(row["name"])]
        row |= {"peak_mib": round(peak / 2**20, 1), "loss": round(loss, 5)}
    report(rows, names[0], arguments)


if __name__ == "__main__":
    main()
