"""Logs of other programs, so that old runs can stand beside new ones.

Known are the lines of PyTorch's ImageNet example and its descendants (torchvision's references among them), DAWNBench's
TSV, Lightning's metrics.csv, and TensorBoard's event files. Lines `# key: value` in a text log, and the example's own
`Namespace(...)`, tell what the figures do not: `# ranks: 2`, `# global_batch: 1024`.
"""

import csv
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.logbook import example_log
from paceline.logbook.read import NotARun, Run
from paceline.system.files import printable
from paceline.system.untrusted import check_regular, open_regular, read_regular
from paceline.track.checks import Imported, sound

_MOST_BYTES = 1 << 28
_LONGEST_LINE = 10_000
_KNOWN = (
    "known are run folders, lines of PyTorch's ImageNet example (`Epoch: [0][10/1252] Time ...`), DAWNBench's TSV "
    "(`epoch hours top1Accuracy top5Accuracy`), Lightning's metrics.csv, and TensorBoard's event files"
)


def read_foreign(path: Path) -> Run:
    files = [path] if path.is_file() else sorted(_readable(path))
    for name, claims, convert in _FORMATS:
        if chosen := next((file for file in files if claims(file)), None):
            run = Run(printable(path.stem if path.is_file() else path.name), path, name, "imported")
            try:
                convert(chosen, run)
            except (csv.Error, OSError) as error:
                raise UserError(f"{chosen} cannot be read as {name}: {error}") from None
            found, run.records = run.records, sound(run.records, Imported)
            if odd := len(found) - len(run.records):
                run.notes.append(f"{odd} record{'s' * (odd > 1)} with impossible values left out")
            run.notes.append(f"imported from {chosen} ({name})")
            if run.records or "seconds" in run.facts:
                return run
    nothing = "neither a run folder nor a log that can be imported" if files else "an empty folder"
    raise NotARun(path, nothing, f"; {_KNOWN}")


def _readable(folder: Path) -> Iterator[Path]:
    """Regular files that lie in the folder; not hidden ones, nor what a logbook tells of a run."""
    for file in folder.rglob("*"):
        copied = file.name == "dawnbench.tsv" and (file.parent / "facts.json").is_file()
        if file.is_file() and not file.name.startswith(".") and not copied:
            try:
                check_regular(file, folder)
            except OSError:
                continue
            yield file


def _head(path: Path) -> str:
    with open_regular(path, sys.maxsize) as file:
        return file.read(1 << 16).decode("utf-8", errors="replace")


def _lines(path: Path) -> list[str]:
    # progress bars write carriage returns
    lines = re.split(r"[\r\n]+", read_regular(path, _MOST_BYTES).decode("utf-8", errors="replace"))
    return [line for line in lines if len(line) <= _LONGEST_LINE]


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else None


def _example(path: Path, run: Run) -> None:
    example_log.read_into(run, _lines(path))


def _dawnbench(path: Path, run: Run) -> None:
    previous = 0.0
    for row in csv.DictReader((line for line in _lines(path) if line.strip()), delimiter="\t"):
        epoch, hours, top1, top5 = (
            _number(row.get(name)) for name in ("epoch", "hours", "top1Accuracy", "top5Accuracy")
        )
        if epoch is None or hours is None:
            run.notes.append("a line was cut off, and left out")
            continue
        step = int(epoch)
        run.records.append(
            {"kind": "train", "step": step, "epoch": epoch, "steps": 1, "seconds": {"compute": hours * 3600 - previous}}
        )
        run.records.append(
            {"kind": "eval", "step": step, "epoch": epoch}
            | {"top1": top1 / 100 if top1 is not None else None, "top5": top5 / 100 if top5 is not None else None}
        )
        previous = hours * 3600
    run.notes.append("its time is that of training and evaluating together")


_LIGHTNING = {
    "train": {
        "loss": ("train_loss", "loss", "train/loss", "train_loss_step"),
        "top1": ("train_acc", "train/acc", "train_acc_step"),
    },
    "eval": {
        "loss": ("val_loss", "val/loss", "valid_loss"),
        "top1": ("val_acc", "val/acc", "val_accuracy", "valid_acc"),
    },
}


def _lightning(path: Path, run: Run) -> None:
    for row in csv.DictReader(line for line in _lines(path) if line.strip()):
        step, epoch = _number(row.get("step")), _number(row.get("epoch"))
        if step is None:
            run.notes.append("a line was cut off, and left out")
            continue
        for kind, names in _LIGHTNING.items():
            found = {
                metric: next((value for name in choices if (value := _number(row.get(name))) is not None), None)
                for metric, choices in names.items()
            }
            if any(value is not None for value in found.values()):
                run.records.append({"kind": kind, "step": int(step), "epoch": epoch, "steps": 1} | found)
    _as_shares(run)


def _as_shares(run: Run) -> None:
    """Accuracies of a log are all shares or all per cent."""
    told = [(record, name) for record in run.records for name in ("top1", "top5") if record.get(name) is not None]
    if any(record[name] > 1 for record, name in told):
        for record, name in told:
            record[name] /= 100


_TAGS = {
    "Loss/train": ("train", "loss"), "train_loss": ("train", "loss"), "loss/train": ("train", "loss"),
    "Accuracy/train": ("train", "top1"), "LearningRate": ("train", "lr"),
    "Throughput/images_per_second": ("train", "images_per_second"),
    "Loss/val": ("eval", "loss"), "val_loss": ("eval", "loss"), "loss/val": ("eval", "loss"),
    "Accuracy/val": ("eval", "top1"), "val_acc": ("eval", "top1"), "Accuracy5/val": ("eval", "top5"),
}  # fmt: skip


def _tensorboard(path: Path, run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in path.parent.glob("*tfevents*"):
        open_regular(file, _MOST_BYTES, path.parent).close()
    events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    try:
        events.Reload()
    except Exception as error:  # whatever the parser of somebody else's format stumbles over
        raise UserError(f"{path} cannot be read as TensorBoard events: {str(error)[:200]}") from None
    records: dict[tuple[str, int], dict[str, Any]] = {}
    tags = events.Tags()["scalars"]
    for tag in tags:
        if tag in _TAGS:
            kind, metric = _TAGS[tag]
            for event in events.Scalars(tag):
                if math.isfinite(event.value):
                    place = {"kind": kind, "step": event.step, "steps": 1}
                    records.setdefault((kind, event.step), place)[metric] = event.value
    run.records = sorted(records.values(), key=lambda record: (record["step"], record["kind"] == "eval"))
    _as_shares(run)
    if unknown := [tag for tag in tags if tag not in _TAGS]:
        run.notes.append(f"tags without a counterpart here: {', '.join(unknown[:5])}{' ...' if unknown[5:] else ''}")


def _is_lightning(path: Path) -> bool:
    return path.suffix == ".csv" and {"epoch", "step"} <= set(_head(path).partition("\n")[0].strip().split(","))


_FORMATS: tuple[tuple[str, Callable[[Path], bool], Callable[[Path, Run], None]], ...] = (
    ("TensorBoard events", lambda path: "events.out.tfevents" in path.name, _tensorboard),
    ("Lightning metrics.csv", _is_lightning, _lightning),
    ("DAWNBench TSV", lambda path: _head(path).lstrip().startswith("epoch\thours"), _dawnbench),
    ("PyTorch ImageNet example", lambda path: example_log.claims(_head(path)), _example),
)  # fmt: skip
