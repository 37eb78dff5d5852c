"""The code that tests of `DDPCompileStrategy` run on each rank, since importing Lightning takes seconds."""

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch
import torch.distributed as dist
from hugging_face import assert_refused
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.wrappers import MetricTracker
from warned import warned

from ddp_compile import ddp_compile, is_replicated, shard_optimizer
from ddp_compile.integrations.lightning import DDPCompileStrategy

SMALL = {"backend": "eager", "bucket_cap_mb": 0.001}


class Net(LightningModule):
    """Records its losses, norms of gradients and graphs."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before BatchNorm would have gradients of rounding errors alone, of which AdamW makes whole steps.
        first = nn.Linear(6, 16, bias=False)
        self.body = nn.Sequential(first, nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)
        self.error = MeanSquaredError()
        self.noted: dict[str, list[float]] = {"loss": [], "norm": [], "validation": []}
        self.kinds: set[str] = set()
        self.graphs: list[tuple[int, int]] = []
        self.num_evaluation_graphs = 0
        self.reduced: list[str] = []
        self.untraced: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        output = self(batch[0])
        loss = (output - batch[1]).square().mean()
        self.log_sometimes(loss)
        self.error(output, batch[1])
        self.log("error", self.error)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return loss

    @torch.compiler.disable
    def log_sometimes(self, loss: Tensor) -> None:
        if self.global_step % 4 == 0:
            self.log("loss", loss)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validation", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kinds.add(type(self.trainer.model).__name__)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted["loss"].append(outputs["loss"].item())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.noted["norm"].append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def on_train_start(self) -> None:
        self.untraced = untraced(self)

    def on_train_end(self) -> None:
        model = self.trainer.model
        if is_replicated(model):
            state = model._ddp_compile_state
            reports = state.backend.reports
            self.graphs = [(len(each.buckets), len(each.parts)) for each in reports if each.buckets]
            self.num_evaluation_graphs = state.num_graphs - len(reports)
            self.reduced = [g.fqn for bucket in model.bucket_plan.buckets for g in bucket.gradients]

    def on_validation_epoch_end(self) -> None:
        self.noted["validation"].append(self.trainer.callback_metrics["validation"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Copies(Net):
    """Counts batches by copies of metrics that are made while it is fitted."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanSquaredError(), maximize=False)
        self.collection = MetricCollection([MeanSquaredError(), MeanAbsoluteError()])

    def on_fit_start(self) -> None:
        self.copied = self.collection.clone(prefix="validation ")
        self.twins = [copy.deepcopy(self)]  # no submodule
        self.noted |= {"tracked": [], "trained": []}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.collection.update(self(batch[0]).detach(), batch[1])
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.tracker(self(batch[0]), batch[1])
        self.copied.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        found = self.copied.compute()
        assert sorted(found) == ["validation MeanAbsoluteError", "validation MeanSquaredError"]
        self.noted["tracked"] += [self.tracker.compute().item(), *(value.item() for value in found.values())]
        self.copied.reset()

    def on_train_epoch_end(self) -> None:
        self.noted["trained"] += [value.item() for value in self.collection.compute().values()]
        self.collection.reset()

    def on_train_end(self) -> None:
        super().on_train_end()
        assert not untraced(self.twins[0]) and self.twins[0].log.__self__ is self.twins[0]


