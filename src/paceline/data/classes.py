"""Classes by name, so that a model's outputs keep their meaning on other data."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.system.files import printable

_SHOWN = 10


@dataclass(frozen=True)
class Class:
    id: str
    """Unique: a folder's name, or ImageNet's synset."""
    name: str
    """For people; two classes may share one."""


def match(model: Sequence[Class], data: Sequence[Class], origin: object, place: object) -> list[int]:
    """The model's index of every class of the data, by id or else by name; unknown classes are an error."""
    by_id = {_plain(own.id): number for number, own in enumerate(model)}
    times = Counter(_plain(own.name) for own in model)
    by_name = {name: number for number, own in enumerate(model) if times[name := _plain(own.name)] == 1}
    found = [by_id.get(_plain(own.id), by_name.get(_plain(own.name), -1)) for own in data]
    unknown = [own for own, number in zip(data, found, strict=True) if number < 0]
    if unknown or len(set(found)) < len(found):
        what = f"{len(unknown)} classes of {place} are unknown to it" if unknown else f"{place} has a class twice"
        raise UserError(
            f"{origin} was trained on other classes: {what}; the model knows {_listed(model)}; the data has "
            f"{_listed(data)}; rename the classes of the data to those of the model"
        )
    return found


def _plain(name: str) -> str:
    """Systems write accents as a part of a letter, or behind it."""
    return unicodedata.normalize("NFC", name)


def _listed(classes: Sequence[Class]) -> str:
    shown = ", ".join(own.name if own.name == own.id else f"{own.id} ({own.name})" for own in classes[:_SHOWN])
    return f"{len(classes)} ({printable(shown)}{', ...' if len(classes) > _SHOWN else ''})"
