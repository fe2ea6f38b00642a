"""Runs commands for the Python API in separate processes."""

import os
import signal
import subprocess
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
from paceline.errors import UserError
from paceline.system.lifetime import own_command, training_env
from paceline.system.outcome import FILE, read_outcome
from paceline.system.signals import STOPPED


def run_in_processes(command: list[str], recipe: Recipe | None, words: list[str], procs: int | str) -> dict[str, Any]:
    """Run a command in `procs` ranks, print its log lines, and return what it reported.

    KeyboardInterrupt is raised after the command has stopped, with a checkpoint.
    """
    with _arguments(command, recipe, words, procs) as (arguments, outcome):
        # a notebook kernel may itself have been started by a launcher, whose variables must not apply here
        environment = training_env({FILE: str(outcome)} | python_path(os.environ))
        with subprocess.Popen(
            own_command(*arguments),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,  # Ctrl-C reaches this process only, which forwards it once: a second one ends it at once
        ) as process:
            try:
                with live_view(outcome):
                    interrupted = _follow(process)
            except BaseException:
                process.kill()
                raise
        found = read_outcome(outcome)
    if interrupted or process.returncode in STOPPED:
        raise KeyboardInterrupt
    if process.returncode:
        raise _error(found, process.returncode)
    return found


def _follow(process: "subprocess.Popen[str]") -> bool:
    """Print the lines of a command until it ends; return whether it was interrupted."""
    interrupted = False
    assert process.stderr
    while True:
        try:
            for line in process.stderr:
                print(line, end="", flush=True)
            process.wait()
            return interrupted
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            interrupted = True


@contextmanager
def _arguments(
    command: list[str], recipe: Recipe | None, words: list[str], procs: int | str
) -> Iterator[tuple[list[str], Path]]:
    """Yield the command line, and the file in which the command reports its result."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        given = []
        if recipe:
            path = Path(folder) / "recipe.yaml"
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            given = [str(path), *words_of_imports(recipe)]
        yield [*command, *given, "--procs", str(procs), *words], Path(folder) / "outcome.json"


def words_of_imports(recipe: Recipe) -> list[str]:
    """Return options that import the modules of this process which registered what the recipe uses."""
    names = {
        "model": [recipe.model.name],
        "dataset": [recipe.data.name],
        "augmentation": recipe.data.augment.custom,
        "loss": [recipe.train.loss],
        "optimizer": [recipe.optim.name],
        "schedule": [recipe.optim.schedule.name],
        "callback": recipe.callbacks,
    }
    used = [found for kind, listed in names.items() for name in listed if (found := extensions.find(kind, name))]
    modules = {extension.call.__module__: extension for extension in used}
    if (local := modules.pop("__main__", None)) and not recipe.imports:
        message = (
            f"{local.kind} {local.name!r} is registered in this script or notebook, which other processes cannot "
            "import. Move it to a module and import that, or train with in_process=True."
        )
        raise UserError("extension-not-importable", message, kind=local.kind, name=local.name)
    return [word for module in modules for word in ("--import", module)]


def python_path(inherited: Mapping[str, str]) -> dict[str, str]:
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
    message = f"the command ended with exit status {status}. The lines above say why."
    return UserError("command-failed", message, status=status)
