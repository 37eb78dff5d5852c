"""torch's own tests of DistributedDataParallel, as its wheel ships them, made to run on a machine without a GPU.

Most of them ask for GPUs, but test nothing that needs one. So the sources are changed before they are compiled: devices
of any kind become the CPU, and decorators that skip a test without a GPU are dropped.
"""

import ast
import importlib
import importlib.util
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch

_PACKAGE = "torch.testing._internal.distributed"

#: The name that the tests of every module find their DistributedDataParallel by.
STAND_IN = "DistributedDataParallel"

#: These need a GPU, or are skipped for what GPUs do on Linux: "unittest.skipIf(IS_LINUX, ...)".
_DECORATORS_LEFT_OUT = ("skip_if_lt_x_gpu", "skip_if_no_gpu", "unittest.skip", "unittest.skipIf")

#: Tests that ask for another number of ranks than two.
_WORLD_SIZES = {
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": 4,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": 4,
}

#: Lines, by their method and the names that they mention, that use internals of DistributedDataParallel and would end
#: tests that check much else.
LOOKS_INSIDE = {
    "_run_uneven_inputs_test": {"_authoritative_rank", "final_rank_tensor", "tensor_list", "ddp_logging_data"},
    "test_detect_ddp_is_actually_static": {"_ddp_graph_static"},
    "test_different_graph_across_ranks": {"_get_ddp_logging_data"},
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": {"forward_sync_buffers"},
    "test_skip_all_reduce_unused_parameters": {"_get_ddp_logging_data"},
}

#: Sizes that are meant for GPUs, in the methods that have them, and what they are on a CPU.
SMALLER = {"test_ddp_uneven_inputs": {1000: 40}}


@dataclass(frozen=True)
class PeerTest:
    module: ModuleType
    make_case: Callable[[str], Any]
    name: str
    world_size: int
    #: Whether the test expects the default process group to be there.
    in_group: bool


def find_tests() -> list[PeerTest]:
    """Every test in the wheel whose source names DistributedDataParallel, itself or through a helper."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2", MASTER_ADDR="localhost", PYTORCH_PRINT_REPRO_ON_FAILURE="0")
    return [*_tests_of_ddp(), *_tests_with_rpc()]


def _tests_of_ddp() -> Iterator[PeerTest]:
    module = load_for_cpu(f"{_PACKAGE}.distributed_test")
    base: Any = module.DistributedTest._DistTestBase
    suite = type("DistributedTestOnCPU", (module.TestDistBackend, base), {})
    for method in _methods_with_ddp(module, "_DistTestBase"):
        yield PeerTest(module, suite, method, _WORLD_SIZES.get(method, 2), True)


def _tests_with_rpc() -> Iterator[PeerTest]:
    fixture = importlib.import_module(f"{_PACKAGE}.rpc.tensorpipe_rpc_agent_test_fixture").TensorPipeRpcAgentTestFixture
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    under_autograd = load_for_cpu(f"{_PACKAGE}.ddp_under_dist_autograd_test")
    rpc = load_for_cpu(f"{_PACKAGE}.rpc.rpc_test")
    # Not DdpUnderDistAutogradTest: it calls a rank that may have no process group yet, and then fails with either.
    for module, name in [(under_autograd, "DdpComparisonTest"), (rpc, "RpcTest")]:
        suite = type(f"{name}OnCPU", (getattr(module, name), fixture, MultiProcessTestCase), {})
        for method in _methods_with_ddp(module, name):
            yield PeerTest(module, suite, method, suite("runTest").world_size, False)


def _methods_with_ddp(module: ModuleType, class_name: str) -> list[str]:
    assert module.__file__ is not None
    return reaches_ddp(Path(module.__file__).read_text(), class_name)


def load_for_cpu(name: str) -> ModuleType:
    """Import a module of torch's tests, its source changed so that every device is the CPU.

    It has its own name and file, since Dynamo does not trace code in torch's. Tracebacks show the lines of torch's
    file.
    """
    torchs = importlib.util.find_spec(name)
    assert torchs is not None and torchs.origin is not None, f"this torch has no {name}"
    spec = importlib.util.spec_from_file_location(f"{name.rpartition('.')[2]}_on_cpu", torchs.origin)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    source = Path(torchs.origin).read_text()
    file = f"{spec.name}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module.__dict__.update(_on_cpu=_on_cpu, _no_cuda=_NO_CUDA)
    sys.modules[spec.name] = module  # unpickling looks up classes there
    exec(compile(for_cpu(source), file, "exec", dont_inherit=True), module.__dict__)
    module.__dict__["init_multigpu_helper"] = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    return module


def for_cpu(source: str) -> ast.Module:
    """The source with the CPU for every device, a name for DistributedDataParallel, and nothing skipped for GPUs."""
    return ast.fix_missing_locations(_OnCPU().visit(ast.parse(source)))


def reaches_ddp(source: str, class_name: str) -> list[str]:
    """Names of the tests of a class in whose methods, or in those they call, DistributedDataParallel is named."""
    tree = ast.parse(source)
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == class_name)
    names = {node.name: _names_in(node) for node in body if isinstance(node, ast.FunctionDef)}
    tests = [name for name in names if name.startswith("test_")]
    return [test for test in tests if STAND_IN in _reached(test, names)]


def _names_in(node: ast.AST) -> set[str]:
    nodes = list(ast.walk(node))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}


def _reached(name: str, names: dict[str, set[str]]) -> set[str]:
    reached, ahead = set[str](), [name]
    while ahead:
        new = names.get(ahead.pop(), set()) - reached
        reached |= new
        ahead += new
    return reached


def _on_cpu(device: Any) -> Any:
    """The CPU for a GPU, by number, name or device; anything else is left."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return torch.device("cpu") if is_number or str(device).startswith("cuda") else device


