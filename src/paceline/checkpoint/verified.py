"""Reads one checkpoint: verifies the checksums of its files, then validates their content.

An untrusted checkpoint may have matching checksums, so neither a file's type nor a value in it is trusted.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import schema
from paceline.checkpoint.tensors import SavedTensor, open_files
from paceline.errors import UserError
from paceline.system.files import sha256
from paceline.system.trees import unflatten
from paceline.system.untrusted import check_regular, read_regular

MANIFEST, COMMIT, STATE = "manifest.json", "COMMIT", "state.json"
FORMAT = 4
_MAX_MANIFEST, _MAX_STATE = 1 << 20, 1 << 26


class CorruptCheckpoint(UserError):
    """A checkpoint that is incomplete, does not match its checksums, or has invalid content."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint whose state.json has been verified. Tensors are verified when they are read."""

    folder: Path
    step: int
    metrics: dict[str, float]
    recipe: dict[str, Any]
    """The recipe as a tree, validated where it is used."""


def open_verified(folder: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    """Verify the checksums of a checkpoint, then open it. CorruptCheckpoint names the file and the problem."""
    verify(folder)
    return open_checkpoint(folder)


def verify(folder: Path) -> None:
    """Compare all files of a checkpoint with their checksums."""
    manifest = manifest_of(folder)
    for name in manifest:
        _verify(folder / name, manifest)


def open_checkpoint(folder: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    """Validate a verified checkpoint, and return its parts with a SavedTensor for every tensor, which is read later."""
    manifest = manifest_of(folder)
    state, progress = _read_state(folder)
    parts: dict[str, Any] = {"progress": progress}
    for part in ("model", "ema", "optimizer"):
        with _named(folder / f"{part}.safetensors"):
            files = [folder / name for name in sorted(manifest) if re.match(rf"{part}[-.]", name)]
            tensors = open_files(files)
        with _named(folder / STATE):
            parts[part] = unflatten(state["parts"][part], tensors)
    with _named(folder / STATE):
        for part in ("model", "ema"):
            for name, tensor in parts[part].items() if isinstance(parts[part], dict) else [("", None)]:
                if not isinstance(tensor, SavedTensor) or tensor.name != name:
                    raise ValueError(f"{part}.{name} is not a named tensor")
        schema.check_optimizer(parts["optimizer"])
    return CheckpointInfo(folder, state["step"], state["metrics"], progress["recipe"]), parts


def describe(folder: Path) -> CheckpointInfo:
    """Return step, metrics and recipe of a checkpoint without reading its tensors."""
    _verify(folder / STATE, manifest_of(folder))
    state, progress = _read_state(folder)
    return CheckpointInfo(folder, state["step"], state["metrics"], progress["recipe"])


def _verify(path: Path, manifest: dict[str, Any]) -> None:
    try:
        check_regular(path, path.parent)
        same = path.stat().st_size == manifest[path.name]["bytes"] and sha256(path) == manifest[path.name]["sha256"]
    except FileNotFoundError:
        raise _incomplete(path) from None
    except OSError as error:
        raise _corrupt(path, f"cannot be read ({error.strerror})") from None
    if not same:
        raise _corrupt(path, "does not match its checksum")


def _corrupt(path: Path, problem: str) -> CorruptCheckpoint:
    message = f"{path} {problem}. Copy the checkpoint again, or use another one."
    return CorruptCheckpoint("checkpoint-corrupt", message, path=path)


def _incomplete(path: Path) -> CorruptCheckpoint:
    message = f"{path} is missing, so the checkpoint is incomplete. Copy the checkpoint again, or use another one."
    return CorruptCheckpoint("checkpoint-incomplete", message, path=path)


def _read_state(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return state.json and its `progress` part, both validated."""
    path = folder / STATE
    with _named(path):
        state = json.loads(read_regular(path, _MAX_STATE, folder))
        found = state.get("format") if isinstance(state, dict) else None
        if isinstance(found, int) and found != FORMAT:
            raise UserError(
                "checkpoint-format-unsupported",
                f"{folder} has checkpoint format {found}, but this version of paceline reads format {FORMAT}. Use the "
                "version that wrote it.",
                path=folder,
                format=found,
            )
        schema.check_state(state)
        progress = unflatten(state["parts"]["progress"], {})
        schema.check_progress(progress, state["step"])
    return state, progress


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn errors about the content of a file into CorruptCheckpoint with its path."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _corrupt(path, f"is not a file written by paceline ({reason})") from None


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the validated manifest of a committed checkpoint: size and checksum by file name."""
    path = folder / MANIFEST
    try:
        if read_regular(folder / COMMIT, len(digest(path)), folder) != digest(path).encode():
            raise _corrupt(path, f"does not match {COMMIT}")
    except FileNotFoundError as error:
        raise _incomplete(folder / Path(error.filename).name) from None
    except OSError as error:
        raise _corrupt(folder, f"cannot be read ({error})") from None
    with _named(path):
        manifest: dict[str, Any] = json.loads(read_regular(path, _MAX_MANIFEST, folder))
        schema.check_manifest(manifest)
        if STATE not in manifest:
            raise ValueError(f"{STATE} is not listed")
    return manifest


def digest(path: Path) -> str:
    """Return the content of COMMIT for a manifest."""
    return hashlib.sha256(read_regular(path, _MAX_MANIFEST, path.parent)).hexdigest() + "\n"
