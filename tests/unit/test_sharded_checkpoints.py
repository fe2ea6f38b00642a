"""Checkpoints in several files, as FSDP ranks write them: read back whole, verified, and refused if they do not fit."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from attack.resealed import reseal
from conftest import raises
from safetensors import safe_open
from saved_checkpoints import read

from paceline.checkpoint import store
from paceline.checkpoint.tensors import TensorChunk
from paceline.checkpoint.verified import CorruptCheckpoint
from paceline.distributed.mesh import ShardId
from paceline.errors import UserError
from paceline.exports.write import Exporter

STEP, SHARDS = 5, 3
WEIGHT = torch.arange(28.0).view(7, 4)  # 3 + 3 + 1 rows


def _parts(shard: int) -> dict[str, Any]:
    """The state of one rank: rows of a weight and of its moments; what is not sharded is on rank 0."""
    rows = slice(3 * shard, 3 * shard + 3)
    chunk = TensorChunk(WEIGHT[rows].clone(), (7, 4), (3 * shard, 0))
    moment = TensorChunk(WEIGHT[rows] / 2, (7, 4), (3 * shard, 0))
    is_first = shard == 0
    return {
        "model": {"weight": chunk, "count": torch.tensor(9) if is_first else None},
        "ema": {},
        "optimizer": {
            "state": {0: {"exp_avg": moment, "step": torch.tensor(5.0) if is_first else None}},
            "param_groups": [{"params": [0]}],
        },
        "progress": {
            "step": STEP,
            "scaler": {},
            "evaluations": {"step": [], "top1": [], "top5": [], "loss": []},
            "recipe": {"data": {}, "checkpoint": {}},
            "epoch": 0.5,
            "data": {"name": "any", "fingerprint": "d1", "splits": {"train": 10, "val": 5, "test": 0}},
            "precision": "fp32",
            "versions": {"torch": "2"},
            "classes": [["a", "a"], ["b", "b"]],
            "preprocessing": {"mean": [0.5], "std": [0.2], "interpolation": "bilinear"},
            "model": {"name": "any", "num_classes": 2, "in_chans": 1, "options": {}},
        },
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / f"step-{STEP:08d}"
    store.begin(path)
    files: dict[str, Any] = {}
    for shard in range(SHARDS):
        files |= store.write_shard(path, STEP, _parts(shard), {}, ShardId(shard, SHARDS))
    store.commit(path, files)
    return path


def test_shards_are_read_as_whole_tensors(checkpoint: Path, tmp_path: Path) -> None:
    names = {f"{part}-{number:05d}-of-00003.safetensors" for part in ("model", "optimizer") for number in (1, 2, 3)}
    assert {path.name for path in checkpoint.iterdir()} == names | {"COMMIT", "manifest.json", "state.json"}
    _, parts = read(checkpoint)
    assert torch.equal(parts["model"]["weight"], WEIGHT)
    assert parts["model"]["count"] == 9
    assert torch.equal(parts["optimizer"]["state"][0]["exp_avg"], WEIGHT / 2)
    Exporter(checkpoint).write(tmp_path / "weights.safetensors", "safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as exported:
        assert torch.equal(exported.get_tensor("weight"), WEIGHT)


def test_200_flipped_bits_in_shards_are_all_detected(checkpoint: Path) -> None:
    generator, files = random.Random(0), sorted(checkpoint.iterdir())
    for number in range(200):
        file = files[number % len(files)]
        content = file.read_bytes()
        bit = generator.randrange(len(content) * 8)
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with raises("checkpoint-corrupt", CorruptCheckpoint):
            read(checkpoint)
        file.write_bytes(content)
    read(checkpoint)


def _rewrite(
    folder: Path,
    shard: int,
    places: Callable[[dict[str, Any]], Any] = lambda places: places,
    tensors: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: tensors,
) -> None:
    """Change the header or the tensors of one model file, and make the checksums match."""
    path = folder / f"model-{shard:05d}-of-00003.safetensors"
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["chunks"])
    content = tensors(safetensors.torch.load_file(path))
    safetensors.torch.save_file(content, path, {"chunks": json.dumps(places(header))})
    reseal(folder)


def _weight(**change: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda places: {"weight": places["weight"] | change}


def _drop(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    reseal(folder)


def _also_whole(folder: Path) -> None:
    safetensors.torch.save_file({"weight": WEIGHT}, folder / "model.safetensors")
    reseal(folder)


def _stranger(folder: Path, name: str) -> None:
    reseal(folder, **{name: {"bytes": 1, "sha256": 64 * "0"}})


HUGE = 10**12
ATTACKS: dict[str, Callable[[Path], None]] = {
    "a shard is missing": _drop,
    "a chunk overlaps another": lambda path: _rewrite(path, 2, _weight(offsets=[2, 0])),
    "a chunk occurs twice": lambda path: _rewrite(path, 2, _weight(offsets=[0, 0])),
    "a gap between chunks": lambda path: _rewrite(path, 3, _weight(offsets=[7, 0])),
    "a chunk out of bounds": lambda path: _rewrite(path, 3, _weight(offsets=[HUGE, 0])),
    "a chunk out of bounds on another axis": lambda path: _rewrite(path, 3, _weight(offsets=[6, 1])),
    "a negative offset": lambda path: _rewrite(path, 3, _weight(offsets=[-1, 0])),
    "an offset that is a string": lambda path: _rewrite(path, 3, _weight(offsets=["6", 0])),
    "too few offsets": lambda path: _rewrite(path, 3, _weight(offsets=[6])),
    "a huge shape": lambda path: _rewrite(path, 3, _weight(shape=[HUGE, HUGE])),
    "all shapes are huge": lambda path: (
        [_rewrite(path, number, _weight(shape=[HUGE, HUGE])) for number in (1, 2, 3)] and None
    ),
    "shapes that differ": lambda path: _rewrite(path, 2, _weight(shape=[8, 4])),
    "more dimensions": lambda path: _rewrite(path, 2, _weight(shape=[7, 4, 1], offsets=[3, 0, 0])),
    "a thousand dimensions": lambda path: _rewrite(path, 2, _weight(shape=[1] * 1000, offsets=[0] * 1000)),
    "types that differ": lambda path: _rewrite(path, 2, tensors=lambda found: {"weight": found["weight"].long()}),
    "fewer columns": lambda path: _rewrite(
        path, 2, tensors=lambda found: {"weight": found["weight"][:, :3].contiguous()}
    ),
    "a chunk without a place": lambda path: _rewrite(path, 2, lambda places: {}),
    "a place without a chunk": lambda path: _rewrite(path, 2, lambda places: places | {"more": places["weight"]}),
    "an unknown key": lambda path: _rewrite(path, 2, _weight(file="../../x")),
    "places that are a list": lambda path: _rewrite(path, 2, lambda places: [1]),
    "a whole tensor beside its chunks": _also_whole,
    "a file outside the folder": lambda path: _stranger(path, "../model-00001-of-00003.safetensors"),
    "a file below the folder": lambda path: _stranger(path, "model-00001-of-00003/x.safetensors"),
    "a file of another name": lambda path: _stranger(path, "model-1-of-3.safetensors"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_shards_are_refused(checkpoint: Path, name: str) -> None:
    ATTACKS[name](checkpoint)
    with pytest.raises(UserError) as caught:
        read(checkpoint)
    assert caught.value.code in {"checkpoint-corrupt", "checkpoint-incomplete"}
