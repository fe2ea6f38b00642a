"""Invalid input and failures: a clear error, a non-zero exit status, and nothing is lost."""

import resource
import socket
from pathlib import Path

import pytest
from conftest import TINY, complaint, environment
from processes import free_port
from saved_checkpoints import read

from paceline.checkpoint import store
from paceline.system.files import LOCK_NAME, FolderLock
from paceline.system.host import host_name
from paceline.track.records import RunFolder


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train",), "[missing-recipe]"),
        (("train", "digts"), ("[recipe-not-found]", "'digits'?")),
        (("train", "nowhere.yaml"), ("[recipe-not-found]", "nowhere.yaml")),
        (("train", "digits", "--optim.lrr", "1"), ("[unknown-field]", "optim.lrr=1", "optim.lr?")),
        (("train", "digits", "--procs", "3"), ("[batch-not-divisible]", "train.global_batch=128", "126 or 129")),
        (("train", "digits", "--procs", "0"), ("[usage]", "--procs: '0'")),
        (("train", "digits", "--nodes", "2"), ("[missing-rendezvous]", "--rendezvous HOST:PORT")),
        (("train", "digits", "--name", "a/b"), ("[invalid-name]", "'a/b'")),
        (("train", "--resume", "nowhere"), ("[run-not-found]", "--resume nowhere")),
        (("train", "digits", "--train.global_batch", "5000"), ("[batch-too-large]", "5000", "1437")),
        (("train", "digits", "--model.name", "resnet81"), "[unknown-model]"),
        (("train", "digits", "--model.name", "resnet18"), "[invalid-model-options]"),
        (("train", "digits", "--optim.name", "adamm"), ("[unknown-optimizer]", "optim.name='adamm'", "adam")),
        (("train", "digits", "--optim.name", "kron"), ("[optimizer-not-supported]", "random numbers")),
        (
            ("train", "digits", "--optim.options.nestrov", "true"),
            ("[unknown-optimizer-option]", "optim.options.nestrov"),
        ),
        (("train", "digits", "--optim.schedule", "{name: cosin}"), ("[unknown-schedule]", "'cosin'", "cosine")),
        (("plan", "digits", "--optim.schedule", "{name: cosin}"), ("[unknown-schedule]", "'cosin'", "cosine")),
        (("train", "digits", "--data.name", "cifar10"), "[data-not-found]"),
        (("train", "digits", "--device", "cuda"), "[no-gpu]"),
        (("train", "digits", "--train.duration", "0ba"), ("[duration-too-short]", "train.duration=0ba")),
        (("train", "digits", "--name", ".."), ("[invalid-name]", "'..'")),
        (("train", "digits", "--optim.lr", "2024-99-99"), ("[invalid-value]", "--optim.lr 2024-99-99")),
        (("train", "digits", "--train.duration", f"{10**400}ba"), "[invalid-duration]"),
        (("train", "digits", "--log.every", "0s"), ("[zero-interval]", "log.every='0s'")),
        (
            ("train", "digits", "--data.mean", "0.5", "0.5", "--data.mean.2", "1"),
            ("[index-out-of-range]", "--data.mean.2", "2 values"),
        ),
        (("train", "--resume", "nowhere", "--name", "other"), "[run-not-found]"),
        (
            ("train", "digits", "--model.options.norm", "batch", "--train.global_batch", "1"),
            "[batch-too-small-for-batch-norm]",
        ),
        (("train", "digits", "--model.options", "{widths: [8, 8, 8, 8]}"), "[model-input-unsupported]"),
        (("evaluate",), "[missing-run]"),
        (("evaluate", "nowhere"), "[not-a-run-or-checkpoint]"),
        (("evaluate", "nowhere", "--device"), "[not-a-run-or-checkpoint]"),
        (("prepare", "cifar10", "--from", "nowhere.tar"), "[source-not-found]"),
        (("prepare", "imagenot"), ("[source-not-found]", "imagenot", "Did you mean imagenet?")),
        (("nonsense",), ("[unknown-command]", "'nonsense'")),
    ],
)
def test_invalid_command_lines_are_refused(
    here, tmp_path: Path, words: tuple[str, ...], says: str | tuple[str, ...]
) -> None:
    message = complaint(here(*words))
    assert [text for text in ((says,) if isinstance(says, str) else says) if text not in message] == [], message
    assert not list(tmp_path.glob("runs/*"))


