"""`paceline train --seeds` in real processes: killed and repeated, under a launcher, and with a seed that fails."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from conftest import HANG, TINY, complaint, raises
from processes import run_ranks, start, wait_for_step

import paceline as pl
from paceline.checkpoint import store
from paceline.config.seeds import run_name
from paceline.track.records import RunFolder

SHORT = ("--device", "cpu", "--precision", "fp32", *TINY)
LONG = (*SHORT, "--train.duration", "150ba")  # long enough that a signal arrives during training


def _folder(where: Path, seed: int) -> RunFolder:
    return RunFolder(where / "runs" / run_name("digits", seed))


def _result(where: Path, seed: int) -> tuple[bytes, list[tuple[float, float]]]:
    """Return the final weights and optimizer state of a finished run, and its evaluations."""
    folder = _folder(where, seed)
    assert folder.finished
    newest = next(store.committed(folder.checkpoints))
    state = (newest / "model.safetensors").read_bytes() + (newest / "optimizer.safetensors").read_bytes()
    return state, [(record["top1"], record["loss"]) for record in folder.records() if record["kind"] == "eval"]


def _num_starts(where: Path) -> list[int]:
    return [len(_folder(where, seed).read_starts()) for seed in range(3)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which three seeds were trained without an interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start(folder, "train", "digits", *LONG, "--seeds", 3)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 0, errors
    return folder


def test_seeds_differ_and_are_one_group(uninterrupted: Path) -> None:
    folders = [_folder(uninterrupted, seed).path for seed in range(3)]
    assert len({_result(uninterrupted, seed)[0] for seed in range(3)}) == 3
    comparison = pl.compare(folders)
    (group,) = comparison.groups
    assert (group.name, group.seeds) == ("digits", (0, 1, 2))
    assert comparison.is_comparable
    assert [run.facts["seed"] for run in comparison.runs] == [0, 1, 2]


def test_killed_and_repeated_seeds_end_as_if_uninterrupted(tmp_path: Path, paceline, uninterrupted: Path) -> None:
    words = ("train", "digits", *LONG, "--seeds", 3)
    process = start(tmp_path, *words)
    wait_for_step(process, _folder(tmp_path, 1).path, 25)
    process.kill()
    process.wait()
    assert [_folder(tmp_path, seed).finished for seed in range(3)] == [True, False, False]
    again = paceline(*words)
    assert again.returncode == 0, again.stderr
    assert "resuming from step" in again.stderr
    assert _num_starts(tmp_path) == [1, 2, 1]  # the first is not trained again
    for seed in range(3):
        assert _result(tmp_path, seed) == _result(uninterrupted, seed)
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_interrupted_seeds_checkpoint_and_are_resumed(tmp_path: Path, paceline, uninterrupted: Path) -> None:
    words = ("train", "digits", *LONG, "--seeds", "0,2")
    process = start(tmp_path, *words)
    wait_for_step(process, _folder(tmp_path, 0).path, 5)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert _folder(tmp_path, 0).read_summary()["status"] == "interrupted"
    assert not _folder(tmp_path, 2).exists
    again = paceline(*words, "--parallel", 2)
    assert again.returncode == 0, again.stderr
    for seed in (0, 2):
        assert _result(tmp_path, seed) == _result(uninterrupted, seed)


def test_ranks_of_a_launcher_train_the_same_runs(tmp_path: Path, paceline) -> None:
    words = ("train", "digits", *SHORT, "--seeds", "0,1,2")
    run_ranks(tmp_path, 2, *words)
    results = [_result(tmp_path, seed) for seed in range(3)]
    assert "is finished" in run_ranks(tmp_path, 2, *words).stderr
    assert _num_starts(tmp_path) == [1, 1, 1]
    elsewhere = tmp_path / "elsewhere"
    alone = paceline("train", "digits", *SHORT, "--seeds", "1,", "--procs", 2, "--runs", elsewhere / "runs")
    assert alone.returncode == 0, alone.stderr
    assert _result(elsewhere, 1) == results[1]


def test_a_seed_that_fails_does_not_stop_the_others(tmp_path: Path, paceline, monkeypatch) -> None:
    other = paceline("train", "digits", *SHORT, "--train.duration", "2ba", "--seed", 1, "--name", run_name("digits", 1))
    assert other.returncode == 0, other.stderr
    before = _result(tmp_path, 1)
    refused = paceline("train", "digits", *SHORT, "--seeds", 3)
    assert refused.returncode == 1
    assert "[seeds-failed]" in complaint(refused)
    assert "seed 1: " in refused.stderr
    assert "[run-of-another-recipe]" in refused.stderr
    assert [_folder(tmp_path, seed).finished for seed in (0, 2)] == [True, True]
    assert _result(tmp_path, 1) == before  # nothing was lost
    monkeypatch.chdir(tmp_path)
    with raises("seeds-failed") as caught:
        pl.train(_folder(tmp_path, 0).recipe, name="digits", seeds=[0, 1, 2, 3], in_process=True)
    assert caught.value.fields["seeds"] == [1]
    assert _folder(tmp_path, 3).finished


def test_a_seed_that_is_killed_does_not_stop_the_others(tmp_path: Path) -> None:
    process = start(tmp_path, "train", "digits", *LONG, "--seeds", 2)
    wait_for_step(process, _folder(tmp_path, 0).path, 5)
    for child in psutil.Process(process.pid).children():
        child.kill()
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert "[seeds-failed]" in errors
    assert [_folder(tmp_path, seed).finished for seed in range(2)] == [False, True]
