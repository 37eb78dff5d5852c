"""Names that wrappers put before those of a module's own entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn


def without_wrapper_prefixes(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The same entries under the module's own names, where all of them stand under a prefix that it does not have."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        return state_dict  # torch says what is wrong with it
    own = module.state_dict().keys()
    stripped: Any = OrderedDict(state_dict)
    # Versions of the modules that wrote the entries, by which they migrate old ones; kept beside the entries.
    metadata = getattr(state_dict, "_metadata", None)
    while stripped and own.isdisjoint(stripped):
        prefix = next((p for p in ("module", "_orig_mod") if all(key.startswith(f"{p}.") for key in stripped)), None)
        if prefix is None:
            break
        stripped = OrderedDict((key.removeprefix(f"{prefix}."), value) for key, value in stripped.items())
        if metadata is not None:
            below = {key: value for key, value in metadata.items() if key.split(".")[0] == prefix}
            metadata = OrderedDict((key.removeprefix(prefix).lstrip("."), value) for key, value in below.items())
    if own.isdisjoint(stripped):
        return state_dict  # of another module: errors shall have the names that it has in the checkpoint
    if metadata is not None:
        stripped._metadata = metadata
    return stripped
