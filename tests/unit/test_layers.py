"""The imports in the sources: layers import lower ones only, and private torch names are used in one folder only."""

import ast
import graphlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.write_page import release_of

PACKAGE = Path(__file__).resolve().parents[2] / "ddp_compile"
# rglob does not follow the links to passes/, runtime/ and kernels/.
SOURCES = sorted(
    path
    for folder in (PACKAGE, *(child for child in PACKAGE.iterdir() if child.is_symlink() and child.is_dir()))
    for path in folder.rglob("*.py")
)
INTERNALS = "ddp_compile.torch_internals"

# Private names that are used outside torch_internals/, each for a reason. Everything else there is a mistake.
ALLOWED_PRIVATE_NAMES = {
    # The only home of pytrees, and of the classes of operators in a graph; both are imported by torch's own documented
    # extension points, and only looked at in type checks and tree walks.
    "torch.utils._pytree",
    "torch._ops",
    # Node targets that Dynamo writes into graphs are compared with these functions by identity.
    "torch._C._set_grad_enabled",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    # A public family of functions that only lacks a public spelling.
    "torch._foreach_add",
    "torch._foreach_add_",
    "torch._foreach_addcdiv_",
    "torch._foreach_addcmul_",
    "torch._foreach_div_",
    "torch._foreach_lerp_",
    "torch._foreach_mul_",
    "torch._foreach_sqrt",
    "torch._foreach_sub_",
}


# Files of the harness whose purpose is a private part of torch: they switch peers on, or stand in for a process group.
PRIVATE_BY_PURPOSE = {
    "ddp_compile.bench.torch_switches",
    "ddp_compile.bench.functional_replicate",
    "ddp_compile.bench.simulated_link",
    "ddp_compile.bench.simulated_transfers",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["ddp_compile", *(part for part in parts if part != "__init__")])


TREES = {module_name(path): ast.parse(path.read_text(), str(path)) for path in SOURCES}


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Everything that is imported, wherever in the file: modules, and for "from a import b" both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None


def torch_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names below torch: imported, or read as attributes of what was imported, by its full name."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update(
                {(a.asname or a.name).split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
            )
        elif isinstance(node, ast.ImportFrom):
            aliases.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    names = set(imported_names(tree))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if id(node) not in inner and (name := dotted_name(node)) is not None:
            first, _, rest = name.partition(".")
            names.add(f"{aliases.get(first, first)}.{rest}".rstrip("."))
    yield from sorted(name for name in names if name.split(".")[0] == "torch")


def private_torch_names(tree: ast.Module) -> set[str]:
    """The names below torch that have a private component and are not allowed."""
    private = {
        name
        for name in torch_names(tree)
        if any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    }
    return {name for name in private if not any(name == a or name.startswith(f"{a}.") for a in ALLOWED_PRIVATE_NAMES)}


def imports_of_ours(module: str) -> set[str]:
    return {name for name in imported_names(TREES[module]) if name.split(".")[0] == "ddp_compile"} - {"ddp_compile"}


def below(layer: str) -> list[str]:
    return [module for module in TREES if module == layer or module.startswith(f"{layer}.")]


def reaches(names: set[str], layer: str) -> set[str]:
    return {name for name in names if name == layer or name.startswith(f"{layer}.")}


#: The layers of the package, the lowest first. A module may import from its own layer and from those before it. Layers
#: of one line do not know each other. A folder stands for its own files, not for the folders in it; the modules at the
#: top of the package, which are the public ones, stand for themselves.
LAYERS = [
    ["errors", "graph_ops", "torch_internals", "checkout", "comm_hooks"],
    ["config", "plan", "kernels.contract"],
    ["report"],
    ["kernels.native"],
    ["kernels.cuda"],
    ["kernels"],
    ["runtime.comm"],
    ["runtime.desync"],
    ["runtime.buckets"],
    ["runtime.arrivals", "runtime.algorithms"],
    ["runtime.sharded", "runtime"],
    ["passes", "passes.analysis"],
    ["passes.forward", "passes.backward"],
    ["compile", "validation", "algorithms"],
    ["features"],
    ["module"],
    ["api", "functions", "sharded_optimizer"],
    [""],
    ["extension of algorithms"],
    ["integrations", "bench", "commands"],
    ["__main__"],
]
#: The algorithms that no module of the core imports, although most lie in its folder.
EXTENSION = {
    f"ddp_compile.runtime.algorithms.{name}"
    for name in (
        "async_model_average",
        "averaging_thread",
        "byte_grad",
        "decentralized",
        "diloco",
        "local_sgd",
        "low_precision_decentralized",
        "parameter_average",
        "parameter_gate",
    )
} | {"ddp_compile.optim"}
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def folder_of(module: str) -> str:
    """The folder of a module, without the package's name; a module at the top of the package stands for itself."""
    if module in EXTENSION:
        return "extension of algorithms"
    name = module.removeprefix("ddp_compile").removeprefix(".")
    if name.split(".")[0] == "bench":
        return "bench"
    is_folder = any(other.startswith(f"{module}.") for other in TREES)
    return name if is_folder or "." not in name else name.rpartition(".")[0]