class Adversaries(Net):
    """Optimizes manually, two parts of it one after the other, each backward reaching its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for optimizer, detaches in zip(self.optimizers(), (True, False), strict=True):
            hidden = self.body(batch[0])
            loss = (self.head(hidden.detach() if detaches else hidden) - batch[1]).square().mean()
            self.manual_backward(loss)
            self.noted["loss"].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.noted["norm"].append(nn.utils.get_total_norm(gradients).item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.head, self.body)]


class Counts(LightningModule):
    """docs/integrations.md's mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.means: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self.layer(batch[0]).tanh().squeeze(-1) * batch[1]).sum()

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.count = batch[1].sum()

    def on_before_backward(self, loss: Tensor) -> None:
        self.trainer.model.normalize_by(self.count / self.trainer.accumulate_grad_batches, loss=loss)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.means.append(float(self.trainer.model.mean_loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def count_both(_folder: Path) -> None:
    """Losses of two steps, the second of which has fewer batches, and the bias after them are those of one process."""
    random = torch.Generator().manual_seed(5)
    batches = [[(torch.randn(4, 6, generator=random), torch.arange(4) >= i - j) for i in range(5)] for j in (0, 2)]
    torch.manual_seed(1)
    plain = copy.deepcopy(net := Counts())
    settings = {"accumulate_grad_batches": 3, "max_epochs": 1, "use_distributed_sampler": False}
    own = DataLoader(batches[dist.get_rank()], batch_size=None)
    make_trainer(DDPCompileStrategy(**SMALL), **settings).fit(net, own)
    optimizer = plain.configure_optimizers()
    for step in ([*batches[0][:3], *batches[1][:3]], [*batches[0][3:], *batches[1][3:]]):
        loss = sum(plain.training_step(batch, 0) for batch in step) / sum(mask.sum() for _, mask in step)
        loss.backward()
        plain.means.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    expected = [*plain.means, float(plain.layer.bias)]
    assert [*net.means, float(net.layer.bias)] == pytest.approx(expected, rel=1e-5)


def make_trainer(strategy: DDPStrategy, **settings: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"enable_checkpointing": False, "max_epochs": 2, **quiet}
    environment = LightningEnvironment()
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, plugins=[environment], **{**defaults, **settings})


def loaders() -> list[DataLoader[Any]]:
    generator = torch.Generator().manual_seed(5)
    sets = [
        TensorDataset(torch.randn(n, 6, generator=generator), torch.randn(n, 1, generator=generator)) for n in (48, 16)
    ]
    return [DataLoader(each, 4) for each in sets]


def trained(make: Callable[[], Net], strategy: DDPStrategy, **settings: Any) -> Net:
    torch.manual_seed(1)
    net = make()
    make_trainer(strategy, **settings).fit(net, *loaders())
    return net


def differences(make: str, ours: dict[str, Any], theirs: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """How far training with the two strategies differs; the modules' classes; graphs; ddp_compile's warnings."""
    with warned() as warnings:
        net = trained(globals()[make], DDPCompileStrategy(**{**SMALL, **ours}), **settings)
    reference = trained(globals()[make], DDPStrategy(**theirs), **settings)
    assert net.noted.keys() == reference.noted.keys() and len(net.noted["loss"]) > 6
    found = {
        name: max((abs(a - b) for a, b in zip(net.noted[name], reference.noted[name], strict=True)), default=0.0)
        for name in net.noted
    }
    states = zip(net.state_dict().values(), reference.state_dict().values(), strict=True)
    found["states"] = max((a.double() - b.double()).abs().max().item() for a, b in states)
    return {
        "differences": found,
        "kinds": (net.kinds, reference.kinds),
        "is plain": is_plain(net),
        "graphs": (net.graphs, net.num_evaluation_graphs),
        "untraced": (net.untraced, reference.untraced),
        "warnings": warnings,
    }


def is_plain(net: Net) -> bool:
    """Whether nothing of ours is left in a module that had been trained."""
    return bool(net.untraced) and not untraced(net) and not any(map(is_replicated, net.modules()))


def untraced(net: nn.Module) -> list[str]:
    """The methods that were put into a module's own attributes so that Dynamo does not look into them."""
    own = [(name, value) for module in net.modules() for name, value in vars(module).items()]
    return [name for name, value in own if type(value).__module__ == DDPCompileStrategy.__module__]


def resume(folder: Path) -> None:
    """Two halves make the same as a run without a stop, and a checkpoint is that of a plain module."""
    whole = trained(Net, DDPCompileStrategy(**SMALL), accumulate_grad_batches=2)
    torch.manual_seed(1)
    first, second = Net(), Net()
    trainer = make_trainer(DDPCompileStrategy(**SMALL), accumulate_grad_batches=2, max_epochs=1)
    trainer.fit(first, *loaders())
    trainer.save_checkpoint(folder / "half.ckpt")
    going_on = make_trainer(DDPCompileStrategy(**SMALL), accumulate_grad_batches=2)
    going_on.fit(second, *loaders(), ckpt_path=folder / "half.ckpt")
    (validated,) = going_on.validate(second, loaders()[1], verbose=False)
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert whole.noted["loss"] == [*first.noted["loss"], *second.noted["loss"]]
    assert torch.load(folder / "half.ckpt", weights_only=False)["state_dict"].keys() == Net().state_dict().keys()
    assert abs(validated["validation"] - whole.noted["validation"][-1]) < 1e-6


def name_parameters(_folder: Path) -> None:
    """Parameters to ignore and to delay are named as in the LightningModule."""
    names = trained(Net, DDPCompileStrategy(**SMALL, parameters_to_ignore=["head.bias"])).reduced
    assert "module.body.0.weight" in names and "module.head.bias" not in names
    net = Net()
    delayed = {"delay_all_reduce_named_params": [("head.weight", net.head.weight)]}
    trained(lambda: net, DDPCompileStrategy(**SMALL, **delayed, param_to_hook_all_reduce=net.body[0].weight))
    assert "module.head.bias" in net.reduced and "module.head.weight" not in net.reduced


def hooked(_folder: Path) -> None:
    """A wrapped comm hook is called for every bucket, and training gives numbers."""
    calls: list[int] = []

    def hook(state: str, bucket: Any) -> Any:
        assert state == "state"
        calls.append(bucket.index())
        return bf16_compress_hook(None, bucket)

    def wrap(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda state, bucket: hook(state.removesuffix(", wrapped"), bucket)

    ours = {"ddp_comm_hook": hook, "ddp_comm_wrapper": wrap, "ddp_comm_state": "state, wrapped"}
    net = trained(Net, DDPCompileStrategy(backend="eager", **ours))
    assert len(calls) == 12 and all(torch.isfinite(p).all() for p in net.parameters())


def replicated_inside() -> Net:
    net = Net()
    net.body = ddp_compile(net.body, backend="eager")
    return net


class HoldsParts(Net):
    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        self.head.weight = nn.Parameter(DTensor.from_local(self.head.weight.detach(), mesh, [Shard(0)]))


class ShardsOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return shard_optimizer(torch.optim.AdamW(self.parameters()), self.trainer.model)


REFUSED: list[tuple[type[DDPStrategy], Callable[[], Any], str]] = [
    (
        DDPCompileStrategy,
        lambda: ddp_compile(Net(), backend="eager"),
        "the LightningModule is already replicated; leave out ddp_compile(...)",
    ),
    (DDPCompileStrategy, replicated_inside, "body is already replicated; leave out ddp_compile(...)"),
    (
        DDPCompileStrategy,
        lambda: torch.compile(Net(), backend="eager"),
        "the Trainer was given torch.compile(module); pass it the module itself",
    ),
    (
        DDPCompileStrategy,
        HoldsParts,
        "head.weight are DTensors, but a checkpoint of this strategy would hold only rank 0's part of them",
    ),
    (DDPCompileStrategy, ShardsOptimizer, "DDPCompileStrategy cannot be used with the sharded optimizer"),
    (
        DDPStrategy,
        lambda: ddp_compile(Net(), backend="eager"),
        "DistributedDataParallel, which also takes 7 of its 7 parameters",
    ),
    (DDPStrategy, replicated_inside, "integrations.lightning.DDPCompileStrategy()"),
]


def fit(strategy: type[DDPStrategy], make: Callable[[], Any]) -> None:
    make_trainer(strategy()).fit(make(), *loaders())


def refuse_modules(_folder: Path) -> None:
    """Each module of `REFUSED` is an error on every rank."""
    by_name = f"^ReplicationError: rank {dist.get_rank()}: .*"
    assert_refused((partial(fit, strategy, make), by_name + re.escape(said)) for strategy, make, said in REFUSED)


def make_wrong_strategies(_folder: Path) -> None:
    """Arguments that are not taken, and a Lightning that is too old."""
    with pytest.raises(TypeError, match=r"did you mean find_unused_parameters\?$"):
        DDPCompileStrategy(find_unused_parameter=True)
    with pytest.raises(TypeError, match=r"use torch\.autocast"):
        DDPCompileStrategy(mixed_precision=torch.bfloat16)
    said = r"needs Lightning 2\.5 or newer, but this is 2\.4\.0\.post0; run pip"
    with mock.patch.object(lightning, "__version__", "2.4.0.post0"), pytest.raises(RuntimeError, match=said):
        DDPCompileStrategy()


def raise_in_a_step(_folder: Path) -> None:
    """The module is plain again."""

    class Fails(Net):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            raise ArithmeticError("on every rank")

    net = Fails()
    with pytest.raises(ArithmeticError):
        make_trainer(DDPCompileStrategy(**SMALL)).fit(net, *loaders())
    assert is_plain(net)
