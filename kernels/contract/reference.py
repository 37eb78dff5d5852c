"""The kernels in plain torch operations: the definition for all implementations, and the fallback without them.

All arithmetic is in float32, or in float64 if a tensor has that dtype, and is rounded once, to nearest even.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# A row of compressed values: minimum and maximum as two float32, one byte for each value, then zeros.
HEADER_BYTES = 8
ROW_ALIGNMENT = 16

_LEVELS = 255.0


def scale_into(sources: Sequence[Tensor], destinations: Sequence[Tensor], scale: float | Tensor) -> None:
    """Write ``sources[i] * scale`` to ``destinations[i]``, with a cast; in place if both are the same memory."""
    # Without forward-mode derivatives too, which a gradient may have, and which no kernel knows.
    with torch.inference_mode():
        for source, destination in zip(sources, destinations, strict=True):
            if isinstance(scale, Tensor) or scale != 1.0:
                # A tensor would be rounded to half precision first.
                if source.dtype != destination.dtype or isinstance(scale, Tensor):
                    source = _widened(source)
                # One pass over memory; a copy and a scaling would take two.
                torch.mul(source, scale, out=destination)
            elif source.data_ptr() != destination.data_ptr() or source.is_neg():
                destination.copy_(source)


def _widened(tensor: Tensor) -> Tensor:
    # Eight-bit formats do not promote.
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def row_bytes(chunk_numel: int) -> int:
    """Bytes of a row with a compressed chunk of this many values."""
    return -(-(HEADER_BYTES + chunk_numel) // ROW_ALIGNMENT) * ROW_ALIGNMENT


def minmax_u8_compress(values: Tensor, rows: Tensor, skip_chunk: int | None = None) -> None:
    """See `ddp_compile.kernels.minmax_u8_compress`; ``rows`` is its result."""
    num_chunks = len(rows)
    chunk_numel = -(-values.numel() // num_chunks)
    for number, row in enumerate(rows):
        if number == skip_chunk:
            continue
        row.zero_()
        chunk = values[number * chunk_numel : (number + 1) * chunk_numel]
        if not len(chunk):
            continue
        exact = chunk.double()
        minimum, maximum = exact.min(), exact.max()
        finite = exact.isfinite().all()
        header = torch.stack([minimum, maximum]).float() + 0.0  # makes every zero positive
        row[:HEADER_BYTES].view(torch.float32).copy_(torch.where(finite, header, torch.nan))
        # Not 255.0 / tensor, which torch computes as a reciprocal and a product, with two roundings.
        inverse = torch.where(finite & (maximum > minimum), _on(values, _LEVELS) / (maximum - minimum), 0.0)
        codes = ((exact - minimum) * inverse).nan_to_num(0.0).round().clamp(0, 255)
        row[HEADER_BYTES : HEADER_BYTES + chunk.numel()].copy_(codes)


def minmax_u8_decompress(rows: Tensor, values: Tensor, accumulate: bool = False) -> None:
    """See `ddp_compile.kernels.minmax_u8_decompress`."""
    chunk_numel = -(-values.numel() // len(rows))
    for row, chunk in zip(rows, values.split(chunk_numel) if chunk_numel else (), strict=False):
        minimum, maximum = row[:HEADER_BYTES].view(torch.float32).double()
        codes = row[HEADER_BYTES : HEADER_BYTES + chunk.numel()].double()
        step = (maximum - minimum) / _on(values, _LEVELS)
        # To float32 first, like the other implementations before half formats.
        decoded = (codes * step + minimum).float()
        chunk.copy_(chunk.float() + decoded if accumulate else decoded)


def average_into(x: Tensor, total: Tensor, copy: Tensor, count: float) -> None:
    """See `ddp_compile.kernels.average_into`."""
    with torch.no_grad():
        wide = torch.promote_types(x.dtype, torch.float32)
        # By a tensor, since on CUDA torch divides by a number by multiplying with its reciprocal.
        x.copy_(x.to(wide) + (total.to(wide) / _on(x, count, wide) - copy.to(wide)))


def add_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    """See `ddp_compile.kernels.add_rows`."""
    with torch.no_grad():
        total = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        for row in rows[1:]:
            total += row
        out.copy_(total.mul_(scale))


def _on(tensor: Tensor, number: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A number as a tensor, filled on the device. With a copy, the host would wait."""
    return torch.full((), number, dtype=dtype, device=tensor.device)
