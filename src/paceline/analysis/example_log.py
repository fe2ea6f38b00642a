"""Reader for logs of PyTorch's ImageNet example and programs derived from it, e.g. torchvision's references."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.analysis.run import LoggedRun
from paceline.system.files import printable
from paceline.system.untrusted import is_plain

_STEP = re.compile(r"Epoch:\s*\[(\d{1,9})\]\s*\[\s*(\d{1,9})/\s*(\d{1,9})\]")
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d.])"
# the example prints `Time 0.123 ( 0.456)`, torchvision `time: 0.1230` and `acc1: 12.5 (11.0)`
_METER = re.compile(
    rf"\b(Time|Data|Loss|Acc@1|Acc@5|Prec@1|Prec@5|acc1|acc5):?\s+{_NUMBER}(?:\s*\(\s*{_NUMBER}\))?", re.IGNORECASE
)
_RESULT = re.compile(
    rf"^\s*(?:\*|Test:)\s*(Val\s+)?(?:Acc|Prec)@1:?\s+{_NUMBER}(?:.*?(?:Acc|Prec)@5:?\s+{_NUMBER})?", re.MULTILINE
)
_EPOCH_TIME = re.compile(r"Epoch:\s*\[(\d{1,9})\]\s*Total time:\s+(\d{1,9}):(\d{1,9}):(\d{1,9})")
_COMPLETE = re.compile(r"Training complete in:?\s+(?:(\d{1,9}) days?, )?(\d{1,9}):(\d{1,9}):(\d{1,9})")
_COMMENT = re.compile(r"^#\s*([\w.]+)\s*:\s*(.+)$")
_MAX_FACTS = {"ranks": 10**9, "nodes": 10**9, "global_batch": 10**12, "seconds": 10**12}
"""Numeric facts and their largest valid values."""
_ARGUMENTS = {
    "batch_size": "global_batch",
    "workers": "data.decode_threads",
    "arch": "model.name",
    "lr": "optim.lr",
    "epochs": "train.duration",
    "momentum": "optim.momentum",
    "weight_decay": "optim.weight_decay",
    "seed": "seed",
}


def claims(head: str) -> bool:
    """Return whether a log with this beginning has the example's format."""
    return bool(_STEP.search(head) or _RESULT.search(head))


def read_into(run: LoggedRun, lines: list[str]) -> None:
    """Add the records, facts and notes of a log to the run."""
    _Example(run, lines)


class _Example:
    """Reads a log line by line.

    `Time` is the seconds of a step and, in parentheses, their mean since the start of the epoch; the time of an epoch
    is computed from the mean.
    """

    def __init__(self, run: LoggedRun, lines: list[str]):
        self._run, self._unread, self._restarted = run, 0, False
        self._epochs: dict[int, dict[str, Any]] = {}
        self._both = any(result[1] for line in lines if (result := _RESULT.match(line)))
        """Whether the log has results of both sets; then those without `Val` are of the training set."""
        numbers = [int(place[1]) for line in lines if (place := _STEP.search(line))]
        self._first = 1 if numbers and numbers[0] == 1 and 0 not in numbers else 0  # some count epochs from 1
        for line in lines:
            self._read(line)
        self._record(max(self._epochs, default=0), complete=False)
        if self._unread:
            run.notes.append(f"{self._unread} truncated lines were left out")
        if self._restarted:
            run.facts.pop("seconds", None)  # the log holds the time of the last start only
        if self._epochs and "train.duration" not in run.facts:
            run.facts["train.duration"] = f"{len(self._epochs)}ep"

    def _read(self, line: str) -> None:
        run = self._run
        if comment := _COMMENT.match(line):
            self._add_fact(comment[1], _value(comment[2]), f"# {comment[1]}: {comment[2]}")
        elif "Namespace(" in line:
            for name, value in _arguments(line, run.notes):
                self._add_fact(name, value, f"{name}={value}")
        elif place := _STEP.search(line):
            self._step(int(place[1]) - self._first, int(place[2]) + 1, int(place[3]), line)
        elif total := _EPOCH_TIME.search(line):
            self._epochs.get(int(total[1]) - self._first, {})["seconds"] = _seconds(total.groups()[1:])
        elif (result := _RESULT.match(line)) and (result[1] or not self._both):
            epoch = max(self._epochs, default=0)
            self._record(epoch)
            top1, top5 = (float(percent) / 100 if percent else None for percent in (result[2], result[3]))
            position = {"step": self._steps(), "epoch": float(epoch + 1)}
            run.records.append({"kind": "eval", **position, "top1": top1, "top5": top5})
        elif complete := _COMPLETE.search(line):
            run.facts["seconds"] = int(complete[1] or 0) * 86400 + _seconds(complete.groups()[1:])

    def _add_fact(self, name: str, value: Any, source: str) -> None:
        """Add a fact; numeric facts must be above zero."""
        is_number = isinstance(value, int | float) and is_plain(value)
        if name in _MAX_FACTS and not (is_number and 0 < value <= _MAX_FACTS[name]):
            self._run.notes.append(f"{source[:100]} was left out: not a number above 0")
        else:
            self._run.facts[name] = value if is_number else printable(str(value))

    def _step(self, epoch: int, done: int, count: int, line: str) -> None:
        meters = {
            name.lower().replace("prec@", "acc").replace("acc@", "acc"): float(mean or now)
            for name, now, mean in _METER.findall(line)
        }
        if not meters or not count:
            self._unread += 1
            return
        known, later = self._epochs.get(epoch, {"batches": 0}), any(number > epoch for number in self._epochs)
        if done == 1 and (known["batches"] > 2 or later):  # several ranks may print, up to a step apart
            self._restart(epoch)
        for number in sorted(self._epochs):
            if number < epoch:
                self._record(number)
        self._epochs[epoch] = {"batches": min(done, count), "of": count, "meters": meters}
        self._run.facts["steps per epoch"] = count

    def _restart(self, epoch: int) -> None:
        run, self._restarted, run.complete = self._run, True, False
        self._epochs = {number: old for number, old in self._epochs.items() if number < epoch}
        run.records = [record for record in run.records if record["epoch"] <= epoch]
        run.notes.append(f"restarted at epoch {epoch}: steps that were repeated, and their time, are left out")

    def _steps(self) -> int:
        return sum(epoch["batches"] for epoch in self._epochs.values())

    def _record(self, number: int, complete: bool = True) -> None:
        """Add the record of an epoch once; an epoch that is followed by more lines is complete."""
        epoch = self._epochs.get(number)
        if epoch is None or epoch.get("recorded"):
            return
        epoch["recorded"] = True
        if complete:
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
                self._run.notes.append(f"the log ends in the middle of epoch {number}")
        self._run.records.append(record)


def _seconds(clock: Sequence[str]) -> int:
    hours, minutes, seconds = map(int, clock)
    return (hours * 60 + minutes) * 60 + seconds


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text.strip()


def _arguments(line: str, notes: list[str]) -> Iterator[tuple[str, Any]]:
    given = {key: _value(text) for key, text in re.findall(r"(\w+)=('[^']*'|[^,)]+)", line)}
    nodes = given.get("world_size", 1)
    if isinstance(nodes, int) and nodes > 1:
        given.pop("batch_size", None)
        notes.append("batch_size is per node here. Add the line `# global_batch: N` to the log.")
    for key, name in _ARGUMENTS.items():
        if given.get(key) is not None:
            yield name, f"{given[key]}ep" if key == "epochs" else given[key]
