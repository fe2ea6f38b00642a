"""A resume that is refused changes nothing, and records that are missing are found wherever they are missing."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import HANG, TINY, command, complaint, environment

from paceline.track.records import RunFolder

RESUME = ("train", "--resume", "runs/digits")


@pytest.fixture
def run(here, tmp_path: Path) -> RunFolder:
    """Checkpoints of steps 10, 20 and 30."""
    words = ("--train.duration", "30ba", "--checkpoint.keep", "5", "--log.every", "5ba")
    assert here("train", "digits", *TINY, *words).returncode == 0
    return RunFolder(tmp_path / "runs" / "digits")


def _names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_corrupt_checkpoint_stays_where_it_is_until_training_starts(here, run: RunFolder) -> None:
    (run.checkpoints / "step-00000030" / "model.safetensors").write_bytes(b"rubbish")
    before = _names(run)
    assert "[resume-changes-experiment]" in complaint(here(*RESUME, "--seed", 7))
    assert _names(run) == before
    answer = here(*RESUME, "--train.duration", "40ba")
    assert answer.returncode == 0, answer.stderr
    assert "resuming from step 20" in answer.stderr
    assert "corrupt-step-00000030" in _names(run)


def test_a_run_that_is_finished_keeps_checkpoints_beyond_its_records(here, run: RunFolder) -> None:
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(line for line in lines if b'"step": 30' not in line and b'"step": 25' not in line))
    before = _names(run)
    assert "[run-finished]" in complaint(here(*RESUME, "--train.duration", "20ba"))
    assert _names(run) == before


def test_a_gap_in_the_middle_of_the_records_is_filled(here, run: RunFolder) -> None:
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(line for line in lines if b'"step": 15' not in line))
    answer = here(*RESUME, "--train.duration", "40ba")
    assert answer.returncode == 0, answer.stderr
    assert "resuming from step 10" in answer.stderr
    steps = [record["step"] for record in run.records() if record["kind"] == "train"]
    assert steps == list(range(5, 41, 5))


def test_a_run_whose_newest_checkpoint_is_corrupt_can_be_evaluated(here, run: RunFolder) -> None:
    (run.checkpoints / "step-00000030" / "state.json").write_bytes(b"rubbish")
    answer = here("evaluate", run.path)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(("procs", "stderr"), [(1, "closed"), (2, "closed"), (1, "full")])
def test_a_signal_saves_though_nobody_takes_the_messages(tmp_path: Path, procs: int, stderr: str) -> None:
    words = command("train", "digits", *TINY, "--train.duration", "100000ba", "--procs", procs)
    reader, writer = os.pipe()
    target = writer if stderr == "closed" else os.open("/dev/full", os.O_WRONLY)
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=target, stdout=target) as process:
        os.close(writer)
        metrics = tmp_path / "runs" / "digits" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            if stderr == "closed":
                os.set_blocking(reader, False)
                with suppress(BlockingIOError):
                    os.read(reader, 1 << 16)
            os.sched_yield()
        os.close(reader)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) != 0
    assert list((tmp_path / "runs" / "digits" / "checkpoints").glob("step-*/COMMIT"))


def test_a_long_folder_of_temporary_files_is_named(paceline, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    answer = paceline("train", "digits", *TINY, "--procs", 2, env=environment() | {"TMPDIR": str(folder)})
    message = complaint(answer)
    assert "[tmpdir-too-long]" in message
    assert str(folder) in message
