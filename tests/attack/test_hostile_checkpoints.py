"""Checkpoints that are flipped, torn, or made by strangers: a clear error or the right result, never a crash."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attack.checkpoint_attacks import FILES, OPTIMIZER, PROGRESS, STATE, WEIGHTS, Attack
from attack.resealed import change_progress, change_state, change_tensors, copied, reseal
from paceline.checkpoint import store
from paceline.checkpoint.verified import CorruptCheckpoint, describe, read
from paceline.cli.main import main
from paceline.config.io import load_recipe
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.errors import UserError
from paceline.system.logs import log

TINY = (
    *("--data.name", "synthetic", "--data.synthetic", "{train_samples: 32, val_samples: 8, channels: 1, size: 8}"),
    *("--model.options", "{widths: [8, 16], norm: batch}", "--train.global_batch", "8", "--train.duration", "4ba"),
    *("--precision", "fp32", "--log.tensorboard", "false", "--evaluate.every", "4ba", "--checkpoint.every", "4ba"),
)
LONGER = ("--train.duration", "6ba")
ADAMW, SGD = ("--optim.name", "adamw", "--ema.decay", "0.9"), ("--precision", "fp16")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Two finished runs: AdamW with averaged weights, and SGD with a loss scale."""
    root, before = tmp_path_factory.mktemp("trained"), Path.cwd()
    os.chdir(root)
    for name, words in (("adamw", ADAMW), ("sgd", SGD)):
        assert main(["train", "digits", *TINY, *words, "--name", name]) == 0
    os.chdir(before)
    yield {name: root / "runs" / name for name in ("adamw", "sgd")}
    log.handlers, log.propagate = [], True


