"""Extension points: user-defined models, datasets, augmentations, losses, optimizers, schedules and callbacks.

    # my_package/nets.py
    import paceline as pl

    @pl.register_model("my-net")
    def my_net(num_classes: int, in_chans: int, width: int = 32) -> nn.Module: ...

    paceline train digits --import my_package.nets --model.name my-net --model.options '{width: 64}'

`imports: [my_package.nets]` in a recipe does the same. Importing the module registers its extensions.
"""

import difflib
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import UserError

T = TypeVar("T", bound=Callable[..., Any])

SIGNATURES = {
    "model": "(num_classes, in_chans, **options) -> nn.Module",
    "dataset": '(split="train"|"val", **options) -> an object with __len__, classes, and __getitem__ -> '
    "(PIL image or uint8 array, label)",
    "augmentation": "(image, rng, **options) -> uint8 array (height, width, channels) of the same shape",
    "loss": "(logits, targets, **options) -> the mean over the batch, a scalar tensor",
    "optimizer": "(params, lr, **options) -> torch.optim.Optimizer",
    "schedule": "(step, total_steps, **options) -> factor on optim.lr",
    "callback": "(**options) -> paceline.Callback",
}
"""How an extension of each kind is called, and what it returns."""
_MAX_LISTED = 5  # files in a message


