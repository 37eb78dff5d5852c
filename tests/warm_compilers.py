"""Imported by the process that ranks are copies of, to do the work of torch's compilers at a process's first graph.

They build tables of torch's functions, decompositions and patterns, and do postponed imports: half a second for Dynamo
and AOTAutograd, and another half for inductor, in each rank that compiles. The graphs here leave nothing behind that
depends on them. No thread is started, since a fork would lose it, and no C++ is compiled. If torch is built for an
accelerator, its autograd starts a thread for each device and, once AOTAutograd has used it, refuses to run in copies.
So nothing is warmed up there.
"""

import torch
from cheap_compiles import make_compiles_cheap
from torch import Tensor, nn

torch.set_num_threads(1)
make_compiles_cheap()
_weight = torch.ones(4, 4, requires_grad=True)


def _product(x: Tensor) -> Tensor:
    return x @ _weight


if torch.accelerator.current_accelerator() is None:
    _model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    torch.compile(_model, backend="aot_eager")(torch.ones(3, 4)).square().mean().backward()
    torch.compile(_product)(torch.ones(3, 4)).sum().backward()
    torch._dynamo.reset()
