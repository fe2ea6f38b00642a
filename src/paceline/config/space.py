"""The search space of a sweep: which values each field of a recipe may take.

optim.lr=0.1,0.2,0.5           a choice of values
optim.lr=0.1..0.5              a range, of integers if the field is an integer
train.global_batch=64..512:64  a range in steps
optim.lr=log:0.01..1           a range, uniform in the logarithm
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any

import yaml

from paceline.config import yamls
from paceline.config.io import recipe_from_tree, to_tree
from paceline.config.overrides import type_at, words_of
from paceline.config.recipe import Recipe
from paceline.errors import UserError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER}?)\.\.({_NUMBER})(?::({_NUMBER}))?")
_FORMS = "Write values (0.1,0.2), a range (0.1..1), a range in steps (64..512:64) or a logarithmic one (log:0.01..1)"
_MAX_GRID = 100_000
Value = float | str
"""A number, or the YAML text of a choice."""


@dataclass(frozen=True)
class Choice:
    """One of several values, as YAML texts."""

    field: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        return ",".join(self.values)

    @property
    def extremes(self) -> tuple[str, ...]:
        """Values that the recipe must accept."""
        return self.values

    def word(self, value: Value) -> str:
        """Return a value as the command line has it."""
        return str(value)

    def grid(self) -> list[Value]:
        """Return all values; an empty list if they cannot be listed."""
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included."""

    field: str
    low: float
    high: float
    step: float | None = None
    log: bool = False
    integer: bool = False

    @property
    def text(self) -> str:
        step = f":{_short(self.step)}" if self.step and not (self.integer and self.step == 1) else ""
        return f"{'log:' * self.log}{_short(self.low)}..{_short(self.high)}{step}"

    @property
    def extremes(self) -> tuple[str, ...]:
        return self.word(self.low), self.word(self.high)

    def word(self, value: Value) -> str:
        return str(int(value)) if self.integer else repr(float(value))

    def grid(self) -> list[Value]:
        if not self.step:
            return []
        low, step = Decimal(repr(self.low)), Decimal(repr(self.step))
        count = int((Decimal(repr(self.high)) - low) / step) + 1
        if count > _MAX_GRID:
            return []
        values = [low + number * step for number in range(count)]
        return [int(value) if self.integer else float(value) for value in values]


def _short(value: float) -> str:
    return repr(value).removesuffix(".0")


Dimension = Choice | Range


def parse_space(settings: Sequence[str]) -> list[Dimension]:
    """Return the search space of the values of --set."""
    found: dict[str, Dimension] = {}
    for setting in settings:
        field, equals, text = setting.partition("=")
        if not (field and equals and text.strip()):
            raise _invalid(
                setting, "the field or the values are missing", "Write FIELD=VALUES, e.g. optim.lr=log:0.01..1"
            )
        if (name := field.replace("-", "_")) in found:
            message = f"--set {setting}: {name} is given twice. Give each field once, with all of its values."
            raise UserError("field-swept-twice", message, field=name)
        found[name] = _parse(name, text.strip(), setting)
    if not found:
        message = "no field to search is given. Add one, e.g. --set optim.lr=log:0.01..1."
        raise UserError("missing-search-space", message)
    return list(found.values())


def space_words(space: Mapping[str, Any]) -> list[str]:
    """Return a space that is given in Python, {"optim.lr": "log:0.01..1", "seed": [1, 2]}, as values of --set."""
    words = []
    for field, values in space.items():
        if isinstance(values, str):
            words.append(f"{field}={values}")
            continue
        if not isinstance(values, list | tuple):
            raise _invalid(f"{field}={values!r:.60}", "it is neither a list nor a string", _FORMS)
        words.append(f"{field}={words_of({field: list(values)})[1].removeprefix('[').removesuffix(']')}")
    return words


