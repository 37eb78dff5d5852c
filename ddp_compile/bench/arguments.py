"""Arguments of ``bench``. Nothing here imports torch, so help and wrong words need not wait for it."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from ddp_compile.bench.settings import OPTIMIZERS
from ddp_compile.validation.rates import Rate

QUICK = ("ddp-eager", "compile-ddp", "ddp_compile-forward")
MODES = ("default", "reduce-overhead", "max-autotune")


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to its parser."""
    add, own = parser.add_argument, "default: the model's own"
    add(
        "--model",
        default="gpt-small",
        help="mlp, gpt-small, gpt-medium, cnn, many-tiny, or your own module:function, which takes nothing and returns"
        " a model, a function that makes (inputs, targets) with a torch.Generator, and a loss function (default:"
        " %(default)s)",
    )
    add("--depth", type=_positive, help=f"layers of the model ({own})")
    add("--width", type=_positive, help=f"features of a layer ({own})")
    add("--batch-size", type=_positive, help=f"samples of a micro-batch on one rank ({own})")
    add(
        "--implementations",
        type=_words,
        default=list(QUICK),
        metavar="NAME,...",
        help="'all', or some of local, ddp-eager, compile-ddp, functional, ddp_compile-auto, ddp_compile-forward,"
        " ddp_compile-backward, ddp_compile-none, ddp_compile-sharded, and also ddp_compile-bfloat16,"
        " ddp_compile-float16, ddp_compile-bfloat16-sums, ddp_compile-reproducible, ddp_compile-byte-grad,"
        " ddp_compile-decentralized, ddp_compile-shift-one, ddp_compile-low-precision, ddp_compile-local-sgd,"
        " ddp_compile-diloco, ddp_compile-async, ddp_compile-qadam, or your own module:function, which takes the model"
        " and a Case and returns an Implementation (see ddp_compile/bench/implementations.py) (default:"
        f" {','.join(QUICK)}; local and communication are always measured)",
    )
    add("--modes", type=_words, default=["default"], metavar="MODE,...", help=f"{', '.join(MODES)} (default: default)")
    add(
        "--bucket-cap-mb", type=_capacities, default=[25.0], metavar="MIB,...", help="capacities to sweep (default: 25)"
    )
    add(
        "--no-sync-every", type=_positive, default=1, metavar="K", help="micro-batches of a step (default: %(default)s)"
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="muon: Muon for the weights of linear layers but the head, AdamW for the rest; on a CPU with Newton-Schulz"
        " iterations in float32 (default: %(default)s)",
    )
    add(
        "--clip",
        type=_positive_float,
        metavar="MAX_NORM",
        help="clip all gradients by their norm: peers with torch's clip_grad_norm_, ours with model.clip_grad_norm_",
    )
    add(
        "--tokens",
        action="store_true",
        help="pad sequences of uneven lengths, and train the mean over tokens (gpt-small, gpt-medium): peers"
        " with a blocking all-reduce of the count before the forward, ours with model.normalize_by",
    )
    add(
        "--link",
        type=link_rates,
        metavar="RATE,...",
        help="rates such as 1gbit, or none for an unshaped link; real ones between CPU ranks (needs root and"
        " iproute2), simulated ones on one CUDA device; simulated:1gbit for one CPU rank on a link that takes time but"
        " no computation (default: 1gbit,none; on CUDA 1gbit)",
    )
    add("--ranks", type=_positive, help="number of ranks (default: 2; 1 on CUDA)")
    add(
        "--simulated-ranks",
        type=_positive,
        default=8,
        help="ranks that a simulated link pretends to have (default: %(default)s)",
    )
    add(
        "--simulated-latency-ms",
        type=_positive_float,
        default=0.05,
        help="of each collective of a simulated link (default: %(default)s)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add("--rounds", type=_positive, default=12, help="turns of each implementation on each link (default: %(default)s)")
    add(
        "--steps",
        type=_positive,
        default=2,
        help="timed steps of a turn, after one that is not timed (default: %(default)s)",
    )
    add("--only-steps", action="store_true", help="no warm starts, memory or profiles")
    add("--output", type=Path, help="folder for the results (default: runs/bench/DATE)")


def command_line(arguments: argparse.Namespace) -> str:
    """The command line for these arguments, with the defaults written out, since they may change."""
    words = ["python", "-m", "ddp_compile", "bench"]
    for name, value in vars(arguments).items():
        if name == "command" or value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return shlex.join(words)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1")
    return int(text)


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("name at least one")
    return words


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a positive number")
    return value


def _capacities(text: str) -> list[float]:
    return [_positive_float(word) for word in _words(text)]


class SimulatedRate(Rate):
    """The rate of a simulated link: "simulated:1gbit"."""

    def __str__(self) -> str:
        return f"simulated:{super().__str__()}"


def _rate(word: str) -> Rate:
    rate = word.removeprefix("simulated:")
    if rate == word:
        return Rate.parse(word)
    if Rate.parse(rate).bits_per_second is None:
        raise ValueError(f"{word}: a simulated link has a rate; pass for example simulated:1gbit")
    return SimulatedRate.parse(rate)


def link_rates(text: str) -> list[Any]:
    try:
        return [_rate(word) for word in _words(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
