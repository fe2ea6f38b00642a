"""FSDP runs: hybrid sharding, initial weights, and sharded checkpoints that any number of ranks can resume."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from saved_checkpoints import read

from paceline.checkpoint import store
from paceline.track.records import RunFolder

WORDS = (
    *("--train.global_batch", 24, "--optim.lr", 0.02, "--optim.name", "adamw", "--ema.decay", 0.9),
    *("--optim.schedule", "{name: constant, warmup: 0ep}", "--model.options", "{widths: [8, 16], norm: group}"),
    *("--log.every", "1ba", "--log.tensorboard", "false", "--evaluate.every", "100ba", "--checkpoint.every", "4ba"),
    *("--precision", "fp32", "--device", "cpu"),
)
FSDP = ("--strategy", "fsdp")
DISTANCE = 1e-5


def _train(name: str, steps: int, *more: object) -> tuple[object, ...]:
    return ("train", "digits", *WORDS, "--name", name, "--train.duration", f"{steps}ba", *more)


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if record["kind"] == "train"]


def _files(run: Path) -> set[str]:
    return {path.name for path in next(store.committed(run / "checkpoints")).glob("model*")}


def _distance(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of 8 steps in one process."""
    folder = tmp_path_factory.mktemp("stayed")
    run_ranks(folder, 1, *_train("stayed", 8))
    return _losses(folder / "runs" / "stayed")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps on two FSDP ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(folder, 2, *_train("moved", 4, *FSDP))
    assert _files(folder / "runs" / "moved") == {f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    return folder / "runs" / "moved"


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_checkpoint_of_two_ranks_is_resumed(
    stayed: list[float], sharded: Path, tmp_path: Path, strategy: str, ranks: int
) -> None:
    """With the same losses as a run that did not move."""
    shutil.copytree(sharded, tmp_path / "runs" / "moved")
    run_ranks(tmp_path, ranks, "train", "--resume", "runs/moved", "--strategy", strategy, "--train.duration", "8ba")
    assert _distance(stayed, _losses(tmp_path / "runs" / "moved")) < DISTANCE
    assert len(_files(tmp_path / "runs" / "moved")) == (ranks if strategy == "fsdp" else 1)


def test_resume_of_a_sharded_run_is_bit_identical(sharded: Path, tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, *_train("whole", 8, *FSDP))
    shutil.copytree(sharded, tmp_path / "runs" / "moved")
    run_ranks(tmp_path, 2, "train", "--resume", "runs/moved", "--train.duration", "8ba")
    whole, resumed = (
        read(tmp_path / "runs" / name / "checkpoints" / "step-00000008")[1] for name in ("whole", "moved")
    )
    for part in ("model", "ema"):
        assert all(torch.equal(whole[part][name], resumed[part][name]) for name in whole[part])
    assert _losses(tmp_path / "runs" / "whole")[4:] == _losses(tmp_path / "runs" / "moved")[4:]


def _two_nodes_of_two(rank: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}


def test_hybrid_sharding_over_two_nodes_computes_the_same_losses(stayed: list[float], tmp_path: Path) -> None:
    """fsdp.mesh=auto. Each node holds a whole model, so that one of them writes it."""
    log = run_ranks(tmp_path, 4, *_train("hybrid", 8, *FSDP), before=_two_nodes_of_two).stderr
    assert " strategy: fsdp, sharded over 2 ranks of each node, 2 replicas\n" in log
    assert _distance(stayed, _losses(tmp_path / "runs" / "hybrid")) < DISTANCE
    assert _files(tmp_path / "runs" / "hybrid") == {f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}


def _nodes_without_shared_folder(rank: int) -> None:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PACELINE_HOST": f"node-{rank}"}
    folder = Path(f"node-{rank}")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)


def test_every_node_has_whole_checkpoints_without_a_shared_folder(stayed: list[float], tmp_path: Path) -> None:
    """Each node writes its own shards; rank 0's node collects them, and sends the checkpoint to the others."""
    run_ranks(tmp_path, 2, *_train("apart", 6, *FSDP), before=_nodes_without_shared_folder)
    first, second = (tmp_path / f"node-{rank}" / "runs" / "apart" for rank in (0, 1))
    for run in (first, second):
        assert len(_files(run)) == 2
        assert not list((run / "checkpoints").glob(".writing-*"))
    for path in store.committed(first / "checkpoints"):
        whole, copy = read(path)[1], read(second / "checkpoints" / path.name)[1]
        assert all(torch.equal(whole["model"][name], copy["model"][name]) for name in whole["model"])
    shutil.rmtree(first)  # that node is replaced by a new one
    (second / "checkpoints" / ".writing-step-00000007").mkdir()  # the other one was killed while it wrote
    more = ("train", "--resume", "runs/apart", "--train.duration", "8ba")
    first.mkdir(parents=True)
    shutil.copy(second / "recipe.yaml", first)
    run_ranks(tmp_path, 2, *more, before=_nodes_without_shared_folder)
    assert _distance(stayed, _losses(second)) < DISTANCE
    assert not list((second / "checkpoints").glob(".writing-*"))


def _slow_disk(rank: int) -> None:
    os.environ["PACELINE_RANK_TIMEOUT"] = "10"
    write, commit = store.write, store.commit

    def slow(action, *arguments: object) -> None:
        if "step-00000003" in str(arguments[0]) and rank == 0:
            time.sleep(15)
        action(*arguments)

    store.write = lambda *arguments: slow(write, *arguments)
    store.commit = lambda *arguments: slow(commit, *arguments)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_last_checkpoint_may_take_longer_than_the_rank_timeout(tmp_path: Path, strategy: str) -> None:
    run_ranks(tmp_path, 2, *_train("slow", 3, "--strategy", strategy), before=_slow_disk)
    assert RunFolder(tmp_path / "runs" / "slow").read_summary()["status"] == "finished"