def test_an_error_that_only_the_ranks_find_is_printed_once(paceline, tmp_path: Path) -> None:
    text = complaint(paceline("train", "digits", "--data.name", "cifar10", "--procs", "2"))
    assert text.count("[data-not-found]") == 1
    assert "paceline prepare cifar10" in text
    assert not list(tmp_path.glob("runs/*"))


def test_more_ranks_than_samples_are_refused(paceline) -> None:
    words = ("--data.name", "synthetic", "--data.synthetic.train_samples", "3", "--train.global_batch", "4")
    assert "[batch-too-large]" in complaint(paceline("train", "digits", *words, "--procs", "4"))


def test_a_rendezvous_port_in_use_is_reported(paceline) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = paceline("train", "digits", "--nodes", 2, "--rendezvous", f"127.0.0.1:{port}")
    text = complaint(answer)
    assert f"port {port} of 127.0.0.1" in text
    assert "[port-unavailable]" in text


def test_a_master_port_in_use_is_reported(paceline) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        answer = paceline("train", "digits", env=environment() | given)
    text = complaint(answer)
    assert f"MASTER_PORT={port}" in text
    assert "[master-unavailable]" in text


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_missing_node_times_out(paceline, node_rank: int) -> None:
    place = f"127.0.0.1:{free_port()}"
    words = ("--nodes", 2, "--node-rank", node_rank, "--rendezvous", place, "--join-timeout", 2)
    text = complaint(paceline("train", "digits", *words))
    assert f"node {node_rank} of 2, rendezvous at {place}: " in text
    assert ("[rendezvous-timeout]" if node_rank == 0 else "[rendezvous-unreachable]") in text


@pytest.mark.parametrize("procs", [1, 2])
def test_a_loss_that_is_not_finite_stops_all_ranks(paceline, tmp_path: Path, procs: int) -> None:
    """The loss of step 27 is that of the weights after step 26, so the checkpoint of step 26 is not valid."""
    points = "[{at: 0ba, factor: 1.0}, {at: 25ba, factor: 1.0}, {at: 25ba, factor: 1.0e+30}]"
    schedule = ("--optim.schedule", f"{{name: piecewise, points: {points}}}", "--checkpoint.every", "13ba")
    text = complaint(paceline("train", "digits", *TINY, *schedule, "--procs", procs, "--log.every", "7ba"))
    assert "[loss-not-finite]" in text
    assert "at step 27" in text
    assert "5e+28" in text
    newest = next(store.committed(tmp_path / "runs" / "digits" / "checkpoints"))
    assert f"runs/digits/checkpoints/{newest.name}" in text
    assert newest.name == "step-00000020"
    assert (newest.parent / "corrupt-step-00000026").exists()
    read(newest)
    assert RunFolder(tmp_path / "runs" / "digits").read_summary()["status"] == "failed"


def test_a_full_disk_during_a_checkpoint_loses_nothing(paceline, here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "20ba").returncode == 0
    before = next(store.committed(tmp_path / "runs" / "digits" / "checkpoints"))

    def limit_file_size() -> None:  # 12 kB: records fit, weights do not
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    words = ("train", "--resume", "runs/digits", "--train.duration", "40ba", "--log.every", "20ba")
    text = complaint(paceline(*words, preexec_fn=limit_file_size))
    folder = "runs/digits/checkpoints/.writing-step-00000040/"
    assert f"the checkpoint of step 40 was not written on {host_name()}: {folder}" in text
    assert "ulimit -f" in text
    assert f"The newest checkpoint is {before.relative_to(tmp_path)}" in text
    assert "[checkpoint-not-written]" in text
    assert next(store.committed(tmp_path / "runs" / "digits" / "checkpoints")) == before
    read(before)
    again = here(*words)
    assert again.returncode == 0, again.stderr
    assert "resuming from step 20" in again.stderr


