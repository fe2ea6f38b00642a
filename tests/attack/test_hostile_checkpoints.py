"""Corrupt, truncated and untrusted checkpoints: a clear error or the right result, never a crash."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import raises
from saved_checkpoints import read

from attack.checkpoint_attacks import FILES, OPTIMIZER, PROGRESS, STATE, WEIGHTS, Attack
from attack.resealed import change_progress, change_state, change_tensors, copied, reseal
from paceline.checkpoint import store
from paceline.checkpoint.verified import CorruptCheckpoint, describe, open_checkpoint
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
    """Two finished runs: AdamW with EMA weights, and SGD with a loss scale."""
    root, before = tmp_path_factory.mktemp("trained"), Path.cwd()
    os.chdir(root)
    for name, words in (("adamw", ADAMW), ("sgd", SGD)):
        assert main(["train", "digits", *TINY, *words, "--name", name]) == 0
    os.chdir(before)
    yield {name: root / "runs" / name for name in ("adamw", "sgd")}
    log.handlers, log.propagate = [], True


def _flipped(content: bytes, generator: random.Random) -> bytes:
    bit = generator.randrange(8 * len(content))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_flipped_bits_are_detected(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """In every file of a checkpoint."""
    _, checkpoint = copied(runs["adamw"], tmp_path / "run")
    generator, count = random.Random(1), 0
    for path in sorted(checkpoint.iterdir()):
        original = path.read_bytes()
        for _ in range(60):
            path.write_bytes(_flipped(original, generator))
            with raises("checkpoint-corrupt", CorruptCheckpoint):
                read(checkpoint)
            count += 1
        path.write_bytes(original)
    assert read(checkpoint)[0].step == 4
    survived("flipped bits in checkpoints", count)


def test_truncated_files_are_detected(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    _, checkpoint = copied(runs["adamw"], tmp_path / "run")
    count = 0
    for path in sorted(checkpoint.iterdir()):
        original = path.read_bytes()
        for length in {0, 1, len(original) // 2, len(original) - 1}:
            path.write_bytes(original[:length])
            with raises("checkpoint-corrupt", CorruptCheckpoint):
                read(checkpoint)
            count += 1
        path.write_bytes(original)
    survived("truncated files of checkpoints", count)


def _setup(run: Path) -> Setup:
    return build(load_recipe(str(run / "recipe.yaml")), World())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_flipped_bits_under_matching_checksums(runs: dict[str, Path], tmp_path: Path, survived, name: str) -> None:
    """Valid values are loaded; all others are an error that names the file."""
    _, checkpoint = copied(runs[name], tmp_path / "run")
    setup, generator, count = _setup(runs[name]), random.Random(2), 0
    original = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    for file, times in (("state.json", 150), ("model.safetensors", 50), ("optimizer.safetensors", 50)):
        for _ in range(times):
            (checkpoint / file).write_bytes(_flipped(original[file], generator))
            reseal(checkpoint)
            try:
                _, parts = open_checkpoint(checkpoint)
                setup.load(parts, str(checkpoint))
            except UserError:
                pass
            count += 1
        (checkpoint / file).write_bytes(original[file])
    survived("flipped bits in checkpoints with matching checksums", count)


READ = {"checkpoint-corrupt", "checkpoint-incomplete", "checkpoint-format-unsupported"}
"""Codes of checkpoints that cannot be read."""
LOAD = {"checkpoint-model-mismatch", "checkpoint-weights-invalid"}
"""Codes of checkpoints whose weights cannot be loaded."""


def _check_refused(answer: Any, codes: set[str]) -> None:
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr, answer.stderr
    assert "paceline: error: " in answer.stderr, answer.stderr
    assert set(re.findall(r"\[([a-z]+(?:-[a-z]+)+)\]$", answer.stderr, re.MULTILINE)) & codes, answer.stderr


def _check_all_refuse(here, run: Path, checkpoint: Path) -> None:
    """Evaluation, export and resume refuse the checkpoint; resuming renames it, but deletes none of its files."""
    kept = sorted(path.name for path in checkpoint.iterdir())
    _check_refused(here("evaluate", checkpoint), READ)
    _check_refused(here("export", checkpoint, "--to", "weights.safetensors"), READ)
    _check_refused(here("train", "--resume", run, *LONGER), READ | {"all-checkpoints-corrupt"})
    aside = checkpoint.with_name(f"corrupt-{checkpoint.name}")
    assert sorted(path.name for path in (checkpoint if checkpoint.exists() else aside).iterdir()) == kept


@pytest.mark.parametrize("kind", ["state", "progress", "files"])
def test_hostile_checkpoints_are_refused(here, runs: dict[str, Path], tmp_path: Path, survived, kind: str) -> None:
    attacks: dict[str, Attack] = {
        "state": {
            name: (lambda checkpoint, change=change: change_state(checkpoint, change)) for name, change in STATE.items()
        },
        "progress": {
            name: (lambda checkpoint, change=change: change_progress(checkpoint, change))
            for name, change in PROGRESS.items()
        },
        "files": FILES,
    }[kind]
    for attack in attacks.values():
        run, checkpoint = copied(runs["adamw"], tmp_path / "runs" / "adamw")
        attack(checkpoint)
        with pytest.raises(UserError) as caught:
            read(checkpoint)
        assert caught.value.code in READ
        _check_all_refuse(here, run, checkpoint)
    survived("hostile checkpoints", len(attacks))


def test_hostile_weights_are_refused(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    for attack in WEIGHTS.values():
        _, checkpoint = copied(runs["adamw"], tmp_path / "runs" / "adamw")
        attack(checkpoint)
        _check_refused(here("evaluate", checkpoint), LOAD)
        _check_refused(here("train", "--resume", "runs/adamw", *LONGER), LOAD)
    survived("hostile checkpoints", len(WEIGHTS))


def test_hostile_optimizer_states_are_refused(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """Before the first step, because fused kernels would write out of bounds."""
    setup = _setup(runs["adamw"])
    for name, attack in OPTIMIZER.items():
        _, checkpoint = copied(runs["adamw"], tmp_path / "run")
        attack(checkpoint)
        _, parts = open_checkpoint(checkpoint)
        with raises("checkpoint-optimizer-mismatch") as caught:
            setup.load(parts, name)
        assert "optimizer state " in str(caught.value)
    survived("hostile checkpoints", len(OPTIMIZER))


@pytest.mark.parametrize("name", ["moments that are larger", "steps in the future"])
def test_resuming_a_hostile_optimizer_state_does_not_crash(
    paceline, runs: dict[str, Path], tmp_path: Path, survived, name: str
) -> None:
    """In a separate process: without the check, fused kernels cause a segmentation fault."""
    _, checkpoint = copied(runs["adamw"], tmp_path / "runs" / "adamw")
    OPTIMIZER[name](checkpoint)
    answer = paceline("train", "--resume", "runs/adamw", *LONGER)
    _check_refused(answer, {"checkpoint-optimizer-mismatch"})
    assert "optimizer state 0" in answer.stderr
    survived("hostile checkpoints", 1)


def test_missing_momentum_starts_from_zero(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """As for unused layers, with a warning: fused SGD needs the momentum of all parameters or of none."""
    _, checkpoint = copied(runs["sgd"], tmp_path / "runs" / "sgd")

    def drop(state: dict[str, Any]) -> None:
        pairs = dict(state["parts"]["optimizer"]["pairs"])
        del pairs["state"]["pairs"][0]

    change_tensors(checkpoint, "optimizer", lambda tensors: tensors.pop("state.0.momentum_buffer"))
    change_state(checkpoint, drop)
    answer = here("train", "--resume", "runs/sgd", *LONGER, "--precision", "fp32")
    assert answer.returncode == 0, answer.stderr
    assert "has no optimizer state for 1 of" in answer.stderr
    survived("hostile checkpoints", 1)


def test_stray_files_are_ignored(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
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
