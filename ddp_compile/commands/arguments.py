"""Arguments of ``explain`` and ``plan``. Nothing here imports torch, so help and wrong words need not wait for it."""

import argparse
from pathlib import Path

DEVICES = ("cpu", "cuda")
#: What the function that ``explain`` calls must do.
RETURNS = "return a module, (module, inputs), (module, args, kwargs) or (module, args, kwargs, loss)"


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of ``explain``."""
    parser.add_argument("function", metavar="module:function", help=f"a function without arguments; it must {RETURNS}")
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--split", choices=("auto", "forward", "backward", "none"), default="auto", help="as in ddp_compile()"
    )
    parser.add_argument("--device", choices=DEVICES, help="assume its default capacities (default: the model's)")
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="as in ddp_compile()")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the explanation as JSON")
    parser.add_argument("--html", help=argparse.SUPPRESS)


#: Arguments of ``plan`` that went, and what to do instead.
GONE = {
    "function": "the profile has the model's gradients; leave module:function out",
    "--tflops": "times come from measured steps only; pass --profile alone",
    "--memory-bandwidth": "times come from measured steps only; pass --profile alone",
    "--max-bucket-cap-mb": "pass bucket_cap_mb= to ddp_compile() to limit buckets, instead of a plan",
}


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of ``plan``."""
    parser.add_argument("--profile", type=Path, metavar="FILE", required=True, help="JSON of a model.measure() report")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: that of the profile)")
    parser.add_argument("--bandwidth", metavar="RATE", help="of a node's link, such as 100gbit (default: as measured)")
    parser.add_argument("--device", choices=DEVICES, help="assume its default capacities (default: as measured)")
    parser.add_argument("--latency", default="20us", metavar="TIME", help="between two nodes (default: %(default)s)")
    parser.add_argument("--intra-node", type=int, default=1, metavar="K", help="ranks that share a node's link")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the best plan for what was measured")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw steps over numbers of ranks (needs --bandwidth)")
    parser.add_argument("function", nargs="?", help=argparse.SUPPRESS)
    for name in GONE:
        if name.startswith("--"):
            parser.add_argument(name, help=argparse.SUPPRESS)
