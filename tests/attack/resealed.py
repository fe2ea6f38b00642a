"""Changes checkpoints and makes their checksums match, as an attacker would."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Tensors = dict[str, torch.Tensor]


def reseal(folder: Path, **entries: Any) -> None:
    """Rewrite manifest and marker. `entries` replace those of the files in the manifest; None removes one."""
    files = [path for path in folder.iterdir() if path.name not in ("manifest.json", "COMMIT") and path.is_file()]
    manifest = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in files
        if path.stat().st_size < 1 << 30
    }
    manifest = {name: entry for name, entry in (manifest | entries).items() if entry is not None}
    commit(folder, json.dumps(manifest).encode())


def commit(folder: Path, manifest: bytes) -> None:
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMMIT").write_text(hashlib.sha256(manifest).hexdigest() + "\n")


def change_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    reseal(folder)


def change_progress(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """`change` gets dictionaries instead of the pairs in state.json."""

    def inside(state: dict[str, Any]) -> None:
        progress = _plain(state["parts"]["progress"])
        change(progress)
        state["parts"]["progress"] = _pairs(progress)

    change_state(folder, inside)


def change_tensors(folder: Path, part: str, change: Callable[[Tensors], object]) -> None:
    path = folder / f"{part}.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    reseal(folder)


def copied(run: Path, target: Path) -> tuple[Path, Path]:
    """Copy a run and return the copy and its checkpoint."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run, target)
    return target, next((target / "checkpoints").glob("step-*"))


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node["pairs"]}
    return [_plain(value) for value in node] if isinstance(node, list) else node


def _pairs(node: Any) -> Any:
    if isinstance(node, dict) and "__tensor__" not in node:
        return {"pairs": [[key, _pairs(value)] for key, value in node.items()]}
    return [_pairs(value) for value in node] if isinstance(node, list) else node
