"""Training on ranks of a pool through Accelerate, with ddp_compile or with Accelerate's own DistributedDataParallel."""

import copy
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import hugging_face
import pytest
import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_compile import ReplicationError, ddp_compile, is_replicated, shard_optimizer
from ddp_compile.algorithms import Decentralized, LocalSGD
from ddp_compile.integrations import accelerate as integration
from ddp_compile.integrations.accelerate import use

SETTINGS = {"backend": "aot_eager", "bucket_cap_mb": 0.001}


def forget_state() -> None:
    """Make the next Accelerator the first one, since the classes keep what they know about the ranks."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def new_accelerator(**settings: Any) -> Accelerator:
    forget_state()
    return Accelerator(cpu=True, **settings)


def new_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 3))


def samples(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(num, 6, generator=generator), torch.randint(3, (num,), generator=generator))


class Run(NamedTuple):
    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any


class Step(NamedTuple):
    """The loss of a micro-batch, and the norm of the gradients after the last one of a step."""

    loss: float
    norm: float


def prepare(ours: bool, scaled: bool = False, **settings: Any) -> Run:
    """A small model and five batches for each rank, after the last of which a step has one instead of two.

    With ``scaled`` in float16 with a GradScaler, whose first gradients overflow. Accelerate makes one on GPUs only.
    """
    accelerator = new_accelerator(**settings)
    if scaled:
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    if ours:
        use(accelerator, **SETTINGS)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return Run(accelerator, *accelerator.prepare(model, optimizer, DataLoader(samples(60), batch_size=6), scheduler))


def train(run: Run, first: int = 0, last: int | None = None) -> list[Step]:
    """Train on the batches from one number on, and before another one."""
    steps = []
    for i, (x, y) in enumerate(run.accelerator.skip_first_batches(run.loader, first), start=first):
        if i == last:
            break
        with run.accelerator.accumulate(run.model):
            loss = nn.functional.cross_entropy(run.model(x), y)
            run.accelerator.backward(loss)
            norm = 0.0
            if run.accelerator.sync_gradients:
                norm = float(run.accelerator.clip_grad_norm_(run.model.parameters(), 0.05))
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()
        steps.append(Step(loss.item(), norm))
    return steps


def train_both(settings: dict[str, Any]) -> tuple[list[Step], list[Step], str]:
    """Steps with ddp_compile and with DistributedDataParallel, and what the first was compiled to."""
    steps = train(run := prepare(True, **settings))
    explained = str(run.model.explain())
    return steps, train(prepare(False, **settings)), explained


def count_both(_folder: str) -> None:
    """Gradients of steps with uneven counts, by `normalize_by`, are those that Accelerate's documentation has."""
    both: list[list[Tensor]] = [[], []]
    for gradients in both:
        accelerator, model, optimizer, loader, _ = prepare(gradients is both[0], gradient_accumulation_steps=2)
        counts = torch.stack([(x[:, 0] < accelerator.process_index).sum() for x, _ in loader])
        totals = [accelerator.gather(step.sum()).sum() for step in counts.split(2)]
        for i, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                targets = y.where(x[:, 0] < accelerator.process_index, -100)
                loss = nn.functional.cross_entropy(model(x), targets, reduction="sum")
                if gradients is both[0]:
                    model.normalize_by(counts[i], loss=loss)
                else:
                    loss = loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / totals[i // 2]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                optimizer.step()
                optimizer.zero_grad()
    assert len(both[0]) == 3
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-6)


def stop_and_go_on(folder: str, settings: dict[str, Any]) -> dict[str, list[Step]]:
    """Train without a stop, and resume after the first of three steps from its saved state, with both."""
    train(run := prepare(True, **settings), last=2)
    run.accelerator.save_state(folder)
    steps = {"without a stop": train(run, first=2)}
    for name, ours in (("with ddp_compile", True), ("with DistributedDataParallel", False)):
        run = prepare(ours, **settings)
        run.accelerator.load_state(folder)
        steps[name] = train(run, first=2)
    return steps


def shard_and_go_on(folder: str) -> None:
    """An optimizer that is sharded after ``prepare``, and resumed after two of five batches, changes no loss."""

    def losses(run: Run, first: int = 0, last: int | None = None) -> list[float]:
        taken = []
        for x, y in itertools.islice(run.accelerator.skip_first_batches(run.loader, first), last):
            taken.append(nn.functional.cross_entropy(run.model(x), y))
            run.accelerator.backward(taken[-1])
            run.model.clip_grad_norm_(0.05)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return [loss.item() for loss in taken]

    def prepare_sharded() -> Run:
        shard_optimizer((run := prepare(True)).optimizer.optimizer, run.model)
        return run

    whole = losses(prepare(True))
    first = losses(run := prepare_sharded(), last=2)
    run.accelerator.save_state(folder)
    (run := prepare_sharded()).accelerator.load_state(folder)
    assert len(whole) == 5 and first + losses(run, first=2) == pytest.approx(whole, rel=2e-6)


