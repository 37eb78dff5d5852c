"""Errors that a training job may want to catch by name, and words for their messages.

Wrong settings raise ``ValueError`` or ``TypeError`` at the call. The classes here are for modules that cannot be
replicated, and for failures later, between ranks or inside a backward. All of them are ``RuntimeError``, like those of
DistributedDataParallel.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist


def this_rank() -> str:
    """This process in messages: "rank 3", its global rank, or "this process" without a process group."""
    return f"rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else "this process"


def warning_level(process_group: dist.ProcessGroup) -> int:
    """The logging level of what every rank of a group would warn of: the first rank warns, the others inform."""
    return logging.WARNING if process_group.rank() == 0 else logging.INFO


def shorten_names(names: Sequence[str]) -> str:
    """Names for a message: all of a few, or the ends of a long list."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def number_of(count: int, what: str) -> str:
    """A count for a message: ``"1 bucket"``, ``"2 buckets"``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def with_article(name: str) -> str:
    """A name for a message, with its article: ``"a UserModel"``, ``"an OptimizedModule"``, ``"an Mlp"``."""
    begins_a_word = name[0] in "AEIOU" or any(letter in "aeiouy" for letter in name[1:3])
    is_spelled_out = name[0].isupper() and (name[1:2].isupper() or not begins_a_word)
    sounds_like_you = name[:3].lower() in ("eur", "une", "uni", "use", "usu", "uti")
    vowels = "AEFHILMNORSX" if is_spelled_out else "" if sounds_like_you else "AEIOUaeiou"
    return f"{'an' if name[0] in vowels else 'a'} {name}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Ascending ranks in few characters: "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def on_ranks(ranks: Iterable[int]) -> str:
    """As "on rank 2", "on ranks 0-1, 3"."""
    ranks = sorted(ranks)
    return f"on rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def name_values(values: Mapping[int, object]) -> str:
    """Which global ranks have which value, the fewest ranks first: "1 on rank 2, 0 on ranks 0-1, 3"."""
    ranks_of: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    rarest_first = sorted(ranks_of.items(), key=lambda item: (len(item[1]), item[1]))
    return ", ".join(f"{value} {on_ranks(ranks)}" for value, ranks in rarest_first)


class DDPCompileError(RuntimeError):
    """Base of the errors that ddp_compile raises while a job runs."""


class ReplicationError(DDPCompileError, ValueError):
    """The module cannot be replicated, or not over these ranks, or not inside another wrapper; names the reason."""


class ParametersChangedError(DDPCompileError):
    """The parameters are not those that were replicated: added, replaced or converted since; names them."""


class RanksDifferError(DDPCompileError):
    """The ranks were given different models or comm hooks, or got out of step; names ranks and difference."""


class MissingGradientError(DDPCompileError):
    """A backward ended although some parameters had no gradient; names them."""


class ReductionError(DDPCompileError):
    """A collective failed or timed out; names the bucket or the tensors that this rank waited for."""


class GradientArrivalError(DDPCompileError):
    """A gradient arrived twice, or after its bucket had been launched; names the parameter."""


class CompilationError(DDPCompileError):
    """A graph would be compiled into wrong gradients; names it."""


class KernelUnavailableError(DDPCompileError):
    """An implementation of the kernels cannot be used here; says why. Not raised unless it was asked for by name."""
