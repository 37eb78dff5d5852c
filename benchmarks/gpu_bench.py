"""Benchmarks on one CUDA device without a network: ``make gpu-bench``.

Two runs of ``python -m ddp_compile bench``: NCCL with one rank, which shows each implementation's cost in addition to
the computation, and a simulated link, which shows how much it overlaps. Results go to a folder with the device's name.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The package is used from the source tree: nothing needs to be installed.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

MODEL = ["--device", "cuda", "--model", "gpt-medium", "--depth", "8", "--width", "1024", "--batch-size", "32"]
RUNS = {
    "one_rank": ["--link", "none", "--implementations", "ddp-eager,compile-ddp,ddp_compile-forward", "--only-steps"],
    "simulated_link": [
        *("--link", "25gbit,100gbit,400gbit", "--simulated-ranks", "8"),
        *("--implementations", "ddp-eager,compile-ddp,ddp-unsplit,functional,ddp_compile-forward,ddp_compile-none"),
    ],
}


def main() -> int:
    import torch

    from ddp_compile.__main__ import main as ddp_compile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the results (default: benchmarks/results/DEVICE)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-bench: torch sees no CUDA device", file=sys.stderr)
        return 2
    device = re.sub(r"\W+", "_", torch.cuda.get_device_name().lower())
    output = arguments.output or ROOT / "benchmarks" / "results" / device
    statuses = []
    for name, flags in RUNS.items():
        start = time.monotonic()
        statuses.append(ddp_compile(["bench", *MODEL, *flags, "--output", str(output / name)]))
        if statuses[-1] == 130:  # Ctrl-C
            break
        print(f"{name}: {time.monotonic() - start:.0f} s\n", flush=True)
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
