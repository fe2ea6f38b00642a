"""A run that was stopped in any way resumes exactly."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import HANG, PRECISIONS, TINY
from processes import ranks, run_ranks, start, wait_for_step
from saved_checkpoints import read as read_checkpoint

from paceline.analysis.read import read
from paceline.checkpoint import store
from paceline.track.records import RunFolder

# long enough that a signal arrives during training
LONG = (*TINY, "--train.duration", "150ba")


def _weights(run: Path) -> bytes:
    newest = next(store.committed(run / "checkpoints"))
    assert newest.name == "step-00000150"
    return (newest / "model.safetensors").read_bytes() + (newest / "optimizer.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> bytes:
    """Final weights and optimizer state of an uninterrupted run on two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks(folder, 2, "train", "digits", *LONG)
    return _weights(folder / "runs" / "digits")


def test_run_killed_within_an_epoch_ends_bit_identical(tmp_path: Path, uninterrupted: bytes) -> None:
    run = tmp_path / "runs" / "digits"
    words = ("train", "digits", *LONG, "--procs", 2)
    process = start(tmp_path, *words)
    wait_for_step(process, run, 25)
    for victim in [*ranks(process), psutil.Process(process.pid)]:
        victim.kill()
    process.wait()
    assert not RunFolder(run).finished
    again = run_ranks(tmp_path, 2, *words)
    assert "is not finished; resuming it" in again.stderr
    assert "resuming from step" in again.stderr
    assert _weights(run) == uninterrupted
    steps = [record["step"] for record in RunFolder(run).records() if record["kind"] == "train"]
    assert steps == list(range(1, 151))


def test_one_killed_rank_ends_the_others_with_a_clear_message(tmp_path: Path, uninterrupted: bytes) -> None:
    run = tmp_path / "runs" / "digits"
    words = ("train", "digits", *LONG, "--procs", 2)
    process = start(tmp_path, *words)
    wait_for_step(process, run, 15)
    ranks(process)[-1].kill()
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert "paceline: error: rank 1 " in errors
    assert "[rank-killed]" in errors
    assert "Traceback" not in errors
    run_ranks(tmp_path, 2, "train", "--resume", run)
    assert _weights(run) == uninterrupted


@pytest.mark.parametrize(("procs", "signum"), [(1, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGINT)])
def test_signal_writes_a_checkpoint_and_logs_how_to_resume(tmp_path: Path, procs: int, signum: int) -> None:
    run = tmp_path / "runs" / "digits"
    process = start(tmp_path, "train", "digits", *LONG, "--procs", procs, "--checkpoint.every", "1000ba")
    wait_for_step(process, run, 5)
    os.kill(process.pid, signum)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signum, errors
    assert "Traceback" not in errors
    assert "resume with: paceline train --resume runs/digits" in errors
    summary = RunFolder(run).read_summary()
    assert summary["status"] == "interrupted"
    assert next(store.committed(run / "checkpoints")).name == f"step-{summary['step']:08d}"


def test_signal_to_one_rank_stops_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "digits"
    process = start(tmp_path, "train", "digits", *LONG, "--procs", 2)
    wait_for_step(process, run, 5)
    ranks(process)[-1].terminate()
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "resume with: paceline train --resume runs/digits --procs 2" in errors
    assert RunFolder(run).read_summary()["status"] == "interrupted"


def test_signal_to_launcher_and_ranks_counts_once(tmp_path: Path) -> None:
    """As systemd stops a service: the ranks get it twice, because the launcher forwards its signal."""
    run = tmp_path / "runs" / "digits"
    process = start(tmp_path, "train", "digits", *LONG, "--procs", 2)
    wait_for_step(process, run, 5)
    for member in [*ranks(process), psutil.Process(process.pid)]:
        member.terminate()
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert RunFolder(run).read_summary()["status"] == "interrupted"


