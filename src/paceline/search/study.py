"""The study that all workers of a sweep share: which trial comes next, and how each of them ended.

A worker holds the lock of the study while it takes a trial, and the lock of the trial while it trains. A trial that
is running but not locked belonged to a worker that was killed: the next worker takes it, with its number and values.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from paceline.analysis.sweeps.record import SWEEP, is_sweep
from paceline.config import yamls
from paceline.config.io import leaves, to_tree
from paceline.errors import UserError
from paceline.search.results import END, write_results
from paceline.search.samplers import next_grid_point, pruner_of, sampler_of, suggest
from paceline.search.spec import SweepSpec
from paceline.search.storage import LOCK_SECONDS, describe_storage, import_optuna, open_storage, storage_errors
from paceline.search.trial import TrialEnd
from paceline.system.files import FolderLock, make_folder, write_json, write_text
from paceline.track.records import RunFolder

_ATTRIBUTE = "paceline"
"""Attribute of the study with its identity."""
_MAX_FAILURES = 3
"""Number of failed trials, without any result, after which the sweep stops."""
_MAX_NAMED = 5
"""Differing fields of recipes that a message names."""


@dataclass(frozen=True)
class Claim:
    """A trial that this worker trains, and no other."""

    trial: Any
    """Optuna's trial."""
    lock: FolderLock
    reported: dict[int, float] = field(default_factory=dict)
    """Values by epoch that a worker that was killed has reported."""

    @property
    def number(self) -> int:
        return int(self.trial.number)


class SharedStudy:
    """A study in a storage."""

    def __init__(self, spec: SweepSpec) -> None:
        """Open the study of a sweep, or create it. UserError if it is the study of another sweep."""
        self._optuna = import_optuna()
        self.spec = spec
        self.shown = describe_storage(spec.storage, spec.folder)
        self.started = datetime.now()
        _check_folder(spec.folder)
        is_new = not spec.folder.exists()
        make_folder(spec.folder / "locks")
        with self._locked():
            is_new &= not (spec.folder / SWEEP).exists()  # a worker that started at the same time may have made it
            try:
                self._study = self._open()
            except BaseException:
                if is_new:  # leave nothing behind
                    shutil.rmtree(spec.folder, ignore_errors=True)
                raise

    def _open(self) -> Any:
        """Return the study after checking that it belongs to this sweep, and write its results so far."""
        identity = _read_identity(self.spec)
        self._storage = open_storage(self.spec.storage, self.spec.folder)
        with storage_errors(self.shown):
            study = self._create(identity)
            write_results(self.spec, study, final=False)
        return study

    def _create(self, identity: dict[str, Any]) -> Any:
        direction = "minimize" if self.spec.minimizes else "maximize"
        study = self._optuna.create_study(
            storage=self._storage,
            study_name=self.spec.name,
            direction=direction,
            pruner=pruner_of(self.spec),
            load_if_exists=True,
        )
        known = study.user_attrs.get(_ATTRIBUTE)
        if known is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(_ATTRIBUTE, identity)
        elif known != identity:
            message = (
                f"{self.shown} has a study {self.spec.name!r} of another folder than {self.spec.folder}. "
                "Choose another --name. Workers on several hosts need the same folder on a shared file system."
            )
            raise UserError("study-of-other-folder", message, path=self.spec.folder, storage=self.shown)
        return study

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the study."""
        try:
            lock = FolderLock(self.spec.folder, grace=LOCK_SECONDS)
        except UserError:
            message = f"another process has locked {self.spec.folder} for {LOCK_SECONDS:.0f} s. Wait until it ends."
            raise UserError("storage-locked", message, path=self.spec.folder) from None
        try:
            yield
        finally:
            lock.release()

    def _trials(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    def next(self) -> Claim | None:
        """Take the trial of a worker that was killed, or a new one; None if there is none."""
        with self._locked(), storage_errors(self.shown):
            trials = self._trials()
            claim = self._take_over(trials)
            if not claim and self._started(trials) < self.spec.trials:
                claim = self._start(trials)
            if claim:
                suggest(claim.trial, self.spec.space)  # a worker that was killed may have chosen some values
                self._write_results()
            return claim

    def is_done(self) -> bool:
        """Return whether no trial is left to start or to wait for."""
        with storage_errors(self.shown):
            trials = self._trials()
        finished = all(trial.state.is_finished() for trial in trials)
        return finished and self._started(trials) >= self.spec.trials

    def _started(self, trials: list[Any]) -> int:
        waiting = self._optuna.trial.TrialState.WAITING  # a point of a grid that no worker took
        return sum(trial.state != waiting for trial in trials)

    def _take_over(self, trials: list[Any]) -> Claim | None:
        running = [trial for trial in trials if trial.state == self._optuna.trial.TrialState.RUNNING]
        for trial in running:
            if (lock := self._lock_of(trial.number)) is None:
                continue
            if RunFolder(self.spec.trial_folder(trial.number)).in_use:  # e.g. on another host without common locks
                lock.release()
                continue
            reported = dict(trial.intermediate_values)
            return Claim(self._optuna.Trial(self._study, trial._trial_id), lock, reported)
        return None

    def _lock_of(self, number: int) -> FolderLock | None:
        try:
            return FolderLock(self.spec.folder / "locks", name=self.spec.trial_folder(number).name)
        except UserError:  # another worker trains it
            return None

    def _start(self, trials: list[Any]) -> Claim:
        if self.spec.sampler == "grid" and self._started(trials) == len(trials):
            visited = [trial.system_attrs.get("fixed_params", {}) | trial.params for trial in trials]
            self._study.enqueue_trial(next_grid_point(self.spec, visited))
        self._study.sampler = sampler_of(self.spec, len(trials))
        trial = self._study.ask()
        lock = self._lock_of(trial.number)
        assert lock, "the trial is new, and the study is locked"
        return Claim(trial, lock)

    def report(self, claim: Claim, epoch: int, value: float) -> bool:
        """Report an evaluation; return whether the trial should be pruned."""
        with storage_errors(self.shown):
            claim.trial.report(value, epoch)
            return bool(claim.trial.should_prune())

    def finish(self, claim: Claim, end: TrialEnd) -> None:
        """Record how a trial ended."""
        states = self._optuna.trial.TrialState
        # a trial that diverged is a bad one to the sampler, as a pruned one is, while a failed one tells it nothing
        state = {"complete": states.COMPLETE, "failed": states.FAIL}.get(end.state, states.PRUNED)
        with self._locked(), storage_errors(self.shown):
            claim.trial.set_user_attr(END, asdict(end))
            self._study.tell(claim.trial, end.value if end.state == "complete" else None, state)
            self._write_results()
        claim.lock.release()

    def check_failures(self) -> None:
        """UserError if the first trials have failed since this worker started, and none has a result."""
        states = self._optuna.trial.TrialState
        with storage_errors(self.shown):
            trials = self._trials()
        if any(trial.state in (states.COMPLETE, states.PRUNED) for trial in trials):
            return
        failed = [trial for trial in trials if trial.state == states.FAIL and trial.datetime_start >= self.started]
        if len(failed) >= min(_MAX_FAILURES, self.spec.trials):
            last = failed[-1]
            reason = str(last.user_attrs.get(END, {}).get("reason", "unknown")).rstrip(".")
            message = (
                f"the first {len(failed)} trials failed, so the sweep stops. Trial {last.number}: {reason}. Fix it, or "
                f"change the search space under another --name. The run folders are in {self.spec.folder}."
            )
            raise UserError("trials-failed", message, path=self.spec.folder, trials=len(failed), reason=reason)

    def summarize(self) -> None:
        """Write the results with the importance of parameters, and the recipe of the best trial."""
        with self._locked(), storage_errors(self.shown):
            self._write_results(final=True)

    def _write_results(self, final: bool = False) -> None:
        write_results(self.spec, self._study, final)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else, such as a run."""
    if folder.exists() and not folder.is_dir():
        raise UserError("folder-not-a-sweep", f"{folder} is not a folder. Choose another --name.", path=folder)
    if not folder.exists() or is_sweep(folder):
        return
    # hidden files are locks and temporary
    begun = ("locks", "base.yaml")
    if others := [path.name for path in folder.iterdir() if path.name not in begun and not path.name.startswith(".")]:
        message = f"{folder} exists and is not a sweep; it contains {others[0]}. Choose another --name."
        raise UserError("folder-not-a-sweep", message, path=folder)


