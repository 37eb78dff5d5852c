"""What ``python -m ddp_compile explain`` prints and writes for one small model. Paths are relative to this folder."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from ddp_compile.__main__ import main


class Halves(nn.Module):
    """The results of a chunk are used on both sides of the place where the graph should be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        upper, lower = self.first.weight.chunk(2)
        x = self.second(x).sin()
        return torch.cat([x @ upper.t(), x @ lower.t()], dim=1) + self.first.bias


def halves() -> Any:
    return Halves(), torch.randn(5, 8)


def relative(text: str) -> str:
    return re.sub(r"[0-9a-f]{16}", "<digest>", text).replace(f"{Path(__file__).parent}/", "")


def test_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--world-size", "4", "--bucket-cap-mb", "0.0001", "--split", "forward"]
    data = tmp_path / "halves.json"
    torch._dynamo.reset()
    assert main(["explain", "test_explain_text:halves", *options, "--json", str(data)]) == 0
    assert_expected_inline(
        relative(capsys.readouterr().out),
        """\
bucket   MiB  cap MiB  dtype    device  gradients  from         to             frame
------  ----  -------  -------  ------  ---------  -----------  -------------  -----
     0  0.00     0.00  float32  cpu             2  first.bias   first.weight   0
     1  0.00     0.00  float32  cpu             2  second.bias  second.weight  0
2 buckets, 4 gradients, 0.00 MiB, generation 0, plan <digest>
Halves on 4 ranks, gradient all-reduce; bucket_cap_mb=[9.91821e-05, 9.91821e-05], split='forward'
bucket 0 launched early: after the backward of a partition
bucket 1 not launched early: all gradients are there only when the backward of the graph ends
graph 0: 2 buckets, 2 partitions
  cut at chunk
    test_explain_text.py:25  upper, lower = self.first.weight.chunk(2)
""",
    )
    document = json.loads(data.read_text())
    assert (document["model"], document["launches"][0]) == (
        "Halves",
        {"bucket": 0, "is_early": True, "when": "after the backward of a partition"},
    )
