"""A random module and its training as data, made from one integer, printed, and made smaller.

Everything is a name, or a tuple of names. So a failing recipe is made smaller by leaving entries out, and by putting
settings back to their defaults; it prints as the expression that makes it.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from fuzz.blocks import FUNCTIONS, HOLDERS, LEAVES, Block


@dataclass(frozen=True)
class Recipe:
    """One case. The defaults are the simplest values, to which settings are reset."""

    blocks: tuple[Block, ...] = ()  # the module, between a first and a last linear layer
    program: tuple[str, ...] = ("train",)  # what is done with it, in order: names of `training.ACTIONS`
    others: tuple[Block, ...] = ()  # a second module in the same process, which "other" and "joint" train
    inputs: str = "tensor"
    outputs: str = "tensor"
    split: str = "none"
    backend: str = "aot_eager"
    cap_mib: float = 25.0  # of every bucket
    dtype: str = "float32"
    view: bool = True  # gradient_as_bucket_view
    find_unused: bool = False
    static_graph: bool = False
    comm_hook: str = ""  # "allreduce" or "halves"
    routes: str = "first"  # the side of a "branch": the first, "in turns", or in turns that differ "by rank"
    rows_vary: bool = False  # from step to step
    scale_varies: bool = False  # the float argument
    input_grad: bool = False

    def __repr__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"Recipe({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def kinds(self) -> frozenset[str]:
        """The kinds of all blocks, also of those inside others."""
        return frozenset(kind for block in (*self.blocks, *self.others) for kind in _kinds(block))


def _kinds(block: Block) -> Iterator[str]:
    yield block.kind
    for inner in block.inner:
        yield from _kinds(inner)


# An entry that is several times in a tuple is more likely by that factor.
PLAIN = ("linear", "linear", "tanh", "gelu", "layer_norm", "weight", "embedding")
# What torch treats in its own way when it makes or cuts a graph; not drawn, but trained one by one.
RARE = (
    *("conjugated", "hooked", "sizes", "transforms", "condition", "convolution", "by_keyword", "autocast"),
    *("inference_mode", "nested_region"),
)
# Their gradient is None, in each backward or in some, which needs find_unused_parameters or static_graph.
UNUSED = ("branch", "no_grad")
HAVE_BUFFERS = ("batch_norm", "counter", "running_mean", "replaced_buffer", "cache", "spectral_norm")
# A checkpoint runs them twice, in which eager code and compiled code differ.
STATEFUL = (*HAVE_BUFFERS, "remembers", "counts_calls")
REPEATED_STEPS = ("zero", "zero_to_none", "step", "step", "clip", "zero_to_none", "zero")
#: Steps like "train" whose forward does not run compiled code, or that of other tensors.
UNUSUAL_CALLS = ("swapped", "flops", "force_eager", "dual")
OUTPUTS = ("tensor", "dict", "tuple", "dataclass", "nested", "views", "with_detached", "with_input", "object")


def recipe_of(seed: int, backends: tuple[str, ...] = ("eager", "eager", "aot_eager"), most_blocks: int = 5) -> Recipe:
    """The case that belongs to ``seed``; a block counts as one with those inside it."""
    random = Random(seed)
    parameters = random.choices(("every", "find_unused", "static_graph"), (6, 3, 2))[0]
    excluded = {*RARE, *(UNUSED if parameters == "every" else ())}
    blocks = _blocks(random, random.randint(1, most_blocks), excluded)
    others = _blocks(random, 2, excluded, depth=2) if random.random() < 0.2 else ()
    program = _program(random, parameters, bool(others))
    # If a hook is not a mean, the number of its calls matters, and that is not promised in these cases.
    hooks = ("", "allreduce", "allreduce" if {"halves", "regularizer"} & set(program) else "halves")
    ways = ["first"] if parameters != "find_unused" else ["first", "in turns", "by rank"]
    return Recipe(
        blocks=blocks,
        program=program,
        others=others,
        inputs=random.choices(("tensor", "keyword", "dict", "dataclass"), (4, 1, 1, 1))[0],
        outputs=random.choices(OUTPUTS, (8, 1, 1, 1, 1, 1, 1, 1, 1))[0],
        split=random.choice(("forward", "backward", "auto", "auto", "none")),
        backend=random.choice(backends),
        cap_mib=random.choice((0.0001, 0.0001, 0.001, 25.0)),
        dtype=random.choice(("float32", "float64")),
        view=random.random() < 0.6,
        find_unused=parameters == "find_unused",
        static_graph=parameters == "static_graph",
        comm_hook=random.choices(hooks, (8, 1, 1))[0],
        routes=random.choice(ways),
        rows_vary=random.random() < 0.25,
        scale_varies=random.random() < 0.25,
        input_grad=random.random() < 0.15,
    )


def _blocks(random: Random, number: int, excluded: set[str], depth: int = 0) -> tuple[Block, ...]:
    return tuple(_block(random, excluded, depth) for _ in range(number))


def _block(random: Random, excluded: set[str], depth: int) -> Block:
    pool = random.choices((PLAIN, tuple(FUNCTIONS), tuple(LEAVES), tuple(HOLDERS)), (4, 4, 4, 2 if depth < 2 else 0))[0]
    kind = random.choice([kind for kind in pool if kind not in excluded])
    if kind not in HOLDERS:
        return Block(kind)
    inside = excluded | (set(STATEFUL) if "checkpoint" in kind else set())
    return Block(kind, _blocks(random, random.randint(1, 2), inside, depth + 1))


def _program(random: Random, parameters: str, with_other: bool) -> tuple[str, ...]:
    """A few steps, each with a backward that is reduced."""
    backwards = ["train"] * 6 + ["two_forwards", "retain", "output_hook", "written_output", "halves", "repeat"]
    backwards += UNUSUAL_CALLS
    if parameters == "find_unused":
        backwards += ["first_half", "first_half"]
    if with_other:
        backwards += ["other", "joint", "joint"]
    if parameters == "static_graph":  # the same gradients in every iteration
        backwards = ["train"] * 6 + list(UNUSUAL_CALLS)
    program: list[str] = []
    for _ in range(random.choice((1, 2, 2, 3))):
        before = ("evaluate", "micro", "micro", "hook", "post_hook", "data_hook", "raise", "reload", "late_hook")
        program += random.choices(before, (3, 3, 3, 1, 1, 1, 1, 1, 0.5), k=random.choice((0, 0, 1, 1)))
        program.append(random.choice(backwards))
        after = ("regularizer", "autograd_grad", "drop_some", "replace_grads", "detach_grads", "evaluate")
        program += random.choices(after, k=random.choice((0, 0, 0, 1)))
        program += random.sample(REPEATED_STEPS, k=random.choice((0, 1, 2, 2)))
    return tuple(program)


def smaller(recipe: Any) -> Iterator[Any]:
    """Recipes of its class with one thing less than ``recipe``, the largest steps first."""
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if isinstance(value, tuple):
            for shorter in _shorter(value):
                if shorter or field.name != "program":
                    yield dataclasses.replace(recipe, **{field.name: shorter})
        elif value != field.default:
            yield dataclasses.replace(recipe, **{field.name: field.default})


def _shorter(entries: tuple) -> Iterator[tuple]:
    for half in (entries[: len(entries) // 2], entries[len(entries) // 2 :]):
        if len(entries) > 2:
            yield half
    for i, entry in enumerate(entries):
        yield (*entries[:i], *entries[i + 1 :])
        if isinstance(entry, Block) and entry.inner:
            yield (*entries[:i], *entry.inner, *entries[i + 1 :])
            for inner in _shorter(entry.inner):
                yield (*entries[:i], Block(entry.kind, inner), *entries[i + 1 :])
        elif isinstance(entry, Block) and entry.kind in LEAVES and entry.kind != "linear":
            yield (*entries[:i], Block("linear"), *entries[i + 1 :])
        elif isinstance(entry, str) and entry != "train":
            yield (*entries[:i], "train", *entries[i + 1 :])
