"""Single, DDP and FSDP compute the same experiment, and a run can move between them."""

import json
from pathlib import Path

import pytest
from conftest import complaint
from processes import run_ranks
from safetensors import safe_open

from paceline.launch.batch_finder import attempt
from paceline.launch.groups import Nodes
from paceline.launch.trials import Trials
from paceline.track.records import RunFolder

NET = (
    *("--train.global_batch", 16, "--optim.lr", 0.02),
    *("--optim.schedule", "{name: cosine, warmup: 5ba, start_factor: 0}"),
)
QUIET = ("--log.every", "1ba", "--log.tensorboard", "false", "--evaluate.every", "25ba", "--precision", "fp32")
POWERSGD = "{powersgd_rank: 2, powersgd_start_step: 5}"
WAYS = {"single": 1, "ddp": 2, "fsdp": 2}


def _words(norm: str, *more: object) -> tuple[object, ...]:
    model = ("--model.options", f"{{widths: [8, 16], norm: {norm}}}", "--model.sync_batchnorm", norm == "batch")
    return ("train", "digits", *NET, *QUIET, *model, "--train.duration", "50ba", *more)


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if record["kind"] == "train"]


def _train(folder: Path, norm: str, strategy: str) -> list[float]:
    run_ranks(folder, WAYS[strategy], *_words(norm, "--strategy", strategy, "--name", f"{norm}-{strategy}"))
    run = folder / "runs" / f"{norm}-{strategy}"
    assert RunFolder(run).read_summary()["final"]["samples"] == 360
    return _losses(run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    return _train(tmp_path_factory.mktemp("alone"), "group", "single")


def test_sharded_training_computes_the_same_losses(alone: list[float], tmp_path: Path) -> None:
    """fp32, the same global batch, 50 steps."""
    sharded = _train(tmp_path, "group", "fsdp")
    assert len(alone) == 50
    assert max(abs(a - b) for a, b in zip(alone, sharded, strict=True)) < 1e-5


def test_batch_norm_over_all_ranks_computes_the_same_losses_under_all_strategies(tmp_path: Path) -> None:
    losses = {strategy: _train(tmp_path, "batch", strategy) for strategy in WAYS}
    for strategy in ("ddp", "fsdp"):
        assert max(abs(a - b) for a, b in zip(losses["single"], losses[strategy], strict=True)) < 1e-5


def test_run_moves_between_strategies_and_numbers_of_ranks(tmp_path: Path) -> None:
    """With weights, momentum and EMA: every step has the same loss as in a run that did not move."""
    words = ("--optim.schedule", "{name: constant, warmup: 0ep}", "--ema.decay", 0.9, "--checkpoint.every", "100ba")
    run_ranks(tmp_path, 1, *_words("group", *words, "--name", "stayed", "--train.duration", "24ba"))
    run_ranks(tmp_path, 1, *_words("group", *words, "--name", "moved", "--train.duration", "4ba"))
    moves = (("ddp", 4), ("fsdp", 4), ("single", 1), ("fsdp", 2), ("ddp", 2))
    for number, (strategy, procs) in enumerate(moves, start=2):
        place = ("--strategy", strategy, "--train.duration", f"{4 * number}ba")
        run_ranks(tmp_path, procs, "train", "--resume", "runs/moved", *place)
    stayed, moved = (_losses(tmp_path / "runs" / name) for name in ("stayed", "moved"))
    assert len(moved) == 24
    assert max(abs(a - b) for a, b in zip(stayed, moved, strict=True)) < 1e-5
    finals = [RunFolder(tmp_path / "runs" / name).read_summary()["final"]["loss"] for name in ("stayed", "moved")]
    assert abs(finals[0] - finals[1]) < 1e-5  # of the averaged weights
    exported = tmp_path / "weights.safetensors"
    run_ranks(tmp_path, 1, "export", "runs/moved", "--to", exported)
    with safe_open(exported, "pt") as weights:
        assert "head.weight" in weights.keys()  # noqa: SIM118 (not a dictionary)


@pytest.mark.parametrize("optimizer", ["adan", "adafactorbv"])
def test_optimizers_of_timm_move_between_strategies(tmp_path: Path, optimizer: str) -> None:
    """Adan counts steps per parameter group; Adafactor keeps factors that are not sharded, and momentum in bf16."""
    words = ("--optim.name", optimizer, "--optim.schedule", "{name: constant, warmup: 0ep}", "--optim.lr", 0.001)
    run_ranks(tmp_path, 1, *_words("group", *words, "--name", "stayed", "--train.duration", "9ba"))
    run_ranks(tmp_path, 1, *_words("group", *words, "--name", "moved", "--train.duration", "3ba"))
    for strategy, procs, duration in (("fsdp", 2, "6ba"), ("single", 1, "9ba")):
        place = ("--strategy", strategy, "--train.duration", duration)
        run_ranks(tmp_path, procs, "train", "--resume", "runs/moved", *place)
    stayed, moved = (_losses(tmp_path / "runs" / name) for name in ("stayed", "moved"))
    assert max(abs(a - b) for a, b in zip(stayed, moved, strict=True)) < 1e-5


def test_optimizers_that_need_whole_tensors_are_refused_with_fsdp(paceline, tmp_path: Path) -> None:
    words = _words("group", "--strategy", "fsdp", "--optim.name", "adamp", "--procs", 2)
    message = complaint(paceline(*words))
    assert message.count("[optimizer-needs-ddp]") == 1
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("grad_sync", "distance"), [("{dtype: bf16}", 0.01), ("{dtype: fp16}", 0.001), (POWERSGD, 0.1)]
)
def test_compressed_gradients_train_nearly_as_well(
    alone: list[float], tmp_path: Path, grad_sync: str, distance: float
) -> None:
    words = ("--grad_sync", grad_sync, "--grad_sync.transport", "network", "--name", "compressed")
    run_ranks(tmp_path, 2, *_words("group", *words))
    compressed = _losses(tmp_path / "runs" / "compressed")
    assert compressed != alone
    assert max(abs(a - b) for a, b in zip(alone, compressed, strict=True)) < distance
    assert compressed[-1] < compressed[0] - 0.1


