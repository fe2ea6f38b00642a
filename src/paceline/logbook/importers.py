"""Logs of other programs, so that old runs can stand beside new ones.

Known are the lines of PyTorch's ImageNet example and its descendants, DAWNBench's TSV, Lightning's metrics.csv, and
TensorBoard's event files. Lines `# key: value` in a text log, and the example's own `Namespace(...)`, tell what the
figures do not: `# ranks: 2`, `# global_batch: 1024`.
"""

import ast
import csv
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.logbook.read import Run

_STEP = re.compile(r"Epoch:\s*\[(\d+)\]\s*\[\s*(\d+)/\s*(\d+)\]")
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d.])"
_METER = re.compile(rf"(Time|Data|Loss|Acc@1|Acc@5|Prec@1|Prec@5)\s+{_NUMBER}\s*\(\s*{_NUMBER}\)")
_RESULT = re.compile(
    rf"^\s*\*\s*(Val\s+)?(?:Acc|Prec)@1:?\s+{_NUMBER}(?:.*?(?:Acc|Prec)@5:?\s+{_NUMBER})?", re.MULTILINE
)
_COMPLETE = re.compile(r"Training complete in:?\s+(?:(\d+) days?, )?(\d+):(\d+):(\d+)")
_TOLD = re.compile(r"^#\s*([\w.]+)\s*:\s*(.+)$")
_FIGURES = ("ranks", "nodes", "global_batch", "seconds")
_ARGUMENTS = {"batch_size": "global_batch", "workers": "data.threads", "arch": "model.name", "lr": "optim.lr"}
_KNOWN = (
    "known are run folders, lines of PyTorch's ImageNet example (`Epoch: [0][10/1252] Time ...`), DAWNBench's TSV "
    "(`epoch hours top1Accuracy top5Accuracy`), Lightning's metrics.csv, and TensorBoard's event files"
)


def read_foreign(path: Path) -> Run:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for name, claims, convert in _FORMATS:
        if chosen := next((file for file in files if claims(file)), None):
            run = Run(path.stem if path.is_file() else path.name, path, name, "imported")
            convert(chosen, run)
            run.notes.append(f"imported from {chosen} ({name})")
            if run.records or "seconds" in run.facts:
                return run
    raise UserError(f"{path} is neither a run folder nor a log that can be imported; {_KNOWN}")


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(1 << 16).decode("utf-8", errors="replace")


def _lines(path: Path) -> list[str]:
    # progress bars write carriage returns
    return re.split(r"[\r\n]+", path.read_text(encoding="utf-8", errors="replace"))


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else None


def _example(path: Path, run: Run) -> None:
    """Each `Time` is the seconds of a step and, in brackets, their mean since the epoch began: sums come from that."""
    epochs: dict[int, dict[str, Any]] = {}
    unread = 0
    lines = _lines(path)
    results = [result for result in map(_RESULT.match, lines) if result]
    both = any(result[1] for result in results)  # then those without `Val` are of the training set
    for line in lines:
        if told := _TOLD.match(line):
            value = _value(told[2])
            if told[1] in _FIGURES and not isinstance(value, int | float):
                run.notes.append(f"# {told[1]}: {told[2]} is no number, and left out")
            else:
                run.facts[told[1]] = value
        elif "Namespace(" in line:
            run.facts |= dict(_arguments(line))
        elif place := _STEP.search(line):
            meters = {name: (float(now), float(mean)) for name, now, mean in _METER.findall(line)}
            epoch, done, count = int(place[1]), int(place[2]) + 1, int(place[3])
            if not meters or not count:
                unread += 1
                continue
            known = epochs.get(epoch, {"batches": 0})
            # ranks that print in turns may be a step apart
            if done == 1 and (known["batches"] > 2 or any(later > epoch for later in epochs)):
                epochs = {number: old for number, old in epochs.items() if number < epoch}
                run.records = [record for record in run.records if record["epoch"] <= epoch]
                run.notes.append(f"it was restarted at epoch {epoch}; what was done twice is left out, its time too")
                run.complete = False
            epochs[epoch] = {"batches": min(done, count), "of": count, "meters": meters}
            run.facts["steps per epoch"] = count
        elif (result := _RESULT.match(line)) and (result[1] or not both):
            epoch = max(epochs, default=0)
            shares = [float(share) / 100 if share else None for share in (result[2], result[3])]
            run.records += [*_epoch_record(epochs, epoch)]
            run.records.append(
                {"kind": "eval", "step": _steps(epochs), "epoch": epoch + 1, "top1": shares[0], "top5": shares[1]}
            )
        elif complete := _COMPLETE.search(line):
            days, *clock = (int(part or 0) for part in complete.groups())
            run.facts["seconds"] = ((days * 24 + clock[0]) * 60 + clock[1]) * 60 + clock[2]
    run.records += [*_epoch_record(epochs, max(epochs, default=0))] if epochs else []
    if unread:
        run.notes.append(f"{unread} lines were cut off, and left out")


