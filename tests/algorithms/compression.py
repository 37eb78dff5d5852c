"""The oracle of gradients in eight bits, and QAdam with groups of settings."""

from typing import Any

import torch
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress
from ddp_compile.optim import QAdam

WARMUP_STEPS = 3
DECAYED = {"betas": (0.9, 0.99), "weight_decay": 0.05}
DECOUPLED = {"betas": (0.8, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True, "lr": 0.02}


def coded(values: Tensor, num_chunks: int = 1) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.float32)
    if values.numel():
        minmax_u8_decompress(minmax_u8_compress(values, num_chunks), out)
    return out


def byte_grad_of(flats: list[Tensor]) -> Tensor:
    """In one process, for whole buckets: each rank adds what the others send to its own chunk, and sends the sum."""
    own = [flat * (1.0 / len(flats)) for flat in flats]
    sent = [coded(each, len(flats)) for each in own]
    chunk_numel = -(-len(own[0]) // len(flats))
    sums = []
    for rank in range(len(flats)):
        chunk = slice(rank * chunk_numel, (rank + 1) * chunk_numel)
        total = own[rank][chunk].float()
        for other, each in enumerate(sent):
            total = total if other == rank else total + each[chunk]
        sums.append(coded(total))
    return torch.cat(sums).to(flats[0].dtype)


def make_qadam(module: nn.Module, **settings: Any) -> tuple[Any, QAdam]:
    named = dict(module.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    others = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": weights, **DECAYED}, {"params": others, **DECOUPLED}]
    optimizer = QAdam(groups, lr=0.01, warmup_steps=WARMUP_STEPS)
    settings = {"bucket_cap_mb": 0.001, "backend": "eager", **settings}
    return ddp_compile(module, algorithm=optimizer.algorithm(), **settings), optimizer
