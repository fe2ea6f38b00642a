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
    register_reader,
    register_schedule,
)

if TYPE_CHECKING:
    from paceline.api.data import PreparedData, prepare, prepare_cifar10, prepare_cifar100, prepare_imagenet
    from paceline.api.exporting import export
    from paceline.api.finding import find_batch, find_lr
    from paceline.api.planning import Estimate, TrainingPlan, check_machine, measured_speed, plan
    from paceline.api.predicting import Prediction, Predictions, load_classifier, predict
    from paceline.api.recording import record_measured
    from paceline.api.runs import Comparison, Run, compare, list_runs, logbook, report
    from paceline.api.serving import serve
    from paceline.api.sweeping import Sweep, sweep
    from paceline.api.training import evaluate, list_recipes, load_recipe, resume, train
    from paceline.data.prepare.raw import RawImage
    from paceline.engine.callbacks import Callback, RunInfo, StepInfo

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Comparison",
    "Estimate",
    "Prediction",
    "Predictions",
    "PreparedData",
    "RawImage",
    "Run",
    "RunInfo",
    "StepInfo",
    "Sweep",
    "TrainingPlan",
    "UserError",
    "check_machine",
    "compare",
    "evaluate",
    "export",
    "find_batch",
    "find_lr",
    "list_recipes",
    "list_runs",
    "load_classifier",
    "load_recipe",
    "logbook",
    "measured_speed",
    "plan",
    "predict",
    "prepare",
    "prepare_cifar10",
    "prepare_cifar100",
    "prepare_imagenet",
    "record_measured",
    "register_augmentation",
    "register_callback",
    "register_dataset",
    "register_loss",
    "register_model",
    "register_optimizer",
    "register_reader",
    "register_schedule",
    "report",
    "resume",
    "serve",
    "sweep",
    "train",
]
_MODULES = (
    *("api.training", "api.exporting", "api.runs", "api.planning", "api.finding", "api.data", "api.predicting"),
    *("api.serving", "api.recording", "api.sweeping", "engine.callbacks", "data.prepare.raw"),
)


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that the command line starts fast."""
    if name == "launch":
        return import_module("paceline.launch")
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    modules = (import_module(f"paceline.{module}") for module in _MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return [*globals(), *__all__]