def _steps(epochs: dict[int, dict[str, Any]]) -> int:
    return sum(epoch["batches"] for epoch in epochs.values())


def _epoch_record(epochs: dict[int, dict[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    """One record per epoch, once."""
    epoch = epochs.get(number)
    if epoch is None or epoch.get("told"):
        return
    epoch["told"] = True
    meters, batches = epoch["meters"], epoch["batches"]
    record: dict[str, Any] = {
        "kind": "train",
        "step": _steps(epochs),
        "epoch": number + batches / epoch["of"],
        "steps": batches,
    }
    record["loss"] = meters["Loss"][1] if "Loss" in meters else None
    top1 = meters.get("Acc@1") or meters.get("Prec@1")
    record["top1"] = top1[1] / 100 if top1 else None
    if "Time" in meters:
        data = meters.get("Data", (0.0, 0.0))[1]
        record["seconds"] = {"data": data * batches, "compute": (meters["Time"][1] - data) * batches}
    yield record


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def _arguments(line: str) -> Iterator[tuple[str, Any]]:
    for key, text in re.findall(r"(\w+)=('[^']*'|[^,)]+)", line):
        if key in _ARGUMENTS:
            yield _ARGUMENTS[key], _value(text)


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
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            step, epoch = _number(row.get("step")), _number(row.get("epoch"))
            if step is None:
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
    for kind in ("train", "eval"):
        for metric in ("top1", "top5"):
            own = [record for record in run.records if record["kind"] == kind and record.get(metric) is not None]
            if any(record[metric] > 1 for record in own):
                for record in own:
                    record[metric] /= 100


_TAGS = {
    "Loss/train": ("train", "loss"), "train_loss": ("train", "loss"), "loss/train": ("train", "loss"),
    "Accuracy/train": ("train", "top1"), "LearningRate": ("train", "lr"),
    "Throughput/images_per_second": ("train", "images_per_second"),
    "Loss/val": ("eval", "loss"), "val_loss": ("eval", "loss"), "loss/val": ("eval", "loss"),
    "Accuracy/val": ("eval", "top1"), "val_acc": ("eval", "top1"), "Accuracy5/val": ("eval", "top5"),
}  # fmt: skip


def _tensorboard(path: Path, run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    events.Reload()
    records: dict[tuple[str, int], dict[str, Any]] = {}
    tags = events.Tags()["scalars"]
    for tag in tags:
        if tag in _TAGS:
            kind, metric = _TAGS[tag]
            for event in events.Scalars(tag):
                place = {"kind": kind, "step": event.step, "steps": 1, "time": event.wall_time}
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
    ("PyTorch ImageNet example", lambda path: bool(_STEP.search(_head(path)) or _RESULT.search(_head(path))), _example),
)  # fmt: skip
