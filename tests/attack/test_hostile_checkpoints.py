"""Checkpoints that are flipped, torn, or made by strangers: a clear error or the right result, never a crash."""

import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attack.resealed import change_progress, change_state, change_tensors, commit, copied, reseal
from paceline.base.logs import log
from paceline.checkpoint import store
from paceline.checkpoint.verified import DamagedCheckpoint, describe, read
from paceline.cli.main import main
from paceline.config.io import load_recipe
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.errors import UserError

TINY = (
    *("--data.name", "synthetic", "--data.synthetic", "{train_samples: 32, val_samples: 8, channels: 1, size: 8}"),
    *("--model.options", "{widths: [8, 16], norm: batch}", "--train.global_batch", "8", "--train.duration", "4ba"),
    *("--precision", "fp32", "--log.tensorboard", "false", "--evaluate.every", "4ba", "--checkpoint.every", "4ba"),
)
LONGER = ("--train.duration", "6ba")
ADAMW, SGD = ("--optim.name", "adamw", "--ema.decay", "0.9"), ("--precision", "fp16")
Attack = Callable[[Path], object]


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
    _, save = copied(runs["adamw"], tmp_path / "run")
    chance, count = random.Random(1), 0
    for path in sorted(save.iterdir()):
        sound = path.read_bytes()
        for _ in range(60):
            path.write_bytes(_flipped(sound, chance))
            with pytest.raises(DamagedCheckpoint):
                read(save)
            count += 1
        path.write_bytes(sound)
    assert read(save)[0].step == 4
    survived("flipped bits in checkpoints", count)


