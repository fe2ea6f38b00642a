"""Running out of memory is an error that names the batch and the fix, and an elastic job is not restarted after it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, environment

from paceline.config.io import load_recipe
from paceline.distributed.world import World
from paceline.engine.memory import lacking_memory, memory_of_training
from paceline.errors import UserError
from paceline.track.records import RunFolder

HUNGRY = """
import os
from pathlib import Path
import torch
from torch import nn
import paceline as pl

class Net(nn.Module):
    def __init__(self, classes, memory, training, calls):
        super().__init__()
        self.head, self.memory, self.needs, self.calls = nn.Linear(64, classes), memory, training, calls

    def forward(self, images):
        if len(images) > 1 and self.training == self.needs:
            with Path(self.calls).open("a") as file:
                file.write(f"{os.getpid()}\\n")
            if self.memory == "host":
                torch.empty(1 << 50, dtype=torch.uint8)  # more than the addresses of a process
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
        return self.head(images.flatten(1))

@pl.register_model("hungry")
def hungry(num_classes, in_chans, memory="gpu", training=True, calls="calls"):
    return Net(num_classes, memory, training, calls)
"""
Paceline = Callable[..., subprocess.CompletedProcess[str]]


def _words(folder: Path, **options: object) -> tuple[object, ...]:
    (folder / "hungry.py").write_text(HUNGRY)
    listed = ", ".join(f"{name}: {value}" for name, value in {"calls": folder / "calls", **options}.items())
    model = ("--import", "hungry", "--model.name", "hungry", "--model.options", f"{{{listed}}}")
    return ("digits", *TINY, *model, "--device", "cpu")


@pytest.mark.parametrize("memory", ["gpu", "host"])
def test_training_without_enough_memory_names_the_batch(paceline: Paceline, tmp_path: Path, memory: str) -> None:
    answer = paceline("train", *_words(tmp_path, memory=memory), "--procs", 2)
    assert answer.returncode == 1
    assert f"[{memory}-out-of-memory]" in answer.stderr
    assert "24 images per rank" in answer.stderr
    assert "paceline find-batch" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert RunFolder(tmp_path / "runs" / "digits").read_summary()["status"] == "failed"


def test_evaluation_without_enough_memory_names_its_own_batch(paceline: Paceline, tmp_path: Path) -> None:
    answer = paceline("train", *_words(tmp_path, training="false"), "--evaluate.per_rank_batch", 70)
    assert "[gpu-out-of-memory]" in answer.stderr
    assert "70 images per rank" in answer.stderr
    assert "--evaluate.per_rank_batch" in answer.stderr


def test_elastic_job_without_enough_memory_is_not_restarted(paceline: Paceline, tmp_path: Path) -> None:
    home = environment() | {"PACELINE_HOME": str(tmp_path / "home")}
    answer = paceline("launch", "local", "--nodes", 1, *_words(tmp_path), env=home)
    assert answer.returncode == 1
    assert "[gpu-out-of-memory]" in answer.stdout
    assert len(set((tmp_path / "calls").read_text().splitlines())) == 1  # rank processes


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."), "GPU"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"), "GPU"),
        (RuntimeError("NCCL error in: NCCLUtils.cpp:77, unhandled cuda error: Cuda failure 2 'out of memory'"), "GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "GPU"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB)"), "GPU"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: ..."), "host"),
        (RuntimeError("std::bad_alloc"), "host"),
        (MemoryError(), "host"),
        (RuntimeError("CUDA error: device-side assert triggered"), ""),
        (OSError(12, "Cannot allocate memory"), ""),
    ],
)
def test_errors_that_mean_a_lack_of_memory(error: BaseException, memory: str) -> None:
    assert lacking_memory(error) == memory


def test_after_the_loss_of_nodes_the_error_names_the_option_that_waits_for_them(tmp_path: Path) -> None:
    recipe, folder = load_recipe("digits", ["--train.global_batch", "48"]), RunFolder(tmp_path)
    start = {"started": "2026-01-01T00:00:00+00:00", "ranks": 4}
    messages = []
    for starts in ([], [start]):
        for each in starts:
            folder.append_environment(each)
        with pytest.raises(UserError) as caught, memory_of_training(recipe, World(1, 2), folder):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more.")
        assert caught.value.fields == {"rank": 1, "device": "cpu", "per_rank_batch": 24}
        messages.append(str(caught.value))
    assert ["--min-nodes" in message for message in messages] == [False, True]


def test_other_errors_are_not_changed(tmp_path: Path) -> None:
    training = memory_of_training(load_recipe("digits"), World(), RunFolder(tmp_path))
    with pytest.raises(RuntimeError, match="a bug"), training:
        raise RuntimeError("a bug")
