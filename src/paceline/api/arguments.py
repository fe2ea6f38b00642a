"""Check the arguments of the Python API, as the parsers of the command line check options."""

import operator
import os
from pathlib import Path
from typing import Any, Literal

from paceline.errors import UserError
from paceline.system.files import is_file_name

Procs = int | Literal["auto"]
"""A number of processes; auto: one per visible GPU, and one on CPUs."""


def invalid(name: str, value: object, expected: str) -> UserError:
    """Return the error for an argument of the wrong type or value."""
    return UserError("invalid-argument", f"argument {name}={value!r:.80} is invalid. Give {expected}.", argument=name)


def check_count(name: str, value: Any) -> int:
    """Return a positive integer."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise invalid(name, value, "a positive integer")
    return number


def check_procs(name: str, value: Any) -> Procs:
    """Return a positive integer or "auto"."""
    return "auto" if value == "auto" else check_count(name, value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise invalid(name, value, " or ".join(map(repr, choices)))


def is_temperature(value: float) -> bool:
    """Return whether logits can be divided by a number without overflow; NaN is none."""
    return 1e-3 <= value <= 1e3


def check_usage(device: str, precision: str, tta: str, crop_pct: float = 0.0, temperature: float = 1.0) -> None:
    """Refuse invalid settings of a model in use. Empty, and 0: those of the model."""
    check_choice("device", device, ("auto", "cpu", "cuda", "mps"))
    check_choice("precision", precision, ("", "auto", "fp32", "bf16", "fp16"))
    check_choice("tta", tta, ("", "none", "flip", "flip-translate"))
    if not isinstance(crop_pct, int | float) or not 0 <= crop_pct <= 1:
        raise invalid("crop_pct", crop_pct, "a number from 0 to 1")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not is_temperature(temperature):
        raise invalid("temperature", temperature, "a number from 0.001 to 1000; 1 changes nothing")


def check_port(name: str, value: Any) -> int:
    """Return a port; 0: any free one."""
    if not isinstance(value, int) or not 0 <= value <= 65535:
        raise invalid(name, value, "a port from 0 to 65535")
    return value


def check_path(name: str, value: Any) -> Path:
    """Return a path."""
    if not isinstance(value, str | os.PathLike):
        raise invalid(name, value, "a path")
    return Path(value)


def check_page(name: str, value: Any) -> Path:
    """Return the path of a page that is to be written."""
    path = check_path(name, value)
    if path.is_dir():
        message = f"{path} is a folder. Give a file, e.g. {path / 'report.html'}."
        raise UserError("output-is-a-folder", message, path=path)
    if path.suffix.lower() not in (".html", ".htm"):  # it may be a log, or a file of a run
        message = f"{path}: reports are written as .html. Choose a name with that suffix."
        raise UserError("wrong-suffix", message, path=path)
    return path


def check_name(value: Any) -> str:
    """Return the name of a run; empty: that of its recipe."""
    if not isinstance(value, str) or (value and not is_file_name(value)):
        raise invalid("name", value, "a single folder name without slashes")
    return value
