"""What holds for every algorithm that averages parameters: nodes, checkpoints, all ways to train, bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of
from rank_pool import RankPool
from test_hierarchical import tell_nodes
from test_parameter_averages import batch, flat_of, make_adamw, train_step
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import (
    AlgorithmConfig,
    Decentralized,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.errors import ReductionError, ReplicationError

Ranks = Callable[[int], RankPool]
PAIRS = Decentralized(peer_selection="shift_one", communication_interval=2)
RING = LowPrecisionDecentralized(communication_interval=2)
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "all": Decentralized(communication_interval=2),
    "shift_one": PAIRS,
    "low precision": RING,
    "local SGD": LocalSGD(period=2, warmup_steps=3),
}


def make_model(algorithm: AlgorithmConfig, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = ddp_compile(Mlp(17, 4), algorithm=algorithm, bucket_cap_mb=0.001, **settings)
    return model, make_adamw(model.parameters())


# Nodes.


@torch.compiler.set_stance("force_eager")
def averaged_over_nodes(sizes: Sequence[int], config: Decentralized) -> tuple[float, float]:
    """How far the first two averages are from those computed of all ranks' parameters."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, list(sizes))
        model, _ = make_model(config, backend="eager")
    first = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = [list(range(start, start + size)) for start, size in zip(first, sizes, strict=True)]
    off = []
    for step in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += dist.get_rank() ** 2 + step
        before = of_all_ranks(flat_of(model))
        loss_of(model(batch(0, step, 0))).backward()
        expected = before.mean(0)  # of two nodes, a pair is all of them
        assert len(nodes) <= 2
        off.append((flat_of(model) - expected).abs().max().item())
    return off[0], off[1]


def of_all_ranks(tensor: Tensor) -> Tensor:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return torch.stack(tensors)


@pytest.mark.parametrize(
    ("sizes", "peers"),
    only(
        [((2, 2), "shift_one"), ((1, 3), "all")],
        [(sizes, peers) for sizes in ((2, 2), (1, 3), (4,)) for peers in ("all", "shift_one")],
    ),
)
def test_nodes_of_any_size_count_by_their_ranks(sizes: tuple[int, ...], peers: Any, ranks: Ranks) -> None:
    config = Decentralized(peer_selection=peers, hierarchical=True)
    for off in ranks(4).run(averaged_over_nodes, sizes, config):
        assert max(off) < 1e-5