def test_signal_while_ranks_are_starting(tmp_path: Path) -> None:
    process = start(tmp_path, "train", "digits", *LONG, "--procs", 2)
    deadline = time.monotonic() + HANG
    while len(ranks(process)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert errors.splitlines()[-1].startswith("SIGINT received")
    assert not list(tmp_path.glob("runs/*"))


def test_signal_during_an_evaluation(tmp_path: Path) -> None:
    """The last evaluation has so many small batches that it takes minutes; resuming repeats it."""
    run = tmp_path / "runs" / "digits"
    shape = "{train_samples: 48, val_samples: 300000, channels: 1, size: 8}"
    words = ("digits", *TINY, "--train.duration", "1ba", "--data.name", "synthetic", "--data.synthetic", shape)
    process = start(tmp_path, "train", *words, "--evaluate.per_rank_batch", 1)
    wait_for_step(process, run, 1)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "SIGINT received" in errors
    assert [record["kind"] for record in RunFolder(run).records()] == ["train", "checkpoint"]
    run_ranks(tmp_path, 1, "train", "--resume", run, "--evaluate.per_rank_batch", 50_000)
    summary = RunFolder(run).read_summary()
    assert (summary["status"], summary["final"]["samples"]) == ("finished", 300_000)


def _catches(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_second_signal_exits_at_once(tmp_path: Path) -> None:
    """During a step that takes a minute and is not finished."""
    process = start(
        tmp_path, "train", "digits", "--model.options.widths", "[4096, 4096]", "--train.global_batch", "1024"
    )
    deadline = time.monotonic() + HANG
    while not _catches(process.pid, signal.SIGTERM):  # caught only within the training loop
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while process.poll() is None:  # signals during one call into torch are seen as one
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(RunFolder(tmp_path / "runs" / "digits").records()) == []


@PRECISIONS
def test_changing_the_number_of_ranks_repeats_and_skips_no_sample(
    tmp_path: Path, precision: str, distance: float
) -> None:
    """Without batch norm all losses over two epochs equal those of a run on one rank."""
    words = (
        "--log.every",
        "1ba",
        "--train.global_batch",
        "96",
        "--optim.schedule",
        "{name: constant, warmup: 0ba}",
        "--optim.lr",
        "0.05",
    )
    words += ("--precision", precision, "--model.options.widths", "[32, 64]")
    run_ranks(tmp_path, 1, "train", "digits", *words, "--name", "alone", "--train.duration", "28ba")
    run_ranks(tmp_path, 2, "train", "digits", *words, "--name", "moved", "--train.duration", "9ba")
    run_ranks(tmp_path, 1, "train", "--resume", "runs/moved", "--train.duration", "19ba")
    run_ranks(tmp_path, 2, "train", "--resume", "runs/moved", "--train.duration", "28ba")
    alone, moved = (
        {record["step"]: record["loss"] for record in RunFolder(tmp_path / "runs" / name).records() if "lr" in record}
        for name in ("alone", "moved")
    )
    assert alone.keys() == moved.keys() == set(range(1, 29))
    assert max(abs(alone[step] - moved[step]) for step in alone) < distance


def test_loading_options_may_change_but_augmentation_may_not(here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "10ba").returncode == 0
    longer = ("train", "--resume", "runs/digits", "--train.duration", "20ba")
    answer = here(*longer, "--data.augment.cutout", "3")
    assert "data cannot change" in answer.stderr
    assert "[resume-changes-experiment]" in answer.stderr
    answer = here(*longer, "--data.decode_threads", "1", "--data.max_corrupt", "0.5")
    assert answer.returncode == 0, answer.stderr


def test_overrides_of_optimizer_and_precision_are_used_when_resuming(here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "20ba").returncode == 0
    words = (
        "--train.duration",
        "30ba",
        "--optim.weight_decay",
        "0.5",
        "--optim.momentum",
        "0.5",
        "--precision",
        "fp16",
    )
    answer = here("train", "--resume", "runs/digits", *words)
    assert answer.returncode == 0, answer.stderr
    _, parts = read_checkpoint(tmp_path / "runs" / "digits" / "checkpoints" / "step-00000030")
    group = parts["optimizer"]["param_groups"][0]
    assert (group["weight_decay"], group["momentum"]) == (0.5, 0.5)
    records = [record for record in RunFolder(tmp_path / "runs" / "digits").records() if record["kind"] == "train"]
    assert ["loss_scale" in record for record in records] == [False] * 20 + [True] * 10


def test_unfinished_run_of_the_same_recipe_is_found_among_others(here, tmp_path: Path) -> None:
    first = ("train", "digits", *TINY, "--train.duration", "20ba")
    assert here(*first).returncode == 0
    assert here(*first, "--seed", 1).returncode == 0
    summary = tmp_path / "runs" / "digits" / "summary.json"
    summary.write_text(summary.read_text().replace("finished", "running"))  # as after a kill at the very end
    answer = here(*first)
    assert "runs/digits is not finished; resuming it" in answer.stderr
    assert RunFolder(tmp_path / "runs" / "digits").finished


def test_other_data_is_evaluated_with_the_normalization_of_the_training_data(here, tmp_path: Path) -> None:
    shape = "{train_samples: 96, val_samples: 10, channels: 1, size: 8}"
    words = (*TINY, "--train.duration", "20ba", "--data.name", "synthetic", "--data.synthetic", shape)
    assert here("train", "digits", *words).returncode == 0
    other = ("evaluate", "runs/digits", "--data.synthetic.train_samples", 48, "--data.synthetic.val_samples", 360)
    _, parts = read_checkpoint(tmp_path / "runs" / "digits" / "checkpoints" / "step-00000020")
    known = parts["progress"]["preprocessing"]
    results = [
        here(*other, *more).stdout
        for more in (
            (),
            ("--data.mean", known["mean"], "--data.std", known["std"]),
            ("--data.mean", "[0.1]", "--data.std", "[0.9]"),
        )
    ]
    assert "of 360)" in results[0]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(("kept", "begin", "missing"), [(25, 20, None), (5, 30, 25)])
def test_records_that_end_before_a_checkpoint(here, tmp_path: Path, kept: int, begin: int, missing: int | None) -> None:
    """A run resumes from a checkpoint that they cover; without one, the gap is logged and recorded."""
    assert here("train", "digits", *TINY, "--train.duration", "30ba").returncode == 0
    run = RunFolder(tmp_path / "runs" / "digits")
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] <= kept))
    answer = here("train", "--resume", "runs/digits", "--train.duration", "40ba")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count(f"metrics.jsonl has no records from step {kept} to the checkpoint of step 30") == 1
    (resumed,) = [record for record in run.records() if record["kind"] == "resume"]
    assert (resumed["step"], resumed.get("missing")) == (begin, missing)
    steps = [record["step"] for record in run.records() if record["kind"] == "train"]
    assert steps == [step for step in range(1, 41) if missing is None or step <= kept or step > 30]
    assert any("records are missing" in note for note in read(run.path).notes) == (missing is not None)
    assert next(store.committed(run.checkpoints)).name == "step-00000040"