def join_both(_folder: str) -> None:
    """If one rank has a batch more than the other, losses and weights are the same with both."""
    results = []
    for ours in (True, False):
        accelerator = new_accelerator()
        if ours:
            use(accelerator, **SETTINGS)
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(30), batch_size=6))
        losses = []
        # What Accelerate asks before it joins; it is so on GPUs only.
        on_gpus = patch.object(type(accelerator), "multi_device", True)
        with on_gpus, accelerator.join_uneven_inputs([model], even_batches=False):
            for x, y in loader:
                losses.append(nn.functional.cross_entropy(model(x), y))
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
        results.append((torch.stack(losses).detach(), accelerator.get_state_dict(model)["0.weight"].clone()))
        assert len(losses) == 3 - accelerator.process_index
    (losses, weights), (expected, expected_weights) = results
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(weights, expected_weights)


def look_at_models(folder: str) -> None:
    """Other methods of an accelerator on a replicated model in bf16."""
    plain_keys = list(new_model().state_dict())
    accelerator, model, _, _, _ = run = prepare(True, mixed_precision="bf16")
    train(run)
    assert accelerator.unwrap_model(model) is model and type(model).__name__ == "Sequential"
    assert list(accelerator.get_state_dict(model)) == plain_keys
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    assert os.listdir(folder) == ["model.safetensors"]

    taken = copy.deepcopy(model).eval()
    assert type(taken) is nn.Sequential and taken.forward.__self__ is taken
    model.eval()
    x = torch.randn(4, 6)
    with torch.no_grad():
        assert torch.equal(taken(x), model(x)) and model(x).dtype == torch.float32
        model[0].weight.zero_()
        assert not torch.equal(taken(x), model(x))
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    with torch.no_grad():
        assert not torch.equal(taken(x), model(x))


def prepare_again(_folder: str) -> None:
    """A model that is prepared for evaluation before it is for training, and then once more; and a frozen one."""
    accelerator = use(new_accelerator(), **SETTINGS)
    model = new_model()
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert type(model) is nn.Sequential
    assert accelerator.prepare(model) is model
    accelerator.free_memory()
    assert accelerator.prepare(model) is model and accelerator._models == [model]
    model(torch.randn(4, 6)).sum().backward()
    assert len(model.bucket_plan.buckets) > 1

    frozen = accelerator.prepare(new_model().requires_grad_(False))
    assert type(frozen) is nn.Sequential


class HasNamesItself(nn.Linear):
    def no_sync(self) -> None:
        raise AssertionError("the module's own")

    unwrap = no_sync


def accumulate_with_names_itself(_folder: str) -> None:
    """``no_sync`` leaves a gradient to its rank, and a refused module stays plain."""
    accelerator = use(new_accelerator(), backend="eager")
    model = accelerator.prepare(HasNamesItself(3, 1))
    with accelerator.no_sync(model):
        model(torch.full((2, 3), float(accelerator.process_index))).sum().backward()
    assert (model.weight.grad == 2 * accelerator.process_index).all()
    refused = HasNamesItself(3, 1)
    with pytest.raises(ReplicationError):
        use(new_accelerator(), backend="eager", algorithm=Decentralized()).prepare(refused)
    assert not is_replicated(refused)


def read_handler(_folder: str) -> None:
    handler = DistributedDataParallelKwargs(
        find_unused_parameters=True, bucket_cap_mb=1, broadcast_buffers=False, comm_hook=DDPCommunicationHookType.BF16
    )
    accelerator = use(new_accelerator(kwargs_handlers=[handler]), backend="aot_eager", find_unused_parameters=True)
    model = accelerator.prepare(new_model())
    assert (model.find_unused_parameters, model.bucket_bytes_cap) == (True, 2**20)
    assert "bf16_compress_hook" in model.comm_algorithm.name


def trigger_sync(_folder: str) -> None:
    """Gradients of three forwards inside ``no_sync``, the last of whose backwards is reduced, are those of DDP."""
    both = []
    for ours in (True, False):
        accelerator, model, _, loader, _ = prepare(ours)
        inputs = [x for x, _ in loader][:3]
        with accelerator.no_sync(model):
            losses = [model(x).square().mean() for x in inputs]
        for loss in losses[:-1]:
            accelerator.backward(loss)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[-1])
        both.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-7)