@torch.compiler.set_stance("force_eager")
def ring_over_nodes(sizes: Sequence[int]) -> tuple[bool, bool, float]:
    """Whether each node is alike, whether the nodes are, and how far these are apart."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, list(sizes))
        model, optimizer = make_model(LowPrecisionDecentralized(hierarchical=True), backend="eager")
    for step in range(3):
        train_step(model, optimizer, step)
    everyone = of_all_ranks(flat_of(model))
    alike = all(torch.equal(everyone[i], everyone[i + 1]) for i in (0, 2))
    return alike, torch.equal(everyone[0], everyone[2]), (everyone[0] - everyone[2]).abs().max().item()


def test_a_ring_of_nodes(ranks: Ranks) -> None:
    for alike_inside, alike_between, apart in ranks(4).run(ring_over_nodes, (2, 2)):
        assert alike_inside and not alike_between
        assert apart < 0.1


# Checkpoints.


@torch.compiler.set_stance("force_eager")
def resumes(name: str) -> bool:
    """Whether 8 steps are 5 steps, a checkpoint in mid-cycle, and 3 steps, in every bit."""
    config = ALGORITHMS[name]
    whole, optimizer = make_model(config, backend="eager")
    for step in range(8):
        train_step(whole, optimizer, step)
        if step == 4:
            states = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), whole.comm_algorithm.state_dict()))
    again, optimizer = make_model(config, backend="eager")
    for part, state in zip((again, optimizer, again.comm_algorithm), states, strict=True):
        part.load_state_dict(state)
    for step in range(5, 8):
        train_step(again, optimizer, step)
    return torch.equal(flat_of(whole), flat_of(again))


@pytest.mark.parametrize("name", only(["shift_one", "low precision"], ALGORITHMS))
def test_a_checkpoint_in_mid_cycle_is_gone_on_from_bit_for_bit(name: str, ranks: Ranks) -> None:
    assert ranks(2).run(resumes, name) == [True, True]


# A forward between a backward and its step.


@torch.compiler.set_stance("force_eager")
def forwards_before_the_step(config: AlgorithmConfig) -> tuple[bool, list[str]]:
    """Whether forwards that send nothing change a step, and what is said of those that would have sent too early."""
    ends = []
    for looks_on in (False, True):
        model, optimizer = make_model(config, backend="eager")
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
    return torch.equal(*ends), said


@pytest.mark.parametrize("config", [LocalSGD(period=1), LowPrecisionDecentralized()])
def test_a_step_whose_parameters_were_sent_before_it_is_refused(config: AlgorithmConfig, ranks: Ranks) -> None:
    for rank, (is_equal, said) in enumerate(ranks(2).run(forwards_before_the_step, config)):
        assert is_equal
        assert len(said) == 2
        assert all(text.startswith(f"rank {rank}: an optimizer is about to step after the l") for text in said)


# Ways to train.


def train_in_all_ways(name: str, split: str) -> float:
    """Whether all goes well, and how far it is from the same on the eager model."""
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
        everyone = of_all_ranks(flat_of(model))
        assert (everyone == everyone[0]).all()
    return ((ends[0] - ends[1]).abs().max() / ends[0].abs().max()).item()


@pytest.mark.parametrize("name", only(["low precision"], ALGORITHMS))
def test_a_skipped_step_a_raising_forward_and_clipping_keep_the_ranks_together(
    name: str, split: str, ranks: Ranks
) -> None:
    for off in ranks(2).run(train_in_all_ways, name, split):
        assert off < (0.02 if name == "low precision" else 1e-5)


def compiled_and_fused_optimizers() -> list[float]:
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
            everyone = of_all_ranks(flat_of(model))
            assert (everyone == everyone[0]).all()  # behind the step, not at the next forward
            expected = flat_of(model) if expected is None else expected
            off.append((flat_of(model) - expected).abs().max().item())
    return off


def test_steps_of_compiled_fused_and_foreach_optimizers_are_heard(ranks: Ranks) -> None:
    for off in ranks(2).run(compiled_and_fused_optimizers):
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


@torch.compiler.set_stance("force_eager")
def steps_of_all_kinds() -> list[bool]:
    """Whether the ranks are alike behind each step: of a closure, of many optimizers, after one that was skipped."""
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

            if step == 4 and dist.get_rank() == 1:  # in the next two iterations no rank asks where the others stand
                closure()  # and no step
            else:
                optimizer.step(closure)
            optimizer.zero_grad()
            if step != 4:  # there the other rank waits in its step until this one comes
                everyone = of_all_ranks(flat_of(model))
                alike.append(bool((everyone == everyone[0]).all()))
        assert strides == [parameter.stride() for parameter in model.parameters()]
        assert storages == [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    return alike


def test_parameters_are_averaged_behind_steps_of_all_kinds_and_in_place(ranks: Ranks) -> None:
    for alike in ranks(2).run(steps_of_all_kinds):
        assert all(alike) and len(alike) == 10


@torch.compiler.set_stance("force_eager")
def closures_called_again(config: AlgorithmConfig) -> str:
    model, _ = make_model(config, backend="eager")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch(0, 0, 0)))
        loss.backward()
        return loss

    with pytest.raises(ReplicationError) as refused:
        optimizer.step(closure)
    return str(refused.value)


@pytest.mark.parametrize("config", [Decentralized(), LowPrecisionDecentralized()], ids=["all", "low precision"])
def test_a_step_of_several_iterations_is_refused(config: AlgorithmConfig, ranks: Ranks) -> None:
    for said in ranks(2).run(closures_called_again, config):
        assert said.startswith("a step of LBFGS calls its closure again, which with the")


# Bytes on the wire.


@torch.compiler.set_stance("force_eager")
def bytes_of_an_exchange(config: AlgorithmConfig) -> tuple[int, int]:
    """Sent by this rank to others, and bytes of the parameters."""
    model, optimizer = make_model(config, backend="eager")
    sent = []
    batch_isend_irecv = dist.batch_isend_irecv

    def count(operations: Any) -> Any:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch_isend_irecv(operations)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "batch_isend_irecv", count)
        train_step(model, optimizer, 0)
    return sum(sent), 4 * flat_of(model).numel()


def test_bytes_sent_are_those_of_the_formula(ranks: Ranks) -> None:
    for sent, num_bytes in ranks(4).run(bytes_of_an_exchange, PAIRS):
        assert sent == num_bytes
    for sent, num_bytes in ranks(4).run(bytes_of_an_exchange, RING):
        numel = num_bytes // 4
        assert sent == 2 * (-(-(8 + numel) // 16) * 16)  # one chunk: minimum, maximum, codes, up to 16 bytes
    for sent, _ in ranks(2).run(bytes_of_an_exchange, RING):  # both neighbours are one rank
        assert sent == -(-(8 + numel) // 16) * 16
