"""Frozen dataclasses from JSON documents, checked against their annotations."""

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from textwrap import shorten
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ddp_compile.errors import with_article

DataT = TypeVar("DataT")

#: A report has thousands of objects of one class.
_types_of = functools.cache(get_type_hints)


def from_document(
    cls: type[DataT], document: Any, where: str, known: Mapping[str, Any] = MappingProxyType({})
) -> DataT:
    """Build a dataclass from what ``json.loads`` returned; a ValueError says which field is missing, unknown or wrong.

    Args:
        cls: The dataclass. Its fields are dataclasses, tuples, strings, literals, integers from 0 on, floats or None.
        document: The document.
        where: Name of the document in errors, such as "plan" in "plan.buckets[1].frame".
        known: Values of fields that are not in the document.
    """
    expected = {field.name for field in fields(cls)} - known.keys()  # type: ignore[arg-type]
    if not isinstance(document, dict):
        raise _wrong(where, document, f"an object with the keys {sorted(expected)}")
    if missing := sorted(expected - document.keys()):
        raise ValueError(f"{where} lacks {missing}")
    if unknown := sorted(document.keys() - expected):
        raise ValueError(f"{where} has {unknown}, which this version of ddp_compile does not know")
    kinds = _types_of(cls)  # type: ignore[arg-type]
    values = {name: _checked(kinds[name], value, f"{where}.{name}") for name, value in document.items()}
    return cls(**values, **known)


def _checked(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return from_document(kind, value, where)
    if get_origin(kind) is UnionType:  # with None
        (other,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _checked(other, value, where)
    if get_origin(kind) is tuple:
        return _checked_tuple(get_args(kind), value, where)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise _wrong(where, value, f"one of {get_args(kind)}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # True is an int
        raise _wrong(where, value, with_article(kind.__name__))
    if kind is int and value < 0:
        raise _wrong(where, value, "at least 0")
    return value


def _checked_tuple(kinds: tuple[Any, ...], values: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise _wrong(where, values, "a list")
    if kinds[1:] == (...,):
        return tuple(_checked(kinds[0], value, f"{where}[{i}]") for i, value in enumerate(values))
    if len(values) != len(kinds):
        raise _wrong(where, values, f"a list of {len(kinds)} items")
    return tuple(_checked(kinds[i], value, f"{where}[{i}]") for i, value in enumerate(values))


def _wrong(where: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{where} is {shorten(repr(value), 80)}, not {expected}")
