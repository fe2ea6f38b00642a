"""All ranks call the same collectives in the same order, in real processes with gloo and as pretended with NCCL.

Ranks that do not would wait for each other for ever. CPU, fp32 and fp16, one thread per process.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
from collectives import Recorder, mark_parts, pretend_in_sessions
from pretended_device import CUDA, PretendedDevice
from processes import run_ranks

from paceline.config.io import load_recipe
from paceline.distributed.world import World
from paceline.engine.session import train_recipe

WORDS = (
    *("--data.synthetic", "{train_samples: 64, val_samples: 20, size: 16}", "--data.name", "synthetic"),
    *("--data.size", 0, "--model", "null", "--model.name", "airbench", "--model.options", "{widths: [8, 16]}"),
    *("--train.global_batch", 16, "--train.duration", "6ba", "--log.every", "1ba", "--evaluate.every", "3ba"),
    *("--checkpoint.every", "2ba", "--log.tensorboard", "false", "--grad_sync.transport", "network"),
)
CASES = {
    "ddp": ("--precision", "fp32", "--grad_sync.bucket_mb", 0.004, "--ema.decay", 0.9),
    "accumulation": ("--precision", "fp16", "--train.grad_accumulation", 2, "--optim.clip_grad_norm", 1),
    "powersgd": ("--precision", "fp16", "--grad_sync", "{powersgd_rank: 1, powersgd_start_step: 2, bucket_mb: 0.004}"),
    "fsdp": ("--precision", "fp32", "--strategy", "fsdp", "--ema.decay", 0.9),
}


def record(rank: int) -> None:
    """Record the collectives of this process from now on."""
    recorder = Recorder(Path(f"collectives-{rank}.txt").absolute())
    mark_parts(pytest.MonkeyPatch(), recorder)
    recorder.__enter__()


def _of_steps(calls: list[str]) -> list[str]:
    """Calls of steps, of the agreement after each and of evaluation.

    The length of texts that ranks gather before training depends on host and device, and what a checkpoint or a log
    record sends depends on whether the last checkpoint is written yet.
    """
    return [call for call in calls if any(f"part='{part}" in call for part in ("step ", "loop'", "evaluation'"))]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_call_the_same_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, case: str
) -> None:
    words = [str(word) for word in (*WORDS, *CASES[case])]
    run_ranks(tmp_path, 2, "train", "cifar10-resnet18", *words, before=record)
    first, second = ((tmp_path / f"collectives-{rank}.txt").read_text().splitlines() for rank in range(2))
    assert first == second
    device = PretendedDevice()
    # FSDP does not work on the pretended device
    world = World(0, 2, 0, 2) if case == "fsdp" else World(0, 2, 0, 2, CUDA)
    pretend_in_sessions(world, monkeypatch)
    recorder = Recorder()
    mark_parts(monkeypatch, recorder)
    with recorder, nullcontext() if case == "fsdp" else device(monkeypatch):
        train_recipe(load_recipe("cifar10-resnet18", words), tmp_path / "pretended", "run")
    alone = [str(call) for call in recorder.calls]
    assert _of_steps(alone) == _of_steps(first)
    parts = {call.part for call in recorder.calls}
    assert parts >= {"start", "loop", "log", "evaluation", *(f"step {step}" for step in range(6))}
