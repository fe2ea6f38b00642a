"""Runs commands for the Python API in separate processes."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline import extensions
from paceline.api.notebook import live_view
from paceline.config.import_files import source_of
from paceline.config.io import dump_recipe
from paceline.config.recipe import Recipe
from paceline.errors import Stopped, UserError
from paceline.system.lifetime import child_env
from paceline.system.outcome import FILE, read_outcome

# variables of a launcher, and colors that notebooks enable: progress bars would flood a cell
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def run_in_processes(
    command: list[str], recipe: "str | Path | Recipe | None", words: list[str], procs: int
) -> dict[str, Any]:
    """Run a command in `procs` ranks, print its log lines, and return what it reported."""
    with _arguments(command, recipe, words, procs) as (arguments, outcome):
        # a notebook kernel may itself have been started by a launcher, whose variables must not apply here
        inherited = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
        environment = child_env(inherited | {FILE: str(outcome)} | _python_path(inherited))
        words = [sys.executable, "-m", "paceline", *arguments]
        with (
            subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process,
            live_view(outcome),
        ):
            assert process.stderr
            for line in process.stderr:
                print(line, end="", flush=True)
        found = read_outcome(outcome)
    if process.returncode in (130, 143):
        raise KeyboardInterrupt
    if process.returncode:
        raise _error(found, process.returncode)
    return found


@contextmanager
def _arguments(
    command: list[str], recipe: "str | Path | Recipe | None", words: list[str], procs: int
) -> Iterator[tuple[list[str], Path]]:
    """Yield the command line, and the file in which the command reports its result."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        given = [str(recipe)] if isinstance(recipe, str | Path) else []
        if isinstance(recipe, Recipe):
            path = Path(folder) / "recipe.yaml"
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            given = [str(path)]
            words = words if "--name" in words else [*words, "--name", recipe.name]
        imports = [word for name in extensions.modules() for word in ("--import", name)]
        yield [*command, *given, "--procs", str(procs), *words, *imports], Path(folder) / "outcome.json"


@contextmanager
def in_this_process() -> Iterator[None]:
    """Hide the variables of a launcher, and turn a stop after a signal into KeyboardInterrupt."""
    hidden = {name: os.environ.pop(name) for name in _NOT_INHERITED if name in os.environ}
    try:
        yield
    except Stopped:
        raise KeyboardInterrupt from None
    finally:
        os.environ.update(hidden)


def _python_path(inherited: Mapping[str, str]) -> dict[str, str]:
    """Let the processes find the modules that registered extensions here.

    They find those of the current folder by name: in PYTHONPATH, the folder would be trusted with all that it contains.
    """
    found = (source_of(name).parent for name in extensions.modules())
    folders = [str(folder) for folder in found if folder.resolve() != Path.cwd()]
    if not folders:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*dict.fromkeys(folders), inherited.get("PYTHONPATH", "")]))}


def _error(found: dict[str, Any], status: int) -> UserError:
    if error := found.get("error"):
        return UserError.from_json(error)
    return UserError("command-failed", f"the command ended with exit status {status}.", status=status)
