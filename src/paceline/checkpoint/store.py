"""Saves on disk: a new folder each, a SHA-256 manifest, and a commit marker written last.

    checkpoints/step-00000120/
        model.safetensors ema.safetensors optimizer.safetensors    tensors
        state.json       everything else: position, metrics, scaler, skeletons of the above
        manifest.json    size and SHA-256 of every file
        COMMIT           SHA-256 of the manifest; without it the checkpoint does not exist

`last` and `best` are found by reading committed checkpoints, never by trusting a name.
"""

import json
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
    read,
)
from paceline.errors import UserError
from paceline.system.files import make_folder, replacing, sha256, sync, write_json, write_text
from paceline.system.logs import log
from paceline.system.trees import flatten

_NAME = re.compile(r"step-\d{8,12}")
USE = ("classes", "preprocessing", "model")
"""Parts of `progress` that say how the weights are used; an export has them as JSON in its header."""


def write(
    folder: Path,
    step: int,
    parts: dict[str, Any],
    metrics: dict[str, float],
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint; an existing one of the same step is replaced only after the new one is complete.

    `before_commit` brings to disk what must survive a power cut if the checkpoint does.
    """
    temporary = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        make_folder(temporary)
        skeletons = {}
        for name, part in parts.items():
            skeletons[name], tensors = flatten(part)
            if tensors:
                _write_tensors(tensors, temporary / f"{name}.safetensors")
        write_json(temporary / STATE, {"format": FORMAT, "step": step, "metrics": metrics, "parts": skeletons})
        files = sorted(path for path in temporary.iterdir() if not path.name.startswith("."))
        for path in files:
            sync(path)
        entries = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}
        write_json(temporary / MANIFEST, entries)
        before_commit()
        write_text(temporary / COMMIT, digest(temporary / MANIFEST))
        replaced = _hide(folder)
        temporary.rename(folder)
        sync(folder.parent)
        if replaced:
            shutil.rmtree(replaced)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        safetensors.torch.save_file(tensors, path)
    except safetensors.SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        raise


def _hide(folder: Path) -> Path | None:
    """Take a checkpoint out of sight before its files go, so that being killed in between leaves no half of it."""
    if not folder.exists():
        return None
    hidden = folder.with_name(f".deleting-{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    return folder.rename(hidden)


def delete(checkpoints: Sequence[Path]) -> None:
    """Delete checkpoints of one folder; none that counts ever lacks some of its files, also after a power cut."""
    hidden = [path for checkpoint in checkpoints if (path := _hide(checkpoint))]
    if hidden:
        sync(hidden[0].parent)
    for path in hidden:
        shutil.rmtree(path)


def clear_up(folder: Path) -> None:
    """Deal with what a kill left: a checkpoint that lacked only its name gets it, halves go."""
    for path in folder.glob(".writing-*"):
        place = path.with_name(path.name.removeprefix(".writing-"))
        if (path / COMMIT).exists() and not place.exists():
            path.rename(place)
            sync(folder)
    for half in [*folder.glob(".writing-*"), *folder.glob(".deleting-*")]:
        shutil.rmtree(half, ignore_errors=True)


def _put_aside(folder: Path) -> None:
    """Keep a checkpoint, but no longer among those that count."""
    names = (f"corrupt-{folder.name}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 10_000))))
    folder.rename(next(path for name in names if not (path := folder.with_name(name)).exists()))


def committed(folder: Path) -> Iterator[Path]:
    """Folders of checkpoints that claim to be complete, newest first; copies by other names do not count."""
    if folder.is_dir():
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink()]
        yield from sorted((path for path in found if (path / COMMIT).exists()), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Of a committed checkpoint, by its name."""
    return int(folder.name.removeprefix("step-"))


def files_of(folder: Path) -> list[Path]:
    """The files of a checkpoint, the marker last, without what file managers left there; none of a corrupt one."""
    try:
        return [folder / name for name in (*manifest_of(folder), MANIFEST, COMMIT)]
    except CorruptCheckpoint:
        return []


def export_weights(folder: Path, target: Path, raw: bool) -> str:
    """Write the averaged weights of a checkpoint, or those that were trained, as one file; what was done, in a line."""
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}; make it first")
    checkpoint, parts = read(folder)
    averaged = bool(parts["ema"]) and not raw
    weights = parts["ema"] if averaged else parts["model"]
    with replacing(target) as file:
        use = json.dumps({name: parts["progress"][name] for name in USE})
        file.write(safetensors.torch.save(weights, {"format": "pt", "paceline": use}))
    kind = "averaged weights" if averaged else "weights"
    return f"{target}: {kind} of step {checkpoint.step} ({len(weights)} tensors) from {folder}"


def last(folder: Path) -> tuple[CheckpointInfo, dict[str, Any]] | None:
    """The newest sound checkpoint; corrupt ones are named, put aside and skipped. None if there never was one."""
    clear_up(folder)
    corrupt = 0
    for path in committed(folder):
        try:
            return read(path)
        except CorruptCheckpoint as error:
            log.warning("corrupt checkpoint: %s; trying the one before it", error)
            _put_aside(path)
            corrupt += 1
    if corrupt:
        raise UserError(
            f"{folder}: all {corrupt} checkpoints are corrupt (kept as corrupt-*); start anew with another --name"
        )
    return None


def put_aside_from(folder: Path, step: int) -> Path | None:
    """Take checkpoints of this step and later ones out of use; the newest of those that stay."""
    for path in committed(folder):
        try:
            if describe(path).step < step:
                return path
        except CorruptCheckpoint as error:
            log.warning("corrupt checkpoint: %s", error)
        _put_aside(path)
    return None


def best(folder: Path, metric: str) -> CheckpointInfo | None:
    """The sound checkpoint with the best metric, the earliest of equals."""
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
