"""Use a trained model: predict the classes of images."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.api.arguments import Procs, check_count, check_path, check_procs, check_usage, invalid
from paceline.api.in_process import in_this_process
from paceline.api.processes import run_in_processes
from paceline.api.runs import Run, check_best_or_last, path_of
from paceline.config.imports import trust as trust_modules
from paceline.inference.prediction_files import ClassProbability, cells, check_target, columns, writing
from paceline.system.packages import needs_package

if TYPE_CHECKING:
    import pandas

    from paceline.inference.classifier import Classifier


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image."""

    path: str
    top: tuple[ClassProbability, ...]
    """Each with id, name and probability, the most probable one first."""

    @property
    def name(self) -> str:
        """The most probable class."""
        return self.top[0].name

    @property
    def probability(self) -> float:
        """The probability of that class."""
        return self.top[0].probability


class Predictions(list[Prediction]):
    """Predictions in the order of the inputs. `skipped` images could not be read; the log lists them."""

    skipped = 0

    def write(self, out: str | Path) -> Path:
        """Write a .csv, .jsonl or .parquet file and return its path."""
        path = check_path("out", out)
        check_target(path)
        with writing(path, len(self[0].top) if self else 1) as write:
            for each in self:
                write(each.path, each.top)
        return path

    def dataframe(self) -> "pandas.DataFrame":
        """Return a pandas DataFrame with the columns path, class_1, id_1, probability_1, class_2, ..."""
        with needs_package("pandas", "Predictions.dataframe()"):
            import pandas
        names = columns(len(self[0].top) if self else 1)
        return pandas.DataFrame([cells(each.path, each.top) for each in self], columns=names)


def predict(
    model: str | Path | Run,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    procs: Procs = "auto",
    batch: int = 0,
    checkpoint: str = "best",
    split: str = "",
    variant: str = "",
    device: str = "auto",
    precision: str = "",
    tta: str = "",
    crop_pct: float = 0.0,
    temperature: float = 1.0,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Predictions:
    """Predict the classes of images with a run, a checkpoint or an export, in `procs` new processes.

    `images`: files, folders, patterns and prepared data. `precision`, `tta` and `batch` are by default those of the
    run's evaluation; the default precision of exports is fp32. Logits are divided by `temperature` before softmax.
    `trust` opens .pt2 files, which can run code. The command line writes millions of predictions to a file; here they
    are held in memory.
    """
    check_best_or_last(checkpoint)
    check_usage(device, precision, tta, crop_pct, temperature)
    names = [os.fspath(check_path("images", name)) for name in _several(images)]
    if not names:
        raise invalid("images", images, "at least one image, folder or pattern")
    options = {
        "--top": check_count("top", top),
        "--batch": check_count("batch", batch) if batch else "",
        "--checkpoint": checkpoint,
        "--split": split,
        "--variant": variant,
        "--device": device,
        "--precision": precision,
        "--evaluate.tta": tta,
        "--evaluate.crop_pct": crop_pct or "",
        "--temperature": temperature,
    }
    words = [f"{option}={value}" for option, value in options.items() if value != ""]
    words += [f"--import={module}" for module in imports] + ["--trust"] * trust
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        out, inputs = Path(folder) / "predictions.jsonl", Path(folder) / "inputs"
        # a command line has a maximum length, and names may look like options
        inputs.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in names))
        command = ["predict", _word(path_of(model)), f"--inputs-from={inputs}", f"--out={out}"]
        counts = run_in_processes(command, None, words, check_procs("procs", procs))
        with out.open(encoding="utf-8", newline="\n") as lines:
            found = Predictions(map(_prediction, lines))
    found.skipped = counts["skipped"]
    return found


def _word(path: Path) -> str:
    """Return a path that is not taken for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _several(images: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [images] if isinstance(images, str | os.PathLike) else images


def _prediction(line: str) -> Prediction:
    row = json.loads(line)
    return Prediction(row["path"], tuple(ClassProbability(**each) for each in row["top"]))


def load_classifier(
    model: str | Path | Run,
    *,
    checkpoint: str = "best",
    device: str = "auto",
    precision: str = "",
    tta: str = "",
    crop_pct: float = 0.0,
    temperature: float = 1.0,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> "Classifier":
    """Return a function that predicts the classes of images in this process, from a run, a checkpoint or an export.

    `classifier(images, top=5)`: images are files, their content as bytes, or PIL images. Returns for each the most
    probable classes, with id, name and probability. Logits are divided by `temperature` before softmax. `trust` opens
    .pt2 files, which can run code.
    """
    from paceline.distributed.world import World
    from paceline.inference.open_model import Usage, open_model

    check_best_or_last(checkpoint)
    check_usage(device, precision, tta, crop_pct, temperature)
    trust_modules(imports)
    usage = Usage(checkpoint, precision, tta, crop_pct, trust, tuple(imports), temperature)
    with in_this_process():
        return open_model(path_of(model), World.from_env(device), usage).classifier
