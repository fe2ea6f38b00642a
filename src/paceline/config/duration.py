"""Durations carry their unit: "10ep" (epochs), "500ba" (optimizer steps), "90s" (seconds).

They stay text in the recipe, so that YAML, command line and run record show what the user wrote, and are turned
into steps by the Timeline, when the dataset's size is known.
"""

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator

Unit = Literal["ep", "ba", "s"]
_PATTERN = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(ep|ba|s)")
_CURE = 'write a number and a unit: "10ep" (epochs), "500ba" (steps)'


class Amount(NamedTuple):
    value: float
    unit: Unit


def parse(text: str) -> Amount:
    match = _PATTERN.fullmatch(text)
    if not match:
        raise ValueError(_CURE)
    return Amount(float(match[1]), match[2])  # type: ignore[arg-type]


def text_of(value: float, unit: Unit) -> str:
    """What `parse` reads as the same amount."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + unit


def _check(text: object) -> str:
    if not isinstance(text, str):
        raise ValueError(_CURE)
    parse(text)
    return text


def _check_interval(text: object) -> str:
    try:
        text = _check(text)
    except ValueError:
        raise ValueError(f'{_CURE} or "90s" (seconds)') from None
    return _not_zero(text)


def _not_zero(text: str) -> str:
    if not parse(text).value:
        raise ValueError('zero is no interval; for "never" write more than the whole training, e.g. "100000ep"')
    return text


def _check_steps(text: object) -> str:
    text = _check(text)
    if parse(text).unit == "s":
        raise ValueError('seconds are not possible here, since the schedule must know its end; use "10ep" or "500ba"')
    return text


Interval = Annotated[str, BeforeValidator(_check_interval)]
StepDuration = Annotated[str, BeforeValidator(_check_steps)]
StepInterval = Annotated[str, BeforeValidator(lambda text: _not_zero(_check_steps(text)))]