def test_overflow_is_skipped_on_all_ranks_and_the_scale_is_checkpointed(tmp_path: Path) -> None:
    words = _words("group", "--name", "half", "--precision", "fp16", "--train.init_loss_scale", 2.0**40)
    answer = run_ranks(tmp_path, 2, *words, "--train.duration", "40ba")
    assert "fp16 gradients overflowed" in answer.stderr
    records = [record for record in RunFolder(tmp_path / "runs" / "half").records() if record["kind"] == "train"]
    scales = [record["loss_scale"] for record in records]
    assert scales[0] < 2.0**40
    assert scales[-1] == scales[-10] < 2.0**30  # it decreased and then stayed
    assert records[-1]["loss"] < records[0]["loss"]
    state = json.loads(next((tmp_path / "runs" / "half" / "checkpoints").glob("step-*/state.json")).read_text())
    assert str(scales[-1]) in json.dumps(state["parts"]["progress"])


def test_one_rank_out_of_memory_ends_a_trial_for_all(tmp_path: Path) -> None:
    """A gigabyte is more than an idle rank needs, and much less than a step with this batch."""
    recipe = tmp_path / "recipe.yaml"
    model = "{name: airbench, options: {norm: group}}"
    recipe.write_text(f"{{name: tiny, data: {{name: cifar10}}, model: {model}, precision: fp32, device: cpu}}")
    plenty, little = 64 << 30, 1 << 30
    trials = Trials(Nodes(procs=2), str(recipe), ())
    assert attempt(trials, 1, [plenty, little], 4).fits
    trial = attempt(trials, 1, [plenty, little], 2048)
    assert (trial.fits, trial.reason) == (False, "out of memory")


def test_ema_of_sharded_weights_and_of_batch_norm_statistics(tmp_path: Path) -> None:
    """The weights are sharded, the statistics are not."""
    words = ("--strategy", "fsdp", "--fsdp.mesh", "hybrid", "--ema.decay", 0.9, "--train.duration", "6ba")
    log = run_ranks(tmp_path, 2, *_words("batch", *words)).stderr
    assert " strategy: fsdp, sharded over 2 ranks\n" in log
    assert "fsdp.mesh=hybrid has no effect on one node" in log
    assert RunFolder(tmp_path / "runs" / "digits").read_summary()["status"] == "finished"


def test_lookahead_changes_sharded_weights_in_the_same_way(tmp_path: Path) -> None:
    words = ("--ema", "{decay: 0.5, every: 2, decay_schedule: constant, lookahead: true}", "--train.duration", "6ba")
    losses = []
    for strategy in ("single", "fsdp"):
        run_ranks(tmp_path, WAYS[strategy], *_words("group", "--strategy", strategy, "--name", strategy, *words))
        losses.append(_losses(tmp_path / "runs" / strategy))
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-5


def test_powersgd_buckets_without_compressible_matrices(tmp_path: Path) -> None:
    words = ("--grad_sync", "{powersgd_rank: 16, powersgd_start_step: 0}", "--train.duration", "6ba")
    run_ranks(tmp_path, 2, *_words("group", *words, "--grad_sync.bucket_mb", 0.001))
    assert len(_losses(tmp_path / "runs" / "digits")) == 6
