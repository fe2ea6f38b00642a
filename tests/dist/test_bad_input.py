"""Clear error, non-zero exit, nothing lost."""

import resource
import socket
from pathlib import Path

import pytest
from conftest import TINY, complaint, environment
from processes import free_port

from paceline.base.files import LOCK_NAME, FolderLock
from paceline.base.host import host_name
from paceline.checkpoint import store
from paceline.track.records import RunFolder


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train",), "which recipe?"),
        (("train", "digts"), "did you mean 'digits'"),
        (("train", "nowhere.yaml"), "no such file"),
        (("train", "digits", "--optim.lrr", "1"), "optim.lrr=1: no such field; did you mean optim.lr?"),
        (("train", "digits", "--procs", "3"), "train.global_batch=128 is not a multiple of 3 ranks"),
        (("train", "digits", "--procs", "0"), "'0' is not a whole number from 1 on"),
        (("train", "digits", "--nodes", "2"), "needs --rendezvous HOST:PORT"),
        (("train", "digits", "--name", "a/b"), "'a/b' is not a plain folder name"),
        (("train", "--resume", "nowhere"), "--resume nowhere: no run folder"),
        (("train", "digits", "--train.global_batch", "5000"), "is more than the 1437 training images"),
        (("train", "digits", "--model.name", "resnet81"), "is no timm model; did you mean"),
        (("train", "digits", "--model.name", "resnet18"), "unexpected keyword argument 'widths'; set --model.options '{}'"),
        (("train", "digits", "--data.name", "cifar10"), "no prepared cifar10 here; run `paceline prepare cifar10"),
        (("train", "digits", "--device", "cuda"), "this PyTorch sees no GPU"),
        (("train", "digits", "--train.duration", "0ba"), "is less than one step"),
        (("train", "digits", "--name", ".."), "'..' is not a plain folder name"),
        (("train", "digits", "--optim.lr", "2024-99-99"), "not readable as a YAML value"),
        (("train", "digits", "--train.duration", f"{10**400}ba"), "write a number and a unit"),
        (("train", "digits", "--log.every", "0s"), "log.every='0s': zero is no interval"),
        (("train", "digits", "--data.mean", "0.5", "0.5", "--data.mean.2", "1"), "there is no such field; it has 2 values"),
        (("train", "--resume", "nowhere", "--name", "other"), "--resume nowhere: no run folder"),
        (("train", "digits", "--model.options.norm", "batch", "--train.global_batch", "1"), "batch norm cannot"),
        (("train", "digits", "--model.options", "{widths: [8, 8, 8, 8]}"), "does not take images of 8x8 with 1 channels"),
        (("evaluate",), "evaluate what?"),
        (("evaluate", "nowhere"), "neither a run folder"),
        (("evaluate", "nowhere", "--device"), "neither a run folder"),
        (("prepare", "cifar10", "--from", "nowhere.tar"), "no such file"),
        (("prepare", "imagenot"), "invalid choice"),
        (("nonsense",), "is not a verb"),
    ],
)
def test_mistakes_on_the_command_line(here, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    assert says in complaint(here(*words))
    assert not list(tmp_path.glob("runs/*"))


def test_a_mistake_that_only_the_ranks_find(paceline, tmp_path: Path) -> None:
    text = complaint(paceline("train", "digits", "--data.name", "cifar10", "--procs", "2"))
    assert text.count("no prepared cifar10 here") == 1
    assert not list(tmp_path.glob("runs/*"))


def test_more_ranks_than_samples(paceline) -> None:
    words = ("--data.name", "synthetic", "--data.synthetic.train_samples", "3", "--train.global_batch", "4")
    assert "a global batch of 4 is more than the 3 training images" in complaint(
        paceline("train", "digits", *words, "--procs", "4")
    )


def test_the_port_is_in_use(paceline) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = paceline("train", "digits", "--nodes", 2, "--rendezvous", f"127.0.0.1:{port}")
    assert f"port {port} of 127.0.0.1 cannot be used" in complaint(answer)


def test_the_port_of_another_launcher_is_in_use(paceline) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        answer = paceline("train", "digits", env=environment() | given)
    assert f"rank 0 of 2 cannot use MASTER_ADDR=127.0.0.1 MASTER_PORT={port}" in complaint(answer)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_the_other_machine_never_comes(paceline, node_rank: int) -> None:
    place = f"127.0.0.1:{free_port()}"
    words = ("--nodes", 2, "--node-rank", node_rank, "--rendezvous", place, "--meet-within", 2)
    text = complaint(paceline("train", "digits", *words))
    assert f"node {node_rank} of 2, meeting at {place}: starting 1 process" in text
    assert ("the machines did not meet" if node_rank == 0 else "node 0 does not answer") in text


@pytest.mark.parametrize("procs", [1, 2])
def test_a_loss_that_is_not_finite_stops_all_ranks(paceline, tmp_path: Path, procs: int) -> None:
    """The loss of step 27 is that of the weights after step 26: the save of step 26 is no good, the one of step 20 is."""
    points = "[{at: 0ba, factor: 1.0}, {at: 25ba, factor: 1.0}, {at: 25ba, factor: 1.0e+30}]"
    schedule = ("--optim.schedule", f"{{name: piecewise, points: {points}}}", "--checkpoint.every", "13ba")
    text = complaint(paceline("train", "digits", *TINY, *schedule, "--procs", procs, "--log.every", "7ba"))
    assert "the loss is not finite at step 27 (learning rate 5e+28 now)" in text
    newest = next(store.committed(tmp_path / "runs" / "digits" / "checkpoints"))
    assert f"the last good checkpoint is runs/digits/checkpoints/{newest.name}" in text
    assert newest.name == "step-00000020"
    assert (newest.parent / "damaged-step-00000026").exists()
    store.read(newest)
    assert RunFolder(tmp_path / "runs" / "digits").read_summary()["status"] == "failed"


def test_a_full_disk_while_saving(paceline, here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "20ba").returncode == 0
    before = next(store.committed(tmp_path / "runs" / "digits" / "checkpoints"))

    def no_room() -> None:  # files of at most 12 kB: weights do not fit, records do
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    words = ("train", "--resume", "runs/digits", "--train.duration", "40ba", "--log.every", "20ba")
    text = complaint(paceline(*words, preexec_fn=no_room))
    place = "runs/digits/checkpoints/.writing-step-00000040/"
    assert f"the checkpoint of step 40 was not written on {host_name()}: {place}" in text
    assert f"ulimit -f). The newest is {before.relative_to(tmp_path)}; resume from it with: " in text
    assert next(store.committed(tmp_path / "runs" / "digits" / "checkpoints")) == before
    store.read(before)
    again = here(*words)
    assert again.returncode == 0, again.stderr
    assert "resuming from step 20" in again.stderr


def test_checkpoints_that_are_damaged_or_of_another_model(here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "20ba").returncode == 0
    run = tmp_path / "runs" / "digits"
    assert "model cannot change in a resumed run" in complaint(
        here("train", "--resume", "runs/digits", "--model.options.widths", "[8, 24]", "--train.duration", "30ba")
    )
    recipe = run / "recipe.yaml"
    sound = recipe.read_text()
    recipe.write_text(sound.replace("- 16", "- 24"))
    text = complaint(here("train", "--resume", "runs/digits", "--train.duration", "30ba"))
    assert "recipe.yaml is not the recipe of runs/digits/checkpoints/step-00000020" in text
    assert "model.options.widths: [8, 24] there, [8, 16] in the checkpoint" in text
    recipe.write_text(sound)

    newest = run / "checkpoints" / "step-00000020"
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "model.safetensors does not match its checksum" in complaint(here("evaluate", newest))
    answer = here("train", "--resume", "runs/digits", "--train.duration", "30ba")
    assert answer.returncode == 0, answer.stderr
    assert "model.safetensors does not match its checksum; trying the one before it" in answer.stderr
    assert "resuming from step 10" in answer.stderr


def test_a_refused_resume_changes_nothing(here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "20ba").returncode == 0
    run = RunFolder(tmp_path / "runs" / "digits")
    kept = (run.recipe, run.environment, run.metrics, run.summary)
    before = [path.read_bytes() for path in kept]
    assert "is finished at step 20" in complaint(here("train", "--resume", run.path, "--train.duration", "15ba"))
    assert [path.read_bytes() for path in kept] == before


def test_a_refused_start_leaves_what_was_there_before(here, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.txt").write_text("precious")
    words = ("--runs", ".", "--name", "mine", "--model.weights", "nowhere.pth")
    assert "nowhere.pth: no such file" in complaint(here("train", "digits", *words))
    assert (tmp_path / "mine" / "log.txt").read_text().startswith("precious")


def test_weights_that_only_the_evaluation_finds_out(here, tmp_path: Path) -> None:
    """The last step's update ruins them: its loss was that of the step before."""
    points = "[{at: 0ba, factor: 1.0}, {at: 19ba, factor: 1.0}, {at: 19ba, factor: 1.0e+38}]"
    schedule = ("--optim.schedule", f"{{name: piecewise, points: {points}}}", "--train.duration", "20ba")
    text = complaint(here("train", "digits", *TINY, *schedule))
    assert "the validation loss is not finite after step 20; the last good checkpoint is runs/digits/checkpoints/step-00000010" in text
    assert RunFolder(tmp_path / "runs" / "digits").read_summary()["status"] == "failed"


def test_a_run_that_is_going_on_is_not_entered_twice(here, tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    lock = FolderLock(tmp_path / "runs" / "digits")
    assert "runs/digits is in use by another process" in complaint(here("train", "digits", *TINY))
    assert (tmp_path / "runs" / "digits" / LOCK_NAME).exists()
    lock.release()
