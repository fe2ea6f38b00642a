"""Import logs of other programs, to compare them with run folders.

Supported are logs of PyTorch's ImageNet example and programs derived from it (torchvision's references among them),
DAWNBench's TSV, Lightning's metrics.csv and TensorBoard's event files. Lines `# key: value` in a text log, and the
example's `Namespace(...)`, add facts that the log does not hold: `# ranks: 2`, `# global_batch: 1024`.
"""

import csv
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.analysis import example_log
from paceline.analysis.run import LoggedRun, NotARun
from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.untrusted import check_regular, open_regular, read_regular
from paceline.track.checks import ImportedRecord, valid

_MAX_BYTES = 1 << 28
_MAX_LINE = 10_000
_SUPPORTED = (
    "Supported are run folders, logs of PyTorch's ImageNet example (`Epoch: [0][10/1252] Time ...`), DAWNBench's TSV "
    "(`epoch hours top1Accuracy top5Accuracy`), Lightning's metrics.csv and TensorBoard's event files."
)


def read_foreign(path: Path) -> LoggedRun:
    """Return the run in another program's log; in a folder, the first readable log counts."""
    files = [path] if path.is_file() else sorted(_readable(path))
    for name, claims, convert in _FORMATS:
        if chosen := next((file for file in files if claims(file)), None):
            run = LoggedRun(printable(path.stem if path.is_file() else path.name), path, name, "imported")
            try:
                convert(chosen, run)
            except (csv.Error, OSError) as error:
                raise UserError("log-unreadable", f"cannot read {chosen} as {name}: {error}", path=chosen) from None
            records, run.records = run.records, valid(run.records, ImportedRecord)
            if invalid := len(records) - len(run.records):
                run.notes.append(f"{invalid} record{'s' * (invalid > 1)} with invalid values left out")
            run.notes.append(f"imported from {chosen} ({name})")
            if run.records or "seconds" in run.facts:
                return run
    reason = "neither a run folder nor a log that can be imported" if files else "an empty folder"
    code = "not-a-run" if files else "empty-folder"
    raise NotARun(code, f"{path} is {reason}. {_SUPPORTED}", path=path, reason=reason)


def _readable(folder: Path) -> Iterator[Path]:
    """Yield the regular files in a folder, without hidden files and without the exports of a logbook."""
    for file in folder.rglob("*"):
        exported = file.name == "dawnbench.tsv" and (file.parent / "facts.json").is_file()
        if file.is_file() and not file.name.startswith(".") and not exported:
            try:
                check_regular(file, folder)
            except OSError:
                continue
            yield file


def _head(path: Path) -> str:
    with open_regular(path, sys.maxsize) as file:
        return file.read(1 << 16).decode("utf-8", errors="replace")


def _lines(path: Path) -> list[str]:
    # progress bars separate their updates by carriage returns
    lines = re.split(r"[\r\n]+", read_regular(path, _MAX_BYTES).decode("utf-8", errors="replace"))
    return [line for line in lines if len(line) <= _MAX_LINE]


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else None


def _example(path: Path, run: LoggedRun) -> None:
    example_log.read_into(run, _lines(path))


def _dawnbench(path: Path, run: LoggedRun) -> None:
    previous = 0.0
    for row in csv.DictReader((line for line in _lines(path) if line.strip()), delimiter="\t"):
        epoch, hours, top1, top5 = (
            _number(row.get(name)) for name in ("epoch", "hours", "top1Accuracy", "top5Accuracy")
        )
        if epoch is None or hours is None:
            run.notes.append("a truncated line was left out")
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
    run.notes.append("its times include evaluation")


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


def _lightning(path: Path, run: LoggedRun) -> None:
    for row in csv.DictReader(line for line in _lines(path) if line.strip()):
        step, epoch = _number(row.get("step")), _number(row.get("epoch"))
        if step is None:
            run.notes.append("a truncated line was left out")
            continue
        for kind, names in _LIGHTNING.items():
            values = {
                metric: next((value for name in choices if (value := _number(row.get(name))) is not None), None)
                for metric, choices in names.items()
            }
            if any(value is not None for value in values.values()):
                run.records.append({"kind": kind, "step": int(step), "epoch": epoch, "steps": 1} | values)
    _as_fractions(run)


def _as_fractions(run: LoggedRun) -> None:
    """Convert percentages to fractions; the accuracies of a log are all one or the other."""
    known = [(record, name) for record in run.records for name in ("top1", "top5") if record.get(name) is not None]
    if any(record[name] > 1 for record, name in known):
        for record, name in known:
            record[name] /= 100


_TAGS = {
    "Loss/train": ("train", "loss"), "train_loss": ("train", "loss"), "loss/train": ("train", "loss"),
    "Accuracy/train": ("train", "top1"), "LearningRate": ("train", "lr"),
    "Throughput/images_per_second": ("train", "images_per_second"),
    "Loss/val": ("eval", "loss"), "val_loss": ("eval", "loss"), "loss/val": ("eval", "loss"),
    "Accuracy/val": ("eval", "top1"), "val_acc": ("eval", "top1"), "Accuracy5/val": ("eval", "top5"),
}  # fmt: skip


def _tensorboard(path: Path, run: LoggedRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for file in path.parent.glob("*tfevents*"):
        open_regular(file, _MAX_BYTES, path.parent).close()
    events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    try:
        events.Reload()
    except Exception as error:  # TensorBoard's parser raises many types
        message = f"cannot read {path} as TensorBoard events: {str(error)[:200]}"
        raise UserError("log-unreadable", message, path=path) from None
    records: dict[tuple[str, int], dict[str, Any]] = {}
    tags = events.Tags()["scalars"]
    for tag in tags:
        if tag in _TAGS:
            kind, metric = _TAGS[tag]
            for event in events.Scalars(tag):
                if math.isfinite(event.value):
                    record = {"kind": kind, "step": event.step, "steps": 1}
                    records.setdefault((kind, event.step), record)[metric] = event.value
    run.records = sorted(records.values(), key=lambda record: (record["step"], record["kind"] == "eval"))
    _as_fractions(run)
    if unknown := [tag for tag in tags if tag not in _TAGS]:
        run.notes.append(f"tags that are not imported: {', '.join(unknown[:5])}{' ...' if unknown[5:] else ''}")


def _is_lightning(path: Path) -> bool:
    return path.suffix == ".csv" and {"epoch", "step"} <= set(_head(path).partition("\n")[0].strip().split(","))


_FORMATS: tuple[tuple[str, Callable[[Path], bool], Callable[[Path, LoggedRun], None]], ...] = (
    ("TensorBoard events", lambda path: "events.out.tfevents" in path.name, _tensorboard),
    ("Lightning metrics.csv", _is_lightning, _lightning),
    ("DAWNBench TSV", lambda path: _head(path).lstrip().startswith("epoch\thours"), _dawnbench),
    ("PyTorch ImageNet example", lambda path: example_log.claims(_head(path)), _example),
)  # fmt: skip
