"""Whole runs as rank 0 of up to 512 pretended ranks (CPU, fp32, one thread): what each step sends, and how much.

The fake process group cannot show that results are right; tests/dist does that with real processes.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from collectives import Collective, Recorder, mark_parts, pretend_in_sessions, pretended
from torch import nn

from paceline.config.io import load_recipe
from paceline.distributed.fsdp import repeated_blocks
from paceline.distributed.world import World
from paceline.engine.session import train_recipe
from paceline.track.records import RunFolder

STEPS = 4
GPUS = 8
"""Ranks per pretended node."""
Train = Callable[..., Recorder]


@pytest.fixture
def train(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Train:
    """Train some steps with two images per rank, evaluate twice and write two checkpoints."""

    def run(ranks: int, *words: object) -> Recorder:
        data = f"{{train_samples: {8 * ranks}, val_samples: 100, size: 16}}"  # rank 0 evaluates all 100
        model = ("--model", "null", "--model.name", "airbench", "--model.options", "{widths: [8, 16], norm: group}")
        overrides = ("--data.name", "synthetic", "--data.synthetic", data, "--data.size", 0, *model)
        overrides += ("--train.global_batch", 2 * ranks, "--train.duration", f"{STEPS}ba", "--log.every", "1ba")
        overrides += ("--precision", "fp32", "--device", "cpu", "--log.tensorboard", "false")
        overrides += ("--checkpoint.every", "2ba", "--evaluate.every", "2ba")
        recipe = load_recipe("cifar10-resnet18", [str(word) for word in (*overrides, *words)])
        pretend_in_sessions(World(0, ranks, 0, GPUS), monkeypatch)
        recorder = Recorder()
        mark_parts(monkeypatch, recorder)
        with recorder:
            path = train_recipe(recipe, tmp_path_factory.mktemp("runs"), "run")
        assert RunFolder(path).read_summary()["status"] == "finished"
        assert len(list((path / "checkpoints").glob("step-*"))) == 2
        return recorder

    return run


def _model(recorder: Recorder) -> nn.Module:
    assert recorder.setup
    return recorder.setup.replica.module


def _trained(recorder: Recorder) -> list[nn.Parameter]:
    return [parameter for parameter in _model(recorder).parameters() if parameter.requires_grad]


def _bytes(calls: list[Collective]) -> int:
    return sum(call.num_bytes for call in calls)


def _check_loop(recorder: Recorder) -> None:
    """After every step ranks agree on five votes and gather their figures; an evaluation sums three tensors.

    No weight is sent for a checkpoint: rank 0 of DDP has all, ranks of FSDP write their own shards. Ranks only ask each
    other whether they are done, as often as the disk needs.
    """
    votes = recorder.of("loop", "allreduce")
    assert [(call.shape, call.dtype) for call in votes] == [((5,), torch.int64)] * STEPS
    assert sum(call.dtype == torch.float64 for call in recorder.of("log", "allgather")) == STEPS
    assert len(recorder.of("evaluation", "allreduce")) == 2 * 3
    assert all(call.num_bytes < 100 for call in recorder.of("checkpoint"))


def test_the_recorder_tells_order_shape_and_type_apart() -> None:
    def called(*calls: Callable[[], object]) -> list[Collective]:
        recorder = Recorder()
        with pretended(World(0, 512, 0, GPUS)), recorder:
            for call in calls:
                call()
        return recorder.calls

    def add(shape: int, dtype: torch.dtype) -> Callable[[], object]:
        return lambda: dist.all_reduce(torch.zeros(shape, dtype=dtype))

    def send() -> None:
        dist.broadcast(torch.zeros(3), 0)

    expected = called(add(3, torch.float32), send)
    assert [(call.name, call.num_bytes) for call in expected] == [("allreduce", 12), ("broadcast", 12)]
    assert called(add(3, torch.float32), send) == expected
    for other in ((send, add(3, torch.float32)), (add(4, torch.float32), send), (add(3, torch.int32), send), (send,)):
        assert called(*other) != expected


@pytest.mark.parametrize("ranks", [16, 512])
@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_ddp_sends_every_gradient_once(train: Train, ranks: int, dtype: str, itemsize: int) -> None:
    recorder = train(ranks, "--grad_sync.dtype", dtype)
    expected = itemsize * sum(parameter.numel() for parameter in _trained(recorder))
    for step in (1, 3):  # in the first step DDP checks the graph, in the third it has rebuilt its buckets
        (sent,) = recorder.of(f"step {step}")
        assert (sent.name, sent.num_bytes) == ("allreduce", expected)
    _check_loop(recorder)


def test_ddp_sends_buckets_of_the_chosen_size(train: Train) -> None:
    recorder = train(512, "--grad_sync.bucket_mb", 0.004)
    sent = recorder.of(f"step {STEPS - 1}", "allreduce")
    number, size = 0, 0
    for parameter in reversed(_trained(recorder)):
        size += 4 * parameter.numel()
        if size >= 0.004 * 2**20:
            number, size = number + 1, 0
    assert len(sent) == number + bool(size) > 1
    assert all(call.num_bytes >= 0.004 * 2**20 for call in sent[:number])
    assert _bytes(sent) == 4 * sum(parameter.numel() for parameter in _trained(recorder))


def test_micro_batches_are_not_synchronized(train: Train) -> None:
    once, twice = (
        train(64, "--train.grad_accumulation", number, "--train.global_batch", 128 * number) for number in (1, 2)
    )
    assert _bytes(once.of("step 3")) == _bytes(twice.of("step 3")) > 0


def test_powersgd_sends_two_tensors_per_bucket(train: Train) -> None:
    rank = 2
    recorder = train(512, "--grad_sync.powersgd_rank", rank, "--grad_sync.powersgd_start_step", 2)
    shapes = [(len(parameter), parameter.numel() // len(parameter)) for parameter in _trained(recorder)]
    matrices = [(rows, columns) for rows, columns in shapes if 2 * rank * (rows + columns) < rows * columns]
    others = sum(rows * columns for rows, columns in shapes if (rows, columns) not in matrices)
    first, second = recorder.of("step 3", "allreduce")
    assert first.num_bytes == 4 * (rank * sum(rows for rows, _ in matrices) + others)
    assert second.num_bytes == 4 * rank * sum(columns for _, columns in matrices) > 0


def _padded(parameters: list[nn.Parameter], shards: int) -> int:
    """Return the bytes of parameters that are sharded by their first dimension."""
    return sum(
        4 * math.ceil(len(parameter) / shards) * shards * math.prod(parameter.shape[1:]) for parameter in parameters
    )


@pytest.mark.parametrize("ranks", [16, 512])
@pytest.mark.parametrize(("mesh", "reshard"), [("flat", "true"), ("flat", "false"), ("hybrid", "true")])
def test_fsdp_gathers_and_scatters_every_block(
    train: Train, monkeypatch: pytest.MonkeyPatch, ranks: int, mesh: str, reshard: str
) -> None:
    shards = GPUS if mesh == "hybrid" else ranks
    # the fake process group cannot say how many ranks other nodes have
    monkeypatch.setattr("paceline.distributed.mesh.ranks_per_replica", lambda *_: shards)
    recorder = train(ranks, "--strategy", "fsdp", "--fsdp", f"{{reshard_after_forward: {reshard}, mesh: {mesh}}}")
    model = _model(recorder)
    blocks, gathers = len(list(repeated_blocks(model))), 2 if reshard == "true" else 1
    assert blocks == 2
    for step in (0, STEPS - 1):
        names = ("allgather", "reduce_scatter", "allreduce")
        gathered, scattered, reduced = (recorder.of(f"step {step}", name) for name in names)
        assert len(gathered) == gathers * (blocks + 1)  # and the rest of the model
        assert len(scattered) == blocks + 1
        assert len(reduced) == (blocks + 1 if mesh == "hybrid" else 0)
        assert len(recorder.of(f"step {step}")) == len(gathered) + len(scattered) + len(reduced)
        assert _bytes(gathered) == gathers * _padded(list(model.parameters()), shards)
        assert _bytes(scattered) == _padded(_trained(recorder), shards)
        assert not reduced or _bytes(reduced) == _padded(_trained(recorder), shards) // shards  # across nodes
    _check_loop(recorder)
