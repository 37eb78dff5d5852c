"""Ways to train, each against eager DistributedDataParallel: gradients, and how many buckets are launched early."""

import pytest
import torch
import torch.distributed as dist
from beside import beside_plain, is_same_everywhere, own_batch
from in_ci import only
from models import Mlp, loss_of, needs_ddp_to_keep_buffers, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from ways_to_train import NUM_STEPS, WAYS, train

from ddp_compile import GradientArrivalError, ddp_compile

#: Of the others, one of these has the same thing happen to the buckets, or other tests have them in CI.
IN_CI = [
    "contributor_that_appears_on_one_rank", "hook_while_accumulating", "hook_after_the_node",
    "hook_before_the_node_on_data_on_one_rank", "hooks_on_all_parameters_twice", "losses_one_by_one",
    "sparse_regulariser", "regulariser_last", "two_forwards_with_batch_norm", "two_forwards_and_backwards",
    "accumulate_any_number", "accumulate_by_attribute", "gradients_freed_in_between", "gradients_zeroed_in_between",
    "backward_in_inference_mode", "under_autocast", "unscaled_and_clipped", "module_used_twice",
    "reentrant_checkpoints",
]  # fmt: skip


def marks_of(way: str) -> list[pytest.MarkDecorator]:
    of_torch = [needs_ddp_to_keep_buffers] if way == "two_forwards_with_batch_norm" else []
    return [*of_torch, *([] if way in IN_CI else [pytest.mark.long])]


@pytest.mark.parametrize("way", [pytest.param(way, marks=marks_of(way)) for way in WAYS])
@on_ranks(2)
def test_ways(way: str, split: str) -> None:
    """The forward split launches nothing early. The backward split need not learn first what it can launch early."""
    if (way, split) == ("losses_one_by_one", "forward"):  # each cut would be a backward of its own
        with pytest.raises(GradientArrivalError, match="arrived twice"):
            train(way, split=split)
        return
    trained = train(way, split=split)
    assert trained.worst <= WAYS[way].tolerance
    if split == "forward":
        assert trained.num_early == (0,) * NUM_STEPS
    else:
        assert trained.num_early[0] >= trained.num_early[-1] == WAYS[way].num_early


STATIC, LAZY = {"static_graph": True}, {"lazy_bucket_allocation": True}


WITH_SETTINGS: list[tuple[str, dict[str, bool]]] = [
    ("accumulate_in_no_sync", {"find_unused_parameters": True}),
    ("accumulate", {"set_to_none": False}),
    ("shared_gradients", STATIC),
    ("plain", {**STATIC, "gradient_as_bucket_view": False}),
    ("contributor_that_appears", {"gradient_as_bucket_view": False}),
    ("gradients_freed_in_between", LAZY),
    ("contributor_that_appears_on_one_rank", LAZY),
    ("plain", {**STATIC, **LAZY}),
    ("reentrant_checkpoints", STATIC),
]


@pytest.mark.parametrize(("way", "settings"), only(WITH_SETTINGS[:6], WITH_SETTINGS), ids=str)
@on_ranks(2)
def test_ways_with_settings(way: str, settings: dict[str, bool]) -> None:
    trained = train(way, split="backward", **settings)
    assert (trained.worst, trained.num_early[-1]) == (0.0, WAYS[way].num_early)


# Its C++ kernels take the compiler most of half a minute; `test_gradient_parity` has "plain" in CI, without any.
@pytest.mark.inductor
@pytest.mark.long
@pytest.mark.parametrize("way", ["contributor_that_appears_on_one_rank", "shared_gradients"])
@on_ranks(2)
def test_ways_under_inductor(way: str) -> None:
    trained = train(way, "inductor", split="backward", static_graph=way != "contributor_that_appears_on_one_rank")
    assert trained.worst < 1e-5
    assert trained.num_early[-1] == WAYS[way].num_early


@on_ranks(2)
def test_kept_graph(each_split: str) -> None:
    assert train("graph_kept", donated_buffer=True).worst < 1e-6


@on_ranks(2)
def test_graph_kept_later(each_split: str) -> None:
    model = ddp_compile(Mlp(17, 3), backend="aot_eager")
    loss_of(model(torch.randn(4, 17))).backward()
    with pytest.raises(RuntimeError, match=r"torch\._functorch\.config\.donated_buffer=False"):
        loss_of(model(torch.randn(4, 17))).backward(retain_graph=True)


@on_ranks(2)
def test_local_gradients(each_split: str) -> None:
    model, plain = beside_plain(lambda: Mlp(7, 2))
    with model.no_sync():
        loss_of(model(own_batch(0, 7))).backward()
    loss_of(plain(own_batch(0, 7))).backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert not is_same_everywhere(model.layers[0].weight.grad)


class TwoHeads(nn.Module):
    """Two outputs, each of a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        torch._dynamo.graph_break()
        left = self.left(h)
        torch._dynamo.graph_break()
        return left, self.right(h)


@on_ranks(2)
def test_backward_of_a_part(each_split: str) -> None:
    heads = TwoHeads()
    heads.trunk = nn.Identity()
    model = ddp_compile(heads, backend="aot_eager", bucket_cap_mb=1e-4)
    x = own_batch(0, 4)
    for _ in range(2):
        model.zero_grad()
        left, right = model(x)
        for loss, layer in ((loss_of(right), model.right), (loss_of(left), model.left)):
            (mean,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
            dist.all_reduce(mean)
            loss.backward()
            # Each branch is averaged when its own backward returns, though the first one does not end the iteration.
            assert relative_difference(layer.weight.grad, mean / dist.get_world_size()) < 1e-6


@on_ranks(2)
def test_gradient_that_arrives_twice(each_split: str) -> None:
    model = ddp_compile(TwoHeads(), backend="aot_eager", bucket_cap_mb=1e-5)
    left, right = model(torch.randn(2, 4))
    with pytest.raises(GradientArrivalError, match=r"(?s)trunk\.weight arrived twice.*add up the losses"):
        loss_of(left).backward(retain_graph=True)
        loss_of(right).backward()


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.table, sparse=True)


@on_ranks(2)
def test_sparse_gradients(each_split: str) -> None:
    """That no module announced, and which are dense then."""
    model, plain = beside_plain(Lookup)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, 20, (6,))
    for each in (model, plain):
        loss_of(each(tokens)).backward()
    total = plain.table.grad.to_dense()
    dist.all_reduce(total)
    assert not model.table.grad.is_sparse and relative_difference(model.table.grad, total / 2) < 1e-6
