"""Finds and imports the modules of a recipe, which register extensions, and checks the names that they register.

A recipe may be untrusted, so it cannot run code of the current folder: only modules that the command line names with
--import are found there. Nothing is imported before that is checked, not even a parent package.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

from paceline.config.io import split_overrides
from paceline.config.problems import unknown_names
from paceline.config.recipe import Recipe
from paceline.errors import USER_CODE_ERRORS, UserError


class _NamedModules(MetaPathFinder):
    """Finds the top-level modules that the command line names in the folder in which it names them."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self.folders.get(name)
        return PathFinder.find_spec(name, [folder, *sys.path]) if folder else None


_named = _NamedModules()


def allow_given(overrides: Sequence[str]) -> None:
    """Let the modules that the command line names with --import be found in the current folder."""
    trust(module for key, modules in split_overrides(overrides) if key == "import" for module in modules)


def trust(modules: Iterable[str]) -> None:
    """Let these modules, or the packages that contain them, be found in the current folder; no others."""
    _named.folders |= {module.partition(".")[0]: os.getcwd() for module in modules}
    if _named.folders and _named not in sys.meta_path:
        sys.meta_path.insert(0, _named)


def trusted() -> list[str]:
    """Return the top-level modules that may be in the current folder."""
    return list(_named.folders)


def load_imports(recipe: Recipe) -> None:
    """Import the modules of a recipe. UserError for names that are neither built in nor registered."""
    load_modules(recipe.imports)
    for error in unknown_names(recipe):
        raise error


def load_modules(modules: Iterable[str]) -> None:
    """Import modules, which register extensions."""
    for module in modules:
        _load_module(module)


def _load_module(module: str) -> None:
    """Import a module, which registers its extensions. UserError if that fails."""
    if module in sys.modules:
        return
    spec = find_top_level(module)
    place = spec.origin or "a package without __init__.py"
    try:
        with _without_current_folder():
            import_module(module)
    except UserError:
        raise
    except USER_CODE_ERRORS as error:  # a script without a main guard may call sys.exit
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise _not_found(module) from None
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        fix = f"Install {missing}; a module next to yours needs --import {missing} as well" if missing else "Fix it"
        message = f"importing {module} ({place}) failed: {reason}. {fix}."
        # the cause tells a launch that the nodes may have what is missing; they do not have what only this folder has
        raise UserError("import-failed", message, module=module) from None if _is_here(missing) else error


def _is_here(module: str | None) -> bool:
    return bool(module and PathFinder.find_spec(module.partition(".")[0], [os.getcwd()]))


def find_top_level(module: str) -> ModuleSpec:
    """Return where the top-level module or package of a module is, without importing anything."""
    top = module.partition(".")[0]
    if not all(part.isidentifier() for part in module.split(".")):
        raise _not_found(module)
    with _without_current_folder():
        spec = _spec(top)
    if spec:
        return spec
    if found := PathFinder.find_spec(top, [os.getcwd()]):
        message = (
            f"imports: {module} is in the current folder, {found.origin or os.path.join(os.getcwd(), top)}. If you "
            f"trust it, name it on the command line: --import {module}. Or install it, or set PYTHONPATH."
        )
        raise UserError("import-not-trusted", message, module=module)
    raise _not_found(module)


def _spec(top: str) -> ModuleSpec | None:
    try:
        return find_spec(top)
    except ValueError:  # __main__ has none
        return None


def _not_found(module: str) -> UserError:
    message = (
        f"module {module!r} is not found. Install its package, or set PYTHONPATH to the folder that contains it; "
        "modules in the current folder are found if --import names them."
    )
    return UserError("import-not-found", message, module=module)


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Do not search the current folder, which Python does for `python -m`, unless PYTHONPATH contains it."""
    here, given = os.path.realpath("."), filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if here in map(os.path.realpath, given):
        yield
        return
    before = sys.path[:]
    sys.path[:] = [entry for entry in before if os.path.realpath(entry or ".") != here]
    try:
        yield
    finally:
        sys.path[:] = before