@dataclass(frozen=True)
class Extension:
    kind: str
    name: str
    call: Callable[..., Any]

    @property
    def where(self) -> str:
        """The module and function, for messages."""
        return f"{self.call.__module__}.{self.call.__qualname__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; an exception in it becomes an error that names it."""
        try:
            return self.call(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            raise self.error(f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    def error(self, problem: str) -> UserError:
        """Return an error that names the function, the problem and what is expected."""
        expected = f"It is called as {SIGNATURES[self.kind]}."
        message = f"{self.where}, registered as {self.kind} {self.name!r}, {problem}. {expected}"
        return UserError("extension-failed", message, kind=self.kind, name=self.name, where=self.where)


_registered: dict[tuple[str, str], Extension] = {}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Return a decorator that registers a function or class under a name."""
    if not isinstance(name, str) or not name or not name.isprintable():
        message = f"register_{kind}({name!r}): the name is not a non-empty printable string."
        raise UserError("invalid-extension-name", message, kind=kind)

    def decorate(call: T) -> T:
        if not callable(call):
            message = f"register_{kind}({name!r}) is used on {call!r}. Use it on a function {SIGNATURES[kind]}."
            raise UserError("invalid-extension", message, kind=kind, name=name)
        new, old = Extension(kind, name, call), _registered.get((kind, name))
        if old and old.where != new.where:  # equal: a notebook cell that ran again
            message = f"{kind} {name!r} is registered by both {old.where} and {new.where}. Rename one."
            raise UserError("extension-name-taken", message, kind=kind, name=name)
        _registered[kind, name] = new
        return call

    return decorate


def register_model(name: str) -> Callable[[T], T]:
    """Register a model: `(num_classes, in_chans, **options) -> nn.Module`; options are `model.options`."""
    return register("model", name)


def register_dataset(name: str) -> Callable[[T], T]:
    """Register a dataset: `(split, **options)` returns a map-style dataset with `classes`; options: `data.options`.

    Items are (PIL image or uint8 array, label) and must not depend on the order or the number of reads. Several threads
    read at once; set `data.decode_threads: 1` if that is not safe.
    """
    return register("dataset", name)


def register_augmentation(name: str) -> Callable[[T], T]:
    """Register an augmentation: `(image, rng, **options)` returns an array of the same shape.

    Images are uint8 arrays (height, width, channels) after cropping and resizing. All randomness must come from `rng`,
    a numpy Generator that depends only on seed, epoch and sample. A recipe lists augmentations with their options in
    `data.augment.custom`, in the order in which they are applied.
    """
    return register("augmentation", name)


def register_loss(name: str) -> Callable[[T], T]:
    """Register a loss: `(logits, targets, **options)` returns the mean over the batch; options: `train.loss_options`.

    Targets are labels (int64), or class probabilities with mixup or cutmix.
    """
    return register("loss", name)


def register_optimizer(name: str) -> Callable[[T], T]:
    """Register an optimizer: `(params, lr, **options)`; params are parameter groups, options `optim.options`."""
    return register("optimizer", name)


def register_schedule(name: str) -> Callable[[T], T]:
    """Register a schedule: `(step, total_steps, **options)` returns the factor on `optim.lr`.

    Options are `optim.schedule.options`. It must be a pure function: a resumed run calls it for later steps only.
    """
    return register("schedule", name)


def register_callback(name: str) -> Callable[[T], T]:
    """Register a class derived from `paceline.Callback`; a recipe lists callbacks with their options in `callbacks`."""
    return register("callback", name)


def find(kind: str, name: str) -> Extension | None:
    """Return a registered extension."""
    return _registered.get((kind, name))


def names(kind: str) -> list[str]:
    """Return the names of all extensions of a kind."""
    return [name for found, name in _registered if found == kind]


def modules() -> list[str]:
    """Return the modules that registered extensions, without `__main__`, which other processes cannot import."""
    found = dict.fromkeys(extension.call.__module__ for extension in _registered.values())
    return [name for name in found if name != "__main__"]


def unknown(kind: str, key: str, name: str, built_in: Iterable[str]) -> UserError:
    """Return the error for a name that is neither built in nor registered."""
    known = [entry for entry in (*built_in, *names(kind)) if entry]
    close = difflib.get_close_matches(name.lower(), known, n=3)
    listed = f"Known: {', '.join(known)}." if len(known) < 30 else f"There are {len(known)}."
    hint = f"Did you mean {' or '.join(close)}?" if close else listed if known else "None is registered."
    message = (
        f"{key}={name!r} is not a known {kind}. {hint} If one of your modules registers it, load that module with "
        "--import MODULE or `imports: [MODULE]`."
    )
    return UserError(f"unknown-{kind}", message, name=name, close=close)


def search_current_folder() -> None:
    """Find modules in the current folder too, in this process and in those that it starts.

    Only a user who names a module on the command line asks for that. `imports` of a recipe do not: the recipe may be
    untrusted, and a module next to it could run any code.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if not _is_chosen(here):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


def _is_chosen(folder: str) -> bool:
    return folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def load(modules: Sequence[str]) -> None:
    """Import modules so that their extensions are registered."""
    for name in modules:
        if name in sys.modules:
            continue
        spec = _spec(name)
        if _in_current_folder(spec):
            message = (
                f"imports: {name} is in the current folder, {spec.origin}. If you trust it, name it on the command "
                f"line: --import {name}. Or install it, or set PYTHONPATH."
            )
            raise UserError("import-not-trusted", message, module=name)
        try:
            import_module(name)
        except UserError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            message = f"importing {name} ({spec.origin}) failed: {reason}. Fix the module."
            raise UserError("import-failed", message, module=name) from error


def _spec(name: str) -> ModuleSpec:
    try:
        spec = find_spec(name) if all(part.isidentifier() for part in name.split(".")) else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        message = (
            f"module {name!r} is not found. Install its package, or set PYTHONPATH to the folder that contains it; "
            "modules in the current folder are found if --import names them."
        )
        raise UserError("import-not-found", message, module=name)
    return spec


def _in_current_folder(spec: ModuleSpec) -> bool:
    """Return whether a module was found only because Python searches the current folder."""
    here = Path.cwd()
    if _is_chosen(str(here)) or not spec.origin:
        return False
    parts = len(spec.name.split(".")) + (spec.submodule_search_locations is not None)
    origin = Path(spec.origin).absolute()
    return len(origin.parents) >= parts and origin.parents[parts - 1] == here


def sources(modules: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the file and SHA-256 of each imported module; for a package, the hash covers all of its Python files."""
    return {name: {"file": str(source_of(name)), "sha256": _digest_of_all(file_hashes([name]))} for name in modules}


def _digest_of_all(hashes: Mapping[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())  # as `sha256sum` prints them
    return hashlib.sha256(lines.encode()).hexdigest()


def file_hashes(modules: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of top-level modules, and of the Python files of packages, by path from PYTHONPATH."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in _files(modules)
        if path.suffix == ".py" or "/" not in name
    }


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the files that differ between two results of `file_hashes`, for messages; empty if none does."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return ", ".join(changed[:_MAX_LISTED]) + (f" and {rest} more" if (rest := len(changed) - _MAX_LISTED) > 0 else "")


def source_of(module: str) -> Path:
    """Return the file of a top-level module, or the folder of the top-level package that contains a module."""
    spec = _spec(module.partition(".")[0])
    folders = spec.submodule_search_locations  # a package without __init__.py has no origin
    place = next(iter(folders)) if folders else spec.origin
    if not place or not Path(place).exists():
        raise UserError("import-without-source", f"module {module!r} has no source file.", module=module)
    return Path(place)


def files_of(modules: Sequence[str]) -> dict[str, str]:
    """Return the text files of the top-level packages of modules by path, as they are found from PYTHONPATH."""
    files = {}
    for name, path in _files(modules):
        try:
            files[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            message = f"{path} is not a text file and cannot be copied to the nodes. Install the package there."
            raise UserError("extension-not-text", message, path=path) from None
    return files


def _files(modules: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files of the top-level packages of modules, in order, with their paths from PYTHONPATH."""
    for root in dict.fromkeys(map(source_of, modules)):
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            name = path.relative_to(root.parent)
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in name.parts):
                yield name.as_posix(), path