def run_example() -> str:
    forget_state()
    return hugging_face.run_example("train_accelerate.py")


# Accelerators and models that are refused, each with its error.


def one_process() -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        del os.environ[name]
    use(new_accelerator())


def with_state(**state: Any) -> None:
    """Use an accelerator in a state that plugins would set, which need GPUs."""
    accelerator = new_accelerator()
    for name, value in state.items():
        setattr(accelerator.state, name, value)
    use(accelerator)


def too_old() -> None:
    with patch.object(integration, "OLDEST", "99.0"):
        use(new_accelerator())


def prepared_before_use() -> None:
    accelerator = new_accelerator()
    accelerator.prepare(new_model())
    use(accelerator)


def with_kwargs(use_settings: dict[str, Any], **kwargs: Any) -> None:
    use(new_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**kwargs)]), **use_settings).prepare(new_model())


def used() -> Accelerator:
    return use(new_accelerator(), **SETTINGS)


def count_one_of_two_models() -> None:
    accelerator = used()
    models = [accelerator.prepare(new_model()) for _ in range(2)]
    models[0].normalize_by(4)
    accelerator.backward(models[0](torch.ones(4, 6)).sum())


def replicated() -> nn.Module:
    return ddp_compile(new_model(), backend="eager")


CASES: list[tuple[Callable[[], Any], str]] = [
    (one_process, r"rank .: .*one process \(DistributedType.NO\).*cpu=True.*leave out use\(\)"),
    (
        partial(with_state, distributed_type=DistributedType("FSDP")),
        "distributed_type=FSDP, which shards.*leave out its plugin",
    ),
    (partial(with_state, distributed_type=DistributedType("DEEPSPEED")), "distributed_type=DEEPSPEED"),
    (partial(with_state, distributed_type=DistributedType("MEGATRON_LM")), "distributed_type=MEGATRON_LM"),
    (partial(with_state, parallelism_config=object()), "parallelism_config.*leave out parallelism_config"),
    (partial(with_state, _mixed_precision="fp8"), "mixed_precision='fp8'.*use 'bf16'"),
    (too_old, r"accelerate \d.* is older than 99.0; pip install -U accelerate"),
    (
        lambda: use(new_accelerator(dynamo_backend="inductor")),
        r"dynamo_backend=INDUCTOR; torch_compile=True of TrainingArguments.*pass backend=",
    ),
    (lambda: use(used(), bucket_cap_mb=1), r"use\(\) was called twice"),
    (prepared_before_use, r"has already prepared Sequential; call use\(\) before"),
    (lambda: use(new_model()), "TypeError: .*an accelerate.Accelerator or a Trainer, not a Sequential"),
    (lambda: use(new_accelerator(), process_group=torch.distributed.group.WORLD), "TypeError: .*drop process_group"),
    (lambda: use(new_accelerator(), log_communication=True), "TypeError: .*add model.comm_stats"),
    (lambda: used().prepare(replicated()), r"replicated this Sequential before accelerator.prepare\(\); leave out"),
    (
        lambda: used().prepare(nn.Sequential(replicated(), nn.Linear(3, 3))),
        "submodule 0 is a ReplicatedModule; replicate the outermost module only",
    ),
    (lambda: ddp_compile(used().prepare(new_model())), r"ddp_compile\(\) was called twice on this module"),
    (
        lambda: new_accelerator().prepare(replicated())(torch.randn(4, 6)),
        r"is called by a DistributedDataParallel.*accelerate.use\(accelerator\) before",
    ),
    (
        lambda: with_kwargs({"bucket_cap_mb": 1}, bucket_cap_mb=5),
        "bucket_cap_mb=1 and DistributedDataParallelKwargs bucket_cap_mb=5; pass it once",
    ),
    (count_one_of_two_models, r"one of 2 models awaits such a backward; call loss.backward\(\) instead"),
    (lambda: with_kwargs({}, dim=1), "TypeError: .*does not take dim=1; drop dim"),
    (
        lambda: use(new_accelerator(), algorithm=LocalSGD(period=2), **SETTINGS).prepare(new_model()),
        r"rank .: use\(\) cannot be used with the local SGD.*Drop algorithm=",
    ),
]


def refuse_all(_folder: str) -> None:
    """The error of each case is on every rank."""
    hugging_face.assert_refused(CASES)
