"""Algorithms that average parameters: each step beside one process, nodes, ways to train, errors, and changes."""

import copy
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averages import Simulation, batch, closure_of, error_of, make_adamw, make_model, on_nodes, train_step
from beside import flat_of, gathered, is_same_everywhere, of_all_ranks, seeded
from compression import make_qadam
from in_ci import only
from models import Mlp, loss_of
from rank_pool import on_ranks
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
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress
from ddp_compile.runtime.algorithms import low_precision_decentralized as ring
from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters

STEPS = 7


def peers(size: int, num_exchanges: int) -> list[int]:
    """Of each rank, by the pairs of lower and upper half."""
    half = size // 2
    peer_of = [0] * size
    for lower in range(half):
        upper = half + (lower + num_exchanges) % half
        peer_of[lower], peer_of[upper] = upper, lower
    return peer_of


def decentralized(simulation: Simulation, config: Decentralized) -> Iterator[None]:
    num_exchanges = 0
    for step in range(STEPS):
        flats = simulation.flats()
        simulation.compute_gradients(step)
        if step % config.communication_interval == 0:
            peer_of = peers(simulation.size, num_exchanges) if config.peer_selection == "shift_one" else []
            for rank in range(simulation.size):
                others = [flats[rank], flats[peer_of[rank]]] if peer_of else flats
                simulation.set(rank, torch.stack(others).sum(0) / len(others))
            num_exchanges += 1
        simulation.step()
        yield


def low_precision(simulation: Simulation, config: LowPrecisionDecentralized) -> Iterator[None]:
    size = simulation.size
    own, left, right = simulation.flats(), simulation.flats(), simulation.flats()
    for step in range(STEPS):
        simulation.compute_gradients(step)
        simulation.step()
        if step % config.communication_interval == 0 and size > 1:  # one rank alone sends nothing and loses nothing
            q = []
            for rank, flat in enumerate(simulation.flats()):
                neighbors = [left[rank], right[rank]] if size > 2 else [left[rank]]
                q.append(coded(flat, own[rank], neighbors))
            for rank in range(size):
                left[rank] = left[rank] + q[(rank - 1) % size]
                right[rank] = right[rank] + q[(rank + 1) % size]
                own[rank] = own[rank] + q[rank]
                simulation.set(rank, own[rank])
        yield


