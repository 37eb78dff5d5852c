"""What ``python -m ddp_compile explain`` prints and writes for one small model. Paths are relative to this folder."""

from __future__ import annotations

import json
import pprint
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
    test_explain_text.py:28  upper, lower = self.first.weight.chunk(2)
""",
    )
    document = json.loads(relative(data.read_text()))
    assert_expected_inline(
        pprint.pformat(document, width=100, compact=True, sort_dicts=False),
        """\
{'version': 1,
 'digest': '<digest>',
 'model': 'Halves',
 'world_size': 4,
 'algorithm': 'gradient all-reduce',
 'settings': ['bucket_cap_mb=[9.91821e-05, 9.91821e-05]', "split='forward'"],
 'plan': {'buckets': [{'cap_bytes': 104,
                       'device': 'cpu',
                       'dtype': 'float32',
                       'frame': 0,
                       'gradients': [[1, 'first.bias', 8, None], [0, 'first.weight', 64, None]],
                       'layout': 'padded',
                       'sparse': False},
                      {'cap_bytes': 104,
                       'device': 'cpu',
                       'dtype': 'float32',
                       'frame': 0,
                       'gradients': [[3, 'second.bias', 8, None], [2, 'second.weight', 64, None]],
                       'layout': 'padded',
                       'sparse': False}],
          'generation': 0,
          'version': 2},
 'launches': [{'bucket': 0, 'is_early': True, 'when': 'after the backward of a partition'},
              {'bucket': 1,
               'is_early': False,
               'when': 'all gradients are there only when the backward of the graph ends'}],
 'graphs': [{'number': 0,
             'num_buckets': 2,
             'partitions': [{'buckets': [1], 'first_node': None, 'source': None},
                            {'buckets': [0],
                             'first_node': 'chunk',
                             'source': {'file': 'test_explain_text.py',
                                        'line': 28,
                                        'code': 'upper, lower = self.first.weight.chunk(2)'}}],
             'launches_in_backward': False,
             'not_cut': [],
             'refusals': []}],
 'regions': [],
 'in_no_graph': [],
 'breaks': [],
 'sharding': [],
 'averaging': [],
 'failures': []}""",
    )
