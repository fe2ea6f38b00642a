"""Paceline trains image classifiers on one node or many with one command, and compares the results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError
from paceline.extensions import (
    register_augmentation,
    register_callback,
    register_dataset,
    register_loss,
    register_model,
    register_optimizer,
    register_schedule,
)

if TYPE_CHECKING:
    from paceline.api import (
        Comparison,
        Run,
        compare,
        evaluate,
        load_recipe,
        logbook,
        prepare_folder,
        report,
        resume,
        train,
    )
    from paceline.engine.callbacks import Callback, RunInfo, StepInfo

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Comparison",
    "Run",
    "RunInfo",
    "StepInfo",
    "UserError",
    "compare",
    "evaluate",
    "load_recipe",
    "logbook",
    "prepare_folder",
    "register_augmentation",
    "register_callback",
    "register_dataset",
    "register_loss",
    "register_model",
    "register_optimizer",
    "register_schedule",
    "report",
    "resume",
    "train",
]
_CALLBACKS = ("Callback", "RunInfo", "StepInfo")


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that the command line starts fast."""
    if name == "launch":
        return import_module("paceline.launch")
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module("paceline.engine.callbacks" if name in _CALLBACKS else "paceline.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
