"""Parameters in flat buffers, and in blocks of themselves."""

from __future__ import annotations

import torch

from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters


def test_blocks_follow_the_flat_buffers() -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(()),
        torch.randn(0, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7).bfloat16(),
        torch.randn(14)[3:],
    ]
    parameters = FlatParameters(tensors)
    flats = parameters.new()
    parameters.read(flats)
    blocks = parameters.blocks(8)
    assert blocks is not None
    for flat, of_kind in zip(flats, blocks, strict=True):
        assert [sum(map(len, block)) for block in of_kind] == [len(block) for block in flat.split(8)]
        assert torch.equal(torch.cat([piece for block in of_kind for piece in block]), flat)
    for piece in (piece for of_kind in blocks for block in of_kind for piece in block):
        piece.add_(1)
    changed = parameters.new()
    parameters.read(changed)
    assert all(torch.equal(after, before + 1) for after, before in zip(changed, flats, strict=True))


def test_parameters_with_gaps_have_no_blocks() -> None:
    assert FlatParameters([torch.randn(4), torch.randn(4, 6)[:, ::2]]).blocks(8) is None
