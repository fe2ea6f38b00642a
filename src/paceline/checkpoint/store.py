"""Checkpoints on disk: a folder each, with a SHA-256 manifest and a commit marker that is written last.

    checkpoints/step-00000120/
        model.safetensors ema.safetensors optimizer.safetensors    tensors; under FSDP a file per rank and part
        state.json       everything else: position, metrics, scaler, skeletons of the above
        manifest.json    size and SHA-256 of every file
        COMMIT           SHA-256 of the manifest; without it the checkpoint is incomplete

`last` and `best` are found by reading committed checkpoints, never by trusting a name.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from paceline.checkpoint.tensors import TensorChunk, file_name, header
from paceline.checkpoint.verified import (
    COMMIT,
    FORMAT,
    MANIFEST,
    STATE,
    CheckpointInfo,
    CorruptCheckpoint,
    describe,
    digest,
    manifest_of,
    open_verified,
)
from paceline.distributed.mesh import ShardId
from paceline.errors import UserError
from paceline.system.files import make_folder, sha256, sync, write_json, write_text
from paceline.system.logs import log
from paceline.system.trees import flatten

_NAME = re.compile(r"step-\d{8,12}")


def write(
    folder: Path,
    step: int,
    parts: dict[str, Any],
    metrics: dict[str, float],
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint. An existing one of the same step is replaced only after the new one is complete."""
    begin(folder)
    try:
        commit(folder, write_shard(folder, step, parts, metrics, ShardId()), before_commit)
    except BaseException:
        discard(folder)
        raise


def temporary(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written until it is committed."""
    return folder.with_name(f".writing-{folder.name}")


def begin(folder: Path) -> None:
    """Create the folder in which a checkpoint is written until it is complete."""
    discard(folder)
    make_folder(temporary(folder))


def discard(folder: Path) -> None:
    """Remove what was written of a checkpoint that was not committed."""
    remove(temporary(folder))


def write_shard(
    folder: Path, step: int, parts: dict[str, Any], metrics: dict[str, float], shard: ShardId
) -> dict[str, Any]:
    """Write the files of one shard, with state.json if it is the first, to disk. Returns their manifest entries."""
    place, skeletons, files = temporary(folder), {}, []
    for name, part in parts.items():
        skeletons[name], tensors = flatten(part, TensorChunk)
        if tensors:
            files.append(place / file_name(name, shard))
            _write_tensors(tensors, files[-1])
    if shard.index == 0 and shard.is_first_replica:
        files.append(place / STATE)
        write_json(files[-1], {"format": FORMAT, "step": step, "metrics": metrics, "parts": skeletons})
    for path in files:
        sync(path)
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}


def commit(folder: Path, files: dict[str, Any], before_commit: Callable[[], None] = lambda: None) -> None:
    """Make a checkpoint valid after the files of all shards are on disk; `files` are their manifest entries.

    `before_commit` writes to disk what must survive a power cut if the checkpoint does.
    """
    place = temporary(folder)
    write_json(place / MANIFEST, dict(sorted(files.items())))
    before_commit()
    write_text(place / COMMIT, digest(place / MANIFEST))
    replaced = _hide(folder)
    try:
        place.rename(folder)
    except OSError:
        if replaced:
            replaced.rename(folder)
        raise
    sync(folder.parent)
    if replaced:
        shutil.rmtree(replaced)


def _write_tensors(tensors: dict[str, torch.Tensor | TensorChunk], path: Path) -> None:
    chunks = {name: chunk for name, chunk in tensors.items() if isinstance(chunk, TensorChunk)}
    data = {name: each.data if isinstance(each, TensorChunk) else each for name, each in tensors.items()}
    try:
        safetensors.torch.save_file(data, path, header(chunks))
    except safetensors.SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        raise


def remove(folder: Path) -> None:
    """Remove what a killed process left, but nothing that a link points to."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _hide(folder: Path) -> Path | None:
    """Rename a checkpoint before its files are deleted, so that a kill leaves no partial checkpoint."""
    if not folder.exists():
        return None
    hidden = folder.with_name(f".deleting-{folder.name}")
    remove(hidden)
    return folder.rename(hidden)


def delete(checkpoints: Sequence[Path]) -> None:
    """Delete checkpoints of one folder. Even a power cut leaves no committed checkpoint without some of its files."""
    hidden = [path for checkpoint in checkpoints if (path := _hide(checkpoint))]
    if hidden:
        sync(hidden[0].parent)
    for path in hidden:
        shutil.rmtree(path)


def clean_up(folder: Path) -> None:
    """Clean up after a kill: rename complete checkpoints that were not renamed yet, delete partial ones."""
    for path in folder.glob(".writing-*"):
        place = path.with_name(path.name.removeprefix(".writing-"))
        if (path / COMMIT).exists() and not place.exists():
            path.rename(place)
            sync(folder)
    for partial in [*folder.glob(".writing-*"), *folder.glob(".deleting-*")]:
        remove(partial)


def _set_aside(folder: Path) -> None:
    """Rename a checkpoint to corrupt-*, so that it is kept but not used."""
    names = (f"corrupt-{folder.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 10_000))))
    folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))


def committed(folder: Path) -> Iterator[Path]:
    """Yield the folders of committed checkpoints, newest first. Copies with other names are ignored."""
    if folder.is_dir():
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink()]
        yield from sorted((path for path in found if (path / COMMIT).exists()), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint from its folder name."""
    return int(folder.name.removeprefix("step-"))


def files_of(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, the commit marker last; none if it is corrupt. Stray files are ignored."""
    try:
        return [folder / name for name in (*manifest_of(folder), MANIFEST, COMMIT)]
    except CorruptCheckpoint:
        return []


def last(folder: Path) -> CheckpointInfo | None:
    """Return the newest valid checkpoint, or None. Corrupt ones are skipped with a warning."""
    clean_up(folder)
    corrupt = 0
    for path in committed(folder):
        try:
            return open_verified(path)[0]
        except CorruptCheckpoint as error:
            log.warning("corrupt checkpoint: %s Trying the previous one.", error)
            corrupt += 1
    if corrupt:
        raise UserError(
            "all-checkpoints-corrupt",
            f"{folder}: all {corrupt} checkpoints are corrupt (kept as corrupt-*). Start a new run with --name.",
            path=folder,
            count=corrupt,
        )
    return None


def set_aside_from(folder: Path, step: int) -> Path | None:
    """Rename checkpoints of this step and later ones to corrupt-*. Returns the newest one that remains."""
    for path in committed(folder):
        try:
            if describe(path).step < step:
                return path
        except CorruptCheckpoint as error:
            log.warning("corrupt checkpoint: %s", error)
        _set_aside(path)
    return None


def best(folder: Path, metric: str) -> CheckpointInfo | None:
    """Return the valid checkpoint with the best metric, the earliest one of equals."""
    checkpoints = []
    for path in committed(folder):
        try:
            checkpoint = describe(path)
        except CorruptCheckpoint:
            continue
        if math.isfinite(checkpoint.metrics.get(metric, math.nan)):
            checkpoints.append(checkpoint)
    sign = -1 if metric == "loss" else 1
    return max(checkpoints, key=lambda checkpoint: (sign * checkpoint.metrics[metric], -checkpoint.step), default=None)
