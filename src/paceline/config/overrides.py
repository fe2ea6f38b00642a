"""Overrides of recipe fields that are given in Python, and how overrides of groups are merged."""

import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_origin

from paceline.config import yamls
from paceline.config.recipe import Recipe
from paceline.errors import UserError

Overrides = Mapping[str, Any]
"""Values by dotted field: {"optim.lr": 0.2, "model.options": {"width": 64}}."""
_KEY = re.compile(r"[A-Za-z][^=\s]*")


def words_of(overrides: Overrides | None) -> list[str]:
    """Return overrides as options of the command line, which reads the same values from them."""
    if overrides is None:
        return []
    if not isinstance(overrides, Mapping):
        message = f'overrides={overrides!r:.60} is not a dictionary. Write e.g. {{"optim.lr": 0.2}}.'
        raise UserError("invalid-override", message)
    words = []
    for key, value in overrides.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            message = f'overrides: the key {key!r:.60} is not the name of a field. Write e.g. {{"optim.lr": 0.2}}.'
            raise UserError("invalid-override", message, key=str(key))
        words += [f"--{key}", _word(_plain(key, value))]
    return words


def _word(value: Any) -> str:
    word = yamls.dump_line(value)
    if isinstance(value, str) and word.startswith("-"):  # it would be read as an option
        return yamls.dump_line(value, quoted=True)
    return word


def _plain(key: str, value: Any) -> Any:
    """Return a value of the types that YAML has; numbers of numpy, 0-d tensors, paths and tuples are converted."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{key}.{index}", inner) for index, inner in enumerate(value)]
    if getattr(value, "ndim", None) == 0 and type(number := value.item()) in (bool, int, float, str):
        return number
    message = (
        f"overrides: {key} is of the type {type(value).__name__}, which a recipe cannot store. "
        "Use a number, string, list or dictionary."
    )
    raise UserError("invalid-override", message, key=key)


def overlay(old: Any, new: Any, kind: Any) -> Any:
    """Return `new` in place of `old`; a group (`kind` is its dataclass) is merged field by field."""
    if not (is_dataclass(kind) and isinstance(old, dict) and isinstance(new, dict)):
        return new
    kinds = {field.name: field.type for field in fields(kind)}
    return old | {key: overlay(old.get(key), value, kinds.get(key)) for key, value in new.items()}


def type_at(dotted: str) -> Any:
    """Return the type of a field or group; None if there is no such field."""
    kind: Any = Recipe
    for name in dotted.split("."):
        kind = {field.name: field.type for field in fields(kind)}.get(name) if is_dataclass(kind) else None
    return kind


def without_nulls(tree: dict[str, Any], kind: Any = Recipe) -> dict[str, Any]:
    """Return a tree without groups and option dictionaries that are null, which thereby get their defaults."""
    kinds = {field.name: field.type for field in fields(kind)}
    groups = {name for name, kind in kinds.items() if is_dataclass(kind)}
    optional = groups | {name for name, kind in kinds.items() if get_origin(kind) is dict}
    return {
        key: without_nulls(value, kinds[key]) if key in groups and isinstance(value, dict) else value
        for key, value in tree.items()
        if not (value is None and key in optional)
    }
