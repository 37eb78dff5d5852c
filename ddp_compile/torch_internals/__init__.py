"""Every private torch name that this package uses, in torch 2.11 to 2.15. docs/compatibility.md says how they differ.

No other file of the package may use one: tests/unit/test_layers.py.
"""

from ddp_compile.torch_internals.autograd import *
from ddp_compile.torch_internals.backward_compile import *
from ddp_compile.torch_internals.dynamo import *
from ddp_compile.torch_internals.graph_breaks import *
from ddp_compile.torch_internals.module_calls import *
from ddp_compile.torch_internals.process_groups import *
from ddp_compile.torch_internals.tensors import *
