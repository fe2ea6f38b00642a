"""Errors that the command line prints as a message instead of a traceback."""

import json
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

USER_CODE_ERRORS = (Exception, SystemExit)
"""What user code may raise. A call of sys.exit in it must not end training as if it had succeeded."""
_NOT_USER_CODE = {"paceline", "torch", "timm", "numpy", "PIL"} | sys.stdlib_module_names


def raised(error: BaseException, inside: str = "") -> str:
    """Return e.g. "raised KeyError in on_step: 'x' (/home/me/nets.py:12)", with the innermost line of user code."""
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [entry for entry in frames if str(entry[0].f_globals.get("__name__")).split(".")[0] not in _NOT_USER_CODE]
    lines = [f" ({frame.f_code.co_filename}:{line})" for frame, line in own or frames]
    text = " ".join(str(error).split())[:200]
    kind = type(error).__name__ + (f" in {inside}" if inside else "")
    return f"raised {kind}{f': {text}' if text else ''}{''.join(lines[-1:])}"


class UserError(Exception):
    """An error that the user can fix. The message names the file or key, the value and the fix.

    `code` is stable: programs and tests rely on it and on `fields`, never on the wording.
    """

    def __init__(self, code: str, message: str, **fields: object):
        super().__init__(code, message)  # so that it can be pickled
        self.code = code
        self.fields = fields

    def __str__(self) -> str:
        return str(self.args[1])

    @property
    def report(self) -> str:
        """The message with its code, as printed."""
        return f"{self} [{self.code}]"

    def to_json(self) -> dict[str, Any]:
        """Return the error for another process. Fields that JSON has no type for, such as paths, become strings."""
        return {"code": self.code, "message": str(self), "fields": json.loads(json.dumps(self.fields, default=str))}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "UserError":
        """Return the error of another process."""
        code, message, fields = (values[key] for key in ("code", "message", "fields"))
        if code == "invalid-recipe":
            return ConfigError(fields["origin"], (Problem(*problem) for problem in fields["problems"]))
        return UserError(code, message, **fields)


class Problem(NamedTuple):
    """One of several problems of a recipe."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"


class ConfigError(UserError):
    """Every problem found in a recipe, raised at once."""

    def __init__(self, origin: str, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        plural = "s" if count > 1 else ""
        super().__init__(
            "invalid-recipe", f"{origin}: {count} problem{plural}{lines}", origin=origin, problems=self.problems
        )
        self.origin = origin

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, tuple[Problem, ...]]]:
        return ConfigError, (self.origin, self.problems)

    @property
    def report(self) -> str:
        return str(self)  # every problem has its own code


class NoRunFolder(UserError):
    """A job that ended, or never started, before it had a run folder to fetch."""


class Stopped(Exception):
    """Training ended early on a signal, after a committed checkpoint; carries the exit status."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(f"stopped by signal {signum}")

    @property
    def exit_status(self) -> int:
        return 128 + self.signum
