"""In what rank 1 may differ, and what docs/divergence.md promises then."""

from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_compile.algorithms import ByteGrad

WIDTH = 8

# Outcomes that may be promised
EXACT = "exact"
NAMED = "error on every rank that names it"
WAITED = "error on the rank that waits, the other one had ended"
ENDED = "gloo ends the process"
# and those that may not
UNNAMED = "error that does not name it"
HANG = "hang"
SILENT = "silently wrong"

TABLE = "Where each rank was when it last posted"


class Kind(NamedTuple):
    """One thing in which rank 1 differs."""

    promise: str  #: the outcome that is promised
    names: str = ""  #: every error matches this regular expression
    settings: dict[str, Any] | None = None  #: of rank 1
    models: tuple[str, ...] = ("mlp", "mlp", "norm")
    also: tuple[str, ...] = ()  #: other outcomes that are documented

    @property
    def allowed(self) -> tuple[str, ...]:
        return (self.promise, *self.also)


KINDS: dict[str, Kind] = {
    "nothing": Kind(EXACT),
    # The model
    "width of a layer": Kind(NAMED, r"float32\[", {}),
    "one more layer": Kind(NAMED, r"rank 1", {}),
    "name of a parameter": Kind(NAMED, r"renamed", {}),
    "dtype": Kind(NAMED, r"float64", {}),
    "frozen parameter": Kind(NAMED, r"frozen|requires_grad|trainable", {}),
    "one more buffer": Kind(NAMED, r"extra", {}),
    # Settings
    "bucket cap": Kind(EXACT, "", {"bucket_cap_mb": 2e-4}),
    "split": Kind(EXACT, r"split|launch", {"split": "none"}, also=(NAMED,)),
    "backend": Kind(EXACT, r"backend|launch", {"backend": "eager"}, also=(NAMED,)),
    "algorithm": Kind(NAMED, r"algorithm", {"algorithm": ByteGrad()}),
    "find_unused_parameters": Kind(NAMED, r"find_unused_parameters", {}),
    "static_graph": Kind(NAMED, r"static_graph", {"static_graph": True}),
    "broadcast_buffers": Kind(NAMED, r"broadcast_buffers", {"broadcast_buffers": False}),
    "init_sync": Kind(NAMED, r"init_sync", {"init_sync": False}),
    "gradient_as_bucket_view": Kind(EXACT, "", {"gradient_as_bucket_view": False}),
    "lazy_bucket_allocation": Kind(EXACT, "", {"lazy_bucket_allocation": True}),
    "parameters_to_ignore": Kind(NAMED, r"0\.bias", {"parameters_to_ignore": ["0.bias"]}),
    "dynamic": Kind(EXACT, "", {"dynamic": False}),
    "fullgraph": Kind(EXACT, "", {"fullgraph": True}),
    "comm hook": Kind(NAMED, r"comm hook", {}),
    "optimizer sharded": Kind(NAMED, r"shard", {}),
    # The program
    "hook later": Kind(NAMED, r"comm hook"),
    "evaluates": Kind(EXACT),
    "accumulates": Kind(EXACT),
    "forward in no_sync": Kind(EXACT),
    "forward without backward": Kind(NAMED, rf"without a backward|{TABLE}"),
    "two forwards": Kind(EXACT, models=("mlp",)),
    "evaluation mode": Kind(EXACT, models=("mlp", "norm")),
    "recompiles": Kind(EXACT),
    "warm caches": Kind(EXACT),
    "caches dropped": Kind(EXACT),
    "gradients set to zero": Kind(EXACT),
    "sleeps": Kind(EXACT),
    "forward raises, caught": Kind(EXACT, TABLE, models=("mlp",)),
    # With an accumulation before it, the other rank steps alone.
    "forward raises, step left out": Kind(WAITED, rf"same bits|{TABLE}", models=("mlp",), also=(NAMED,)),
    "backward left out": Kind(NAMED, rf"without a backward|{TABLE}"),
    "backward raises, caught": Kind(NAMED, rf"raised|without a backward|{TABLE}"),
    "backward twice": Kind(NAMED, rf"without a forward|donated buffer|{TABLE}", also=(WAITED,)),
    # With an accumulation before it, its optimizer steps with gradients of this rank alone.
    "step left out": Kind(WAITED, rf"no_sync|same bits|{TABLE}", also=(NAMED,)),
    "fewer batches": Kind(WAITED, TABLE),
    "step inside no_sync": Kind(NAMED, r"no_sync"),
    "optimizer step left out": Kind(NAMED, r"same bits"),
    "optimizer step twice": Kind(NAMED, r"same bits"),
    # Its own error is gloo's.
    "collective in between": Kind(ENDED, rf"{TABLE}|gloo", also=(NAMED,)),
    # Two models
    "order of models": Kind(NAMED, r"process group of its own", models=("mlp",)),
    "order of models, once": Kind(NAMED, r"process group of its own", models=("mlp",)),
}
CAUGHT = ("forward raises, caught", "forward raises, step left out")
SETTINGS = {name for name, kind in KINDS.items() if kind.settings is not None}
PROGRAM = {name for name, kind in KINDS.items() if kind.settings is None and not name.startswith("order of models")}


def make_net(model: str, kind: str) -> nn.Module:
    """The module, with rank 1's difference if there is one in the model."""
    torch.manual_seed(3)
    width = WIDTH + 3 if kind == "width of a layer" else WIDTH
    middle: nn.Module = nn.BatchNorm1d(width) if model == "norm" else nn.Tanh()
    net = nn.Sequential(nn.Linear(WIDTH, width), middle, nn.Linear(width, WIDTH))
    if kind == "one more layer":
        net.append(nn.Linear(WIDTH, WIDTH))
    elif kind == "name of a parameter":
        net = nn.Sequential()
        for name, layer in (("renamed", nn.Linear(WIDTH, width)), ("1", middle), ("2", nn.Linear(width, WIDTH))):
            net.add_module(name, layer)
    elif kind == "dtype":
        net.double()
    elif kind == "frozen parameter":
        net[0].bias.requires_grad_(False)
    elif kind == "one more buffer":
        net.register_buffer("extra", torch.zeros(3))
    return net


def settings_of(recipe: Any, rank: int) -> dict[str, Any]:
    """The settings of ``ddp_compile`` on a rank."""
    settings = {
        "backend": recipe.backend,
        "split": recipe.split,
        "bucket_cap_mb": recipe.cap_mib,
        "find_unused_parameters": recipe.find_unused,
    }
    if rank == 0:
        return settings
    if recipe.kind == "find_unused_parameters":
        settings["find_unused_parameters"] = not recipe.find_unused
    return {**settings, **(KINDS[recipe.kind].settings or {})}
