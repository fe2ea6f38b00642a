"""Trains real runs: one without interruption, one whose rank 0 is killed and that is resumed; reads a checkpoint."""

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.checkpoint import store
from paceline.engine.evaluation.saved import evaluate_path, find_checkpoint
from paceline.engine.session import train_recipe
from paceline.errors import UserError
from paceline.selftest.probes import Probing
from paceline.selftest.probes.exact import exact_kernels
from paceline.selftest.settings import CHECKPOINT_EVERY, KILLED_AT, exact_recipe
from paceline.track.records import RunFolder

_WAIT = 120.0  # seconds for a checkpoint to be on disk


def whole_run(probing: Probing) -> dict[str, Any]:
    """Train without interruption."""
    return _trained(probing, "whole")


def killed_run(probing: Probing) -> dict[str, Any]:
    """Kill rank 0 with SIGKILL between two checkpoints."""
    if probing.world.is_rank_zero:
        steps = 0

        def kill_at_step(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == KILLED_AT:
                _wait_for_checkpoint(_runs(probing) / "interrupted")
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(kill_at_step)
    return _trained(probing, "interrupted")


def resumed_run(probing: Probing) -> dict[str, Any]:
    """Resume the run that was killed."""
    return _trained(probing, "interrupted")


def round_trip(probing: Probing) -> dict[str, Any]:
    """Load the last checkpoint and evaluate it; then flip one bit in each of its files, which must be detected."""
    run = _runs(probing) / "whole"
    recorded = RunFolder(run).read_summary().get("final") or {}
    words = ["--device", probing.settings.device]
    with exact_kernels():  # as in training, whose loss is compared
        _, loaded = evaluate_path(run, "last", words)
    checkpoint, copied = find_checkpoint(run, "last"), _runs(probing) / "flipped"
    undetected, flipped = [], 0
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size):
        target = copied / checkpoint.name
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(checkpoint, target)
        _flip_bit(target / path.relative_to(checkpoint))
        flipped += 1
        try:
            evaluate_path(target, "last", words)
            undetected.append(path.name)
        except UserError:
            pass
    return {
        "recorded": {name: recorded.get(name) for name in ("loss", "top1")},
        "loaded": {name: loaded.get(name) for name in ("loss", "top1")},
        "flipped": flipped,
        "undetected": undetected,
    }


def _trained(probing: Probing, name: str) -> dict[str, Any]:
    """Train or resume a run; return its losses, its time split and a digest of the weights in its last checkpoint."""
    with exact_kernels(), _noting_ddp() as wrapped:  # without exact kernels, no two runs on GPUs are bit-identical
        path = train_recipe(exact_recipe(probing.settings), _runs(probing), name)
    if not probing.world.is_rank_zero:
        return {}
    folder = RunFolder(path)
    trained = [record for record in folder.records() if record["kind"] == "train"]
    return {
        "first_step": folder.read_starts()[-1]["first_step"],
        "steps": [record["step"] for record in trained],
        "losses": [record["loss"] for record in trained],
        "digest": _digest(find_checkpoint(path, "last")),
        "split": [record["seconds"] for record in trained],
        "times": [record["time"] for record in trained],
        "ddp_ranks": probing.world.size if wrapped else 0,
    }


@contextmanager
def _noting_ddp() -> Iterator[set[type]]:
    """Collect the type of the model's DDP wrapper. One rank, and ranks that share memory, have none."""
    found: set[type] = set()

    def note(module: nn.Module, _: object) -> None:
        if isinstance(module, DistributedDataParallel):
            found.add(type(module))

    hook = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def _runs(probing: Probing) -> Path:
    return Path(probing.settings.folder) / "runs"


def _wait_for_checkpoint(run: Path) -> None:
    """Wait until the checkpoint that the run resumes from is complete; it is written in the background."""
    deadline = time.monotonic() + _WAIT
    while time.monotonic() < deadline:
        newest = next(store.committed(RunFolder(run).checkpoints), None)
        if newest and store.step_of(newest) == CHECKPOINT_EVERY:
            return
        time.sleep(0.05)


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _digest(checkpoint: Path) -> str:
    """Return a digest of all tensor files of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