def coded(x: Tensor, own: Tensor, neighbors: list[Tensor]) -> Tensor:
    """Of blocks alone, since the last bits of a sum depend on where a vector ends, and a code on these."""
    values = torch.empty_like(x)
    for of_x, of_own, result, *others in zip(
        *(f.split(ring.BLOCK_NUMEL) for f in (x, own, values, *neighbors)), strict=True
    ):
        z = (of_own * (-5 / 3)).add(of_x)
        for each in others:
            z = z.add(each, alpha=2 / 3 / len(neighbors))
        rows = minmax_u8_compress(z, -(-z.numel() // ring.CHUNK_NUMEL))
        minmax_u8_decompress(rows, result)
    return values


def local_sgd(simulation: Simulation, config: LocalSGD) -> Iterator[None]:
    for step in range(STEPS):
        simulation.compute_gradients(step)
        if step < config.warmup_steps:
            simulation.average_gradients()
        simulation.step()
        if step >= config.warmup_steps and (step - config.warmup_steps) % config.period == 0:
            mean = torch.stack(simulation.flats()).sum(0) / simulation.size
            for rank in range(simulation.size):
                simulation.set(rank, mean)
        yield


SIMULATIONS: dict[Any, Callable[..., Iterator[None]]] = {
    Decentralized: decentralized,
    LowPrecisionDecentralized: low_precision,
    LocalSGD: local_sgd,
}
PAIRS = Decentralized(peer_selection="shift_one", communication_interval=2)
RING = LowPrecisionDecentralized(communication_interval=2)
CASES: dict[str, AlgorithmConfig] = {
    "all": Decentralized(),
    "all in intervals": Decentralized(communication_interval=3),
    "shift_one": Decentralized(peer_selection="shift_one"),
    "shift_one in intervals": PAIRS,
    "low precision": LowPrecisionDecentralized(),
    "low precision in intervals": LowPrecisionDecentralized(communication_interval=3),
    "local SGD": LocalSGD(period=2, warmup_steps=3),
}


def check_invariants(algorithm: Any) -> None:
    """A rank's copies of its neighbors in a ring equal the neighbors' parameters in every bit."""
    if not hasattr(algorithm, "_left"):
        return
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone = gathered(algorithm.state_dict())
    for mine, theirs in (("left", (rank - 1) % size), ("right", (rank + 1) % size)):
        for kept, own in zip(everyone[rank][mine], everyone[theirs]["own"], strict=True):
            assert torch.equal(kept, own)


EVERYWHERE = [(name, size) for name in CASES for size in ([2, 4] if "shift_one" in name else [1, 2, 3, 4, 5])]
IN_CI = [("shift_one in intervals", 4), ("low precision in intervals", 4), ("local SGD", 3)]


@pytest.mark.parametrize(("name", "world_size"), only(IN_CI, EVERYWHERE))
@on_ranks()
def test_steps_match_simulation(name: str, world_size: int) -> None:
    config, rank = CASES[name], dist.get_rank()
    with pytest.MonkeyPatch.context() as monkeypatch:  # several blocks, and several segments, of 1224 elements
        monkeypatch.setattr(ring, "CHUNK_NUMEL", 100)
        monkeypatch.setattr(ring, "BLOCK_NUMEL", 200)
        monkeypatch.setattr(ring, "SEGMENT_NUMEL", 400)
        model, optimizer = make_model(config)
        simulation = Simulation(copy.deepcopy(model), world_size)
        for step, _ in enumerate(SIMULATIONS[type(config)](simulation, config)):
            train_step(model, optimizer, step)
            with torch.no_grad():
                model(batch(rank, step, 0))  # an evaluation moves nothing
            expected = flat_of(simulation.models[rank])
            # AdamW divides by the gradient's own size, so its first steps enlarge a rounding error of small gradients.
            assert (flat_of(model) - expected).abs().max() < 5e-6 * expected.abs().max(), step
            check_invariants(model.comm_algorithm)


# The ring's messages are under way while the ranks train on, and no rank is left waiting for them.


@on_ranks(2, eagerly=True)
def test_ring_step_does_not_wait() -> None:
    """Rank 1 begins its step after rank 0 has told it that its own is done, and its next forward and backward too."""
    model, optimizer = make_model(LowPrecisionDecentralized(), broadcast_buffers=False)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    loss_of(model(batch(rank, 0, 0))).backward()
    if rank == 1:
        store.wait(["rank 0 is done"], timedelta(seconds=30))
    before = flat_of(model)
    optimizer.step()
    assert not torch.equal(before, flat_of(model))
    if rank == 0:
        store.set("rank 0 is done", "")
    for step in range(1, 4):
        train_step(model, optimizer, step)
    check_invariants(model.comm_algorithm)


@on_ranks(2, eagerly=True)
def test_loaded_parameters_are_not_rounded() -> None:
    model, _ = make_model(LowPrecisionDecentralized())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_step(model, optimizer, 0)
    torch.manual_seed(1)
    loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    for step in range(1, 3):
        train_step(model, optimizer, step)
    check_invariants(model.comm_algorithm)
    for name, value in model.state_dict().items():
        assert (value - loaded[name]).abs().max() < 1e-6  # eight bits of such a change would be 0.01


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
    with_gaps = torch.randn(4, 6)[:, ::2]
    assert FlatParameters([*tensors, with_gaps]).blocks(8) is None


ALGORITHMS: dict[str, AlgorithmConfig] = {
    "all": Decentralized(communication_interval=2),
    "shift_one": PAIRS,
    "low precision": RING,
    "local SGD": CASES["local SGD"],
    "DiLoCo": DiLoCo(sync_every=4, fragments=2, fragment_sync_delay=3, fragment_update_alpha=0.5),
}


@pytest.mark.parametrize(
    ("sizes", "peers"),
    only([((2, 2), "shift_one"), ((1, 3), "all")], itertools.product([(2, 2), (1, 3), (4,)], ["all", "shift_one"])),
)
@on_ranks(4, eagerly=True)
def test_nodes_count_by_their_ranks(sizes: tuple[int, ...], peers: Any) -> None:
    with on_nodes(*sizes):
        model, _ = make_model(Decentralized(peer_selection=peers, hierarchical=True))
    for step in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += dist.get_rank() ** 2 + step
        expected = of_all_ranks(flat_of(model)).mean(0)  # of two nodes, a pair is all of them
        loss_of(model(batch(0, step, 0))).backward()
        assert (flat_of(model) - expected).abs().max() < 1e-5


@on_ranks(4, eagerly=True)
def test_ring_of_nodes() -> None:
    with on_nodes(2, 2):
        model, optimizer = make_model(LowPrecisionDecentralized(hierarchical=True))
    for step in range(3):
        train_step(model, optimizer, step)
    everyone = of_all_ranks(flat_of(model))
    assert all(torch.equal(everyone[i], everyone[i + 1]) for i in (0, 2))
    assert 0 < (everyone[0] - everyone[2]).abs().max() < 0.1


def make_with_optimizer(name: str) -> tuple[Any, torch.optim.Optimizer]:
    return make_qadam(seeded(lambda: Mlp(17, 2))) if name == "QAdam" else make_model(ALGORITHMS[name])


@pytest.mark.parametrize("name", only(["shift_one", "low precision", "DiLoCo", "QAdam"], [*ALGORITHMS, "QAdam"]))
@on_ranks(2, eagerly=True)
def test_resumes_in_mid_cycle(name: str) -> None:
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


# Steps: between a backward and its step nothing may be sent, and each step counts once.


@pytest.mark.parametrize("config", [LocalSGD(period=1), LowPrecisionDecentralized()])
@on_ranks(2, eagerly=True)
def test_step_after_its_exchange_is_refused(config: AlgorithmConfig) -> None:
    """A forward, or a checkpoint, between a backward and its step has taken the step for skipped."""
    model, optimizer = make_model(config)
    for look in (lambda: model(batch(0, 0, 0)), model.comm_algorithm.state_dict):
        loss_of(model(batch(dist.get_rank(), 2, 0))).backward()
        look()
        before = flat_of(model)
        said = error_of(ReductionError, optimizer.step)
        assert said.startswith(f"rank {dist.get_rank()}: an optimizer is about to step after the l")
        assert torch.equal(flat_of(model), before)
    loss_of(model(batch(dist.get_rank(), 3, 0))).backward()
    optimizer.zero_grad()  # the step is skipped, and so is the next backward
    model(batch(0, 0, 0))
    optimizer.step()  # without gradients, which changes nothing
    loss_of(model(batch(dist.get_rank(), 4, 0))).backward()
    optimizer.step()


@pytest.mark.parametrize("name", only(["low precision"], ALGORITHMS))
@on_ranks(2)
def test_skipped_steps_keep_ranks_together(name: str, split: str) -> None:
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
                loss = loss * float("inf")  # the scaler of this rank alone skips, unless gradients are averaged
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
def test_compiled_and_fused_steps_are_noticed() -> None:
    ends = []
    for compiled, settings in ((False, {"foreach": True}), (True, {"foreach": True}), (False, {"fused": True})):
        model: Any = ddp_compile(seeded(lambda: Mlp(17, 4)), algorithm=LocalSGD(period=1), backend="eager")
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=0.01, **settings)
        step_function = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model(batch(dist.get_rank(), step, 0))).backward()
            step_function()
        assert is_same_everywhere(flat_of(model))  # after the step, not at the next forward
        ends.append(flat_of(model))
    assert (ends[0] - torch.stack(ends)).abs().max() < 1e-4


