"""Every pair of features: both work together, or every rank raises the error in the table of exclusions.

The table is that of `ddp_compile.features.compatibility`. Pairs that may be used together train two steps to the
parameters that one process gets from the whole batch.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from halves import Built
from in_ci import only
from models import TanhLayer, relative_difference
from rank_pool import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward

from ddp_compile import ReplicationError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import AlgorithmConfig, AsyncModelAverage, CommAlgorithm, LocalSGD, Traits
from ddp_compile.features.compatibility import EXCLUSIONS, Exclusion, Feature

WIDTH, ROWS, LR = 4, 3, 0.1
NO_MOMENTUM: Any = {"lr": LR}


class Net(nn.Module):
    """Two blocks that repeat, and a head that may be sharded; with a buffer if one is asked for."""

    def __init__(self, has_buffer: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TanhLayer(WIDTH) for _ in range(2))
        self.head, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        if has_buffer:
            self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


class OwnAlgorithm(CommAlgorithm):
    name = "all-reduce of a user"

    def __init__(self, group: dist.ProcessGroup, traits: Traits) -> None:
        self.group = group
        self.traits = traits

    def launch(self, bucket: Any, is_last: bool) -> Any:
        return self.group.allreduce([bucket.flat])


def own(**traits: Any) -> AlgorithmConfig:
    return Built(partial(OwnAlgorithm, traits=Traits(**traits)))


#: The algorithms of parameters average gradients while they warm up, which is all that is tried here.
ARGUMENTS: Mapping[Feature, Mapping[str, Any]] = {
    Feature.SPLIT: {"split": "backward"},
    Feature.REGIONS: {"regions": "auto"},
    Feature.MODE: {"backend": "inductor", "mode": "default"},
    Feature.OPTIONS: {"backend": "inductor", "options": {"max_autotune": False}},
    Feature.BUFFERS: {"broadcast_buffers": True},
    Feature.COPIED_GRADIENTS: {"gradient_as_bucket_view": False},
    Feature.LAZY_BUCKETS: {"lazy_bucket_allocation": True},
    Feature.FIND_UNUSED: {"find_unused_parameters": True},
    Feature.SKIP_UNUSED: {"skip_all_reduce_unused_params": True},
    Feature.STATIC_GRAPH: {"static_graph": True},
    Feature.ALGORITHM: {"algorithm": own()},
    Feature.NO_SHADOWS: {"algorithm": own(takes_shadows=False)},
    Feature.BEYOND_GROUP: {"algorithm": own(beyond_group=True)},
    Feature.AVERAGES: {"algorithm": LocalSGD(period=2, warmup_steps=100)},
    Feature.ASYNC: {"algorithm": AsyncModelAverage(sync_interval_ms=50, warmup_steps=100)},
}
#: Switched on by a call, in both orders.
CALLS: Mapping[Feature, Callable[[Any, Any], object]] = {
    Feature.COMM_HOOK: lambda model, optimizer: model.register_comm_hook(None, allreduce_hook),
    Feature.BUFFER_HOOK: lambda model, optimizer: model._register_buffer_comm_hook(None, lambda state, buffers: None),
    Feature.SHARDED_OPTIMIZER: lambda model, optimizer: shard_optimizer(optimizer, model),
    Feature.STEPS_IN_BACKWARD: lambda model, optimizer: _apply_optimizer_in_backward(
        torch.optim.SGD, model.blocks.parameters(), NO_MOMENTUM
    ),
    Feature.DELAYED_STEPS: lambda model, optimizer: _apply_optimizer_in_backward(
        torch.optim.SGD, [model.last.bias], NO_MOMENTUM
    ),
    Feature.MANUAL_FINALIZATION: lambda model, optimizer: setattr(model, "require_manual_backward_finalization", True),
}
#: Part of how `train` and `make` do it.
WAYS = (Feature.PROCESS_GROUP, Feature.DEVICE_MESH, Feature.DELAYED, Feature.NO_SYNC, Feature.NORMALIZE, Feature.JOIN)
#: Tried where those libraries are, tests/integrations.
ELSEWHERE = (Feature.ACCELERATE, Feature.LIGHTNING, Feature.KEEPS_STATE)
#: Features that one cannot have without others.
IMPLIED: Mapping[Feature, tuple[Feature, ...]] = {
    Feature.NO_SHADOWS: (Feature.ALGORITHM,),
    Feature.BEYOND_GROUP: (Feature.ALGORITHM,),
    Feature.AVERAGES: (Feature.ALGORITHM,),
    Feature.ASYNC: (Feature.AVERAGES, Feature.ALGORITHM),
    Feature.BUFFER_HOOK: (Feature.BUFFERS,),
    Feature.DELAYED_STEPS: (Feature.STEPS_IN_BACKWARD, Feature.DELAYED),
}


def exclusions_of(one: Feature, other: Feature) -> list[Exclusion]:
    """What the table has against the two, each with all that it implies."""
    ones, others = ({feature, *IMPLIED.get(feature, ())} for feature in (one, other))
    return [
        exclusion
        for exclusion in EXCLUSIONS
        for with_it, against in ((ones, others), (others, ones))
        if exclusion.feature in with_it and against & set(exclusion.others)
    ]


def is_one_argument(one: Feature, other: Feature) -> bool:
    return bool(ARGUMENTS.get(one, {}).keys() & ARGUMENTS.get(other, {}).keys() & {"algorithm"})


def pairs() -> list[tuple[Feature, Feature]]:
    """In both orders if both are calls; a feature with itself if the table says something about it."""
    features = [*ARGUMENTS, *WAYS, *CALLS]
    features.remove(Feature.DELAYED_STEPS)
    found = [pair for pair in itertools.combinations(features, 2) if not is_one_argument(*pair)]
    found += [(b, a) for a, b in itertools.combinations(CALLS, 2) if Feature.DELAYED_STEPS not in (a, b)]
    twice = [(e.feature, e.feature) for e in EXCLUSIONS if e.feature in e.others]
    return [*found, *twice, (Feature.DELAYED, Feature.DELAYED_STEPS)]


def make(features: tuple[Feature, ...], backend: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    net: Any = Net(has_buffer=not {Feature.BUFFERS, Feature.BUFFER_HOOK}.isdisjoint(features))
    settings: dict[str, Any] = {"backend": backend, "bucket_cap_mb": 0.0001}
    for feature in features:
        settings.update(ARGUMENTS.get(feature, {}))
    if Feature.PROCESS_GROUP in features:
        settings["process_group"] = dist.group.WORLD
    if Feature.DEVICE_MESH in features:
        settings["device_mesh"] = init_device_mesh("cpu", (2,))
    if Feature.DELAYED in features:
        settings["delay_all_reduce_named_params"] = [("last.bias", net.last.bias)]
        settings["param_to_hook_all_reduce"] = net.blocks[0].linear.weight
    model: Any = ddp_compile(net, first_bucket_cap_mb=0.0001, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for number, feature in enumerate(features):
        if feature in CALLS:
            is_again = feature in features[:number]
            CALLS[feature](model, torch.optim.SGD(model.parameters(), lr=LR) if is_again else optimizer)
    return model, optimizer


def train(features: tuple[Feature, ...], backend: str) -> float:
    """The largest difference of a parameter to that of one process, after two steps."""
    model, optimizer = make(features, backend)
    torch.manual_seed(0)
    alone, of_rank = Net(has_buffer=False), slice(ROWS * dist.get_rank(), ROWS * (1 + dist.get_rank()))
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=LR)
    num_backwards = 2 if Feature.NO_SYNC in features else 1
    normalizes = Feature.NORMALIZE in features
    contexts = [model.join() for feature in features if feature is Feature.JOIN]
    with contextlib.ExitStack() as joined:
        for context in contexts:
            joined.enter_context(context)
        for step in range(2):
            torch.manual_seed(10 + step)
            for number in range(num_backwards):
                x = torch.randn(2 * ROWS, WIDTH)
                with model.no_sync() if number < num_backwards - 1 else contextlib.nullcontext():
                    squares = model(x[of_rank]).square()
                    if normalizes:
                        model.normalize_by(squares.numel())
                    (squares.sum() if normalizes else squares.mean()).backward()
                (alone(x).square().mean() / (num_backwards if normalizes else 1)).backward()
            if Feature.MANUAL_FINALIZATION in features:
                model.finalize_backward()
            for each in (optimizer, optimizer_alone):
                each.step()
                each.zero_grad()
    ours = model.state_dict()
    return max(relative_difference(ours[name], p.detach()) for name, p in alone.named_parameters())


def try_pairs(first: Feature, backend: str) -> list[tuple[Feature, str]]:
    """For each feature that is tried after the first one: the error, or how far the parameters are from the mean."""
    said = []
    eager = torch.compiler.set_stance("force_eager") if backend == "eager" else contextlib.nullcontext()
    with warnings.catch_warnings(), eager:
        warnings.simplefilter("ignore")  # pairs of which one has no effect
        for one, other in pairs():
            if one is not first:
                continue
            try:
                difference = train((one, other), backend)
                said.append((other, "" if difference < 1e-5 else f"differs by {difference}"))
            except Exception as error:
                said.append((other, f"{type(error).__name__}: {error}"))
    return said


FIRST = list(dict.fromkeys(first for first, _ in pairs()))
#: Those with the most exclusions.
IN_CI = [f for f in (Feature.ASYNC, Feature.BEYOND_GROUP, Feature.SHARDED_OPTIMIZER, Feature.JOIN) if f in FIRST]


@pytest.mark.parametrize("backend", only(["eager"], ["eager", "aot_eager"]))
@pytest.mark.parametrize("first", only(IN_CI, FIRST), ids=lambda first: first.name)
def test_pairs(first: Feature, backend: str, ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(try_pairs, first, backend)):
        assert len(said) > 0
        for other, text in said:
            exclusions = exclusions_of(first, other)
            if exclusions:
                assert text.startswith(f"ReplicationError: rank {rank}: "), (first, other, text)
                assert any(each.reason in text and each.way_out in text for each in exclusions), (first, other, text)
            else:
                assert text == "", (first, other, text)


def test_fused_steps_beside_a_sharded_optimizer(single_rank_group: None) -> None:
    model, _ = make((Feature.SHARDED_OPTIMIZER,), "eager")
    with pytest.raises(ReplicationError, match="_register_fused_optim cannot be used with the sharded optimizer: "):
        model._register_fused_optim(torch.optim.SGD, LR)


def test_every_feature_is_tried() -> None:
    assert {*ARGUMENTS, *CALLS, *WAYS, *ELSEWHERE} == set(Feature)
    tried = {frozenset(pair) for pair in pairs()}
    for exclusion in EXCLUSIONS:
        for other in exclusion.others:
            pair = {exclusion.feature, other}
            assert pair in tried or not pair.isdisjoint(ELSEWHERE), pair
