"""The results of a sweep as its results.json has them, which may be untrusted."""

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from paceline.errors import UserError
from paceline.system.files import printable_tree
from paceline.system.untrusted import is_plain, read_regular
from paceline.track.checks import FiniteFloat, NonNegativeFloat, NonNegativeInt, UnitFraction
from paceline.track.records import RunFolder
from paceline.track.sealed import is_intact, write_sealed

RESULTS = "results.json"
SWEEP = "sweep.json"
_MAX_BYTES = 1 << 26
_STRICT = ConfigDict(extra="forbid", strict=True)
Text = Annotated[str, Field(max_length=10_000)]


@dataclass(frozen=True)
class SweepTrial:
    """A trial of a sweep."""

    __pydantic_config__ = _STRICT

    number: NonNegativeInt
    state: Literal["running", "complete", "pruned", "diverged", "failed"]
    values: dict[Text, Text]
    """Values by field, as written on the command line."""
    run: Text
    """Name of the run folder."""
    value: FiniteFloat | None = None
    """The metric of its best evaluation, which was after `epoch`."""
    epoch: NonNegativeFloat | None = None
    seconds: NonNegativeFloat | None = None
    """Training time."""
    reason: Text = ""
    """Why it was pruned, diverged or failed."""
    curve: list[tuple[NonNegativeInt, FiniteFloat]] = field(default_factory=list)
    """Epochs and values that were reported to the pruner."""


@dataclass(frozen=True)
class SweepRecord:
    """A sweep with all of its trials."""

    __pydantic_config__ = _STRICT

    name: Text
    recipe: Text
    metric: Literal["top1", "top5", "loss"]
    space: dict[Text, Text]
    sampler: Text
    pruner: Text
    planned: NonNegativeInt
    """Number of trials that the last command asked for."""
    trials: list[SweepTrial]
    importance: dict[Text, UnitFraction] | None = None
    """Fraction of the variance of the metric that each field explains; None: unknown, or too few trials."""

    @property
    def best(self) -> SweepTrial | None:
        """The best trial that was neither pruned nor failed."""
        complete = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        choose = min if self.metric == "loss" else max  # the first of equal ones
        return choose(complete, key=lambda trial: trial.value or 0.0, default=None)

    @property
    def label(self) -> str:
        """The metric as tables name it."""
        return {"top1": "top-1", "top5": "top-5"}.get(self.metric, self.metric)

    def shown(self, value: float | None) -> str:
        """Return a value of the metric as text."""
        if value is None:
            return "-"
        return f"{value:.4f}" if self.metric == "loss" else f"{value:.2%}"

    def write(self, folder: Path) -> None:
        """Write results.json."""
        write_sealed(folder / RESULTS, asdict(self))


def is_sweep(path: Path) -> bool:
    """Return whether a path is the folder of a sweep."""
    return (path / SWEEP).is_file()


def read_sweep(path: Path) -> SweepRecord:
    """Return the sweep in a folder; UserError if there is none, or its results are corrupt."""
    if not is_sweep(path):
        message = f"{path} is not the folder of a sweep. `paceline sweep RECIPE --set ...` creates one."
        raise UserError("sweep-not-found", message, path=path)
    file = path / RESULTS
    try:
        text = read_regular(file, _MAX_BYTES, path)
        tree: Any = json.loads(text)
        tree.pop("crc", None)
        if not (is_intact(text) and is_plain(tree)):
            raise ValueError("its checksum is wrong")
        return _adapter().validate_json(json.dumps(printable_tree(tree)))
    except FileNotFoundError:
        reason = "it is missing"
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
    message = f"{file} cannot be read ({reason}). Run the command of the sweep again, which rewrites the file."
    raise UserError("sweep-results-corrupt", message, path=file)


@cache
def _adapter() -> TypeAdapter[SweepRecord]:
    return TypeAdapter(SweepRecord)


def is_training(path: Path, trial: SweepTrial) -> bool:
    """Return whether a worker trains a trial that is listed as running; the worker may have been killed."""
    return trial.state == "running" and RunFolder(path / trial.run).in_use
