"""Ways to train, and how many buckets are launched inside a compiled backward in each of their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from models import Mlp, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Called with the model, this rank's batch, and the number of the step.
Step = Callable[[nn.Module, Tensor, int], None]

NUM_STEPS = 6
#: The fifth step, which brings something new.
APPEARS_AT = 4


def inner_weight(model: nn.Module) -> Tensor:
    """Only the second layer's bucket: the first layer's is ready when the backward ends, and not earlier."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return weights[min(1, len(weights) - 1)]


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * inner_weight(model).square().sum()


def plain(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(x)).backward()


def regularizer_built_after(model: nn.Module, x: Tensor, step: int) -> None:
    (loss_of(model(x)) + penalty(model)).backward()


def regularizer_built_before(model: nn.Module, x: Tensor, step: int) -> None:
    extra = penalty(model)
    (extra + loss_of(model(x))).backward()


def two_forwards(model: nn.Module, x: Tensor, step: int) -> None:
    (loss_of(model(x)) + loss_of(model(2 * x))).backward()


def two_forwards_later(model: nn.Module, x: Tensor, step: int) -> None:
    (two_forwards if step >= APPEARS_AT else plain)(model, x, step)


def contributor_on_one_rank(model: nn.Module, x: Tensor, step: int) -> None:
    (regularizer_built_after if dist.get_rank() == 1 else plain)(model, x, step)


def contributor_that_appears(model: nn.Module, x: Tensor, step: int) -> None:
    (regularizer_built_before if step >= APPEARS_AT else plain)(model, x, step)


def contributor_that_appears_on_one_rank(model: nn.Module, x: Tensor, step: int) -> None:
    (contributor_that_appears if dist.get_rank() == 1 else plain)(model, x, step)


def accumulate(model: nn.Module, x: Tensor, step: int) -> None:
    for scale in (1.0, 2.0, 3.0):
        loss_of(model(scale * x)).backward()


def accumulate_in_no_sync(model: nn.Module, x: Tensor, step: int) -> None:
    for scale in (1.0, 2.0, 3.0):
        with model.no_sync() if scale < 3 else contextlib.nullcontext():
            loss_of(model(scale * x)).backward()


def accumulate_and_regularize(model: nn.Module, x: Tensor, step: int) -> None:
    with model.no_sync():
        loss_of(model(2 * x)).backward()
    contributor_that_appears(model, x, step)


def average_and_regularize(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(2 * x)).backward()
    contributor_that_appears(model, x, step)


def forward_that_nobody_uses(model: nn.Module, x: Tensor, step: int) -> None:
    model(3 * x)
    loss_of(model(x)).backward()


def contributor_on_one_rank_and_a_forward_on_the_other(model: nn.Module, x: Tensor, step: int) -> None:
    if step >= APPEARS_AT and dist.get_rank() == 0:
        with model.no_sync():  # outside, it would be one that the ranks miss
            model(3 * x)
    contributor_that_appears_on_one_rank(model, x, step)


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def halve_in_place(gradient: Tensor) -> None:
    gradient.div_(2)


