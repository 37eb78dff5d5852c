"""In what rank 1 may differ, and what docs/divergence.md promises then."""

from typing import Any, NamedTuple

import torch
from torch import nn

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
TWO_MODELS = "order of models, once"


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
    # Settings; tests/features/test_different_models.py has models that differ
    "bucket cap": Kind(EXACT, "", {"bucket_cap_mb": 2e-4}),
    "split": Kind(EXACT, r"split|launch", {"split": "none"}, also=(NAMED,)),
    "backend": Kind(EXACT, r"backend|launch", {"backend": "eager"}, also=(NAMED,)),
    "static_graph": Kind(NAMED, r"static_graph", {"static_graph": True}),
    "broadcast_buffers": Kind(NAMED, r"broadcast_buffers", {"broadcast_buffers": False}),
    "init_sync": Kind(NAMED, r"init_sync", {"init_sync": False}),
    "gradient_as_bucket_view": Kind(EXACT, "", {"gradient_as_bucket_view": False}),
    "lazy_bucket_allocation": Kind(EXACT, "", {"lazy_bucket_allocation": True}),
    "parameters_to_ignore": Kind(NAMED, r"0\.bias", {"parameters_to_ignore": ["0.bias"]}),
    "dynamic": Kind(EXACT, "", {"dynamic": False}),
    "fullgraph": Kind(EXACT, "", {"fullgraph": True}),
    "optimizer sharded": Kind(NAMED, r"shard"),
    # The program; tests/desync has backwards that raise, and ranks that end
    "evaluates": Kind(EXACT),
    "accumulates": Kind(EXACT),
    "forward in no_sync": Kind(EXACT),
    "forward without backward": Kind(NAMED, rf"without a backward|{TABLE}"),
    "two forwards": Kind(EXACT, models=("mlp",)),
    "evaluation mode": Kind(EXACT, models=("mlp", "norm")),
    "recompiles": Kind(EXACT),
    "warm caches": Kind(EXACT),
    "forward raises, caught": Kind(EXACT, TABLE, models=("mlp",)),
    "backward left out": Kind(NAMED, rf"without a backward|{TABLE}"),
    "backward twice": Kind(NAMED, rf"without a forward|donated buffer|{TABLE}", also=(WAITED,)),
    # With an accumulation before it, its optimizer steps with gradients of this rank alone.
    "step left out": Kind(WAITED, rf"no_sync|same bits|{TABLE}", also=(NAMED,)),
    "step inside no_sync": Kind(NAMED, r"no_sync"),
    "optimizer step left out": Kind(NAMED, r"same bits"),
    "optimizer step twice": Kind(NAMED, r"same bits"),
    # Its own error is gloo's.
    "collective in between": Kind(ENDED, rf"{TABLE}|gloo", also=(NAMED,)),
    # tests/desync/test_divergence.py has models that stay in another order
    TWO_MODELS: Kind(NAMED, r"process group of its own", models=("mlp",)),
}


def make_net(model: str) -> nn.Module:
    torch.manual_seed(3)
    middle: nn.Module = nn.BatchNorm1d(WIDTH) if model == "norm" else nn.Tanh()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))


def settings_of(recipe: Any, rank: int) -> dict[str, Any]:
    """The settings of ``ddp_compile`` on a rank."""
    settings = {
        "backend": recipe.backend,
        "split": recipe.split,
        "bucket_cap_mb": recipe.cap_mib,
        "find_unused_parameters": recipe.find_unused,
    }
    return settings if rank == 0 else {**settings, **(KINDS[recipe.kind].settings or {})}
