"""Trains the module of a recipe in one of several ways, and records everything visible after each action."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from fuzz.blocks import NUM_IDS, WIDTH, Arguments, Block, build, run
from fuzz.recipe import Recipe
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

#: Everything visible after an action: values by name, None if there is none; or only "raised" and the error's text.
Observation = dict[str, Any]


@dataclass
class Batch:
    x: Tensor
    ids: Tensor


@dataclass
class Output:
    y: Tensor
    h: Tensor


class Hidden:
    """Holds tensors where no pytree finds them."""

    def __init__(self, y: Tensor, h: Tensor) -> None:
        self.y, self.h = y, h


class DeliberateError(Exception):
    """Raised by the module's forward when the program says so."""


class Net(nn.Module):
    """The blocks, between two linear layers."""

    def __init__(self, blocks: tuple[Block, ...], outputs: str) -> None:
        super().__init__()
        self.outputs = OUTPUTS[outputs]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = build(blocks, self.first)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Any, ids: Tensor | None = None, scale: float = 1.0, route: bool = True, fail: bool = False
    ) -> Any:
        if isinstance(x, Batch):
            x, ids = x.x, x.ids
        elif isinstance(x, dict):
            x, ids = x["x"], x["ids"]
        h = self.first(x)
        if fail:
            raise DeliberateError
        h = run(self.blocks, h, [], Arguments(ids, scale, route))
        return self.outputs(self.last(h), h, x)


OUTPUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "tensor": lambda y, h, x: y,
    "dict": lambda y, h, x: {"y": y, "h": h},
    "tuple": lambda y, h, x: (y, 3, None, "text", h),
    "dataclass": lambda y, h, x: Output(y, h),
    "nested": lambda y, h, x: {"a": [y, (h, {"b": Output(y, h)})], "n": 1.5},
    "views": lambda y, h, x: [y, y.view(-1), y[:, :2]],
    "with_detached": lambda y, h, x: {"y": y, "log": y.detach()},
    "with_input": lambda y, h, x: (y, x),
    "object": lambda y, h, x: Hidden(y, h),
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Hidden):
        yield from (value.y, value.h)
    elif dataclasses.is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def losses_of(output: Any) -> list[Tensor]:
    """A loss of each output that has an autograd graph; of each half, if there is only one output."""
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if len(found) == 1 and found[0].dim() == 2:
        found = [found[0][:, :2], found[0][:, 2:]]
    return [tensor.square().mean() for tensor in found]


class Training:
    """One way to train the recipe's modules; ``wrap`` makes each of them data-parallel."""

    def __init__(
        self, recipe: Recipe, wrap: Callable[[nn.Module, Recipe, dist.ProcessGroup], Any], group: dist.ProcessGroup
    ) -> None:
        torch.manual_seed(7)
        self.recipe = recipe
        self.rank = group.rank()
        self.position = 0
        self.nets = [Net(recipe.blocks, recipe.outputs)]
        if recipe.others:
            self.nets.append(Net(recipe.others, "tensor"))
        for net in self.nets:
            net.to(getattr(torch, recipe.dtype))
        self.models = [wrap(net, recipe, group) for net in self.nets]
        self.parameters = [p for net in self.nets for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05)
        self.seen: list[Tensor] = []

    def forward(self, model: int = 0, salt: int = 0, around: Callable[[Any], Any] = lambda m: m, **more: Any) -> Any:
        """One forward with a batch of this position and rank; input and output are observed.

        ``around`` makes the function to call out of the model.
        """
        recipe = self.recipe
        generator = torch.Generator().manual_seed(1000 * self.position + 10 * self.rank + salt)
        rows = 3 + self.position % 3 if recipe.rows_vary else 4
        x = torch.randn(rows, WIDTH, generator=generator, dtype=getattr(torch, recipe.dtype))
        x.requires_grad_(recipe.input_grad)
        ids = torch.randint(NUM_IDS, (rows,), generator=generator)
        turns = {"first": 0, "in turns": self.position, "by rank": self.position + self.rank}[recipe.routes]
        scale = 1.0 + 0.5 * self.position if recipe.scale_varies else 1.5
        settings = {"scale": scale, "route": turns % 2 == 0, **more}
        output = _call(around(self.models[model]), recipe.inputs, x, ids, settings)
        self.seen += [x, *tensors_in(output)]
        return output

    def average(self, *models: int) -> None:
        """For the reference that averages by hand; the others have done so in the backward of these ``models``."""
        for model in [self.models[number] for number in models or (0,)]:
            if isinstance(model, MeanOfRanks):
                model.average()

    def do(self, action: str) -> Observation:
        self.seen = []
        ACTIONS[action](self)
        found: Observation = {}
        for i, tensor in enumerate(self.seen):
            found[f"forward {i}"] = tensor.detach().clone()
            if tensor.is_leaf and tensor.requires_grad:
                found[f"forward {i} gradient"] = _clone(tensor.grad)
        for number, net in enumerate(self.nets):
            prefix = "other." if number else ""
            for name, parameter in net.named_parameters():
                found[f"gradient of {prefix}{name}"] = _clone(parameter.grad)
                found[f"{prefix}{name}"] = _clone(parameter)
            for name, buffer in net.named_buffers():
                found[f"buffer {prefix}{name}"] = _clone(buffer)
        self.position += 1
        return found