def test_torn_files_are_noticed(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    _, save = copied(runs["adamw"], tmp_path / "run")
    count = 0
    for path in sorted(save.iterdir()):
        sound = path.read_bytes()
        for length in {0, 1, len(sound) // 2, len(sound) - 1}:
            path.write_bytes(sound[:length])
            with pytest.raises(DamagedCheckpoint):
                read(save)
            count += 1
        path.write_bytes(sound)
    survived("torn files of checkpoints", count)


def _setup(run: Path) -> Setup:
    return build(load_recipe(str(run / "recipe.yaml")), World())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_flipped_bits_under_matching_checksums(runs: dict[str, Path], tmp_path: Path, survived, name: str) -> None:
    """What cannot be told from the work of paceline is taken over; all else is an error for users."""
    _, save = copied(runs[name], tmp_path / "run")
    setup, chance, count = _setup(runs[name]), random.Random(2), 0
    sound = {path.name: path.read_bytes() for path in save.iterdir()}
    for file, times in (("state.json", 150), ("model.safetensors", 50), ("optimizer.safetensors", 50)):
        for _ in range(times):
            (save / file).write_bytes(_flipped(sound[file], chance))
            reseal(save)
            try:
                _, parts = read(save)
                setup.load(parts, str(save))
            except UserError:
                pass
            count += 1
        (save / file).write_bytes(sound[file])
    survived("flipped bits in checkpoints with matching checksums", count)


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    """A change: the value at a path, or `...` to remove it."""

    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        if to is ...:
            del tree[path[-1]]
        else:
            tree[path[-1]] = to

    return change


def _nested(depth: int) -> Any:
    node: Any = 0
    for _ in range(depth):
        node = [node]
    return node


NAN, INF, HUGE = float("nan"), float("inf"), 10**30
_SCALER = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
_STATE: dict[str, Callable[[Any], None]] = {
    "format is a text": _set("format", to="2"),
    "format is missing": _set("format", to=...),
    "format of the future": _set("format", to=3),
    "format is huge": _set("format", to=HUGE),
    "step is negative": _set("step", to=-1),
    "step is huge": _set("step", to=HUGE),
    "step is a text": _set("step", to="4"),
    "step is not whole": _set("step", to=4.5),
    "step is infinite": _set("step", to=INF),
    "step is another": _set("step", to=3),
    "step is missing": _set("step", to=...),
    "metrics are missing": _set("metrics", to=...),
    "metrics are a list": _set("metrics", to=[1]),
    "accuracy is a text": _set("metrics", to={"top1": "high"}),
    "accuracy is not a number": _set("metrics", to={"top1": NAN}),
    "accuracy above 1": _set("metrics", to={"top1": 1e9}),
    "an unknown metric": _set("metrics", to={"../x": 1.0}),
    "an unknown key": _set("more", to=1),
    "no parts": _set("parts", to=...),
    "parts are a list": _set("parts", to=[]),
    "no model": _set("parts", "model", to=...),
    "a part that leads out": _set("parts", "../../evil", to={"pairs": []}),
    "a model without tensors": _set("parts", "model", to={"pairs": []}),
    "a model that is a text": _set("parts", "model", to="x"),
    "neither tensor nor pairs": _set("parts", "model", to={"x": 1}),
    "pairs that are none": _set("parts", "model", to={"pairs": [[1], 2]}),
    "keys that are lists": _set("parts", "model", to={"pairs": [[[1], 2]]}),
    "a tensor that is not there": _set("parts", "model", to={"pairs": [["a", {"__tensor__": "nowhere"}]]}),
    "a tensor named by a number": _set("parts", "model", to={"pairs": [["a", {"__tensor__": 5}]]}),
    "deeply nested": _set("parts", "model", to={"pairs": [["a", _nested(400)]]}),
    "an optimizer without groups": _set("parts", "optimizer", to={"pairs": [["state", {"pairs": []}]]}),
}
_PROGRESS: dict[str, Callable[[Any], None]] = {
    "progress.step is negative": _set("step", to=-4),
    "progress.step is another": _set("step", to=2),
    "progress.step is a text": _set("step", to="4"),
    "no recipe": _set("recipe", to=...),
    "recipe is a text": _set("recipe", to="x"),
    "recipe without data": _set("recipe", to={}),
    "data of the recipe is a number": _set("recipe", "data", to=5),
    "fingerprint is a number": _set("data", to=5),
    "classes are a text": _set("classes", to="abcdefghij"),
    "classes are numbers": _set("classes", to=[[1, 2]] * 10),
    "classes without names": _set("classes", to=[["a"]] * 10),
    "classes that are too few": _set("classes", to=[["a", "a"]]),
    "no preprocessing": _set("preprocessing", to=...),
    "mean is empty": _set("preprocessing", "mean", to=[]),
    "mean is a text": _set("preprocessing", "mean", to=["x"]),
    "mean is not a number": _set("preprocessing", "mean", to=[NAN]),
    "std is zero": _set("preprocessing", "std", to=[0.0]),
    "std of other channels": _set("preprocessing", "std", to=[1.0, 1.0, 1.0]),
    "a tensor in progress": _set("preprocessing", "mean", to={"__tensor__": "x"}),
    "model arguments are missing": _set("model", to=...),
    "a billion classes": _set("model", "num_classes", to=10**10),
    "an unknown key of progress": _set("more", to=1),
    "loss scale is a text": _set("scaler", to=_SCALER | {"scale": "2"}),
    "loss scale is negative": _set("scaler", to=_SCALER | {"scale": -2.0}),
    "loss scale is not a number": _set("scaler", to=_SCALER | {"scale": NAN}),
    "loss scale is infinite": _set("scaler", to=_SCALER | {"scale": INF}),
    "loss scale lacks values": _set("scaler", to={"scale": 2.0}),
    "loss scale grows never": _set("scaler", to=_SCALER | {"growth_interval": 0}),
    "loss scale counts below zero": _set("scaler", to=_SCALER | {"_growth_tracker": -1}),
}


def _header(save: Path, header: bytes, data: bytes = b"") -> None:
    (save / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    reseal(save)


def _content(save: Path, name: str, content: bytes) -> None:
    (save / name).write_bytes(content)
    reseal(save)


def _links_out(save: Path) -> None:
    path = save / "model.safetensors"
    outside = shutil.copy(path, save.parent.parent.parent / "outside.safetensors")
    path.unlink()
    path.symlink_to(outside)
    reseal(save)


def _is_fifo(save: Path) -> None:
    (save / "model.safetensors").unlink()
    os.mkfifo(save / "model.safetensors")
    reseal(save, **{"model.safetensors": {"bytes": 0, "sha256": 64 * "0"}})


def _is_enormous(save: Path) -> None:
    with (save / "model.safetensors").open("wb") as file:
        file.truncate(10**11)
    reseal(save, **{"model.safetensors": {"bytes": 10**11, "sha256": 64 * "0"}})


_ONE = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
_FILES: dict[str, Attack] = {
    "state.json is empty": lambda save: _content(save, "state.json", b""),
    "state.json is a list": lambda save: _content(save, "state.json", b"[]"),
    "state.json is not JSON": lambda save: _content(save, "state.json", b"{"),
    "state.json is not UTF-8": lambda save: _content(save, "state.json", b"\xff\xfe"),
    "state.json is bottomless": lambda save: _content(save, "state.json", b"[" * 200_000),
    "state.json has endless digits": lambda save: _content(save, "state.json", b'{"format": ' + b"9" * 5000 + b"}"),
    "the manifest leads out": lambda save: reseal(save, **{"../../x": {"bytes": 1, "sha256": 64 * "0"}}),
    "the manifest is absolute": lambda save: reseal(save, **{"/etc/passwd": {"bytes": 1, "sha256": 64 * "0"}}),
    "the manifest lacks state.json": lambda save: reseal(save, **{"state.json": None}),
    "the manifest lacks weights": lambda save: reseal(save, **{"model.safetensors": None}),
    "the manifest counts below zero": lambda save: reseal(save, **{"state.json": {"bytes": -1, "sha256": ""}}),
    "the manifest has no sums": lambda save: reseal(save, **{"state.json": 5}),
    "the manifest is a list": lambda save: commit(save, b"[]"),
    "the manifest is bottomless": lambda save: commit(save, b"[" * 50_000),
    "the manifest is not UTF-8": lambda save: commit(save, b"\xff"),
    "weights are a FIFO": _is_fifo,
    "weights lead out": _links_out,
    "weights are enormous": _is_enormous,
    "weights are empty": lambda save: _content(save, "model.safetensors", b""),
    "a header of 2**63 bytes": lambda save: _content(save, "model.safetensors", struct.pack("<Q", 1 << 63)),
    "a header that is not JSON": lambda save: _header(save, b"{" * 100),
    "a header without data": lambda save: _header(save, _ONE),
    "a header beyond the data": lambda save: _header(save, _ONE.replace(b"[0, 8]", b"[0, 8000]"), bytes(8)),
    "a header of an unknown type": lambda save: _header(save, _ONE.replace(b"F32", b"X99"), bytes(8)),
    "a header of a negative shape": lambda save: _header(save, _ONE.replace(b"[2]", b"[-2]"), bytes(8)),
    "other tensors": lambda save: _header(save, _ONE, bytes(8)),
}


def _first(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


def _tensor(part: str, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    def inside(tensors: dict[str, torch.Tensor]) -> None:
        name = _first(tensors, ending)
        tensors[name] = change(tensors[name])

    return lambda save: change_tensors(save, part, inside)


_WEIGHTS: dict[str, Attack] = {
    "weights of another shape": _tensor("ema", "weight", lambda own: own[:1]),
    "weights of another type": _tensor("ema", "weight", torch.Tensor.double),
    "weights that are whole numbers": _tensor("ema", "weight", torch.Tensor.long),
    "weights that are not finite": _tensor("ema", "weight", lambda own: own.fill_(NAN)),
    "batches counted below zero": _tensor("ema", "num_batches_tracked", lambda own: own.fill_(-1)),
}
_OPTIMIZER: dict[str, Attack] = {
    "moments of another shape": _tensor("optimizer", "exp_avg", lambda own: own.flatten()[:1]),
    "moments that are larger": _tensor("optimizer", "exp_avg", lambda own: torch.zeros(4096)),
    "moments of another type": _tensor("optimizer", "exp_avg_sq", torch.Tensor.half),
    "moments that are not finite": _tensor("optimizer", "exp_avg", lambda own: own.fill_(INF)),
    "squares below zero": _tensor("optimizer", "exp_avg_sq", lambda own: own.fill_(-1.0)),
    "steps below zero": _tensor("optimizer", "step", lambda own: own.fill_(-3.0)),
    "steps that are not a number": _tensor("optimizer", "step", lambda own: own.fill_(NAN)),
    "steps to come": _tensor("optimizer", "step", lambda own: own.fill_(1e30)),
    "steps by the dozen": _tensor("optimizer", "step", lambda own: own.repeat(12)),
}


def _refused(answer: Any) -> None:
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr, answer.stderr
    assert "paceline: " in answer.stderr, answer.stderr


def _all_refuse(here, run: Path, save: Path) -> None:
    """Evaluation, export and resume; the last one puts the checkpoint aside, and loses nothing of it."""
    kept = sorted(path.name for path in save.iterdir())
    _refused(here("evaluate", save))
    _refused(here("export", save, "--to", "weights.safetensors"))
    _refused(here("train", "--resume", run, *LONGER))
    aside = save.with_name(f"damaged-{save.name}")
    assert sorted(path.name for path in (save if save.exists() else aside).iterdir()) == kept


@pytest.mark.parametrize("kind", ["state", "progress", "files"])
def test_hostile_checkpoints_are_refused(here, runs: dict[str, Path], tmp_path: Path, survived, kind: str) -> None:
    attacks: dict[str, Attack] = {
        "state": {name: (lambda save, own=own: change_state(save, own)) for name, own in _STATE.items()},
        "progress": {name: (lambda save, own=own: change_progress(save, own)) for name, own in _PROGRESS.items()},
        "files": _FILES,
    }[kind]
    for attack in attacks.values():
        run, save = copied(runs["adamw"], tmp_path / "runs" / "adamw")
        attack(save)
        with pytest.raises(UserError):
            read(save)
        _all_refuse(here, run, save)
    survived("hostile checkpoints", len(attacks))


def test_weights_of_strangers_are_refused(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    for attack in _WEIGHTS.values():
        _, save = copied(runs["adamw"], tmp_path / "runs" / "adamw")
        attack(save)
        _refused(here("evaluate", save))
        _refused(here("train", "--resume", "runs/adamw", *LONGER))
    survived("hostile checkpoints", len(_WEIGHTS))


def test_optimizer_states_of_strangers_are_refused(runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """By what resuming calls before the first step: fused kernels would write out of bounds."""
    setup = _setup(runs["adamw"])
    for name, attack in _OPTIMIZER.items():
        _, save = copied(runs["adamw"], tmp_path / "run")
        attack(save)
        _, parts = read(save)
        with pytest.raises(UserError, match="of the optimizer"):
            setup.load(parts, name)
    survived("hostile checkpoints", len(_OPTIMIZER))


@pytest.mark.parametrize("name", ["moments that are larger", "steps to come"])
def test_resuming_a_strangers_optimizer_does_not_crash(
    paceline, runs: dict[str, Path], tmp_path: Path, survived, name: str
) -> None:
    """In a process of its own: without the check, fused kernels end it with a segmentation fault."""
    _, save = copied(runs["adamw"], tmp_path / "runs" / "adamw")
    _OPTIMIZER[name](save)
    answer = paceline("train", "--resume", "runs/adamw", *LONGER)
    _refused(answer)
    assert "state 0 of the optimizer" in answer.stderr
    survived("hostile checkpoints", 1)


def test_momentum_that_is_missing_starts_from_zero(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    """As that of layers which were never used, and said: fused SGD takes the momentum of all or of none."""
    _, save = copied(runs["sgd"], tmp_path / "runs" / "sgd")

    def drop(state: dict[str, Any]) -> None:
        pairs = dict(state["parts"]["optimizer"]["pairs"])
        del pairs["state"]["pairs"][0]

    change_tensors(save, "optimizer", lambda tensors: tensors.pop("state.0.momentum_buffer"))
    change_state(save, drop)
    answer = here("train", "--resume", "runs/sgd", *LONGER, "--precision", "fp32")
    assert answer.returncode == 0, answer.stderr
    assert "the optimizer has no state of 1 of" in answer.stderr
    survived("hostile checkpoints", 1)


def test_stray_files_do_no_harm(here, runs: dict[str, Path], tmp_path: Path, survived) -> None:
    run, save = copied(runs["adamw"], tmp_path / "runs" / "adamw")
    strays = (
        ".DS_Store",
        "Thumbs.db",
        "desktop.ini",
        "._state.json",
        "state.json~",
        "#state.json#",
        "ema.bak",
    )
    for folder in (save, save.parent, run, run / "telemetry"):
        for name in strays:
            (folder / name).write_bytes(b"\0\1stray")
    shutil.copytree(save, save.with_name(f"{save.name} copy"))
    (run / "telemetry" / "._host.jsonl").write_bytes(b"\0\1stray")
    assert describe(save).step == 4
    for words in (("evaluate", run), ("export", run, "--to", "w.safetensors"), ("doctor", run), ("runs", run.parent)):
        answer = here(*words)
        assert answer.returncode == 0, answer.stderr
    answer = here("train", "--resume", run, *LONGER)
    assert "resuming from step 4" in answer.stderr, answer.stderr
    assert answer.returncode == 0
    assert [path.name for path in store.committed(save.parent)] == ["step-00000006", "step-00000004"]
    survived("stray files", 4 * len(strays) + 2)
