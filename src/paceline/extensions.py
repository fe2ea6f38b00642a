"""Extension points: user-defined models, datasets, augmentations, losses, optimizers, schedules, callbacks
and readers.

    # my_package/nets.py
    import paceline as pl

    @pl.register_model("my-net")
    def my_net(num_classes: int, in_chans: int, width: int = 32) -> nn.Module: ...

    paceline train digits --import my_package.nets --model.name my-net --model.options '{width: 64}'

`imports: [my_package.nets]` in a recipe does the same. Importing the module registers its extensions.
"""

import difflib
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from traceback import extract_stack
from typing import Any, TypeVar

from paceline.errors import USER_CODE_ERRORS, UserError, raised

T = TypeVar("T", bound=Callable[..., Any])

SIGNATURES = {
    "model": "(num_classes, in_chans, **options) -> nn.Module",
    "dataset": '(split="train"|"val"|"test", **options) -> an object with __len__, classes, and __getitem__ -> '
    "(PIL image or uint8 array, label)",
    "augmentation": "(image, rng, **options) -> uint8 array (height, width, channels) of the same shape",
    "loss": "(logits, targets, **options) -> the mean over the batch, a scalar tensor",
    "optimizer": "(params, lr, **options) -> torch.optim.Optimizer",
    "schedule": "(step, total_steps, **options) -> factor on optim.lr",
    "callback": "(**options) -> paceline.Callback",
    "reader": "(source, **options) -> an iterable of paceline.RawImage",
}
"""How an extension of each kind is called, and what it returns."""


BUILT_IN = {
    "model": ("airbench", "ffcv_resnet18", "ffcv_resnet50"),
    "dataset": ("digits", "synthetic", "cifar10", "cifar100", "imagenet", "shards", "folder", "list"),
    "loss": ("cross-entropy", "bce"),
    "optimizer": ("sgd", "adamw", "lamb"),
    "schedule": ("constant", "one-cycle", "cosine", "linear", "polynomial", "step", "plateau", "piecewise"),
    "reader": ("folder", "list", "tar", "webdataset", "hf", "cifar10", "cifar100", "imagenet"),
}
"""Names of each kind that cannot be registered."""


@dataclass(frozen=True)
class Extension:
    kind: str
    name: str
    call: Callable[..., Any]
    line: str = ""
    """File and line that registered it."""
    loaded: ModuleSpec | None = None
    """The spec of its module; a reload replaces it."""

    @property
    def module(self) -> str:
        """The module that defines it."""
        return _named(self.call).__module__

    @property
    def where(self) -> str:
        """The module and function, for messages."""
        return f"{self.module}.{_named(self.call).__qualname__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; an exception in it becomes an error that names it."""
        try:
            return self.call(*args, **kwargs)
        except (UserError, BdbQuit):
            raise
        except USER_CODE_ERRORS as error:
            raise self.error(raised(error)) from error

    def error(self, problem: str) -> UserError:
        """Return an error that names the function, the problem and what is expected."""
        expected = f"It is called as {SIGNATURES[self.kind]}."
        message = f"{self.where}, registered as {self.kind} {self.name!r}, {problem}. {expected}"
        return UserError("extension-failed", message, kind=self.kind, name=self.name, where=self.where)


def _named(call: Any) -> Any:
    """Return the function or class of a callable; partials and instances have no name of their own."""
    while isinstance(call, partial):
        call = call.func
    return call if hasattr(call, "__qualname__") else type(call)


_registered: dict[tuple[str, str], Extension] = {}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Return a decorator that registers a function or class under a name."""
    if not isinstance(name, str) or not name or not name.isprintable():
        message = f"register_{kind}({name!r}): the name is not a non-empty printable string."
        raise UserError("invalid-extension-name", message, kind=kind)

    user = extract_stack(limit=3)[0]  # calls register_KIND, which calls this
    line = f"{user.filename}:{user.lineno}"

    def decorate(call: T) -> T:
        if not callable(call):
            message = f"register_{kind}({name!r}) is used on {call!r}. Use it on a function {SIGNATURES[kind]}."
            raise UserError("invalid-extension", message, kind=kind, name=name)
        loaded = getattr(sys.modules.get(_named(call).__module__), "__spec__", None)
        new, old = Extension(kind, name, call, line, loaded), _registered.get((kind, name))
        taken = "is built in" if name in BUILT_IN.get(kind, ()) else ""
        if old and not _ran_again(old, new):
            taken = f"is already registered by {old.where} ({old.line})"
        if taken:
            message = f"{kind} {name!r} {taken}. Rename the one of {new.where} ({line})."
            raise UserError("name-taken", message, kind=kind, name=name)
        _registered[kind, name] = new
        return call

    return decorate


def _ran_again(old: Extension, new: Extension) -> bool:
    """Return whether the same code ran again: a notebook cell, or a module that was reloaded."""
    if old.where != new.where:
        return False
    return new.module == "__main__" or new.line == old.line or new.loaded is not old.loaded


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
    a numpy Generator that depends only on seed, epoch and sample. `data.augment.custom` of a recipe maps augmentations
    to their options, in the order in which they are applied: `custom: {my-blur: {sigma: 2}}`.
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
    """Register a class derived from `paceline.Callback`.

    `callbacks` of a recipe maps callbacks to their options: `callbacks: {target-accuracy: {top1: 0.97}}`.
    """
    return register("callback", name)


def register_reader(name: str) -> Callable[[T], T]:
    """Register a reader of `paceline prepare NAME SOURCE`: `(source, **options)` returns `paceline.RawImage` objects.

    It lists images; their `read` is called later, by several threads. An attribute `classes` of what it returns sets
    the order of the classes. A resumed preparation calls it again and must get the same names, labels and sizes.
    """
    return register("reader", name)


def find(kind: str, name: str) -> Extension | None:
    """Return a registered extension."""
    return _registered.get((kind, name))


def names(kind: str) -> list[str]:
    """Return the names of all extensions of a kind."""
    return [name for found, name in _registered if found == kind]


def modules() -> list[str]:
    """Return the modules that registered extensions, without `__main__`, which other processes cannot import."""
    found = dict.fromkeys(extension.module for extension in _registered.values())
    return [name for name in found if name != "__main__"]


_LISTING = {
    "model": "; timm.list_models() lists those of timm",
    "optimizer": "; timm.optim.list_optimizers() lists those of timm",
}


def unknown(kind: str, key: str, name: str, built_in: Iterable[str]) -> UserError:
    """Return the error for a name that is neither built in nor registered."""
    known = [entry for entry in (*built_in, *names(kind)) if entry]
    close = difflib.get_close_matches(name.lower(), known, n=3)
    many = f"{len(known):,} {kind}s are known{_LISTING.get(kind, '')}."
    listed = f"Known: {', '.join(known)}." if len(known) < 30 else many
    hint = f"Did you mean {' or '.join(close)}?" if close else listed if known else "None is registered."
    load = "--import MODULE" if kind == "reader" else "--import MODULE or `imports: [MODULE]`"  # prepare has no recipe
    message = f"{key}={name!r} is not a known {kind}. {hint} If one of your modules registers it, load it with {load}."
    return UserError(f"unknown-{kind}", message, name=name, close=close)