@on_ranks(2, eagerly=True)
def test_averaging_in_place_after_a_closure() -> None:
    torch.manual_seed(0)
    model: Any = ddp_compile(Mlp(17, 4), algorithm=LocalSGD(period=1), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = [(p.stride(), p.untyped_storage().data_ptr()) for p in model.parameters()]
    for step in range(6):
        closure = closure_of(model, optimizer, batch(dist.get_rank(), step, 0))
        if step == 4 and dist.get_rank() == 1:  # no agreement point is in the next two iterations
            closure()  # and no step: the other rank waits in its own until the next forward of this one
        else:
            optimizer.step(closure)
        optimizer.zero_grad()
        assert step == 4 or is_same_everywhere(flat_of(model))
    assert places == [(p.stride(), p.untyped_storage().data_ptr()) for p in model.parameters()]


@pytest.mark.parametrize("config", [Decentralized(), LowPrecisionDecentralized()], ids=["all", "low precision"])
@on_ranks(2, eagerly=True)
def test_step_of_several_iterations_is_refused(config: AlgorithmConfig) -> None:
    model, _ = make_model(config)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    said = error_of(ReplicationError, lambda: optimizer.step(closure_of(model, optimizer, batch(0, 0, 0))))
    assert said.startswith("a step of LBFGS calls its closure again. With the")


@on_ranks(2)
def test_errors() -> None:
    rank = dist.get_rank()
    for by_fused_optimizer in (False, True):
        model, _ = make_model(Decentralized())
        loss = loss_of(model(batch(0, 0, 0)))
        first = next(model.parameters())
        if by_fused_optimizer:
            first.grad = torch.ones_like(first)
            torch.optim.SGD([first], fused=True).step()
        else:
            with torch.no_grad():
                first.add_(1.0)
        written = error_of(ReductionError, loss.backward)
        assert written.startswith(f"rank {rank}: parameters were written between a forward and the end of its backward")
    complex_model = nn.Linear(2, 2).to(torch.complex64)
    dtype = error_of(ReplicationError, lambda: ddp_compile(complex_model, algorithm=Decentralized()))
    assert f"rank {rank}: the decentralized average (all, every 1) takes gradients of float32" in dtype
    model, _ = make_model(RING)
    states = gathered(model.comm_algorithm.state_dict())
    for state, says in (
        ({"algorithm": "another"}, "was given the state of another, but needs that of"),
        (states[1 - rank], f"was given the state of rank {1 - rank} of 2, which has other neighbors"),
    ):
        assert says in error_of(ValueError, lambda state=state: model.comm_algorithm.load_state_dict(state))


@on_ranks(3)
def test_nodes_that_do_not_fit_are_refused() -> None:
    rank = dist.get_rank()
    for config, says in (
        (Decentralized(peer_selection="shift_one"), "pairs all ranks, and there are 3;"),
        (Decentralized(hierarchical=True), f"rank {rank}: the decentralized average (all, every 1, hierarchical) has"),
        (LowPrecisionDecentralized(hierarchical=True), "LOCAL_RANK is not a number on ranks 0-2"),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.delenv("LOCAL_RANK", raising=False)
            assert says in error_of(ValueError, lambda config=config: ddp_compile(nn.Linear(2, 2), algorithm=config))
    with on_nodes(1, 2), pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:
            monkeypatch.setenv("LOCAL_RANK", "first")
        config = GradientAllReduce(hierarchical=True)
        said = error_of(ValueError, lambda: ddp_compile(nn.Linear(2, 2), algorithm=config))
        assert "LOCAL_RANK is not a number on rank 1" in said
    with on_nodes(1, 2):
        model, optimizer = make_model(Decentralized())
        sizes = error_of(ValueError, lambda: model.set_comm_algorithm(LowPrecisionDecentralized(hierarchical=True)))
        assert "needs nodes of one size" in sizes and "1, 2 ranks" in sizes
        train_step(model, optimizer, 0)  # by the one before


@on_ranks(2)
def test_every_algorithm_follows_every_other() -> None:
    chain = [GradientAllReduce(), Decentralized(), RING, ByteGrad(), LocalSGD(period=3), PAIRS]
    chain += [ALGORITHMS["DiLoCo"], AsyncModelAverage()]
    model, optimizer = make_model(chain[0], backend="aot_eager")
    for number, config in enumerate([*chain[1:], GradientAllReduce()]):
        for step in range(3):
            train_step(model, optimizer, 10 * number + step)
        if isinstance(config, ByteGrad | GradientAllReduce):
            with pytest.raises(ReplicationError, match=r"optimizers have reached different states.*unwrap\(\)"):
                model.set_comm_algorithm(config)
            train_step(model, optimizer, 10 * number + 3)  # by the one before
            model = ddp_compile(model.unwrap(), algorithm=config, bucket_cap_mb=0.001, backend="aot_eager")
            optimizer = make_adamw(model.parameters())
        else:
            model.set_comm_algorithm(config)
        assert is_same_everywhere(flat_of(model)), config
    for step in range(4):
        train_step(model, optimizer, step)
    assert is_same_everywhere(flat_of(model))
    with pytest.raises(TypeError, match=r"takes no optimizers; .*unwrap\(\).* its optimizers anew"):
        model.set_comm_algorithm(LocalSGD(period=2), [optimizer])  # also by position


@on_ranks(2)
def test_last_forward_of_one_rank() -> None:
    model, optimizer = make_model(Decentralized(peer_selection="shift_one"))
    train_step(model, optimizer, 0)
    if dist.get_rank() == 0:
        model(batch(0, 1, 0))  # which has sent, and no other rank has
    model.unwrap()
    assert is_same_everywhere(flat_of(model))


@on_ranks(2)
def test_out_of_step_ranks_raise() -> None:
    """One rank leaves out a backward."""
    model, optimizer = make_model(LowPrecisionDecentralized())
    train_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        loss_of(model(batch(0, 0, 0)))
    with pytest.raises(RanksDifferError, match="training forwards without a backward: ") as raised:
        for step in range(1, 5):
            train_step(model, optimizer, step)
    assert str(raised.value).startswith(f"rank {dist.get_rank()}: at the end of iteration")
