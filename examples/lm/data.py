"""Text that every machine has, the sources of Python's standard library, cut into samples and shared by the ranks."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lm.model import PADDING

Batch = tuple[Tensor, Tensor]

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_HELD_OUT_EVERY = 20


def standard_library_text(max_bytes: int) -> tuple[Tensor, Tensor]:
    """The sources of the running Python's standard library, one after the other in the order of their names.

    Args:
        max_bytes: Maximum length of each of the two texts.

    Returns:
        The text to train on, and a held-out text from every twentieth file. uint8 tensors.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(p for p in root.rglob("*.py") if _LEFT_OUT.isdisjoint(p.relative_to(root).parts))
    held_out = sources[::_HELD_OUT_EVERY]
    del sources[::_HELD_OUT_EVERY]
    return _read(sources, max_bytes), _read(held_out, max_bytes)


def _read(files: list[Path], max_bytes: int) -> Tensor:
    text = b"".join(file.read_bytes() for file in files)
    # A bytearray, because a tensor needs writable memory.
    return torch.frombuffer(bytearray(text[:max_bytes]), dtype=torch.uint8)


class ByteWindows(Dataset[Batch]):
    """A text in consecutive windows. Each item is ``context`` bytes and, as targets, the bytes that follow them.

    Args:
        text: uint8 tensor.
        context: Bytes of a window.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        # The last target is one byte past the last window.
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Batch:
        """Tokens and targets, int64, ``(context,)`` each."""
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class ByteDocuments(Dataset[Batch]):
    """A text as documents of uneven lengths, which are its blocks between blank lines. Each item is padded at its end.

    Args:
        text: uint8 tensor.
        context: Length of an item; longer documents are cut off.
    """

    def __init__(self, text: Tensor, context: int) -> None:
        blocks = text.numpy().tobytes().split(b"\n\n")
        self.documents = [block[: context + 1] for block in blocks if len(block) > 1]  # a byte, and what follows it
        self.context = context

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Batch:
        """Tokens and targets, int64, ``(context,)`` each; targets after the document's end are PADDING."""
        document = torch.tensor(list(self.documents[index]))
        padding = (0, self.context + 1 - len(document))
        return F.pad(document[:-1], padding), F.pad(document[1:], padding, value=PADDING)


def load_samples(text_mb: float, context: int, padded: bool) -> tuple[Dataset[Batch], Dataset[Batch]]:
    """Windows or padded documents to train on, and those of files that are held out."""
    training, held_out = standard_library_text(int(text_mb * 1e6))
    cut = ByteDocuments if padded else ByteWindows
    return cut(training, context), cut(held_out, context)


class SamplerState(TypedDict):
    epoch: int
    position: int


class ResumableSampler(DistributedSampler[Batch]):
    """A `DistributedSampler` that can resume in the middle of an epoch.

    ``position`` is the number of this rank's samples that have been used in the current epoch.
    """

    position = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.position, None)

    def next_epoch(self) -> None:
        self.set_epoch(self.epoch + 1)
        self.position = 0

    def state_dict(self) -> SamplerState:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: SamplerState) -> None:
        self.set_epoch(state["epoch"])
        self.position = state["position"]


def training_batches(
    samples: Dataset[Batch], sampler: ResumableSampler, batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's training batches without end, in a new order each epoch.

    The sampler's position advances before a batch is yielded, so training from a checkpoint taken after the batch's
    step continues with the next batch.

    Yields:
        Tokens and targets on ``device``, int64, ``(batch_size, context)`` each.
    """
    loader = DataLoader(samples, batch_size, sampler=sampler, drop_last=True, pin_memory=device.type == "cuda")
    if len(sampler) < batch_size:
        raise ValueError(f"the text gives each rank {len(sampler)} samples, which is less than one batch")
    while True:
        for batch in loader:
            sampler.position += batch_size
            yield to_device(batch, device)
        sampler.next_epoch()


def held_out_batches(samples: Dataset[Batch], batch_size: int, count: int, device: torch.device) -> Iterator[Batch]:
    """``count`` batches of this rank, spread over a text, always the same ones.

    Yields:
        Tokens and targets on ``device``, int64, ``(batch_size, context)`` each.
    """
    sampler: DistributedSampler[Batch] = DistributedSampler(samples, seed=0, drop_last=True)
    if len(sampler) < batch_size * count:
        raise ValueError(f"the held-out text gives each rank {len(sampler)} samples, not {count} batches")
    for batch in islice(DataLoader(samples, batch_size, sampler=sampler), count):
        yield to_device(batch, device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    tokens, targets = batch
    return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
