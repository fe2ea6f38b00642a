"""The verdict names the bottleneck of real runs with a simulated clock, on any machine."""

import time
from pathlib import Path

from processes import run_ranks

from paceline.analysis.read import read
from paceline.analysis.verdict import Bottleneck, verdict

WORDS = (
    *("train", "digits", "--log.every", "5ba", "--log.tensorboard", "false", "--train.duration", "20ba"),
    *("--model.options", "{widths: [16, 32], norm: group}", "--train.global_batch", 16, "--precision", "fp32"),
    *("--evaluate.every", "100ba", "--checkpoint.every", "100ba"),
)


def _verdict(folder: Path, procs: int, *words: object, before=None) -> Bottleneck:
    answer = run_ranks(folder, procs, *WORDS, *words, before=before)
    found = verdict(read(folder / "runs" / "digits"))[0]
    assert found.text in answer.stderr  # logged at the end of the run
    return found


def _simulate(**seconds: float) -> None:
    """Let time pass only in loading, forward and backward, the optimizer, evaluation and checkpoints."""
    from torch.optim import SGD

    from paceline.checkpoint.writer import Writer
    from paceline.data.load import in_memory
    from paceline.engine import train
    from paceline.engine.evaluation import measure

    now = 0.0
    time.perf_counter = lambda: now

    def taking(part: str, function):
        def slowly(*arguments, **named):
            nonlocal now
            now += seconds.get(part, 0.0)
            return function(*arguments, **named)

        return slowly

    steps = in_memory.ResidentLoader.steps

    def loaded(self, first_step: int = 0):
        nonlocal now
        for batches in steps(self, first_step):
            now += seconds.get("data", 0.0)
            yield batches

    in_memory.ResidentLoader.steps = loaded
    train.train_step = taking("compute", train.train_step)
    measure.evaluate = taking("evaluate", measure.evaluate)
    SGD.step = taking("optimizer", SGD.step)
    Writer.snapshot = taking("checkpoint", Writer.snapshot)


def _slow_loader(_rank: int) -> None:
    _simulate(compute=0.1, data=0.4)


def _slow_loader_on_rank_1(rank: int) -> None:
    _simulate(compute=0.1, data=0.4 if rank == 1 else 0.0)


def _slow_rank_1(rank: int) -> None:
    _simulate(compute=0.3 if rank == 1 else 0.1)


def _slow_optimizer(_rank: int) -> None:
    _simulate(compute=0.1, optimizer=0.1)


def _slow_evaluation(_rank: int) -> None:
    _simulate(compute=0.1, evaluate=1.0)


def _slow_checkpoints(_rank: int) -> None:
    _simulate(compute=0.1, checkpoint=1.0)


def _nothing_slow(_rank: int) -> None:
    _simulate(compute=0.1, data=0.001, optimizer=0.001, evaluate=0.01, checkpoint=0.01)


def test_slow_loader(tmp_path: Path) -> None:
    found = _verdict(tmp_path, 1, before=_slow_loader)
    assert found.cause == "input-bound"
    assert "80%" in found.text
    assert "160 images/s" in found.text


def test_slow_loader_on_one_rank(tmp_path: Path) -> None:
    found = _verdict(tmp_path, 2, before=_slow_loader_on_rank_1)
    assert found.cause == "input-straggler"
    assert "rank 1 on " in found.text


def test_slow_rank(tmp_path: Path) -> None:
    found = _verdict(tmp_path, 2, before=_slow_rank_1)
    assert found.cause == "compute-straggler"
    assert "rank 1 on " in found.text


def test_small_batch(tmp_path: Path) -> None:
    assert _verdict(tmp_path, 1, "--train.global_batch", 2, before=_slow_optimizer).cause == "small-batch"


def test_frequent_evaluation(tmp_path: Path) -> None:
    assert _verdict(tmp_path, 1, "--evaluate.every", "1ba", before=_slow_evaluation).cause == "frequent-evaluation"


def test_blocking_checkpoints(tmp_path: Path) -> None:
    assert _verdict(tmp_path, 1, "--checkpoint.every", "2ba", before=_slow_checkpoints).cause == "blocking-checkpoints"


def test_compute_bound(tmp_path: Path) -> None:
    assert _verdict(tmp_path, 1, before=_nothing_slow).cause == "compute-bound"