def _call(model: Any, inputs: str, x: Tensor, ids: Tensor, settings: dict[str, Any]) -> Any:
    if inputs == "tensor":
        return model(x, ids, **settings)
    if inputs == "keyword":
        return model(x=x, ids=ids, **settings)
    return model({"x": x, "ids": ids} if inputs == "dict" else Batch(x, ids), **settings)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to_dense().clone()


class MeanOfRanks(nn.Module):
    """The mean over the ranks of what a plain module computes, after each backward that is to be reduced.

    The reference where ddp_compile is documented to do something else than DistributedDataParallel: several backwards
    of one forward are all averaged, and buffers are broadcast before training forwards outside ``no_sync`` alone.
    """

    def __init__(self, net: nn.Module, recipe: Recipe, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.net, self.recipe, self.group = net, recipe, group
        self.sync = True
        self.parameters_reduced = [p for p in net.parameters() if p.requires_grad]
        layers = (layer for layer in net.modules() if isinstance(layer, nn.Embedding))
        self.sparse: set[Tensor] = {layer.weight for layer in layers if layer.sparse}
        self.arrived: set[Tensor] = set()
        self.awaited: set[Tensor] = set()
        self.incomplete = False
        self.expects_backward = False  # of a synchronized forward
        for parameter in self.parameters_reduced:
            parameter.register_post_accumulate_grad_hook(self.arrived.add)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and self.sync and torch.is_grad_enabled():
            if self.incomplete and not (self.recipe.find_unused or self.recipe.static_graph):
                raise RuntimeError("the last backward left parameters without a gradient")
            self.awaited = set(self.parameters_reduced)
            self.expects_backward = True
            for buffer in self.net.buffers():
                dist.broadcast(buffer, 0, self.group)
        return self.net(*args, **kwargs)

    def average(self) -> None:
        used = torch.tensor([p in self.arrived for p in self.parameters_reduced], dtype=torch.int32)
        dist.all_reduce(used, group=self.group)
        self.awaited -= self.arrived
        self.incomplete = bool(self.awaited) and bool(self.arrived)
        self.arrived.clear()
        self.expects_backward = False
        factor = (0.5 if self.recipe.comm_hook == "halves" else 1.0) / self.group.size()
        for parameter, is_used in zip(self.parameters_reduced, used, strict=True):
            if is_used:
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                dist.all_reduce(total, group=self.group)
                # Where this rank has not used it as well.
                is_sparse = parameter in self.sparse if parameter.grad is None else parameter.grad.is_sparse
                parameter.grad = (total * factor).to_sparse(1) if is_sparse else total * factor


class MeanOfRanksWithCopies(MeanOfRanks):
    """The same, but layers save copies for their backward, so that later writes to saved tensors do not matter.

    Eager autograd refuses such a backward; a graph whose writes were made functional computes this one.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved):
            return super().forward(*args, **kwargs)


def backward(t: Training, losses: list[Tensor], *models: int, **settings: bool) -> None:
    """One backward of all losses, of these models or the first one, which is reduced."""
    torch.stack(losses).sum().backward(**settings)
    t.average(*models)


def train(t: Training, model: int = 0) -> None:
    backward(t, losses_of(t.forward(model)), model)


def swapped(t: Training) -> None:
    """Tensors that are computed from the parameters take their place."""

    def around(model: Any) -> Any:
        halves = {name: 0.5 * parameter for name, parameter in model.named_parameters()}
        return lambda *args, **kwargs: torch.func.functional_call(model, halves, args, kwargs)

    backward(t, losses_of(t.forward(around=around)))


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Training], None]:
    def train_inside(t: Training) -> None:
        with context():
            losses = losses_of(t.forward())
        backward(t, losses)

    return train_inside


def dual(t: Training) -> None:
    """With forward-mode derivatives in the direction of the input."""

    def around(model: Any) -> Any:
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            return model(forward_ad.make_dual(x, torch.ones_like(x)) if isinstance(x, Tensor) else x, *args, **kwargs)

        return call if t.recipe.inputs == "tensor" else model

    with forward_ad.dual_level():
        unpacked = [forward_ad.unpack_dual(tensor) for tensor in tensors_in(t.forward(around=around))]
        found = [tensor for pair in unpacked for tensor in pair if tensor is not None and tensor.requires_grad]
        backward(t, [tensor.square().mean() for tensor in found])


def micro(t: Training) -> None:
    model = t.models[0]
    with model.no_sync():
        torch.stack(losses_of(t.forward())).sum().backward()
    if isinstance(model, MeanOfRanks) and model.expects_backward and t.recipe.outputs == "object":
        t.average()  # documented: such outputs do not tell of which forward they are


def two_forwards(t: Training) -> None:
    backward(t, losses_of(t.forward()) + losses_of(t.forward(salt=1)))


def joint(t: Training) -> None:
    models = range(len(t.models))
    backward(t, [loss for model in models for loss in losses_of(t.forward(model))], *models)


def repeat(t: Training) -> None:
    losses = [torch.stack(losses_of(t.forward())).sum()]
    backward(t, losses, retain_graph=True)
    backward(t, losses)


def halves(t: Training) -> None:
    """Two losses, and a backward of each."""
    first, *rest = losses_of(t.forward())
    backward(t, [first], retain_graph=True)
    if rest:
        backward(t, rest)


def output_hook(t: Training) -> None:
    """Only of the output that nothing else depends on: compiled, the hook of another output does not see that path."""
    output = t.forward()
    next(tensors_in(output)).register_hook(lambda gradient: 2 * gradient)
    backward(t, losses_of(output))


def written_output(t: Training) -> None:
    """The user writes into the output of the forward."""
    output = t.forward()
    next(tensors_in(output)).mul_(0.5)
    backward(t, losses_of(output))


def evaluate(t: Training) -> None:
    t.models[0].eval()
    with torch.no_grad():
        t.forward()
    t.models[0].train()


def evaluate_on_rank_0(t: Training) -> None:
    if t.rank == 0:
        evaluate(t)


def fail(t: Training) -> None:
    try:
        t.forward(fail=True)
    except DeliberateError:
        return
    raise AssertionError("the forward did not raise")


def regularizer(t: Training) -> None:
    (0.1 * t.nets[0].first.weight.square().sum()).backward()


def autograd_grad(t: Training) -> None:
    loss = torch.stack(losses_of(t.forward())).sum()
    gradients = torch.autograd.grad(loss, t.parameters, allow_unused=True)
    t.seen += [gradient.to_dense() for gradient in gradients if gradient is not None]


def register(t: Training, how: str, hook: Callable[[Tensor], Any]) -> None:
    for parameter in t.parameters[::2]:
        getattr(parameter, how)(hook)


def late_hook(t: Training) -> None:
    """A hook that comes between the forward and its backward."""
    losses = losses_of(t.forward())
    register(t, "register_hook", lambda gradient: 2 * gradient)
    backward(t, losses)


def with_gradients(t: Training, change: Callable[[Tensor], None], step: int = 1) -> None:
    for parameter in t.parameters[::step]:
        if parameter.grad is not None:
            change(parameter)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _replace(parameter: Tensor) -> None:
    parameter.grad = 0.5 * parameter.grad


def _clamp_gradient(parameter: Tensor) -> None:
    # Compiled, such a hook is called without a gradient for what only a checkpoint in ``no_grad`` uses (torch 2.13).
    if parameter.grad is not None and not parameter.grad.is_sparse:
        parameter.grad.clamp_(-0.01, 0.01)


def clip(t: Training) -> None:
    nn.utils.clip_grad_norm_([p for p in t.parameters if p.grad is not None and not p.grad.is_sparse], 0.1)


def _halve_gradient_data(parameter: Tensor) -> None:
    parameter.grad.data.mul_(0.5)


#: What a program consists of. Those that end in a reduction call `Training.average`.
ACTIONS: dict[str, Callable[[Training], None]] = {
    "train": train,
    "swapped": swapped,
    "flops": inside(lambda: FlopCounterMode(display=False)),
    "force_eager": inside(lambda: torch.compiler.set_stance("force_eager")),
    "dual": dual,
    "micro": micro,
    "two_forwards": two_forwards,
    "other": lambda t: train(t, len(t.models) - 1),
    "joint": joint,
    "retain": lambda t: backward(t, losses_of(t.forward()), retain_graph=True),
    "repeat": repeat,
    "halves": halves,
    "first_half": lambda t: backward(t, losses_of(t.forward())[-1:]),
    "output_hook": output_hook,
    "written_output": written_output,
    "evaluate": evaluate,
    "evaluate_on_rank_0": evaluate_on_rank_0,
    "raise": fail,
    "regularizer": regularizer,
    "autograd_grad": autograd_grad,
    "hook": lambda t: register(t, "register_hook", lambda gradient: 2 * gradient),
    "post_hook": lambda t: register(t, "register_post_accumulate_grad_hook", _clamp_gradient),
    "data_hook": lambda t: register(t, "register_post_accumulate_grad_hook", _halve_gradient_data),
    "late_hook": late_hook,
    "reload": lambda t: t.nets[0].load_state_dict(t.nets[0].state_dict()),
    "drop_some": lambda t: with_gradients(t, _drop, 2),
    "replace_grads": lambda t: with_gradients(t, _replace),
    "detach_grads": lambda t: with_gradients(t, lambda p: p.grad.detach_().mul_(0.5)),
    "clip": clip,
    "zero": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "zero_to_none": lambda t: t.optimizer.zero_grad(),
    "step": lambda t: t.optimizer.step(),
}
