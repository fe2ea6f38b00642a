"""The disk refuses writes during a command: full, over quota, read-only or failing."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HANG, TINY, command, complaint, environment
from disk import preloaded
from made_runs import make_run
from sample_images import tree
from saved_checkpoints import read

from paceline.checkpoint import store
from paceline.system.host import host_name
from paceline.track.records import RunFolder

TRAIN = ("train", "digits", *TINY, "--precision", "fp32", "--log.tensorboard", "true")
RUN = Path("runs") / "digits"
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
ROOM = 250_000
"""Bytes, enough for some of the checkpoints."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("uninterrupted")
    answer = _run(folder, {}, *TRAIN)
    assert answer.returncode == 0, answer.stderr
    return RunFolder(folder / RUN)


def _run(folder: Path, variables: dict[str, str], *words: object, **more: object) -> subprocess.CompletedProcess[str]:
    options = {"cwd": folder, "env": environment() | variables, "capture_output": True, "text": True, "timeout": HANG}
    return subprocess.run(command(*words), **(options | more), check=False)


def _is_the_same(run: RunFolder, other: RunFolder) -> bool:
    """Return whether both runs have every step once, the same losses and the same final weights."""
    losses = [
        [(record["step"], record["loss"]) for record in each.records() if record["kind"] == "train"]
        for each in (run, other)
    ]
    weights = [(each.checkpoints / "step-00000060" / "model.safetensors").read_bytes() for each in (run, other)]
    return losses[0] == losses[1] and weights[0] == weights[1] and run.finished


def _is_polite(text: str) -> bool:
    return not any(word in text for word in ("Traceback", "Logging error", "Exception"))


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_training_warns_once_fails_and_resumes(
    number: int, tmp_path: Path, uninterrupted: RunFolder, here: Callable, survived
) -> None:
    answer = _run(tmp_path, preloaded(tmp_path, tmp_path / "runs", room=ROOM, errno=number), *TRAIN)
    text = complaint(answer)
    assert answer.returncode == 1
    assert _is_polite(text), text
    last = text.splitlines()[-1]
    assert last.startswith(
        f"paceline: error: the checkpoint of step 60 was not written on {host_name()}: runs/digits/"
    ), last
    assert os.strerror(number) in last
    assert last.endswith("paceline train --resume runs/digits [checkpoint-not-written]")
    assert text.count("Training continues") <= 1
    run = RunFolder(tmp_path / RUN)
    checkpoints = [read(path)[0].step for path in store.committed(run.checkpoints)]
    assert checkpoints
    assert max(checkpoints) < 60
    again = here("train", "--resume", RUN)
    assert again.returncode == 0, again.stderr
    assert f"resuming from step {max(checkpoints)} " in again.stderr
    assert _is_the_same(run, uninterrupted)
    assert run.num_corrupt == 0
    survived("disks that refuse writes during training")


def test_buffered_records_are_written_when_there_is_space_again(
    tmp_path: Path, uninterrupted: RunFolder, survived
) -> None:
    disk = preloaded(tmp_path, tmp_path / "runs", room=ROOM, errno=errno.ENOSPC, failures=40)
    answer = _run(tmp_path, disk, *TRAIN)
    assert answer.returncode == 0, answer.stderr
    assert _is_polite(answer.stderr)
    assert answer.stderr.count("Training continues") == 1
    assert answer.stderr.count("the disk accepts writes again") == 1
    run = RunFolder(tmp_path / RUN)
    assert _is_the_same(run, uninterrupted)
    assert run.read_starts()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert [event.step for event in events.Scalars("Loss/train")] == list(range(1, 61))
    survived("disks that were full for a while")


def test_other_commands_leave_no_partial_files(tmp_path: Path, here: Callable, survived) -> None:
    make_run(tmp_path / "runs", "made")
    assert here(*TRAIN, "--train.duration", "10ba", "--name", "trained").returncode == 0
    commands = (
        ("report", "runs/made", "--out", "out/report.html"),
        ("logbook", "runs/made", "--out", "out/logbook"),
        ("export", "runs/trained", "--to", "out/weights.safetensors"),
        ("prepare", "folder", str(tree(tmp_path / "images")), "--out", "out/data"),
    )
    program = f"from paceline.cli.main import main\nassert [main(words) for words in {commands!r}] == [1] * 4"
    for number in ERRORS:
        (tmp_path / "out").mkdir()
        variables = environment() | preloaded(tmp_path, tmp_path / "out", room=1000, errno=number)
        options = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True, "timeout": HANG}
        answer = subprocess.run([sys.executable, "-c", program], **options, check=False)
        assert answer.returncode == 0, answer.stderr
        assert _is_polite(answer.stderr), answer.stderr
        complaints = [line for line in answer.stderr.splitlines() if line.startswith("paceline: error: ")]
        for words, text in zip(commands, complaints, strict=True):
            assert words[-1] in text, text
            assert os.strerror(number) in text, text
        left = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name[0] != "."]
        assert not left
        for words in commands:
            again = here(*words)
            assert again.returncode == 0, again.stderr
        shutil.rmtree(tmp_path / "out")
    survived("disks that refuse writes of other commands", len(ERRORS) * len(commands))


def test_standard_output_on_a_full_disk(tmp_path: Path, survived) -> None:
    with open("/dev/full", "w") as full:
        for words in (["recipes"], ["runs", "--json"]):  # larger and smaller than a buffer
            (tmp_path / "runs").mkdir(exist_ok=True)
            answer = _run(tmp_path, {}, *words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
            assert answer.returncode == 1
            (line,) = answer.stderr.splitlines()
            assert line.startswith("paceline: error: No space left on device")
        answer = _run(tmp_path, {}, *TRAIN, capture_output=False, stdout=full, stderr=full)
        assert answer.returncode == 0
    assert RunFolder(tmp_path / RUN).finished
    survived("full disks behind standard output", 3)


MOUNTED = """
mount -t tmpfs -o size={size}k none runs || exit 77
{python} -m paceline {train} && exit 1
mount -o remount,size=50m runs
{python} -m paceline {train}
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small disk needs root")
def test_training_on_a_small_file_system(tmp_path: Path, survived) -> None:
    (tmp_path / "runs").mkdir()
    words = {"python": sys.executable, "train": " ".join(f"'{word}'" for word in TRAIN), "size": 260}
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": HANG}
    answer = subprocess.run(["unshare", "-m", "sh", "-c", MOUNTED.format(**words)], **options, check=False)
    if answer.returncode == 77:
        pytest.skip(f"nothing can be mounted here: {answer.stderr.strip()}")
    assert answer.returncode == 0, answer.stderr
    assert _is_polite(answer.stderr), answer.stderr
    _, _, second = answer.stderr.partition(
        f"paceline: error: the checkpoint of step 60 was not written on {host_name()}: "
    )
    assert " kB needed)" in second
    assert "[checkpoint-not-written]" in second
    assert "resuming from step" in second
    assert "finished: " in second
    survived("full file systems")
