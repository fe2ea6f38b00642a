"""Reading one checkpoint: files are compared with their checksums, then what they hold is checked.

Whoever made a checkpoint may have made its checksums too, so that neither a file's kind nor a value in it is trusted.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from paceline.checkpoint import schema
from paceline.errors import UserError
from paceline.system.files import sha256
from paceline.system.trees import unflatten
from paceline.system.untrusted import check_regular, read_regular

MANIFEST, COMMIT, STATE = "manifest.json", "COMMIT", "state.json"
FORMAT = 2
_MOST_MANIFEST, _MOST_STATE = 1 << 16, 1 << 26


class CorruptCheckpoint(UserError):
    """A checkpoint that does not match its own checksums."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint whose description has been verified; tensors are verified when they are read."""

    folder: Path
    step: int
    metrics: dict[str, float]
    recipe: dict[str, Any]
    """What was trained, as a tree; checked when it is used."""


def read(folder: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    """Read and verify one checkpoint; CorruptCheckpoint names the file, and what is wrong with it."""
    manifest = manifest_of(folder)
    for name in manifest:
        _verify(folder / name, manifest)
    state, progress = _read_state(folder)
    parts: dict[str, Any] = {"progress": progress}
    for name in ("model", "ema", "optimizer"):
        path = folder / f"{name}.safetensors"
        try:
            tensors = safetensors.torch.load_file(path) if path.name in manifest else {}
        except Exception as error:  # whatever safetensors and torch make of a stranger's header
            raise CorruptCheckpoint(f"{path} does not hold tensors: {str(error)[:200]}") from None
        with _named(folder / STATE):
            parts[name] = unflatten(state["parts"][name], tensors)
    with _named(folder / STATE):
        schema.check_tensors(parts)
    return CheckpointInfo(folder, state["step"], state["metrics"], progress["recipe"]), parts


def describe(folder: Path) -> CheckpointInfo:
    """Step, metrics and recipe of a checkpoint, without reading its tensors."""
    _verify(folder / STATE, manifest_of(folder))
    state, progress = _read_state(folder)
    return CheckpointInfo(folder, state["step"], state["metrics"], progress["recipe"])


def _verify(path: Path, manifest: dict[str, Any]) -> None:
    try:
        check_regular(path, path.parent)
        same = path.stat().st_size == manifest[path.name]["bytes"] and sha256(path) == manifest[path.name]["sha256"]
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror}") from None
    if not same:
        raise CorruptCheckpoint(f"{path} does not match its checksum")


def _read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The verified state.json, and the part of it that says how far the training is."""
    path = folder / STATE
    with _named(path):
        state = json.loads(read_regular(path, _MOST_STATE, folder))
        found = state.get("format") if isinstance(state, dict) else None
        if isinstance(found, int) and found != FORMAT:
            raise UserError(
                f"{folder} has checkpoint format {found}; this version of paceline reads format {FORMAT}: use the "
                "version that wrote it"
            )
        schema.check_state(state)
        progress = unflatten(state["parts"]["progress"], {})
        schema.check_progress(progress, state["step"])
    return state, progress


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong within a file, with its name; strangers make files whose checksums match."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CorruptCheckpoint(f"{path}: {reason}; paceline has not written this: copy the checkpoint again") from None


def manifest_of(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        if read_regular(folder / COMMIT, len(digest(path)), folder) != digest(path).encode():
            raise CorruptCheckpoint(f"{path} does not match its commit marker")
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{folder} is not complete: {Path(error.filename).name} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} cannot be read ({error})") from None
    with _named(path):
        manifest: dict[str, Any] = json.loads(read_regular(path, _MOST_MANIFEST, folder))
        schema.check_manifest(manifest)
        if STATE not in manifest:
            raise ValueError(f"{STATE} is not named")
    return manifest


def digest(path: Path) -> str:
    return hashlib.sha256(read_regular(path, _MOST_MANIFEST, path.parent)).hexdigest() + "\n"