def tensor_hook(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT:
        inner_weight(model).register_hook(halve)
    plain(model, x, step)


def tensor_hook_in_place(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT:
        inner_weight(model).register_hook(halve_in_place)
    plain(model, x, step)


def halve_data(gradient: Tensor) -> None:
    gradient.data.div_(2)  # changes neither the address nor the version


def tensor_hook_on_data_on_one_rank(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT and dist.get_rank() == 1:
        inner_weight(model).register_hook(halve_data)
    plain(model, x, step)


def halve_stored(parameter: Tensor) -> None:
    parameter.grad.div_(2)


def hook_after_accumulation(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT:
        inner_weight(model).register_post_accumulate_grad_hook(halve_stored)
    plain(model, x, step)


def halve_before(gradients: tuple[Tensor, ...]) -> None:
    gradients[0].div_(2)


def hook_before_accumulation(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT:
        torch.autograd.graph.get_gradient_edge(inner_weight(model)).node.register_prehook(halve_before)
    plain(model, x, step)


def only_look(gradient: Tensor) -> None:
    """As logging does."""


def hook_on_one_rank(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT and dist.get_rank() == 0:
        inner_weight(model).register_hook(only_look)
    plain(model, x, step)


def hook_while_accumulating(model: nn.Module, x: Tensor, step: int) -> None:
    with model.no_sync():
        loss_of(model(2 * x)).backward()
    hook_after_accumulation(model, x, step)


def graph_kept(model: nn.Module, x: Tensor, step: int) -> None:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_asked_for(model: nn.Module, x: Tensor, step: int) -> None:
    loss = loss_of(model(x))
    torch.autograd.grad(loss, inner_weight(model), retain_graph=True)
    loss.backward()


def regularizer_by_itself_on_one_rank(model: nn.Module, x: Tensor, step: int) -> None:
    if step >= APPEARS_AT and dist.get_rank() == 1:
        penalty(model).backward()
    plain(model, x, step)


def losses_one_by_one(model: nn.Module, x: Tensor, step: int) -> None:
    early, late = model(x)
    loss_of(early).backward(retain_graph=True)
    loss_of(late).backward()


class TwoOutputs(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        early = torch.tanh(self.layers[0](x))
        x = early
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return early, x


class UsedTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.layers[0](super().forward(x))))


class FrameUsedTwice(Mlp):
    """One compiled frame that the model calls twice, so that its graph computes each bucket twice in a backward."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Tied(Mlp):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__(width, num_layers)
        self.layers[-1].weight = self.layers[0].weight


class Shared(nn.Module):
    """One gradient for two parameters, and the tangent itself as a third one's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right, self.last = (nn.Parameter(torch.randn(6, width)) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x + self.left + self.right) @ self.weight) + self.last


class Table(nn.Module):
    """A table that the model uses whole, and a regularizer by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return torch.tanh(self.layers[2](x @ self.weight.t() @ self.weight))


def sparse_regularizer(model: nn.Module, x: Tensor, step: int) -> None:
    if step >= APPEARS_AT:
        nn.functional.embedding(torch.tensor([1, 2]), model.weight, sparse=True).sum().backward()
    plain(model, x, step)


class Convolutions(nn.Module):
    """Inductor computes their gradients in channels_last, whatever the parameters' strides are."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(fan_in, 16, 3, padding=1) for fan_in in (1, 16, 16, 16))
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :32].view(-1, 1, 4, 8)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Checkpointed(Mlp):
    """The whole model in one checkpoint, which is one node of the forward graph and flat in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Pattern(NamedTuple):
    """A way to train.

    Args:
        step: One step.
        num_early: How many of the four buckets are launched inside the backward in each step, without the last one,
            which is ready when it ends; more if a step has several backwards.
        make: Makes the model.
        is_ddps: Whether DistributedDataParallel can do it; otherwise the plain model's mean is the reference.
    """

    step: Step
    num_early: tuple[int, ...] = (0, 3, 3, 3, 3, 3)
    make: Callable[[], nn.Module] = lambda: Mlp(33, 4)
    is_ddps: bool = True


#: For `Pattern.num_early`: the buckets wait for their hooks in every step.
NEVER = (0, 0, 0, 0, 0, 0)
#: Two backwards in a step; only the very first one is learned from.
TWICE = (3, 6, 6, 6, 6, 6)
#: The regularized weight's bucket waits, the others do not.
BUT_ONE = (0, 2, 2, 2, 2, 2)
#: A bucket that is launched too early is launched again, and waits from then on.
UNTIL_IT_APPEARS = (0, 3, 3, 3, 3, 2)
PATTERNS = {
    "plain": Pattern(plain),
    "regularizer_built_after": Pattern(regularizer_built_after, BUT_ONE),
    "regularizer_built_before": Pattern(regularizer_built_before, BUT_ONE),
    "two_forwards": Pattern(two_forwards, NEVER),
    "two_forwards_later": Pattern(two_forwards_later, (0, 3, 3, 3, 3, 0)),
    "contributor_on_one_rank": Pattern(contributor_on_one_rank, BUT_ONE),
    "contributor_that_appears": Pattern(contributor_that_appears, UNTIL_IT_APPEARS),
    "contributor_that_appears_on_one_rank": Pattern(contributor_that_appears_on_one_rank, UNTIL_IT_APPEARS),
    "contributor_on_one_rank_and_a_forward_on_the_other": Pattern(
        contributor_on_one_rank_and_a_forward_on_the_other, UNTIL_IT_APPEARS
    ),
    "accumulate": Pattern(accumulate, (6, 9, 9, 9, 9, 9)),
    "accumulate_in_no_sync": Pattern(accumulate_in_no_sync),
    "accumulate_and_regularize": Pattern(accumulate_and_regularize, UNTIL_IT_APPEARS),
    "average_and_regularize": Pattern(average_and_regularize, (3, 6, 6, 6, 6, 4)),
    "forward_that_nobody_uses": Pattern(forward_that_nobody_uses),
    "tensor_hook": Pattern(tensor_hook, UNTIL_IT_APPEARS),
    "tensor_hook_in_place": Pattern(tensor_hook_in_place, UNTIL_IT_APPEARS),
    "tensor_hook_on_data_on_one_rank": Pattern(tensor_hook_on_data_on_one_rank, UNTIL_IT_APPEARS),
    "hook_after_accumulation": Pattern(hook_after_accumulation, UNTIL_IT_APPEARS),
    "hook_before_accumulation": Pattern(hook_before_accumulation, UNTIL_IT_APPEARS),
    "hook_on_one_rank": Pattern(hook_on_one_rank, UNTIL_IT_APPEARS),
    "hook_while_accumulating": Pattern(hook_while_accumulating, UNTIL_IT_APPEARS),
    "graph_kept": Pattern(graph_kept, TWICE, is_ddps=False),
    "gradients_asked_for": Pattern(gradients_asked_for, is_ddps=False),
    "losses_one_by_one": Pattern(losses_one_by_one, TWICE, lambda: TwoOutputs(33, 4), is_ddps=False),
    "regularizer_by_itself_on_one_rank": Pattern(regularizer_by_itself_on_one_rank),
    "sparse_regularizer": Pattern(sparse_regularizer, (0, 2, 2, 2, 2, 1), lambda: Table(33), is_ddps=False),
    "module_used_twice": Pattern(plain, make=lambda: UsedTwice(33, 4)),
    "frame_used_twice": Pattern(plain, NEVER, make=lambda: FrameUsedTwice(33, 4)),
    "tied_weights": Pattern(plain, BUT_ONE, make=lambda: Tied(33, 4)),
    "shared_gradients": Pattern(plain, (0, 1, 1, 1, 1, 1), make=lambda: Shared(33)),
    "convolutions": Pattern(plain, make=lambda: Convolutions(torch.contiguous_format)),
    "channels_last": Pattern(plain, make=lambda: Convolutions(torch.channels_last)),
}
