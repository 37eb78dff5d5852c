"""Frozen dataclasses from JSON documents, checked against their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from textwrap import shorten
from types import MappingProxyType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

DataT = TypeVar("DataT")


def from_document(
    cls: type[DataT], document: Any, where: str, known: Mapping[str, Any] = MappingProxyType({})
) -> DataT:
    """A dataclass of dataclasses, tuples, strings, numbers and None from what ``json.loads`` returned.

    Args:
        cls: The dataclass.
        document: The document.
        where: Its name in errors.
        known: Fields that are not in the document, with their values.

    Raises:
        ValueError: A field is missing, unknown, or of another type.
    """
    expected = {field.name for field in fields(cls)} - known.keys()  # type: ignore[arg-type]
    if not isinstance(document, dict) or document.keys() != expected:
        raise ValueError(f"{where} is {shorten(repr(document), 80)}, not an object with the keys {sorted(expected)}")
    kinds = get_type_hints(cls)
    values = {name: _checked(kinds[name], value, f"{name} of {where}") for name, value in document.items()}
    return cls(**values, **known)


def _checked(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return from_document(kind, value, where)
    if get_origin(kind) is UnionType:  # with None
        (other,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _checked(other, value, where)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_checked(get_args(kind)[0], each, where) for each in value)
    if type(value) is not kind:  # True is an int
        raise ValueError(f"{where} is {shorten(repr(value), 80)}, not of type {getattr(kind, '__name__', kind)}")
    return value
