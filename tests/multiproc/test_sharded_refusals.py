"""What a sharded optimizer does not do is an error by name, and never a step by other values than the user's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import RankPool
from test_sharded_optimizer import CAP_MB, WIDTH, batch, plain
from test_sharded_parameters import make
from torch import Tensor, nn

from ddp_compile import ReductionError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad

Ranks = Callable[[int], RankPool]


def said_by(attempt: Callable[[], Any], kinds: Any = (RuntimeError, ValueError, TypeError)) -> str:
    with pytest.raises(kinds) as raised:
        attempt()
    return f"{type(raised.value).__name__}: {raised.value}"


def assert_all_say(ranks: Ranks, function: Callable[[], list[str]], expected: list[str]) -> None:
    """Each rank of two is told, in turn, what is expected."""
    for said in ranks(2).run(function):
        for text, part in zip(said, expected, strict=True):
            assert part in text


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(group["lr"] * (0.9 * momentum + 0.1 * parameter.grad).sign())
                    momentum.lerp_(parameter.grad, 0.01)


def refused_at_the_call() -> list[str]:
    module = Mlp(WIDTH, 2)
    model: Any = ddp_compile(module, bucket_cap_mb=CAP_MB, backend="eager")
    parameters = list(model.parameters())

    def shard(optimizer: Any, other: Any = model, **settings: Any) -> Callable[[], Any]:
        return lambda: shard_optimizer(optimizer, other, **settings)

    def groups(number: int) -> Any:
        return torch.optim.SGD([{"params": parameters[:number]}, {"params": parameters[number:]}])

    def two(first: int) -> Any:
        return [torch.optim.SGD(parameters[i::2]) for i in (first, 1 - first)]

    adamw, rank = torch.optim.AdamW(parameters), dist.get_rank()
    halved = Mlp(WIDTH, 2)
    halved.layers[0].requires_grad_(False)
    halved = ddp_compile(halved, backend="eager")
    said = [
        said_by(shard("adamw")),
        said_by(shard(adamw, Mlp(WIDTH, 2))),
        said_by(shard(torch.optim.AdamW(parameters[1:]))),
        said_by(shard(torch.optim.AdamW([*parameters, nn.Parameter(torch.zeros(2))]))),
        said_by(shard(torch.optim.LBFGS(parameters))),
        said_by(shard([torch.optim.LBFGS(parameters)], placement="whole")),
        said_by(shard([torch.optim.SGD(parameters[:1]), torch.optim.Adafactor(parameters[2:])])),
        said_by(shard([torch.optim.SGD(parameters[1:]), torch.optim.Adafactor(parameters[:1])])),
        said_by(shard([])),
        said_by(shard(adamw, placement="flat")),
        said_by(shard(Lion(parameters), placement="whole", elementwise=True)),
        said_by(shard(torch.optim.Adafactor([*parameters, nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]))),
        said_by(shard([torch.optim.SGD(parameters), torch.optim.SGD(parameters[:1])])),
        said_by(shard([torch.optim.SGD(halved.layers[i].parameters()) for i in range(2)], halved)),
        said_by(shard(Lion(parameters))),
        said_by(shard(torch.optim.SGD(parameters, differentiable=True))),
        said_by(shard(torch.optim.SGD(parameters, lr=0.1 * (1 + rank)))),
        said_by(shard(torch.optim.SGD(parameters, lr=torch.tensor(0.1 + 1e-7 * rank)))),
        *(said_by(shard(each)) for each in (groups(1 + rank), two(rank), torch.optim.SGD(parameters[:: 1 - 2 * rank]))),
        said_by(shard(Lion(parameters), elementwise=rank == 0)),
        said_by(shard(adamw, ddp_compile(Mlp(WIDTH, 2), backend="eager", algorithm=ByteGrad()))),
    ]
    loss_of(model(batch(0))).backward()
    said.append(said_by(shard(adamw)))
    model.zero_grad()
    shard_optimizer(adamw, model)
    loss_of(model(batch(0))).backward()
    return [
        *said,
        *(said_by(torch.optim.SGD(parameters, foreach=foreach).step) for foreach in (False, True)),
        said_by(shard(adamw)),
        said_by(shard(torch.optim.AdamW(parameters))),
        said_by(lambda: adamw.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})),
        said_by(lambda: model.register_comm_hook(None, lambda state, bucket: None)),
        said_by(lambda: model.join_hook()),
    ]


def test_what_cannot_be_sharded_is_refused_by_name(ranks: Ranks) -> None:
    expected = [
        "TypeError: optimizer='adamw' is not a torch.optim.Optimizer",
        "ReplicationError: shard_optimizer: model is a Mlp that is not replicated; call ddp_compile(model) first",
        "the model reduces parameters that the optimizer does not have: layers.0.weight. Put all of them",
        "the optimizer has 1 parameters that the model does not have",
        "LBFGS cannot be sharded, since it looks at all parameters at once",
        "rank {rank}: LBFGS cannot be sharded, since it looks at all parameters at once",
        "rank {rank}: the model reduces parameters that the optimizer does not have: layers.0.bias. Put all",
        "rank {rank}: Adafactor with 1 whole parameters on 2 ranks leaves 1 of the ranks without any",
        "optimizer=[] has no optimizer",
        "placement='flat' with elementwise=False: pass 'whole' for optimizers that need whole parameters",
        "placement='whole' with elementwise=True: pass 'whole' for optimizers that need whole parameters",
        "Adafactor with eps=(None, 0.001) takes the first epsilon of a group from the dtype of its first parameter",
        "more than one optimizer has the parameters layers.0.weight; leave each in one",
        "SGD has no parameter that the model reduces; leave it out",
        "Lion works element by element is not known; pass elementwise=True",
        "a SGD with differentiable=True cannot be sharded",
        *5 * ["RanksDifferError: rank {rank}: the optimizers that are to be sharded have other settings"],
        "",
        "a sharded optimizer cannot be used with the ByteGrad",
        "4 parameters have gradients, which are no shards; call shard_optimizer between two steps",
        *2 * ["the gradient of layers.0.weight, which is reduced to shards: no rank has all of it"],
        "this AdamW is sharded already",
        "the first call shards all parameters of a model. Pass all optimizers to one call",
        "add_param_group of an optimizer that is sharded",
        "cannot be used with the sharded optimizer: ",
        "Join cannot be used with the sharded optimizer: ",
    ]
    for rank, said in enumerate(ranks(2).run(refused_at_the_call)):
        for text, part in zip(said, expected, strict=True):
            assert part.format(rank=rank) in text
        of_one_rank = ("on ranks 1 than on rank 0, or are refused there", "Lion works element by element is not known")
        assert of_one_rank[rank] in said[expected.index("")]


class WithAlias(Mlp):
    """Has something on the memory of its first weight."""

    def __init__(self, alias: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__(WIDTH, 2)
        if alias is not None:
            self.add(alias)

    def add(self, alias: Callable[[Tensor], Tensor]) -> None:
        value = alias(self.layers[0].weight)
        if isinstance(value, nn.Parameter):
            self.alias = value
        else:
            self.register_buffer("alias", value)


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.data[1:], requires_grad=False)


@torch.compiler.set_stance("force_eager")
def refused_for_their_memory() -> list[str]:
    """At the call, at the end of the first backward, and after it."""

    def made(alias: Any = None, share: bool = False) -> Any:
        module = WithAlias(alias)
        model: Any = ddp_compile(module.share_memory() if share else module, bucket_cap_mb=CAP_MB, backend="eager")
        return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    said = []
    for settings in ({"alias": Tensor.detach}, {"alias": frozen}, {"share": True}):
        model, optimizer = made(**settings)
        said.append(said_by(lambda: shard_optimizer(optimizer, model)))  # noqa: B023
    for change in (lambda m: m.add(Tensor.detach), lambda m: m.add(frozen), lambda m: m.share_memory()):
        model, optimizer = made()
        shard_optimizer(optimizer, model)
        loss = loss_of(model(batch(0)))
        if dist.get_rank() == 1:
            change(model)
        said.append(said_by(loss.backward))
    model, optimizer = made()
    shard_optimizer(optimizer, model)
    loss_of(model(batch(0))).backward()
    said.append(said_by(model.share_memory))  # has come to the gradient of the first parameter
    return [*said, said_by(optimizer.step)]


def test_memory_that_is_shared_with_trained_parameters_is_refused_by_name(ranks: Ranks) -> None:
    of_buffer = "one storage, and would not any more: layers.0.weight, the buffer alias, which is not trained"
    of_parameter = "one storage, and would not any more: layers.0.weight, the parameter alias, which is not trained"
    shared = "parameters lie in memory that other processes share"
    names = "would not any more: layers.0.weight, layers.0.bias, layers.1.weight, layers.1.bias. Give each"
    expected = [
        of_buffer,
        of_parameter,
        shared,
        of_buffer,
        of_parameter,
        shared,
        "share_memory() and the gradient of layers.0.weight",
        "layers.0.weight has been moved into memory",
    ]
    for rank, said in enumerate(ranks(2).run(refused_for_their_memory)):
        for place, (text, part) in enumerate(zip(said, expected, strict=True)):
            assert f"ReplicationError: rank {1 if 3 <= place < 6 else rank}: " in text and part in text
            assert part != shared or names in text


@torch.compiler.set_stance("force_eager")
def sent_to_another_process() -> str:
    """What the step after says, if a parameter itself goes to a queue of torch.multiprocessing."""
    model, optimizer = make()
    for step in range(3):
        plain(model, optimizer, step)
        ForkingPickler.dumps([parameter.detach().clone() for parameter in model.parameters()])
    ForkingPickler.dumps(model.layers[0].weight)
    return said_by(lambda: plain(model, optimizer, 3))


def test_copies_of_parameters_may_go_to_another_process_and_parameters_may_not(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(sent_to_another_process)):
        assert f"ReplicationError: rank {rank}: layers.0.weight has been moved into memory" in said
        assert "Send p.detach().clone()" in said


@torch.compiler.set_stance("force_eager")
def refused_after_a_backward() -> list[str]:
    model, optimizer = make()
    first = next(model.parameters())
    with model.no_sync():
        loss_of(model(batch(0))).backward()
    said = [said_by(optimizer.step)]
    model.zero_grad()
    for step in range(2):
        loss_of(model(batch(step))).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    said += [
        said_by(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        said_by(lambda: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)),
        said_by(lambda: first.grad.abs()),
        said_by(lambda: print(first.grad * 2)),
        said_by(lambda: first.square().sum().backward()),
    ]
    assert "reduced to shards" in repr(first.grad)
    first.grad = torch.ones_like(first)
    said.append(said_by(optimizer.step))
    first.grad = None
    before = first.detach().clone()
    optimizer.step()
    assert torch.equal(first.detach(), before)  # None is no gradient
    optimizer.zero_grad()
    kept = loss_of(model(batch(2)))
    kept.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    said.append(said_by(kept.backward))
    model, optimizer = make()
    for step in range(2):
        loss = loss_of(model(batch(step)))
        if step == 0:
            loss.backward()
            optimizer.step()
    return [*said, said_by(loss.backward)]


def test_gradients_that_are_read_written_or_forgotten_are_errors(ranks: Ranks) -> None:
    expected = [
        "optimizer.step() and a gradient of this rank alone, of backwards inside of model.no_sync()",
        "model.clip_grad_norm_(max_norm)",
        "would be that of this rank's part alone, and another one on each rank; clip with model.clip_grad_norm_",
        "which is reduced to shards: no rank has all of it",
        "read with model.full_gradients()",
        "is reduced to shards, and a second backward adds to it without a forward of the module between",
        ".grad of layers.0.weight has been set after a backward",
        "has been modified by an inplace operation",
        "has not been zeroed",
    ]
    assert_all_say(ranks, refused_after_a_backward, expected)


@torch.compiler.set_stance("force_eager")
def refused_after_a_forward() -> list[str]:
    """A forward that no backward has followed yet, between backward and step."""
    said = []
    for is_local in (False, True):
        model, optimizer = make()
        loss_of(model(batch(0))).backward()
        with model.no_sync() if is_local else nullcontext():
            loss = loss_of(model(batch(1)))
        first = next(model.parameters())
        said += [
            said_by(partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)),
            said_by(first.grad.sum),
        ]
        first.grad = torch.ones_like(first)
        said.append(said_by(optimizer.step))
        first.grad = None
        optimizer.step()
        optimizer.zero_grad()
        said.append(said_by(loss.backward))
    model, optimizer = make()
    loss_of(model(batch(0))).backward()
    said += [said_by(partial(model.clip_grad_norm_, 1.0, order)) for order in (0, -math.inf, math.nan)]
    with model.no_sync():
        loss_of(model(batch(1))).backward()
    return [
        *said,
        said_by(lambda: model.clip_grad_norm_(1.0)),
        said_by(model.full_gradients),
        said_by(optimizer.step),
    ]


def test_a_forward_between_backward_and_step_hides_no_error(ranks: Ranks) -> None:
    expected = [
        *2
        * [
            "Clip with model.clip_grad_norm_(max_norm)",
            "read with model.full_gradients()",
            ".grad of layers.0.weight has been set after a backward",
            "has been modified by an inplace operation",
        ],
        *(f"ValueError: norm_type={order}: with a sharded optimizer the order" for order in (0.0, -math.inf, math.nan)),
        "model.clip_grad_norm_() and a gradient of this rank alone",
        "model.full_gradients() and a gradient of this rank alone",
        "optimizer.step() and a gradient of this rank alone",
    ]
    assert_all_say(ranks, refused_after_a_forward, expected)


@torch.compiler.set_stance("force_eager")
def different_calls() -> str:
    model, _ = make()
    loss_of(model(batch(0))).backward()
    return said_by(model.full_gradients if dist.get_rank() else lambda: model.clip_grad_norm_(1.0))


def test_ranks_that_call_different_things_are_told(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(different_calls)):
        what = ("model.clip_grad_norm_()", "model.full_gradients()")[rank]
        assert f"RanksDifferError: rank {rank}: {what} has met something else on another rank" in said


@torch.compiler.set_stance("force_eager")
def written_between() -> tuple[bool, bool, str]:
    """Edits of parameters between two steps: in place, by ``.data``, and to another dtype."""
    results = []
    for write in (lambda p: p.data.mul_(2.0), lambda p: setattr(p, "data", p.data * 2)):
        ends = []
        for sharded in (True, False):
            model, optimizer = make("sgd", sharded=sharded)
            for step in range(4):
                loss_of(model(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    for parameter in model.parameters():
                        write(parameter)
            ends.append([p.detach().clone() for p in model.parameters()])
        results.append(all(map(torch.equal, *ends)))
    model, optimizer = make("sgd")
    loss_of(model(batch(0))).backward()
    first = next(model.parameters())
    first.data = first.data.double()
    return results[0], results[1], said_by(optimizer.step)


def test_what_users_write_into_parameters_is_stepped_from(ranks: Ranks) -> None:
    for in_place, by_data, converted in ranks(2).run(written_between):
        assert in_place and by_data
        assert "ParametersChangedError" in converted and "layers.0.weight" in converted


@torch.compiler.set_stance("force_eager")
def steps_of_all_kinds() -> list[bool]:
    """Without a backward before, twice in a row, and with a part frozen: as without shards."""
    ends = []
    for sharded in (True, False):
        model, optimizer = make("adamw", sharded=sharded, find_unused_parameters=True)
        optimizer.step()
        for step in range(5):
            loss_of(model(batch(step))).backward()
            optimizer.step()
            if step == 2:
                optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            if step == 3:
                model.layers[1].requires_grad_(False)
        ends.append([p.detach().clone() for p in model.parameters()])
    return list(map(torch.equal, *ends))


def test_steps_without_gradients_and_twice_are_what_they_are_without_shards(ranks: Ranks) -> None:
    for equal in ranks(2).run(steps_of_all_kinds):
        assert all(equal)


@torch.compiler.set_stance("force_eager")
def custom_optimizer() -> bool:
    ends = []
    for sharded in (True, False):
        torch.manual_seed(1)
        model: Any = ddp_compile(Mlp(WIDTH, 3), bucket_cap_mb=CAP_MB, backend="eager")
        optimizer = Lion(model.parameters())
        if sharded:
            shard_optimizer(optimizer, model, elementwise=True)
        for step in range(4):
            loss_of(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
    return all(map(torch.equal, *ends))


def test_another_elementwise_optimizer_may_be_sharded(ranks: Ranks) -> None:
    assert ranks(2).run(custom_optimizer) == [True, True]


@torch.compiler.set_stance("force_eager")
def a_rank_that_does_not_step() -> str:
    model, optimizer = make()
    for step in range(2):
        loss_of(model(batch(step))).backward()
        if step and dist.get_rank() == 1:
            time.sleep(0.5)  # or the other one's step would find the connection closed
            return ""
        optimizer.step()
        optimizer.zero_grad()
    return said_by(lambda: model(batch(3)), ReductionError)


def test_a_rank_that_does_not_step_is_an_error_of_the_others(ranks: Ranks) -> None:
    said, nothing = ranks(2).run_expecting_failures(a_rank_that_does_not_step, timeout_s=2.0)
    assert nothing == "" and "gather of parameters after step 2 failed" in said
