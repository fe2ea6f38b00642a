"""Logs of other programs, so that old runs can stand beside new ones.

Known are the lines of PyTorch's ImageNet example and its descendants (torchvision's references among them), DAWNBench's
TSV, Lightning's metrics.csv, and TensorBoard's event files. Lines `# key: value` in a text log, and the example's own
`Namespace(...)`, tell what the figures do not: `# ranks: 2`, `# global_batch: 1024`.
"""

import ast
import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.base.files import printable
from paceline.errors import UserError
from paceline.logbook.read import NotARun, Run

_STEP = re.compile(r"Epoch:\s*\[(\d+)\]\s*\[\s*(\d+)/\s*(\d+)\]")
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d.])"
# `Time 0.123 ( 0.456)` of the example, `time: 0.1230` and `acc1: 12.5 (11.0)` of torchvision's
_METER = re.compile(
    rf"\b(Time|Data|Loss|Acc@1|Acc@5|Prec@1|Prec@5|acc1|acc5):?\s+{_NUMBER}(?:\s*\(\s*{_NUMBER}\))?", re.IGNORECASE
)
_RESULT = re.compile(
    rf"^\s*(?:\*|Test:)\s*(Val\s+)?(?:Acc|Prec)@1:?\s+{_NUMBER}(?:.*?(?:Acc|Prec)@5:?\s+{_NUMBER})?", re.MULTILINE
)
_EPOCH_TIME = re.compile(r"Epoch:\s*\[(\d+)\]\s*Total time:\s+(\d+):(\d+):(\d+)")
_COMPLETE = re.compile(r"Training complete in:?\s+(?:(\d+) days?, )?(\d+):(\d+):(\d+)")
_TOLD = re.compile(r"^#\s*([\w.]+)\s*:\s*(.+)$")
_FIGURES = ("ranks", "nodes", "global_batch", "seconds")
_ARGUMENTS = {
    "batch_size": "global_batch",
    "workers": "data.threads",
    "arch": "model.name",
    "lr": "optim.lr",
    "epochs": "train.duration",
    "momentum": "optim.momentum",
    "weight_decay": "optim.weight_decay",
    "seed": "seed",
}
_KNOWN = (
    "known are run folders, lines of PyTorch's ImageNet example (`Epoch: [0][10/1252] Time ...`), DAWNBench's TSV "
    "(`epoch hours top1Accuracy top5Accuracy`), Lightning's metrics.csv, and TensorBoard's event files"
)


def read_foreign(path: Path) -> Run:
    inside = sorted(file for file in path.rglob("*") if file.is_file() and not _copied(file))
    files = [path] if path.is_file() else inside
    for name, claims, convert in _FORMATS:
        if chosen := next((file for file in files if claims(file)), None):
            run = Run(printable(path.stem if path.is_file() else path.name), path, name, "imported")
            try:
                convert(chosen, run)
            except csv.Error as error:
                raise UserError(f"{chosen} cannot be read as {name}: {error}") from None
            run.notes.append(f"imported from {chosen} ({name})")
            if run.records or "seconds" in run.facts:
                return run
    nothing = "neither a run folder nor a log that can be imported" if files else "an empty folder"
    raise NotARun(path, nothing, f"; {_KNOWN}")


def _copied(file: Path) -> bool:
    """Whether it is what a logbook tells of a run."""
    return file.name == "dawnbench.tsv" and (file.parent / "facts.json").is_file()


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


