"""Properties of every algorithm that averages parameters: nodes, checkpoints, ways to train, bytes, bad input."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, is_same_everywhere, of_all_ranks, seeded
from in_ci import only
from models import Mlp, loss_of
from rank_pool import on_ranks
from test_gradient_compression import tell_nodes
from test_parameter_averages import batch, make_model, train_step
from test_qadam import make as make_qadam
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import (
    AlgorithmConfig,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.errors import RanksDifferError, ReductionError, ReplicationError

PAIRS = Decentralized(peer_selection="shift_one", communication_interval=2)
RING = LowPrecisionDecentralized(communication_interval=2)
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "all": Decentralized(communication_interval=2),
    "shift_one": PAIRS,
    "low precision": RING,
    "local SGD": LocalSGD(period=2, warmup_steps=3),
    "DiLoCo": DiLoCo(
        sync_every=4, fragments=2, fragment_sync_delay=3, fragment_update_alpha=0.5, wire_dtype=torch.uint8
    ),
}


# Nodes.


def make_model_on_nodes(sizes: Sequence[int], algorithm: AlgorithmConfig) -> tuple[Any, torch.optim.Optimizer]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, sizes)
        return make_model(algorithm)


@pytest.mark.parametrize(
    ("sizes", "peers"),
    only([((2, 2), "shift_one"), ((1, 3), "all")], itertools.product([(2, 2), (1, 3), (4,)], ["all", "shift_one"])),
)
@on_ranks(4)
@torch.compiler.set_stance("force_eager")
def test_nodes_of_any_size_count_by_their_ranks(sizes: tuple[int, ...], peers: Any) -> None:
    model, _ = make_model_on_nodes(sizes, Decentralized(peer_selection=peers, hierarchical=True))
    for step in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += dist.get_rank() ** 2 + step
        expected = of_all_ranks(flat_of(model)).mean(0)  # of two nodes, a pair is all of them
        loss_of(model(batch(0, step, 0))).backward()
        assert (flat_of(model) - expected).abs().max() < 1e-5


@on_ranks(4)
@torch.compiler.set_stance("force_eager")
def test_a_ring_of_nodes() -> None:
    model, optimizer = make_model_on_nodes((2, 2), LowPrecisionDecentralized(hierarchical=True))
    for step in range(3):
        train_step(model, optimizer, step)
    everyone = of_all_ranks(flat_of(model))
    assert all(torch.equal(everyone[i], everyone[i + 1]) for i in (0, 2))
    assert 0 < (everyone[0] - everyone[2]).abs().max() < 0.1


# Checkpoints.


def make_with_optimizer(name: str) -> tuple[Any, torch.optim.Optimizer]:
    return make_qadam(seeded(lambda: Mlp(17, 2))) if name == "QAdam" else make_model(ALGORITHMS[name])


@pytest.mark.parametrize("name", only(["shift_one", "low precision", "DiLoCo", "QAdam"], [*ALGORITHMS, "QAdam"]))
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_checkpoint_in_mid_cycle_is_gone_on_from_bit_for_bit(name: str) -> None:
    whole, optimizer = make_with_optimizer(name)
    states = {}
    for step in range(8):
        parts = [whole, optimizer, whole.comm_algorithm]
        states[step] = copy.deepcopy([part.state_dict() for part in parts])
        train_step(whole, optimizer, step)
    for begin in (1, 3, 5):  # of QAdam, in warm-up, at its end, and after it
        again, optimizer = make_with_optimizer(name)
        for part, state in zip((again, optimizer, again.comm_algorithm), states[begin], strict=True):
            part.load_state_dict(state)
        for step in range(begin, 8):
            train_step(again, optimizer, step)
        assert torch.equal(flat_of(whole), flat_of(again)), begin


# A forward between a backward and its step.


@pytest.mark.parametrize("config", [LocalSGD(period=1), LowPrecisionDecentralized()])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_step_whose_parameters_were_sent_before_it_is_refused(config: AlgorithmConfig) -> None:
    ends = []
    for looks_on in (False, True):
        model, optimizer = make_model(config)
        for step in range(2):
            loss_of(model(batch(dist.get_rank(), step, 0))).backward()
            if looks_on:
                with torch.no_grad():
                    model(batch(0, 0, 0))
                with model.no_sync():
                    model(batch(0, 0, 0))
            optimizer.step()
            optimizer.zero_grad()
        ends.append(flat_of(model))
    said = []
    for look in (lambda: model(batch(0, 0, 0)), model.comm_algorithm.state_dict):
        loss_of(model(batch(dist.get_rank(), 2, 0))).backward()
        look()
        before = flat_of(model)
        with pytest.raises(ReductionError) as refused:
            optimizer.step()
        assert torch.equal(flat_of(model), before)
        said.append(str(refused.value))
    loss_of(model(batch(dist.get_rank(), 3, 0))).backward()
    optimizer.zero_grad()  # the step is skipped, and so is the next backward
    model(batch(0, 0, 0))
    optimizer.step()  # without gradients, which changes nothing
    loss_of(model(batch(dist.get_rank(), 4, 0))).backward()
    optimizer.step()
    rank = dist.get_rank()
    is_equal = torch.equal(*ends)
    assert is_equal
    assert len(said) == 2
    assert all(text.startswith(f"rank {rank}: an optimizer is about to step after the l") for text in said)


@on_ranks(2)
def test_a_second_step_after_an_average_is_an_error() -> None:
    """Of an optimizer whose parameters have a gradient; one without any changes nothing."""
    model, _ = make_model(LocalSGD(period=2))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.layers[:2], model.layers[2:]))
    for step in range(4):
        loss_of(model(batch(dist.get_rank(), step, 0))).backward()
        first.step()
        second.step()
        if step % 2 == 1:
            second.step()  # between two averages
            continue
        assert is_same_everywhere(flat_of(model))
        with pytest.raises(ReductionError, match=f"rank {dist.get_rank()}: an optimizer has stepped again after the l"):
            second.step()
        first.zero_grad()
        first.step()


# Ways to train.


@pytest.mark.parametrize("name", only(["low precision"], ALGORITHMS))
@on_ranks(2)
def test_a_skipped_step_a_raising_forward_and_clipping_keep_the_ranks_together(name: str, split: str) -> None:
    ends = []
    for backend in ("eager", "aot_eager"):
        model, optimizer = make_model(ALGORITHMS[name], backend=backend, split=split, find_unused_parameters=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(6):
            if step == 3 and dist.get_rank() == 1:
                with pytest.raises(RuntimeError):
                    model(torch.randn(3, 3))  # done over
            loss = loss_of(model(batch(dist.get_rank(), step, 0)))
            if step == 4 and dist.get_rank() == 0:
                loss = loss * float(
                    "inf"
                )  # its scaler skips the step, on this rank alone unless gradients are averaged
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(flat_of(model))
        assert torch.isfinite(ends[-1]).all()
        model.unwrap()
        assert is_same_everywhere(flat_of(model))
    off = ((ends[0] - ends[1]).abs().max() / ends[0].abs().max()).item()
    assert off < (0.02 if name == "low precision" else 1e-5)


@on_ranks(2)
def test_steps_of_compiled_fused_and_foreach_optimizers_are_heard() -> None:
    off = []
    for settings in ({"fused": True}, {"foreach": True}):
        torch.manual_seed(0)
        module = Mlp(17, 4)
        expected = None
        for compiled in (False, True) if settings.get("foreach") else (False,):
            model: Any = ddp_compile(copy.deepcopy(module), algorithm=LocalSGD(period=1), backend="eager")
            groups = [{"params": [p]} for p in model.parameters()]
            optimizer = torch.optim.AdamW(groups, lr=0.01, **settings)
            step_function = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model(batch(dist.get_rank(), step, 0))).backward()
                step_function()
            assert is_same_everywhere(flat_of(model))  # after the step, not at the next forward
            expected = flat_of(model) if expected is None else expected
            off.append((flat_of(model) - expected).abs().max().item())
    assert max(off) < 1e-4


class Many:
    """Steps of several optimizers, one for each parameter."""

    def __init__(self, parameters: Any) -> None:
        self.optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, closure: Any) -> None:
        closure()
        for optimizer in self.optimizers:
            optimizer.step()


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_parameters_are_averaged_after_steps_of_all_kinds_and_in_place() -> None:
    alike = []
    for make in (lambda p: torch.optim.SGD(p, lr=0.1), Many):
        torch.manual_seed(0)
        model: Any = ddp_compile(Mlp(17, 4), algorithm=LocalSGD(period=1), backend="eager")
        optimizer: Any = make(model.parameters())
        strides = [parameter.stride() for parameter in model.parameters()]
        storages = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
        for step in range(6):

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(batch(dist.get_rank(), step, 0)))
                loss.backward()
                return loss

            if step == 4 and dist.get_rank() == 1:  # no agreement point is in the next two iterations
                closure()  # and no step
            else:
                optimizer.step(closure)
            optimizer.zero_grad()
            if step != 4:  # there the other rank waits in its step until this one comes
                alike.append(is_same_everywhere(flat_of(model)))
        assert strides == [parameter.stride() for parameter in model.parameters()]
        assert storages == [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert all(alike) and len(alike) == 10


@pytest.mark.parametrize("config", [Decentralized(), LowPrecisionDecentralized()], ids=["all", "low precision"])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_step_of_several_iterations_is_refused(config: AlgorithmConfig) -> None:
    model, _ = make_model(config)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch(0, 0, 0)))
        loss.backward()
        return loss

    with pytest.raises(ReplicationError) as refused:
        optimizer.step(closure)
    said = str(refused.value)
    assert said.startswith("a step of LBFGS calls its closure again. With the")


# Bytes on the wire.


def four_bytes(numel: int) -> int:
    return 4 * numel


def row(numel: int) -> int:
    return -(-(8 + numel) // 16) * 16  # one chunk: minimum, maximum, codes, up to 16 bytes


def two_rows(numel: int) -> int:
    return 2 * row(numel)


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        (PAIRS, 4, four_bytes),
        (RING, 4, two_rows),
        (RING, 2, row),  # both neighbors are one rank
    ],
    ids=["pairs", "ring", "ring of two"],
)
@on_ranks()
@torch.compiler.set_stance("force_eager")
def test_bytes_sent_are_those_of_the_formula(config: Any, world_size: int, expected: Any) -> None:
    model, optimizer = make_model(config)
    sent: list[int] = []
    batch_isend_irecv = dist.batch_isend_irecv

    def count(operations: Any) -> Any:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch_isend_irecv(operations)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "batch_isend_irecv", count)
        train_step(model, optimizer, 0)
    assert sum(sent) == expected(flat_of(model).numel())


# Refusals, failures, and changes of the algorithm.


@on_ranks(2)
def test_what_goes_wrong_is_named() -> None:
    said = []
    model, _ = make_model(Decentralized())
    loss = loss_of(model(batch(0, 0, 0)))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises((ReductionError, RuntimeError)) as refused:
        loss.backward()
    said.append(str(refused.value))
    model, _ = make_model(RING)
    with pytest.raises(ValueError) as refused:
        model.comm_algorithm.load_state_dict({"algorithm": "another"})
    said.append(str(refused.value))
    with pytest.raises(ReplicationError) as refused:
        ddp_compile(nn.Linear(2, 2).to(torch.complex64), algorithm=Decentralized())
    rank = dist.get_rank()
    written, state, dtype = [*said, str(refused.value)]
    assert written.startswith(f"rank {rank}: parameters were written between a forward and the end of its backward")
    assert "was given the state of another, but needs that of" in state
    assert f"rank {rank}: the decentralized average (all, every 1) takes gradients of float32" in dtype


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (Decentralized, {"communication_interval": 0}),
        (Decentralized, {"peer_selection": "ring"}),
        (LowPrecisionDecentralized, {"communication_interval": 1.5}),
        (LocalSGD, {"period": 0}),
        (LocalSGD, {"period": 2, "warmup_steps": -1}),
        (AsyncModelAverage, {"sync_interval_ms": 0}),
        (AsyncModelAverage, {"sync_interval_ms": float("inf")}),
        (AsyncModelAverage, {"warmup_steps": -1}),
    ],
)
def test_settings_out_of_range_are_refused(config: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{config.__name__}\({list(setting)[-1]}="):
        config(**setting)


@on_ranks(3)
def test_odd_numbers_of_ranks_and_unknown_nodes_are_refused() -> None:
    said = []
    for config in (
        Decentralized(peer_selection="shift_one"),
        Decentralized(hierarchical=True),
        LowPrecisionDecentralized(hierarchical=True),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.delenv("LOCAL_RANK", raising=False)
            with pytest.raises(ValueError) as refused:
                ddp_compile(nn.Linear(2, 2), algorithm=config)
        said.append(str(refused.value))
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, [1, 2])
        model, optimizer = make_model(Decentralized())
        with pytest.raises(ValueError) as refused:
            model.set_comm_algorithm(LowPrecisionDecentralized(hierarchical=True))
        train_step(model, optimizer, 0)  # by the one before
    rank = dist.get_rank()
    odd, unknown, ring, sizes = [*said, str(refused.value)]
    assert odd.startswith("Decentralized(peer_selection='shift_one') pairs all ranks, and there are 3;")
    assert unknown.startswith(f"rank {rank}: the decentralized average (all, every 1, hierarchical) has to know which")
    assert "LOCAL_RANK is not a number on ranks 0-2" in ring
    assert "needs nodes of one size" in sizes and "1, 2 ranks" in sizes


@on_ranks(2)
def test_the_state_of_another_rank_is_refused() -> None:
    model, _ = make_model(RING)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, model.comm_algorithm.state_dict())
    with pytest.raises(ValueError) as refused:
        model.comm_algorithm.load_state_dict(states[1 - dist.get_rank()])
    rank = dist.get_rank()
    said = str(refused.value)
    assert said.startswith(f"rank {rank} of 2: the low-precision decentralized average (every 2) was given the state")
    assert f"of rank {1 - rank} of 2, which has other neighbors" in said


@on_ranks(2)
def test_every_algorithm_may_follow_every_other() -> None:
    chain = [GradientAllReduce(), Decentralized(), RING, ByteGrad(), LocalSGD(period=3), PAIRS]
    chain += [ALGORITHMS["DiLoCo"], AsyncModelAverage()]
    model, optimizer = make_model(chain[0], backend="aot_eager")
    for number, config in enumerate([*chain[1:], GradientAllReduce()]):
        for step in range(3):
            train_step(model, optimizer, 10 * number + step)
        if isinstance(config, ByteGrad):
            with pytest.raises(ReplicationError, match="the ranks' optimizers have reached different states"):
                model.set_comm_algorithm(config)
        model.set_comm_algorithm(config, [optimizer])
        assert is_same_everywhere(flat_of(model)), config


@on_ranks(2)
def test_optimizers_whose_counts_differ_are_made_alike() -> None:
    """Adam's step counts become equal too. If optimizers cannot be made equal, nothing changes."""
    model, optimizer = make_model(LocalSGD(period=2))
    for step in range(4):
        train_step(model, optimizer, step)
    for state in optimizer.state.values():
        state["step"] += dist.get_rank()
    with pytest.raises(TypeError, match="pass a list of"):
        model.set_comm_algorithm(GradientAllReduce(), optimizers=optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    with pytest.raises(RanksDifferError, match="other states or settings on ranks 1"):
        model.set_comm_algorithm(GradientAllReduce(), optimizers=[optimizer])
    optimizer.param_groups[0]["lr"] = 0.01
    train_step(model, optimizer, 4)
    assert model.comm_algorithm.name.startswith("local SGD")
    model.set_comm_algorithm(GradientAllReduce(), optimizers=[optimizer])
    for step in range(5, 9):
        train_step(model, optimizer, step)
    assert is_same_everywhere(flat_of(model))


@on_ranks(2)
def test_a_last_forward_on_one_rank_does_not_hold_up_the_end() -> None:
    model, optimizer = make_model(Decentralized(peer_selection="shift_one"))
    train_step(model, optimizer, 0)
    if dist.get_rank() == 0:
        model(batch(0, 1, 0))  # which has sent, and no other rank has
    model.unwrap()
    assert is_same_everywhere(flat_of(model))


@on_ranks(2)
def test_ranks_that_get_out_of_step_are_told() -> None:
    """One rank leaves out a backward."""
    model, optimizer = make_model(LowPrecisionDecentralized())
    train_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        loss_of(model(batch(0, 0, 0)))
    with pytest.raises(RanksDifferError, match="training forwards without a backward: ") as raised:
        for step in range(1, 5):
            train_step(model, optimizer, step)
    assert str(raised.value).startswith(f"rank {dist.get_rank()}: at the end of iteration")