def arrows() -> dict[tuple[str, str], set[str]]:
    """For each pair of folders of which the first imports from the second: the modules that do."""
    found: dict[tuple[str, str], set[str]] = {}
    for module in TREES:
        for name in imports_of_ours(module) & set(TREES):
            if folder_of(module) != folder_of(name):
                found.setdefault((folder_of(module), folder_of(name)), set()).add(module)
    return found


def test_folders_import_from_lower_layers_only() -> None:
    assert {folder_of(module) for module in TREES} == set(LAYER_OF)
    upward = {pair: modules for pair, modules in arrows().items() if LAYER_OF[pair[0]] <= LAYER_OF[pair[1]]}
    # For type checkers; `test_the_core_loads_no_extension` is about run time.
    features = {"compatibility", "measurement", "regions", "uneven_inputs", "warm_up"}
    assert upward == {
        ("algorithms", "extension of algorithms"): {"ddp_compile.algorithms"},
        ("features", "module"): {f"ddp_compile.features.{name}" for name in features},  # the state of a module
    }


def imported_at_load(node: ast.AST) -> Iterator[str]:
    """What a file imports when it is imported itself: not in functions, and not for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):  # from a package: one of its files, or a name
            files = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from (file if file in TREES else str(child.module) for file in files)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.If) and dotted_name(child.test) == "TYPE_CHECKING":
            yield from imported_at_load(ast.Module(child.orelse, []))
        elif not isinstance(child, ast.FunctionDef):
            yield from imported_at_load(child)


def test_no_files_import_each_other_in_a_circle() -> None:
    imports = {module: set(imported_at_load(tree)) & (set(TREES) - {"ddp_compile"}) for module, tree in TREES.items()}
    assert "ddp_compile.runtime.reducer" in imports["ddp_compile.module.replicate_state"]
    graphlib.TopologicalSorter(imports).prepare()  # raises a CycleError that names the files


#: Names by which a source would know a kind of accelerator, or its streams.
DEVICE_NAMES = ("torch.cuda", "torch.xpu", "torch.mps", "torch.accelerator", "torch.get_device_module", "torch.Stream")
#: The kernels are of one kind of device. The benchmark stands in for a process group, and times one device.
KNOW_DEVICES = ("ddp_compile.runtime.comm.streams", "ddp_compile.kernels", "ddp_compile.bench")
#: What a part of the package may import of ours beside itself, more strictly than by layers.
ALLOWED = {"kernels": {"errors"}, "plan.spec": {"errors", "plan.typed_json"}}


def test_streams_are_known_in_one_file() -> None:
    others = [module for module in TREES if not any(reaches({module}, layer) for layer in KNOW_DEVICES)]
    found = {
        module: [name for name in torch_names(TREES[module]) if any(reaches({name}, device) for device in DEVICE_NAMES)]
        for module in others
    }
    methods = {"record_stream", "wait_stream", "wait_event", "record_event", "current_stream"}
    for module in others:
        attributes = {node.attr for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)}
        found[module] += sorted(attributes & (methods | {"is_cuda"}))
    assert {module: names for module, names in found.items() if names} == {}


def test_parts_that_stay_apart() -> None:
    pairs = {(folder.split(".")[0], other.split(".")[0]) for folder, other in arrows()}
    assert pairs & {("passes", "runtime"), ("runtime", "passes")} == set()
    for part, allowed in ALLOWED.items():
        names = set.union(*(imports_of_ours(module) & set(TREES) for module in below(f"ddp_compile.{part}")))
        assert names - set(below(f"ddp_compile.{part}")) == {f"ddp_compile.{name}" for name in allowed}
    assert not [name for name in torch_names(TREES["ddp_compile.plan.spec"]) if name.startswith("torch.distributed")]


@pytest.mark.parametrize("module", sorted(set(TREES) - set(below(INTERNALS)) - PRIVATE_BY_PURPOSE))
def test_private_torch_names_live_in_one_folder(module: str) -> None:
    assert private_torch_names(TREES[module]) == set()


def writes_of_grad(tree: ast.Module) -> int:
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete)
        for target in (node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target])
    ]
    return sum(isinstance(t, ast.Attribute) and t.attr == "grad" for target in targets for t in ast.walk(target))


def test_gradient_stores_alone_write_gradients() -> None:
    writers = {module for module in below("ddp_compile.runtime") if writes_of_grad(TREES[module])}
    # The other one makes a gradient of its own, whose references it counts.
    sharded = {f"ddp_compile.runtime.sharded.{name}" for name in ("bucket", "gradients", "optimizer")}
    assert writers == {"ddp_compile.runtime.buckets.gradients", "ddp_compile.runtime.buckets.gradient_views", *sharded}


# Names that are looked for before they are used, and the first torch that has them: docs/compatibility.md.
SINCE = {"torch._inductor.custom_graph_pass.get_custom_graph_passes": "2.13"}
# And the first torch that no longer has them.
UNTIL = {"torch.fx._symbolic_trace._is_fx_tracing_flag": "2.14"}


def exists(name: str) -> bool:
    """Whether the installed torch has what a dotted name says."""
    found: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def test_private_names_exist() -> None:
    names = {name for module in below(INTERNALS) for name in private_torch_names(TREES[module])}
    assert len(names) > 40 and "torch._C._current_graph_task_id" in names
    release = release_of(torch.__version__)
    missing = {name for name, since in SINCE.items() if release < release_of(since)}
    missing |= {name for name, until in UNTIL.items() if release >= release_of(until)}
    assert {name for name in names if not exists(name)} == missing


#: What the core imports at first use only. `ddp_compile.report.explanation` belongs to the core.
EXTENSIONS = {
    "sharded optimizers": {"runtime.sharded", "sharded_optimizer"},
    "measuring and reports": {"features.measurement", "report", "runtime.comm.host_clock"},
    "planning and commands": {"commands", "plan.costs", "plan.optimum", "plan.scenarios", "plan.schedule"},
    "algorithms": {name.removeprefix("ddp_compile.") for name in EXTENSION},
    "integrations": {"integrations"},
    "bench": {"bench"},
    "fakes of `python -m ddp_compile explain`": {"torch_internals.fake_training"},
    "CUDA": {"kernels.cuda"},
}
TRAINING = """
import sys
import torch
import torch.distributed as dist
import ddp_compile
import ddp_compile.algorithms
print(*sys.modules)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = ddp_compile.ddp_compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="aot_eager")
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters()).step()
print(*sys.modules)
dist.destroy_process_group()
names = {}
exec("from ddp_compile import *", names)
print(names["shard_optimizer"].__module__, hasattr(ddp_compile, "shard"))
"""


def test_the_core_loads_no_extension() -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    printed = subprocess.check_output([sys.executable, "-c", TRAINING], env=environment, text=True)
    *lines, of_extension = printed.splitlines()
    imported, trained = ({name for name in line.split() if name in TREES} for line in lines)
    assert of_extension == "ddp_compile.sharded_optimizer False"
    assert len(imported) <= 110
    assert "ddp_compile.passes.forward.split_forward" in trained
    core = {"ddp_compile.report", "ddp_compile.report.explanation"}
    layers = {f"ddp_compile.{name}" for names in EXTENSIONS.values() for name in names}
    assert all(below(layer) for layer in layers)
    assert {layer: loaded for layer in layers if (loaded := reaches(trained - core, layer))} == {}


def test_extension_imports_public_names() -> None:
    algorithms = importlib.import_module("ddp_compile.algorithms")
    public = {"ddp_compile.algorithms", *(f"ddp_compile.algorithms.{name}" for name in algorithms.__all__)}
    layers = ("ddp_compile.errors", "ddp_compile.kernels")
    for module in EXTENSION:
        own = set.union(*(reaches(imports_of_ours(module), other) for other in EXTENSION))
        rest = imports_of_ours(module) - public - own - {"ddp_compile.runtime.algorithms"}
        assert {name for name in rest if not any(reaches({name}, layer) for layer in layers)} == set(), module
