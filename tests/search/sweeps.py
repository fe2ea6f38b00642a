"""Sweeps for tests: tiny trials, and assertions that hold for every finished sweep."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from conftest import HANG, command, environment

from paceline.analysis.sweeps.record import SweepRecord, SweepTrial, read_sweep
from paceline.track.records import RunFolder

TINY = (
    *("--precision", "fp32", "--device", "cpu", "--log.tensorboard", "false", "--train.global_batch", "96"),
    *("--model.options", "{widths: [4, 8], norm: batch}", "--evaluate.every", "1ep"),
)
SPACE = ("--set", "optim.lr=log:0.001..1", "--set", "seed=0..9")


def words_of(*words: object, epochs: int = 2, space: tuple[str, ...] = SPACE) -> list[str]:
    """Return the words of a sweep on digits."""
    return ["sweep", "digits", *space, *TINY, "--train.duration", f"{epochs}ep", *map(str, words)]


def start(folder: Path, out: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a worker whose output goes to a file."""
    with out.open("wb") as file:
        return subprocess.Popen(command(*words), cwd=folder, env=environment(), stdout=file, stderr=file)


def wait_until(condition: Callable[[], bool], *processes: "subprocess.Popen[bytes]") -> None:
    """Wait for a condition while the processes run."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        assert all(process.poll() is None for process in processes), "a worker ended"
        time.sleep(0.02)


def first_steps(run: Path) -> list[int]:
    """Return the step that each start of a run began at."""
    return [start["first_step"] for start in RunFolder(run).read_starts()]


def check_complete(folder: Path, trials: int) -> SweepRecord:
    """Assert that every trial is complete, was trained once from beginning to end, and reports its own result."""
    record = read_sweep(folder)
    assert [trial.number for trial in record.trials] == list(range(trials))
    assert {trial.state for trial in record.trials} == {"complete"}
    assert sorted(path.name for path in folder.glob("trial-*")) == [trial.run for trial in record.trials]
    for trial in record.trials:
        check_trained_once(folder / trial.run, trial)
    numbers = [line["trial_id"] for line in journal(folder) if line["op_code"] == 6]
    assert sorted(numbers) == list(range(trials)), "each trial ends once"
    return record


def check_trained_once(path: Path, trial: SweepTrial) -> None:
    run = RunFolder(path)
    records, summary = run.records(), run.read_summary()
    assert sum(record["steps"] for record in records if record["kind"] == "train") == summary["total_steps"]
    best = max((record for record in records if record["kind"] == "eval"), key=lambda record: record["top1"])
    assert (trial.value, trial.epoch) == (best["top1"], best["epoch"])
    text = run.recipe.read_text()
    assert all(f"{field.rpartition('.')[2]}: {value}\n" in text for field, value in trial.values.items())


def journal(folder: Path) -> list[dict]:
    """Return the lines of the journal of a study."""
    return [json.loads(line) for line in (folder / "study.journal").read_text().splitlines()]