def _parse(field: str, text: str, setting: str) -> Dimension:
    if match := _RANGE.fullmatch(text):
        return _range(field, match, setting)
    if text.startswith("log:") or re.search(r"\d\.\.|\.\.\d", text):
        raise _invalid(setting, "it is not a range of numbers", _FORMS)
    try:
        values = yamls.parse(f"[{text}]")
    except yaml.YAMLError:
        raise _invalid(setting, "the values are not valid YAML", "Check its quotes and brackets") from None
    words = tuple(words_of({field: value})[1] for value in values)
    if repeated := [word for number, word in enumerate(words) if word in words[:number]]:
        raise _invalid(setting, f"{repeated[0]} is given twice", "Give each value once")
    if len(words) == 1:
        message = f"--set {setting}: there is only one value. Use --{field} {text} instead of --set, or add values."
        raise UserError("empty-range", message, field=field)
    return Choice(field, words)


def _range(field: str, match: re.Match[str], setting: str) -> Range:
    log, step = bool(match[1]), match[4]
    low, high = float(match[2]), float(match[3])
    whole = all("." not in word and "e" not in word.lower() for word in (match[2], match[3], step or "1"))
    kind = type_at(field)
    number = getattr(kind, "__origin__", kind)  # types of numbers are annotated with their limits
    integer = whole and number is not float
    if number is int and not whole:
        raise _invalid(setting, "the field takes whole numbers", "Write its numbers without a point or exponent")
    if not (math.isfinite(low) and math.isfinite(high)) or low >= high:
        message = f"--set {setting}: the range is empty. The first number must be lower than the second."
        raise UserError("empty-range", message, field=field)
    if log and low <= 0:
        message = f"--set {setting}: a logarithmic range must start above zero. Write e.g. log:1e-4..{match[3]}."
        raise UserError("log-range-not-positive", message, field=field)
    if log and step:
        raise _invalid(setting, "a logarithmic range cannot have a step", "Omit the step, or list the values")
    if step and not 0 < float(step) <= high - low:
        message = f"--set {setting}: the step {step} does not fit into the range. Use a smaller step above zero."
        raise UserError("empty-range", message, field=field)
    chosen = float(step) if step else 1.0 if integer and not log else None
    if chosen:  # the highest value is a whole number of steps away
        steps = math.floor((Decimal(repr(high)) - Decimal(repr(low))) / Decimal(repr(chosen)))
        high = float(Decimal(repr(low)) + steps * Decimal(repr(chosen)))
    return Range(field, low, high, chosen, log, integer)


def _invalid(setting: str, problem: str, fix: str) -> UserError:
    return UserError("invalid-search-space", f"--set {setting}: {problem}. {fix}.", setting=setting)


def check_space(recipe: Recipe, space: Sequence[Dimension], given: Collection[str] = ()) -> list[Recipe]:
    """Refuse a space with values that the recipe does not accept. All choices and both ends of ranges are checked.

    `given`: fields that are overridden. Returns the recipes that were checked.
    """
    for dimension in space:
        if dimension.field in given:
            message = f"{dimension.field} is given by --set and as --{dimension.field}. Omit one of them."
            raise UserError("conflicting-options", message, option=dimension.field)
    first = {dimension.field: dimension.extremes[0] for dimension in space}
    return [
        recipe_from_tree(to_tree(recipe), recipe.name, override_words(first | {dimension.field: word}))
        for dimension in space
        for word in dimension.extremes
    ]


def override_words(values: Mapping[str, str]) -> list[str]:
    """Return values by field as overrides of the command line."""
    return [f"--{field}={word}" for field, word in values.items()]


def grid_of(space: Sequence[Dimension]) -> dict[str, list[Value]]:
    """Return all values of each field, for a grid; UserError if a range has no steps, or the grid is huge."""
    found = {dimension.field: dimension.grid() for dimension in space}
    for dimension in space:
        if not found[dimension.field]:
            message = (
                f"--sampler grid needs a finite number of values, but {dimension.field}={dimension.text} is a range. "
                "List the values, or give the range a step: 0.1..0.5:0.1."
            )
            raise UserError("grid-needs-steps", message, field=dimension.field)
    if (size := math.prod(map(len, found.values()))) > _MAX_GRID:
        message = f"the grid has {size:,} points, more than {_MAX_GRID:,}. Give fewer values, or use --sampler tpe."
        raise UserError("grid-too-large", message, size=size)
    return found


def points(grid: Mapping[str, Sequence[Value]]) -> Iterator[dict[str, Value]]:
    """Yield the points of a grid."""
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))