class _Example:
    """Lines of PyTorch's example, one by one.

    Each `Time` is the seconds of a step and, in brackets, their mean since the epoch began: sums come from that.
    """

    def __init__(self, run: Run, lines: list[str]):
        self._run, self._unread, self._restarted = run, 0, False
        self._epochs: dict[int, dict[str, Any]] = {}
        self._both = any(result[1] for line in lines if (result := _RESULT.match(line)))
        """Then results without `Val` are of the training set."""
        numbers = [int(place[1]) for line in lines if (place := _STEP.search(line))]
        self._first = 1 if numbers and numbers[0] == 1 and 0 not in numbers else 0  # some count epochs from 1
        for line in lines:
            self._read(line)
        self._tell(max(self._epochs, default=0), whole=False)
        if self._unread:
            run.notes.append(f"{self._unread} lines were cut off, and left out")
        if self._restarted:
            run.facts.pop("seconds", None)  # what the log tells is the time of the last start
        if self._epochs and "train.duration" not in run.facts:
            run.facts["train.duration"] = f"{len(self._epochs)}ep"

    def _read(self, line: str) -> None:
        run = self._run
        if told := _TOLD.match(line):
            value = _value(told[2])
            number = isinstance(value, int | float) and math.isfinite(value)
            if told[1] in _FIGURES and not number:
                run.notes.append(f"# {told[1]}: {told[2]} is no number, and left out")
            else:
                run.facts[told[1]] = value if number else str(value)
        elif "Namespace(" in line:
            run.facts |= dict(_arguments(line, run.notes))
        elif place := _STEP.search(line):
            self._step(int(place[1]) - self._first, int(place[2]) + 1, int(place[3]), line)
        elif whole := _EPOCH_TIME.search(line):
            self._epochs.get(int(whole[1]) - self._first, {})["seconds"] = _seconds(whole.groups()[1:])
        elif (result := _RESULT.match(line)) and (result[1] or not self._both):
            epoch = max(self._epochs, default=0)
            self._tell(epoch)
            shares = [float(share) / 100 if share else None for share in (result[2], result[3])]
            place_now = {"step": self._steps(), "epoch": float(epoch + 1)}
            run.records.append({"kind": "eval", **place_now, "top1": shares[0], "top5": shares[1]})
        elif complete := _COMPLETE.search(line):
            run.facts["seconds"] = int(complete[1] or 0) * 86400 + _seconds(complete.groups()[1:])

    def _step(self, epoch: int, done: int, count: int, line: str) -> None:
        meters = {
            name.lower().replace("prec@", "acc").replace("acc@", "acc"): float(mean or now)
            for name, now, mean in _METER.findall(line)
        }
        if not meters or not count:
            self._unread += 1
            return
        known, later = self._epochs.get(epoch, {"batches": 0}), any(number > epoch for number in self._epochs)
        if done == 1 and (known["batches"] > 2 or later):  # ranks that print in turns may be a step apart
            self._restart(epoch)
        for number in sorted(self._epochs):
            if number < epoch:
                self._tell(number)
        self._epochs[epoch] = {"batches": min(done, count), "of": count, "meters": meters}
        self._run.facts["steps per epoch"] = count

    def _restart(self, epoch: int) -> None:
        run, self._restarted, run.complete = self._run, True, False
        self._epochs = {number: old for number, old in self._epochs.items() if number < epoch}
        run.records = [record for record in run.records if record["epoch"] <= epoch]
        run.notes.append(f"it was restarted at epoch {epoch}; what was done twice is left out, its time too")

    def _steps(self) -> int:
        return sum(epoch["batches"] for epoch in self._epochs.values())

    def _tell(self, number: int, whole: bool = True) -> None:
        """One record per epoch, once; an epoch that something follows was done to its end."""
        epoch = self._epochs.get(number)
        if epoch is None or epoch.get("told"):
            return
        epoch["told"] = True
        if whole:
            epoch["batches"] = epoch["of"]
        meters, batches = epoch["meters"], epoch["batches"]
        record: dict[str, Any] = {"kind": "train", "step": self._steps(), "epoch": number + batches / epoch["of"]}
        record |= {"steps": batches, "loss": meters.get("loss")}
        record["top1"] = meters["acc1"] / 100 if "acc1" in meters else None
        if isinstance(batch := self._run.facts.get("global_batch"), int):
            record["images"] = batch * batches
        if "time" in meters:
            seconds = epoch.get("seconds", meters["time"] * batches)
            data = min(seconds, meters.get("data", 0.0) * batches)
            record["seconds"] = {"data": data, "compute": seconds - data}
            if batches != epoch["of"]:
                self._run.notes.append(f"the log ends within epoch {number}")
        self._run.records.append(record)


def _seconds(clock: Sequence[str]) -> int:
    hours, minutes, seconds = map(int, clock)
    return (hours * 60 + minutes) * 60 + seconds


def _example(path: Path, run: Run) -> None:
    _Example(run, _lines(path))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def _arguments(line: str, notes: list[str]) -> Iterator[tuple[str, Any]]:
    given = {key: _value(text) for key, text in re.findall(r"(\w+)=('[^']*'|[^,)]+)", line)}
    nodes = given.get("world_size", 1)
    if isinstance(nodes, int) and nodes > 1:
        given.pop("batch_size", None)
        notes.append("batch_size is that of a node in this program: say `# global_batch: N`")
    for key, name in _ARGUMENTS.items():
        if given.get(key) is not None:
            yield name, f"{given[key]}ep" if key == "epochs" else given[key]


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

    events = EventAccumulator(str(path.parent), size_guidance={"scalars": 0})
    events.Reload()
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
    ("PyTorch ImageNet example", lambda path: bool(_STEP.search(_head(path)) or _RESULT.search(_head(path))), _example),
)  # fmt: skip
