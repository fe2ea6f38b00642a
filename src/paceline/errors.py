"""The one exception that the command line shows as a plain message instead of a traceback."""

from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right: the message names the key or file, the value and the cure."""


class ConfigError(UserError):
    """Every problem found in a recipe, raised at once."""

    def __init__(self, origin: str, problems: Iterable[str]):
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{origin}: {count} problem{'s' if count > 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


class NoRunFolder(UserError):
    """A job that ended, or has not come, before there was anything to bring home."""


class Stopped(Exception):
    """Training ended early on a signal, after a committed checkpoint; carries the exit status."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(f"stopped by signal {signum}")

    @property
    def exit_status(self) -> int:
        return 128 + self.signum
