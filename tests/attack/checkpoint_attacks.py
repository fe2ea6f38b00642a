"""Attacks with untrusted checkpoints, by name. Each one changes a checkpoint and makes its checksums match."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attack.resealed import change_tensors, commit, reseal
from paceline.checkpoint.verified import FORMAT

Attack = Callable[[Path], object]


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    """Return a change of the value at a path; `...` removes it."""

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


def _evaluations(*steps: int) -> dict[str, list[float]]:
    return {"step": [*steps]} | {name: [0.5] * len(steps) for name in ("top1", "top5", "loss")}


NAN, INF, HUGE = float("nan"), float("inf"), 10**30
_SCALER = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
STATE: dict[str, Callable[[Any], None]] = {
    "format is a string": _set("format", to=str(FORMAT)),
    "format is missing": _set("format", to=...),
    "format of the future": _set("format", to=FORMAT + 1),
    "format is huge": _set("format", to=HUGE),
    "step is negative": _set("step", to=-1),
    "step is huge": _set("step", to=HUGE),
    "step is a string": _set("step", to="4"),
    "step is not an integer": _set("step", to=4.5),
    "step is infinite": _set("step", to=INF),
    "step differs": _set("step", to=3),
    "step is missing": _set("step", to=...),
    "metrics are missing": _set("metrics", to=...),
    "metrics are a list": _set("metrics", to=[1]),
    "accuracy is a string": _set("metrics", to={"top1": "high"}),
    "accuracy is not a number": _set("metrics", to={"top1": NAN}),
    "accuracy above 1": _set("metrics", to={"top1": 1e9}),
    "an unknown metric": _set("metrics", to={"../x": 1.0}),
    "an unknown key": _set("more", to=1),
    "no parts": _set("parts", to=...),
    "parts are a list": _set("parts", to=[]),
    "no model": _set("parts", "model", to=...),
    "a part outside the folder": _set("parts", "../../evil", to={"pairs": []}),
    "a model without tensors": _set("parts", "model", to={"pairs": []}),
    "a model that is a string": _set("parts", "model", to="x"),
    "neither tensor nor pairs": _set("parts", "model", to={"x": 1}),
    "pairs that are not pairs": _set("parts", "model", to={"pairs": [[1], 2]}),
    "keys that are lists": _set("parts", "model", to={"pairs": [[[1], 2]]}),
    "a tensor that does not exist": _set("parts", "model", to={"pairs": [["a", {"__tensor__": "nowhere"}]]}),
    "a tensor named by a number": _set("parts", "model", to={"pairs": [["a", {"__tensor__": 5}]]}),
    "deeply nested": _set("parts", "model", to={"pairs": [["a", _nested(400)]]}),
    "an optimizer without groups": _set("parts", "optimizer", to={"pairs": [["state", {"pairs": []}]]}),
}
PROGRESS: dict[str, Callable[[Any], None]] = {
    "progress.step is negative": _set("step", to=-4),
    "progress.step differs": _set("step", to=2),
    "progress.step is a string": _set("step", to="4"),
    "no recipe": _set("recipe", to=...),
    "recipe is a string": _set("recipe", to="x"),
    "recipe without data": _set("recipe", to={}),
    "data of the recipe is a number": _set("recipe", "data", to=5),
    "data is a string": _set("data", to="d1"),
    "fingerprint is a number": _set("data", "fingerprint", to=5),
    "a negative number of images": _set("data", "splits", "val", to=-1),
    "epoch is infinite": _set("epoch", to=INF),
    "versions are numbers": _set("versions", "torch", to=2),
    "classes are a string": _set("classes", to="abcdefghij"),
    "classes are numbers": _set("classes", to=[[1, 2]] * 10),
    "classes without names": _set("classes", to=[["a"]] * 10),
    "too few classes": _set("classes", to=[["a", "a"]]),
    "no preprocessing": _set("preprocessing", to=...),
    "mean is empty": _set("preprocessing", "mean", to=[]),
    "mean is a string": _set("preprocessing", "mean", to=["x"]),
    "mean is not a number": _set("preprocessing", "mean", to=[NAN]),
    "std is zero": _set("preprocessing", "std", to=[0.0]),
    "std of other channels": _set("preprocessing", "std", to=[1.0, 1.0, 1.0]),
    "unknown interpolation": _set("preprocessing", "interpolation", to="nearest"),
    "a tensor in progress": _set("preprocessing", "mean", to={"__tensor__": "x"}),
    "model arguments are missing": _set("model", to=...),
    "a billion classes": _set("model", "num_classes", to=10**10),
    "an unknown key of progress": _set("more", to=1),
    "evaluations are a list": _set("evaluations", to=[]),
    "evaluations without a metric": _set("evaluations", "top5", to=...),
    "evaluations of later steps": _set("evaluations", to=_evaluations(2, 5)),
    "evaluations out of order": _set("evaluations", to=_evaluations(3, 2)),
    "more evaluations than steps": _set("evaluations", "step", to=[0, 1, 2, 3, 4]),
    "accuracy of an evaluation above 1": _set("evaluations", to=_evaluations(4) | {"top1": [1.5]}),
    "loss of an evaluation is not a number": _set("evaluations", to=_evaluations(4) | {"loss": [NAN]}),
    "loss scale is a string": _set("scaler", to=_SCALER | {"scale": "2"}),
    "loss scale is negative": _set("scaler", to=_SCALER | {"scale": -2.0}),
    "loss scale is not a number": _set("scaler", to=_SCALER | {"scale": NAN}),
    "loss scale is infinite": _set("scaler", to=_SCALER | {"scale": INF}),
    "loss scale with missing values": _set("scaler", to={"scale": 2.0}),
    "loss scale never grows": _set("scaler", to=_SCALER | {"growth_interval": 0}),
    "loss scale with a negative count": _set("scaler", to=_SCALER | {"_growth_tracker": -1}),
}


def _header(checkpoint: Path, header: bytes, data: bytes = b"") -> None:
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    reseal(checkpoint)


def _content(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    reseal(checkpoint)


def _links_out(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    outside = shutil.copy(path, checkpoint.parent.parent.parent / "outside.safetensors")
    path.unlink()
    path.symlink_to(outside)
    reseal(checkpoint)


def _is_fifo(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    reseal(checkpoint, **{"model.safetensors": {"bytes": 0, "sha256": 64 * "0"}})


def _is_huge(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.truncate(10**11)
    reseal(checkpoint, **{"model.safetensors": {"bytes": 10**11, "sha256": 64 * "0"}})


_ONE = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
FILES: dict[str, Attack] = {
    "state.json is empty": lambda checkpoint: _content(checkpoint, "state.json", b""),
    "state.json is a list": lambda checkpoint: _content(checkpoint, "state.json", b"[]"),
    "state.json is not JSON": lambda checkpoint: _content(checkpoint, "state.json", b"{"),
    "state.json is not UTF-8": lambda checkpoint: _content(checkpoint, "state.json", b"\xff\xfe"),
    "state.json is deeply nested": lambda checkpoint: _content(checkpoint, "state.json", b"[" * 200_000),
    "state.json has a number of 5000 digits": lambda checkpoint: _content(
        checkpoint, "state.json", b'{"format": ' + b"9" * 5000 + b"}"
    ),
    "the manifest names a file outside": lambda checkpoint: reseal(
        checkpoint, **{"../../x": {"bytes": 1, "sha256": 64 * "0"}}
    ),
    "the manifest has an absolute path": lambda checkpoint: reseal(
        checkpoint, **{"/etc/passwd": {"bytes": 1, "sha256": 64 * "0"}}
    ),
    "the manifest lacks state.json": lambda checkpoint: reseal(checkpoint, **{"state.json": None}),
    "the manifest lacks weights": lambda checkpoint: reseal(checkpoint, **{"model.safetensors": None}),
    "the manifest has a negative size": lambda checkpoint: reseal(
        checkpoint, **{"state.json": {"bytes": -1, "sha256": ""}}
    ),
    "the manifest has no checksums": lambda checkpoint: reseal(checkpoint, **{"state.json": 5}),
    "the manifest is a list": lambda checkpoint: commit(checkpoint, b"[]"),
    "the manifest is deeply nested": lambda checkpoint: commit(checkpoint, b"[" * 50_000),
    "the manifest is not UTF-8": lambda checkpoint: commit(checkpoint, b"\xff"),
    "weights are a FIFO": _is_fifo,
    "weights are a link to a file outside": _links_out,
    "weights are huge": _is_huge,
    "weights are empty": lambda checkpoint: _content(checkpoint, "model.safetensors", b""),
    "a header of 2**63 bytes": lambda checkpoint: _content(checkpoint, "model.safetensors", struct.pack("<Q", 1 << 63)),
    "a header that is not JSON": lambda checkpoint: _header(checkpoint, b"{" * 100),
    "a header without data": lambda checkpoint: _header(checkpoint, _ONE),
    "a header with offsets out of bounds": lambda checkpoint: _header(
        checkpoint, _ONE.replace(b"[0, 8]", b"[0, 8000]"), bytes(8)
    ),
    "a header of an unknown type": lambda checkpoint: _header(checkpoint, _ONE.replace(b"F32", b"X99"), bytes(8)),
    "a header of a negative shape": lambda checkpoint: _header(checkpoint, _ONE.replace(b"[2]", b"[-2]"), bytes(8)),
    "other tensors": lambda checkpoint: _header(checkpoint, _ONE, bytes(8)),
}


def _first(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


def _tensor(part: str, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    def inside(tensors: dict[str, torch.Tensor]) -> None:
        name = _first(tensors, ending)
        tensors[name] = change(tensors[name])

    return lambda checkpoint: change_tensors(checkpoint, part, inside)


WEIGHTS: dict[str, Attack] = {
    "weights of another shape": _tensor("ema", "weight", lambda tensor: tensor[:1]),
    "weights of another type": _tensor("ema", "weight", torch.Tensor.double),
    "weights that are integers": _tensor("ema", "weight", torch.Tensor.long),
    "weights that are not finite": _tensor("ema", "weight", lambda tensor: tensor.fill_(NAN)),
    "a negative count of batches": _tensor("ema", "num_batches_tracked", lambda tensor: tensor.fill_(-1)),
}
OPTIMIZER: dict[str, Attack] = {
    "moments of another shape": _tensor("optimizer", "exp_avg", lambda tensor: tensor.flatten()[:1]),
    "moments that are larger": _tensor("optimizer", "exp_avg", lambda tensor: torch.zeros(4096)),
    "moments of another type": _tensor("optimizer", "exp_avg_sq", torch.Tensor.half),
    "moments that are not finite": _tensor("optimizer", "exp_avg", lambda tensor: tensor.fill_(INF)),
    "negative squares": _tensor("optimizer", "exp_avg_sq", lambda tensor: tensor.fill_(-1.0)),
    "negative steps": _tensor("optimizer", "step", lambda tensor: tensor.fill_(-3.0)),
    "steps that are not a number": _tensor("optimizer", "step", lambda tensor: tensor.fill_(NAN)),
    "steps in the future": _tensor("optimizer", "step", lambda tensor: tensor.fill_(1e30)),
    "twelve steps": _tensor("optimizer", "step", lambda tensor: tensor.repeat(12)),
}
