"""Runs trials: short trainings in new processes, on this machine or on all of several hosts together.

Rank 0 prints what it measures as lines of JSON. However a rank fails, it ends its trial on all ranks and hosts, and
cannot affect the next one.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.imports import trusted
from paceline.config.io import dump_recipe
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.launch.checks import extension_files
from paceline.launch.doctor import refuse_different_code
from paceline.launch.groups import CONSEQUENCES, Nodes, RankGroup, with_folders
from paceline.launch.ssh_errors import ssh_problem
from paceline.system.files import make_folder, write_text

_TIMEOUT = 900.0  # seconds without a line
_SSH_FAILED = 255
_VARIABLES = {"MALLOC_ARENA_MAX": "2"}
"""glibc reserves addresses for an arena per thread, which would count towards a limit on addresses."""


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    status: int
    """0, or the exit status of a node that failed."""
    error: UserError | None = None
    """What a rank reported."""
    output: str = ""
    """The last lines that the nodes printed to standard error."""
    reason: str = ""
    """Why it failed: the line that explains the others."""
    timed_out: bool = False


@dataclass(frozen=True)
class Trials:
    """What all trials of a search share."""

    nodes: Nodes
    recipe: str
    """The file of the recipe, on every node."""
    imports: Sequence[str]
    """Modules that may be in the folder in which the ranks start."""

    def run(self, command: str, words: Sequence[object], on_record: Callable[[dict[str, Any]], object]) -> Ended:
        """Run a trial; call a function with every line that rank 0 prints. HostError if a host is unreachable."""
        words = [command, self.recipe, *words, *(word for name in self.imports for word in ("--import", name))]
        errors: list[UserError] = []
        with RankGroup(self.nodes.commands(words, _VARIABLES)) as group:
            try:
                for line in group.lines(_TIMEOUT):
                    record = _parsed(line)
                    if "error" in record:
                        errors += _errors(record["error"])
                    elif record:
                        on_record(record)
            except TimeoutError as error:
                return Ended(1, reason=str(error), timed_out=True)
            for host, status, lines in zip(self.nodes.hosts, group.statuses, group.errors, strict=False):
                if status == _SSH_FAILED:
                    raise host.error(*ssh_problem(host.name, "\n".join(lines)))
            failed = next((status for status in group.statuses if status), 0)
            causes = [error for error in errors if error.code not in CONSEQUENCES] or errors
            output = "\n".join(line for lines in group.errors for line in lines)
            return Ended(failed, causes[0] if causes else None, output, group.reason)


def _parsed(line: str) -> dict[str, Any]:
    """Return the object in a line; {} for other lines, which user code may print."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _errors(values: Any) -> list[UserError]:
    """Return the error that a rank reported; nothing if it is invalid."""
    try:
        return [UserError.from_json(values)]
    except (KeyError, TypeError, ValueError):
        return []


@contextmanager
def prepared_trials(recipe: Recipe, folder: Path, nodes: Nodes, old: Sequence[str]) -> Iterator[Trials]:
    """Write the recipe to the folder of results, without `old` results, and to a folder of every host meanwhile."""
    text = dump_recipe(recipe)
    if nodes.hosts:
        refuse_different_code(nodes.hosts, nodes.python, with_this_machine=True)
    make_folder(folder)
    for name in old:
        (folder / name).unlink(missing_ok=True)
    write_text(folder / "recipe.yaml", text)
    if not nodes.hosts:
        yield Trials(nodes, str(folder / "recipe.yaml"), trusted())
        return
    files = {path: content.encode() for path, content in extension_files(recipe).items()}
    with with_folders(nodes, "trials", {**files, "recipe.yaml": text.encode()}) as placed:
        yield Trials(placed, "recipe.yaml", recipe.imports)
