"""What the runtime asks of a device that runs what it is given later, on streams."""

from __future__ import annotations

import torch


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is put on streams, which the runtime has to keep in order."""
    if device.type == "cpu":
        return False
    try:
        return hasattr(torch.get_device_module(device), "current_stream")
    except RuntimeError:  # there is no such module
        return False


def is_capturing(device: torch.device) -> bool:
    """Whether work for the device is being recorded into a graph, to be replayed later."""
    if device.type == "cpu":
        return False
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())
