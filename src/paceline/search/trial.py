"""Train one trial in a process of its own, follow its evaluations, and find out how it ended."""

import queue
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.config import yamls
from paceline.config.io import recipe_from_tree, to_tree
from paceline.config.space import override_words
from paceline.errors import UserError
from paceline.search.spec import SweepSpec
from paceline.system.lifetime import own_command, training_env
from paceline.system.outcome import FILE as OUTCOME
from paceline.system.outcome import read_outcome
from paceline.system.signals import STOPPED
from paceline.track.records import RunFolder, records_of

PRUNED_BY = "sweep"
"""`stopped_by` in the summary of a pruned run."""
_POLL_SECONDS = 0.2
_MAX_RESTARTS = 2
_MAX_REASON = 2000  # characters; results.json refuses texts that are much longer
_DIVERGED = ("loss-not-finite", "validation-loss-not-finite", "below-expected-curve")
"""Errors that the values of a trial cause, and that are its result."""
_OF_THE_MACHINE = (
    *("disk-full", "disk-quota-exceeded", "file-size-limit", "disk-read-only", "disk-failure", "file-error"),
    *("checkpoint-not-written", "summary-not-written", "run-folder-not-writable", "folder-in-use", "missing-package"),
)
"""Errors that every trial would have on this machine: the worker stops, and the trial is resumed later."""
Report = Callable[[int, float], bool]
"""Takes the epoch and value of an evaluation; returns whether to prune the trial."""


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended."""

    state: str
    """complete, pruned, diverged or failed; empty: stopped, to be resumed."""
    value: float | None = None
    """Metric of its best evaluation, which was after `epoch`."""
    epoch: float | None = None
    seconds: float | None = None
    """Training time."""
    reason: str = ""


@dataclass
class TrialRun:
    """The run of a trial."""

    spec: SweepSpec
    number: int
    words: dict[str, str]
    """Values by field, as written on the command line."""
    environment: dict[str, str]
    """Variables of its processes, such as the GPUs that it may use."""
    report: Report
    reported: dict[int, float]
    """Values by epoch that were reported before."""
    _signals: "queue.SimpleQueue[int]" = field(default_factory=queue.SimpleQueue)
    _offset: int = 0

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.spec.trial_folder(self.number))

    def train(self, is_stopping: Callable[[], bool]) -> TrialEnd:
        """Train, or resume, until the run ends; return how."""
        self._refuse_other_run()
        for attempt in range(_MAX_RESTARTS + 1):
            if is_stopping():
                return TrialEnd("")
            if self.folder.finished:
                return self._end_of_finished()
            status, error, last_line = self._run()
            if status == 0 and self.folder.finished:
                return self._end_of_finished()
            if status in STOPPED and is_stopping():
                return TrialEnd("")
            code = error.get("code", "")
            if code in _OF_THE_MACHINE:
                raise UserError.from_json(error)
            if code in _DIVERGED:
                return self._end("diverged", reason=str(error["message"]))
            was_killed = status < 0 or code in ("rank-killed", "rank-crashed", "rank-lost")
            if not was_killed or attempt == _MAX_RESTARTS:
                break
        message = error.get("message") or last_line or f"the training ended with exit status {status}"
        return self._end("failed", reason=f"{message} [{code}]" if code else str(message))

    def send(self, signum: int) -> None:
        """Pass a signal on to the training, also one that is just starting."""
        self._signals.put(signum)

    def _refuse_other_run(self) -> None:
        """Refuse a run folder of this name that another study made."""
        if not self.folder.exists:
            return
        try:
            tree = yamls.read(self.folder.recipe, self.folder.path, fast=True)
            # a value may be a section, which the recipe of the run has with all of its fields
            recipe = recipe_from_tree(to_tree(self.spec.recipe), self.spec.recipe.name, override_words(self.words))
            expected = to_tree(recipe)
            same = all(_at(tree, name) == _at(expected, name) for name in self.words)
        except (OSError, yaml.YAMLError, KeyError, TypeError, IndexError):
            same = False
        if not same:
            message = (
                f"{self.folder.path} has a run with other values than trial {self.number}, perhaps because the study "
                "was deleted. Move the folder away, or start another sweep with --name."
            )
            raise UserError("trial-folder-differs", message, path=self.folder.path)

    def _run(self) -> tuple[int, dict[str, Any], str]:
        """Run the training once; return its exit status, its error and its last line."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            outcome, lines = Path(scratch) / "outcome.json", Path(scratch) / "stderr"
            more = {**self.spec.environment, **self.environment, OUTCOME: str(outcome)}
            with (
                lines.open("wb") as stderr,
                subprocess.Popen(
                    own_command(*self._command()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    env=training_env(more),
                    process_group=0,  # Ctrl-C reaches the worker only, which forwards it once
                ) as process,
            ):
                try:
                    status = self._follow(process)
                except BaseException:
                    process.kill()
                    raise
            printed = lines.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return status, read_outcome(outcome).get("error") or {}, printed[-1][:500] if printed else ""

    def _command(self) -> list[object]:
        procs = ("--procs", self.spec.procs)
        if self.folder.exists:
            return ["train", "--resume", self.folder.path, *procs, *self.spec.words]
        place = ("--runs", self.spec.folder, "--name", self.folder.path.name)
        return ["train", self.spec.base, *override_words(self.words), *place, *procs, *self.spec.words]

    def _follow(self, process: "subprocess.Popen[bytes]") -> int:
        """Report evaluations until the process ends; return its exit status."""
        while True:
            try:
                status = process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            if self._report_new() and status is None:
                epoch, value = next(reversed(self.reported.items()))
                reason = f"pruned: {self.spec.metric} {value:.4g} at epoch {epoch} is worse than in other trials"
                self.folder.request_stop(PRUNED_BY, reason)
            if status is not None:
                return status
            while not self._signals.empty():
                process.send_signal(self._signals.get())

    def _report_new(self) -> bool:
        """Report evaluations that were recorded since the last call; return whether to prune."""
        prune = False
        for record in self._new_records():
            epoch, value = int(record.get("epoch", 0) + 1e-9), record[self.spec.metric]
            if value is not None and epoch > 0 and epoch not in self.reported:
                self.reported[epoch] = value
                prune |= self.report(epoch, value)
        return prune

    def _new_records(self) -> list[dict[str, Any]]:
        try:
            with self.folder.metrics.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:  # not there yet
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for record in records_of(complete.splitlines(keepends=True)) if record["kind"] == "eval"]

    def _end_of_finished(self) -> TrialEnd:
        self._report_new()
        self.folder.stop_request.unlink(missing_ok=True)  # it may have been written when the run had just ended
        summary = self.folder.read_summary()
        if summary.get("stopped_by") == PRUNED_BY:
            return self._end("pruned", reason=str(summary.get("stop_reason", "")))
        return self._end("complete")

    def _end(self, state: str, reason: str = "") -> TrialEnd:
        """Return the end of a run with its best evaluation."""
        metric, choose = self.spec.metric, min if self.spec.minimizes else max
        records = self.folder.records(per_rank=1)
        evaluated = [record for record in records if record["kind"] == "eval" and record[metric] is not None]
        best = choose(evaluated, key=lambda record: record[metric]) if evaluated else {}
        if state == "complete" and not best:
            state, reason = "failed", f"no evaluation has {metric}"
        seconds = sum(sum(record["seconds"].values()) for record in records if record["kind"] == "train")
        return TrialEnd(state, best.get(metric), best.get("epoch"), seconds, reason[:_MAX_REASON])


def _at(tree: Any, dotted: str) -> Any:
    """Return the value at a dotted path of a recipe's tree."""
    for name in dotted.split("."):
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    return tree