def _flipped(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(8 * len(content))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def test_flipped_bits_are_noticed(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """In every file, by whoever reads the checkpoint as a whole or only its description."""
    _, checkpoint = copied(runs["adamw"], tmp_path / "run")
    chance, count = random.Random(1), 0
    for path in sorted(checkpoint.iterdir()):
        sound = path.read_bytes()
        for _ in range(60):
            path.write_bytes(_flipped(sound, chance))
            with pytest.raises(CorruptCheckpoint):
                read(checkpoint)
            count += 1
        path.write_bytes(sound)
    assert read(checkpoint)[0].step == 4
    survived("flipped bits in checkpoints", count)


def test_torn_files_are_noticed(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    _, checkpoint = copied(runs["adamw"], tmp_path / "run")
    count = 0
    for path in sorted(checkpoint.iterdir()):
        sound = path.read_bytes()
        for length in {0, 1, len(sound) // 2, len(sound) - 1}:
            path.write_bytes(sound[:length])
            with pytest.raises(CorruptCheckpoint):
                read(checkpoint)
            count += 1
        path.write_bytes(sound)
    survived("torn files of checkpoints", count)


def _setup(run: Path) -> Setup:
    return build(load_recipe(str(run / "recipe.yaml")), World())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_flipped_bits_under_matching_checksums(runs: dict[str, Path], tmp_path: Path, survived, name: str) -> None:
    """What cannot be told from the work of paceline is taken over; all else is an error for users."""
    _, checkpoint = copied(runs[name], tmp_path / "run")
    setup, chance, count = _setup(runs[name]), random.Random(2), 0
    sound = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    for file, times in (("state.json", 150), ("model.safetensors", 50), ("optimizer.safetensors", 50)):
        for _ in range(times):
            (checkpoint / file).write_bytes(_flipped(sound[file], chance))
            reseal(checkpoint)
            try:
                _, parts = read(checkpoint)
                setup.load(parts, str(checkpoint))
            except UserError:
                pass
            count += 1
        (checkpoint / file).write_bytes(sound[file])
    survived("flipped bits in checkpoints with matching checksums", count)


def _refused(answer: Any) -> None:
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr, answer.stderr
    assert "paceline: " in answer.stderr, answer.stderr


def _all_refuse(here, run: Path, checkpoint: Path) -> None:
    """Evaluation, export and resume; the last one puts the checkpoint aside, and loses nothing of it."""
    kept = sorted(path.name for path in checkpoint.iterdir())
    _refused(here("evaluate", checkpoint))
    _refused(here("export", checkpoint, "--to", "weights.safetensors"))
    _refused(here("train", "--resume", run, *LONGER))
    aside = checkpoint.with_name(f"corrupt-{checkpoint.name}")
    assert sorted(path.name for path in (checkpoint if checkpoint.exists() else aside).iterdir()) == kept


@pytest.mark.parametrize("kind", ["state", "progress", "files"])
def test_hostile_checkpoints_are_refused(here, runs: dict[str, Path], tmp_path: Path, survived, kind: str) -> None:
    attacks: dict[str, Attack] = {
        "state": {name: (lambda checkpoint, own=own: change_state(checkpoint, own)) for name, own in STATE.items()},
        "progress": {
            name: (lambda checkpoint, own=own: change_progress(checkpoint, own)) for name, own in PROGRESS.items()
        },
        "files": FILES,
    }[kind]
    for attack in attacks.values():
        run, checkpoint = copied(runs["adamw"], tmp_path / "runs" / "adamw")
        attack(checkpoint)
        with pytest.raises(UserError):
            read(checkpoint)
        _all_refuse(here, run, checkpoint)
    survived("hostile checkpoints", len(attacks))


def test_weights_of_strangers_are_refused(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    for attack in WEIGHTS.values():
        _, checkpoint = copied(runs["adamw"], tmp_path / "runs" / "adamw")
        attack(checkpoint)
        _refused(here("evaluate", checkpoint))
        _refused(here("train", "--resume", "runs/adamw", *LONGER))
    survived("hostile checkpoints", len(WEIGHTS))


def test_optimizer_states_of_strangers_are_refused(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """By what resuming calls before the first step: fused kernels would write out of bounds."""
    setup = _setup(runs["adamw"])
    for name, attack in OPTIMIZER.items():
        _, checkpoint = copied(runs["adamw"], tmp_path / "run")
        attack(checkpoint)
        _, parts = read(checkpoint)
        with pytest.raises(UserError, match="of the optimizer"):
            setup.load(parts, name)
    survived("hostile checkpoints", len(OPTIMIZER))


@pytest.mark.parametrize("name", ["moments that are larger", "steps to come"])
def test_resuming_a_strangers_optimizer_does_not_crash(
    paceline, runs: dict[str, Path], tmp_path: Path, survived, name: str
) -> None:
    """In a process of its own: without the check, fused kernels end it with a segmentation fault."""
    _, checkpoint = copied(runs["adamw"], tmp_path / "runs" / "adamw")
    OPTIMIZER[name](checkpoint)
    answer = paceline("train", "--resume", "runs/adamw", *LONGER)
    _refused(answer)
    assert "state 0 of the optimizer" in answer.stderr
    survived("hostile checkpoints", 1)


def test_momentum_that_is_missing_starts_from_zero(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """As that of layers which were never used, and said: fused SGD takes the momentum of all or of none."""
    _, checkpoint = copied(runs["sgd"], tmp_path / "runs" / "sgd")

    def drop(state: dict[str, Any]) -> None:
        pairs = dict(state["parts"]["optimizer"]["pairs"])
        del pairs["state"]["pairs"][0]

    change_tensors(checkpoint, "optimizer", lambda tensors: tensors.pop("state.0.momentum_buffer"))
    change_state(checkpoint, drop)
    answer = here("train", "--resume", "runs/sgd", *LONGER, "--precision", "fp32")
    assert answer.returncode == 0, answer.stderr
    assert "the optimizer has no state of 1 of" in answer.stderr
    survived("hostile checkpoints", 1)


def test_stray_files_do_no_harm(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    run, checkpoint = copied(runs["adamw"], tmp_path / "runs" / "adamw")
    strays = (
        ".DS_Store",
        "Thumbs.db",
        "desktop.ini",
        "._state.json",
        "state.json~",
        "#state.json#",
        "ema.bak",
    )
    for folder in (checkpoint, checkpoint.parent, run, run / "telemetry"):
        for name in strays:
            (folder / name).write_bytes(b"\0\1stray")
    shutil.copytree(checkpoint, checkpoint.with_name(f"{checkpoint.name} copy"))
    (run / "telemetry" / "._host.jsonl").write_bytes(b"\0\1stray")
    assert describe(checkpoint).step == 4
    for words in (("evaluate", run), ("export", run, "--to", "w.safetensors"), ("doctor", run), ("runs", run.parent)):
        answer = here(*words)
        assert answer.returncode == 0, answer.stderr
    answer = here("train", "--resume", run, *LONGER)
    assert "resuming from step 4" in answer.stderr, answer.stderr
    assert answer.returncode == 0
    assert [path.name for path in store.committed(checkpoint.parent)] == ["step-00000006", "step-00000004"]
    survived("stray files", 4 * len(strays) + 2)