def test_checkpoints_that_are_corrupt_or_of_another_model_are_refused(here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "20ba").returncode == 0
    run = tmp_path / "runs" / "digits"
    text = complaint(
        here("train", "--resume", "runs/digits", "--model.options.widths", "[8, 24]", "--train.duration", "30ba")
    )
    assert "runs/digits: model " in text
    assert "[resume-changes-experiment]" in text
    recipe = run / "recipe.yaml"
    original = recipe.read_text()
    recipe.write_text(original.replace("- 16", "- 24"))
    text = complaint(here("train", "--resume", "runs/digits", "--train.duration", "30ba"))
    assert "[recipe-differs-from-checkpoint]" in text
    assert "runs/digits/recipe.yaml" in text
    assert "runs/digits/checkpoints/step-00000020" in text
    assert "model.options.widths: [8, 24] in recipe.yaml, [8, 16] in the checkpoint" in text
    recipe.write_text(original)

    newest = run / "checkpoints" / "step-00000020"
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    text = complaint(here("evaluate", newest))
    assert "model.safetensors" in text
    assert "[checkpoint-corrupt]" in text
    answer = here("train", "--resume", "runs/digits", "--train.duration", "30ba")
    assert answer.returncode == 0, answer.stderr
    assert "corrupt checkpoint: runs/digits/checkpoints/step-00000020/model.safetensors" in answer.stderr
    assert "resuming from step 10" in answer.stderr


def test_a_refused_resume_changes_nothing(here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "20ba").returncode == 0
    run = RunFolder(tmp_path / "runs" / "digits")
    kept = (run.recipe, run.environment, run.metrics, run.summary)
    before = [path.read_bytes() for path in kept]
    text = complaint(here("train", "--resume", run.path, "--train.duration", "15ba"))
    assert "at step 20" in text
    assert "[run-finished]" in text
    assert [path.read_bytes() for path in kept] == before


def test_a_refused_start_keeps_existing_files(here, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.txt").write_text("precious")
    words = ("--runs", ".", "--name", "mine", "--model.weights", "nowhere.pth")
    text = complaint(here("train", "digits", *words))
    assert "model.weights=nowhere.pth" in text
    assert "[weights-not-found]" in text
    assert (tmp_path / "mine" / "log.txt").read_text().startswith("precious")


def test_a_validation_loss_that_is_not_finite_stops_the_run(here, tmp_path: Path) -> None:
    """The update of the last step makes the weights invalid, which its loss does not show."""
    points = "[{at: 0ba, factor: 1.0}, {at: 19ba, factor: 1.0}, {at: 19ba, factor: 1.0e+38}]"
    schedule = ("--optim.schedule", f"{{name: piecewise, points: {points}}}", "--train.duration", "20ba")
    text = complaint(here("train", "digits", *TINY, *schedule))
    assert "[validation-loss-not-finite]" in text
    assert "after step 20" in text
    assert "runs/digits/checkpoints/step-00000010" in text
    assert RunFolder(tmp_path / "runs" / "digits").read_summary()["status"] == "failed"


def test_a_run_folder_in_use_is_refused(here, tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    lock = FolderLock(tmp_path / "runs" / "digits")
    text = complaint(here("train", "digits", *TINY))
    assert "runs/digits" in text
    assert "[folder-in-use]" in text
    assert (tmp_path / "runs" / "digits" / LOCK_NAME).exists()
    lock.release()