def _nothing(*_: Any, **__: Any) -> None:
    return None


#: Takes the place of ``torch.cuda``.
_NO_CUDA = SimpleNamespace(
    current_device=lambda: 0,
    device_count=lambda: int(os.environ["WORLD_SIZE"]),
    is_available=lambda: False,
    manual_seed=_nothing,
    set_device=_nothing,
    synchronize=_nothing,
    amp=torch.cuda.amp,
)


class _OnCPU(ast.NodeTransformer):
    """``x.cuda(0)`` -> ``x.cpu()``; ``device=rank`` and ``x.to(rank)`` -> the CPU; ``torch.cuda`` -> ``_no_cuda``."""

    _looks_inside = frozenset[str]()
    _smaller: Mapping[int, int] = MappingProxyType({})

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if not _is_left_out(d)]
        around = self._looks_inside, self._smaller
        self._looks_inside = self._looks_inside | LOOKS_INSIDE.get(node.name, set())
        self._smaller = SMALLER.get(node.name, self._smaller)
        self.generic_visit(node)
        self._looks_inside, self._smaller = around
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int:
            node.value = self._smaller.get(node.value, node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if self._looks_inside & _names_in(node) else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if self._looks_inside & _names_in(node) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(attr="cuda"):
                node.func.attr, node.args, node.keywords = "cpu", [], []
            case ast.Attribute(attr="to") | ast.Attribute(value=ast.Name(id="torch"), attr="device"):
                node.args[:1] = [_put_on_cpu(arg) for arg in node.args[:1]]
        for keyword in node.keywords:
            if keyword.arg == "device":
                keyword.value = _put_on_cpu(keyword.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == STAND_IN:  # torch.nn.parallel.DistributedDataParallel
            return ast.copy_location(ast.Name(STAND_IN, node.ctx), node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name("_no_cuda", node.ctx), node)
        return node


def _put_on_cpu(device: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name("_on_cpu", ast.Load()), [device], []), device)


def _is_left_out(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in _DECORATORS_LEFT_OUT
