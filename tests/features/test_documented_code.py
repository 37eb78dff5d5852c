"""The code of README, migration, tutorial and notebooks runs, and recipes equal DistributedDataParallel."""

import contextlib
import copy
import io
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside import gathered
from process_copies import run_in_copy
from rank_pool import Ranks, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY = 11


def sections(page: str) -> dict[str, str]:
    """The code in each section of a page, by the section's title."""
    _, *parts = re.split(r"^## (.+)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    blocks = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return {title: "\n".join(blocks.findall(text)) for title, text in zip(parts[::2], parts[1::2], strict=True)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.tokens(tokens))))

    def generate(self, tokens: Tensor, length: int) -> Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


class NetWithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.BatchNorm1d(5))


def loss_function(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(dist.get_rank())
    return [
        (x, (3 * x + 1) % VOCABULARY)
        for x in (torch.randint(VOCABULARY, (4, 5), generator=random) for _ in range(number))
    ]


replicate_quickly = partial(ddp_compile, backend="aot_eager", bucket_cap_mb=0.0005)


def run_recipe(title: str, replicate: Callable[[nn.Module], Any], path: Path, **given: Any) -> dict[str, Any]:
    """The names that a recipe has defined."""
    torch.manual_seed(3)
    model = replicate(Net())
    names = {
        "torch": torch,
        "dist": dist,
        "ddp_compile": replicate,
        "Net": Net,
        "NetWithBatchNorm": NetWithBatchNorm,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": batches(2 + 2 * dist.get_rank() if title == "Uneven inputs" else 4),
        "loss_function": loss_function,
        "tasks": [loss_function, lambda output, targets: loss_function(output, VOCABULARY - 1 - targets)],
        "device": "cpu",
        "path": path,
        "prompt": torch.zeros(1, 2, dtype=torch.long),
        "save_every": 2,
        **given,
    }
    code = sections("migration.md")[title]
    if replicate is DistributedDataParallel:
        code = code.replace("model.clip_grad_norm_(", "torch.nn.utils.clip_grad_norm_(model.parameters(), ")
    exec(compile(code, f"migration.md: {title}", "exec"), names)
    return names


@pytest.mark.parametrize(
    "title",
    [
        "Gradient accumulation",
        "Clipping",
        "Moving averages of weights",
        "Gradients that are kept",
        "Asynchronous checkpoints",
        "Uneven inputs",
    ],
)
@on_ranks(2, eagerly=True)  # tracing would be most of the time
def test_recipe(title: str, tmp_path: Path) -> None:
    ours = run_recipe(title, replicate_quickly, tmp_path / "ours")
    theirs = run_recipe(title, DistributedDataParallel, tmp_path / "theirs")
    start = run_recipe("Generating", replicate_quickly, tmp_path)["model"]
    for p, q, s in zip(ours["model"].parameters(), theirs["model"].parameters(), start.parameters(), strict=True):
        assert torch.equal(p, q)
        assert (p - s).abs().max() > 1e-4, "nothing was trained"
    values = {name: float(ours[name]) for name in ("norm", "conflict") if name in ours}
    assert gathered(values) == [values] * 2  # the same bits on both ranks, which have also written their files
    if title == "Gradients that are kept":
        assert values["conflict"] < 0
    if title == "Moving averages of weights":
        assert list(torch.load(tmp_path / "ours")) == list(Net().state_dict())
    if title == "Asynchronous checkpoints":
        state = {"model": Net().state_dict()}
        before = copy.deepcopy(state)
        dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
        assert not torch.equal(state["model"]["mix.weight"], before["model"]["mix.weight"])


@on_ranks(2)
def test_mean_over_tokens(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = [[torch.randint(VOCABULARY, (4, 5), generator=random) for _ in range(4)] for _ in range(2)]
    loaders = [[(x, x.masked_fill(x > 9 - i - 3 * rank, -100)) for i, x in enumerate(inputs[rank])] for rank in (0, 1)]
    ours = run_recipe("The mean over tokens", replicate_quickly, tmp_path, loader=loaders[dist.get_rank()])
    torch.manual_seed(3)
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in (loaders[0][:2] + loaders[1][:2], loaders[0][2:] + loaders[1][2:]):
        x, y = (torch.cat(parts) for parts in zip(*step, strict=True))
        loss = loss_function(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert ours["mean_loss"] == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(dict(ours["model"].named_parameters()), dict(plain.named_parameters()))


@on_ranks(2, eagerly=True)
def test_generating(tmp_path: Path) -> None:
    names = run_recipe("Generating", replicate_quickly, tmp_path)
    assert ("tokens" in names) == (dist.get_rank() == 0)
    if "tokens" in names:
        assert torch.equal(names["tokens"], names["model"].unwrap().generate(names["prompt"], 4))


def adapters_trained(path: Path) -> tuple[set[str], list[float]]:
    names = run_recipe("Adapters of PEFT", replicate_quickly, path)
    trained = {name: p for name, p in names["model"].named_parameters() if p.grad is None and p.requires_grad}
    return set(trained), [float(p.detach().sum()) for p in names["model"].parameters()]


@pytest.mark.long
def test_adapters(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    (trained, rank_0), (_, rank_1) = ranks(2).run(adapters_trained, tmp_path)
    assert {name.split(".")[-3] for name in trained} == {"lora_A", "lora_B"}
    assert rank_0 == rank_1
    assert (tmp_path / "adapter_config.json").exists()


@on_ranks(2)
def test_synchronized_batch_norm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        run_recipe("Synchronized BatchNorm", replicate_quickly, tmp_path)


@on_ranks(2)
def test_debugging(tmp_path: Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_recipe("Debugging", replicate_quickly, tmp_path)
    assert printed.getvalue().count("5 gradients") == 2  # the table, and once more in what explain() says
    assert "graph 0: " in printed.getvalue()


def run_script(folder: Path) -> str:
    """``train.py``, in a process group that is there already, and with a backend that takes less time."""
    printed = io.StringIO()
    defaults = {**(ddp_compile.__kwdefaults__ or {}), "backend": "aot_eager"}
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(ddp_compile, "__kwdefaults__", defaults),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path("train.py", run_name="train")
    return printed.getvalue()


@pytest.mark.parametrize(("page", "num_losses"), [("docs/tutorial.md", 5), ("README.md", 4)])
def test_script_of_a_page(page: str, num_losses: int, ranks: Ranks, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(# train\.py\n.*?)^```", (DOCS.parent / page).read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(script)
    rank_0, rank_1 = ranks(2).run(run_script, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", rank_0)]
    assert len(losses) == num_losses and losses[-1] < losses[0] / 2
    assert rank_1 == ""
    if page == "docs/tutorial.md":
        assert "4 buckets, 8 gradients" in rank_0 and "4 partitions" in rank_0
        assert next(iter(torch.load(tmp_path / "model.pt"))) == "layers.0.weight"


def run_cell_twice() -> None:
    for _ in range(2):
        exec(sections("compatibility.md")["Notebooks"], {"ddp_compile": ddp_compile, "Net": Net})


def test_notebook_cell_runs_again() -> None:
    ended = run_in_copy(run_cell_twice)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.count("1 bucket, 5 gradients") == 2
