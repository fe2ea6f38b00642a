"""Durations carry their unit: "10ep" (epochs), "500ba" (optimizer steps), "90s" (seconds).

A recipe keeps them as text, so that YAML, command line and run records show what the user wrote. The Timeline converts
them to steps once the size of the dataset is known.
"""

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from paceline.errors import UserError

Unit = Literal["ep", "ba", "s"]
CODES = ("invalid-duration", "zero-interval", "seconds-not-allowed")
"""Codes of the problems that a duration can have."""
_PATTERN = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(ep|ba|s)")
_FIX = 'write a number and a unit: "10ep" (epochs) or "500ba" (steps)'
_INTERVAL_FIX = 'write a number and a unit: "10ep" (epochs), "500ba" (steps) or "90s" (seconds)'


class Amount(NamedTuple):
    value: float
    unit: Unit


def parse(text: str) -> Amount:
    """The value and unit of a duration; ValueError if the text is not one."""
    match = _PATTERN.fullmatch(text)
    if not match:
        raise PydanticCustomError("invalid-duration", _FIX)
    return Amount(float(match[1]), match[2])  # type: ignore[arg-type]


def text_of(value: float, unit: Unit) -> str:
    """Text that `parse` reads as the same amount."""
    return f"{value:.9f}".rstrip("0").rstrip(".") + unit


def _check(text: object) -> str:
    if not isinstance(text, str):
        raise PydanticCustomError("invalid-duration", _FIX)
    parse(text)
    return text


def _check_interval(text: object) -> str:
    try:
        text = _check(text)
    except PydanticCustomError:
        raise PydanticCustomError("invalid-duration", _INTERVAL_FIX) from None
    return _not_zero(text)


def _not_zero(text: str) -> str:
    if not parse(text).value:
        raise PydanticCustomError(
            "zero-interval", 'an interval must be above zero; to disable it, exceed train.duration, e.g. "100000ep"'
        )
    return text


def _check_steps(text: object) -> str:
    text = _check(text)
    if parse(text).unit == "s":
        raise PydanticCustomError(
            "seconds-not-allowed",
            'seconds are not allowed here, because the schedule needs a known end; write "10ep" or "500ba"',
        )
    return text


def check_steps(option: str, text: str) -> None:
    """UserError if the value of an option is not a number of epochs or steps above zero."""
    try:
        _not_zero(_check_steps(text))
    except PydanticCustomError as error:
        raise UserError(error.type, f"{option} {text}: {error.message()}.", option=option) from None


Interval = Annotated[str, BeforeValidator(_check_interval)]
StepDuration = Annotated[str, BeforeValidator(_check_steps)]
StepInterval = Annotated[str, BeforeValidator(lambda text: _not_zero(_check_steps(text)))]
