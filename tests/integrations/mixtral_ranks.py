"""Mixtral of Transformers on ranks of a pool, against DistributedDataParallel and one process with the whole batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

from ddp_compile import ddp_compile

VOCABULARY, NUM_STEPS = 32, 3


class Trained(NamedTuple):
    """The results of training on one rank; differences are the largest relative ones of a gradient."""

    to_ddp: float
    to_whole: float  # to one process with the batches of all ranks
    num_early: int  # buckets launched before the backward reached the first layer, in the last step
    num_buckets: int
    unused_experts: set[tuple[int, int]]  # (layer, expert) to which no token went on this rank in some step
    says: str  # by ``explain()``


def new_model(experts: str) -> Any:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        **sizes,
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def tokens(step: int) -> list[Tensor]:
    """The batches of all ranks; each rank has a few words of its own, so that tokens go to other experts."""
    torch.manual_seed(step)
    return [torch.randint(3 * rank, 3 * rank + 2, (2, 6)) for rank in range(dist.get_world_size())]


def train(experts: str, backend: str, split: Any) -> Trained:
    models = [new_model(experts) for _ in range(3)]
    model: Any = ddp_compile(models[0], bucket_cap_mb=0.003, backend=backend, split=split, find_unused_parameters=True)
    with_ddp, whole = DistributedDataParallel(models[1], find_unused_parameters=True), models[2]
    early: list[bool] = []
    begin, algorithm = models[0].model.layers[0].input_layernorm.weight, model.comm_algorithm
    launch = algorithm.launch
    algorithm.launch = lambda *args: (early.append(begin.grad is None), launch(*args))[1]
    to_ddp, to_whole, unused = [0.0], [0.0], set[tuple[int, int]]()
    for step in range(NUM_STEPS):
        early.clear()
        for each in models:
            each.zero_grad()
        for each in (model, with_ddp):
            loss_of(each, tokens(step)[dist.get_rank()]).backward()
        loss_of(whole, torch.cat(tokens(step))).backward()
        for ours, theirs, of_whole in zip(*(each.parameters() for each in models), strict=True):
            to_ddp.append(relative_difference(ours.grad, theirs.grad))
            to_whole.append(relative_difference(ours.grad, of_whole.grad))
        unused |= unused_experts(models[1], tokens(step)[dist.get_rank()])
    assert model._ddp_compile_state.compiler.failures == []
    num_buckets = len(model.bucket_plan.buckets)
    return Trained(max(to_ddp), max(to_whole), sum(early), num_buckets, unused, str(model.explain()))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-9))


def unused_experts(model: Any, ids: Tensor) -> set[tuple[int, int]]:
    with torch.no_grad():
        of_layers = model(input_ids=ids, output_router_logits=True).router_logits
    chosen = [logits.topk(2, dim=-1).indices.unique().tolist() for logits in of_layers]
    return {(layer, expert) for layer, of_layer in enumerate(chosen) for expert in range(4) if expert not in of_layer}
