"""Early stops and decays on a plateau (CPU, fp32) come after the same steps, however a run was interrupted."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import run_ranks

import paceline.engine.train as loop
from paceline.analysis.read import read
from paceline.checkpoint import store
from paceline.engine.run import TrainingRun
from paceline.track.records import RunFolder

# From any first result there is at most one improvement of 50 points, so that the run stops at step 28 or before.
STOP = ("--early_stop", "{patience: 3, min_delta: 0.5}", "--evaluate.every", "4ba", "--checkpoint.every", "8ba")
PLATEAU = "{name: plateau, patience: 0, threshold: 0.5, threshold_mode: abs, gamma: 0.5, end_factor: 0.2, warmup: 2ba}"
WORDS = (
    *("digits", "--model.options", "{widths: [8, 16], norm: group}", "--train.global_batch", 48, *STOP),
    *("--train.duration", "40ba", "--optim.lr", 0.02, "--optim.schedule", PLATEAU, "--log.every", "1ba"),
    *("--log.tensorboard", "false", "--precision", "fp32", "--device", "cpu"),
)


def _exit_before_checkpoint(_: int) -> None:
    """Exit as abruptly as a killed process: after the evaluation of step 8, before its checkpoint."""
    save = TrainingRun.save

    def save_or_exit(self: TrainingRun, step: int, setup: Any) -> None:
        if step == 8:
            self.sink.flush()
            self.checkpoints.complete()  # the previous one
            with suppress(Exception):  # rank 0 exits first, so that it does not see the others fail
                if not setup.world.is_rank_zero:
                    setup.world.barrier()
            os._exit(0)
        save(self, step, setup)

    TrainingRun.save = save_or_exit  # type: ignore[method-assign]


def _facts(path: Path) -> tuple[Any, ...]:
    """What must not depend on interruptions: when it was evaluated, each learning rate, and the end."""
    run, summary = RunFolder(path), RunFolder(path).read_summary()
    kinds = {kind: [each for each in run.records() if each["kind"] == kind] for kind in ("train", "eval")}
    assert summary["status"] == "finished"
    assert summary["total_steps"] == summary["step"] < 40
    assert summary["stopped_by"] == "early_stop"
    assert store.step_of(next(store.committed(run.checkpoints))) == summary["step"]
    rates = [record["lr"] for record in kinds["train"]]
    assert len(set(rates[2:])) > 2, "no decay"
    return summary["step"], [record["step"] for record in kinds["eval"]], rates, summary["final"]["step"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    answer = run_ranks(folder, 1, "train", *WORDS)
    facts = _facts(folder / "runs" / "digits")
    assert f"(step {facts[0]} of 40) by early_stop: top-1 has not improved by more than 50 points" in answer.stderr
    return facts


@pytest.mark.parametrize(
    ("procs", "resumed", "more"), [(1, 2, ()), (2, 1, ("--ema.decay", 0.3)), (2, 2, ("--strategy", "fsdp"))]
)
def test_a_run_killed_between_evaluation_and_checkpoint_stops_at_the_same_step(
    tmp_path: Path, uninterrupted: tuple[Any, ...], procs: int, resumed: int, more: tuple[object, ...]
) -> None:
    path = tmp_path / "runs" / "digits"
    run_ranks(tmp_path, procs, "train", *WORDS, *more, before=_exit_before_checkpoint)
    assert RunFolder(path).last_recorded_step == 8
    assert store.step_of(next(store.committed(path / "checkpoints"))) == 4
    answer = run_ranks(tmp_path, resumed, "train", "--resume", path)
    assert answer.stderr.count("stopped early") == 1
    if "--ema.decay" in more:
        run_ranks(tmp_path, 1, "train", *WORDS, *more, "--name", "whole")
        uninterrupted = _facts(tmp_path / "runs" / "whole")
    assert _facts(path) == uninterrupted


def test_a_stop_in_place_of_an_evaluation_postpones_it(here, monkeypatch, tmp_path, uninterrupted) -> None:
    """SIGTERM arrives during step 8, after which an evaluation is due."""
    train_step = loop.train_step

    def interrupted(setup: Any, batches: Any, step: int, lr: float) -> Any:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(setup, batches, step, lr)

    path = tmp_path / "runs" / "digits"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", interrupted)
        assert here("train", *WORDS).returncode == 128 + signal.SIGTERM
    assert RunFolder(path).read_summary()["step"] == 8
    assert [each["step"] for each in RunFolder(path).records() if each["kind"] == "eval"] == [4]
    answer = here("train", "--resume", path)
    assert answer.returncode == 0, answer.stderr
    assert _facts(path) == uninterrupted


def test_a_stopped_run_is_finished_and_only_other_settings_continue_it(here, monkeypatch, tmp_path: Path) -> None:
    def killed(self: TrainingRun, step: int) -> None:
        self.wait_for_checkpoint(step)
        raise KeyboardInterrupt

    path = tmp_path / "runs" / "digits"
    with monkeypatch.context() as patch:  # after the last checkpoint, before the summary
        patch.setattr(TrainingRun, "finish", killed)
        assert here("train", *WORDS).returncode != 0
    last = next(store.committed(path / "checkpoints"))
    assert not RunFolder(path).finished
    assert here("train", *WORDS).returncode == 0
    (at, evaluated, *_) = _facts(path)
    assert store.step_of(last) == at == evaluated[-1]
    assert any(note.startswith("stopped early at epoch") for note in read(path).notes)

    for more in ((), ("--train.duration", "50ba"), ("--early_stop.min_delta", 0.6)):
        answer = here("train", "--resume", path, *more)
        assert (answer.returncode, "[run-finished]" in answer.stderr) == (1, True), answer.stderr
    answer = here("train", "--resume", path, "--early_stop", "null")
    assert answer.returncode == 0, answer.stderr
    assert "Its training continues now" in answer.stderr
    summary = RunFolder(path).read_summary()
    assert (summary["step"], "stop_reason" in summary) == (40, False)
    steps = [each["step"] for each in RunFolder(path).records() if each["kind"] == "train"]
    assert steps == list(range(1, 41))


def test_settings_that_are_never_reached_are_warned_of(here) -> None:
    words = ("--train.duration", "6ba", "--evaluate.every", "2ba", "--optim.schedule.patience", 1)
    answer = here("train", *WORDS, *words)
    assert answer.returncode == 0, answer.stderr
    assert "early_stop.patience=3 cannot stop this run: it has 2 evaluations before its end" in answer.stderr
    assert "optim.schedule.patience=1 never lowers the learning rate: the run has 2 evaluations" in answer.stderr


def test_plan_says_what_depends_on_evaluations(here) -> None:
    answer = here("plan", *WORDS)
    assert answer.returncode == 0, answer.stderr
    assert "without the decays of plateau" in answer.stdout
    assert "The run may end earlier: early_stop.patience=3" in answer.stdout