def _read_identity(spec: SweepSpec) -> dict[str, Any]:
    """Return the identity of the sweep in the folder; write it if there is none. The study must be locked."""
    path = spec.folder / SWEEP
    if not path.exists():
        identity = spec.identity | {"id": secrets.token_hex(8), "created": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_text(spec.base, spec.base_text)
        write_json(path, identity)
        return identity
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name, value in spec.identity.items() if known[name] != value]
        described = _described(known)
    except (ValueError, KeyError, TypeError):
        message = f"{path} is corrupt. Restore it from a backup, or start another sweep with --name."
        raise UserError("storage-corrupt", message, path=path) from None
    if differing:
        message = (
            f"{spec.folder} has a sweep of {described}, but this command is one of {_described(spec.identity)}"
            f"{_recipe_differences(spec) if 'fingerprint' in differing else ''}. "
            "Choose another --name, or use the same recipe, --set and --metric."
        )
        raise UserError("study-differs", message, path=spec.folder, differing=differing)
    if _text(spec.base) != spec.base_text:  # trials train this file, which may have been edited or deleted
        write_text(spec.base, spec.base_text)
    return dict(known)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _recipe_differences(spec: SweepSpec) -> str:
    """Return how the recipe of the sweep differs from the one of this command."""
    try:
        found = dict(leaves(yamls.read(spec.base)))
    except (OSError, yaml.YAMLError, AttributeError):  # an edited file only makes the message shorter
        found = {}
    own = dict(leaves(to_tree(spec.recipe)))
    texts = [
        f"{name}: {found[name]!r} / {own.get(name)!r}"
        for name in found
        if not name.startswith("about.") and found[name] != own.get(name)
    ]
    more = [f"and {len(texts) - _MAX_NAMED} more"] if texts[_MAX_NAMED:] else []
    named = f" (first that of the sweep): {'; '.join([*texts[:_MAX_NAMED], *more])}" if texts else " in their values"
    return f"; the recipes differ{named}"


def _described(identity: dict[str, Any]) -> str:
    space = " ".join(f"{field}={text}" for field, text in dict(identity["space"]).items())
    return f"{identity['recipe']} for {identity['metric']} over {space}"
