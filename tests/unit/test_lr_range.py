"""The learning-rate range test: its learning rates, when it stops, what it suggests, its chart and bad options."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import raises

from paceline.analysis.charts import Chart, Line, log_ticks, svg
from paceline.api.finding import find_lr
from paceline.config.io import load_recipe
from paceline.config.timeline import Timeline
from paceline.engine.lr_test import _with_momentum, as_lr_test
from paceline.launch import lr_finder
from paceline.launch.groups import Nodes
from paceline.launch.trials import Ended, Trials
from paceline.optim.lr_range import LrRange, StopRule, suggest
from paceline.optim.schedules import LrPlan, lr_at, momentum_at

NOISE = 0.01
FACTS = {"ranks": 1, "precision": "fp32", "peak_factor": 2.0}


def _valley(steps: int = 100, noise: float = NOISE) -> list[float]:
    """Return losses that fall fastest at step 60, are lowest at step 70, and explode after that."""
    draw = random.Random(0)
    fall = [2.3 - 1.5 / (1 + math.exp(-(step - 0.6 * steps) / (0.03 * steps))) for step in range(steps)]
    rise = [math.exp(0.5 * (step - 0.8 * steps)) for step in range(steps)]
    return [loss + more + draw.gauss(0, noise) for loss, more in zip(fall, rise, strict=True)]


def test_learning_rates_grow_by_the_same_factor_or_difference() -> None:
    lrs = [LrRange(1e-4, 1.0, 41).lr_at(step) for step in range(41)]
    assert (lrs[0], lrs[-1]) == pytest.approx((1e-4, 1.0))
    assert [after / before for before, after in itertools.pairwise(lrs)] == pytest.approx([10**0.1] * 40)
    linear = [LrRange(0.1, 0.5, 41, linear=True).lr_at(step) for step in range(41)]
    assert [after - before for before, after in itertools.pairwise(linear)] == pytest.approx([0.01] * 40)
    assert linear[-1] == pytest.approx(0.5)


@pytest.mark.parametrize("noise", [0.0, NOISE, 0.1])
def test_the_suggestion_is_where_the_loss_falls_fastest(noise: float) -> None:
    losses = _valley(noise=noise)
    found = suggest(losses)
    assert found.steepest is not None
    assert 55 <= found.steepest <= 65
    assert found.steepest < found.lowest <= 80
    assert found.smoothed[found.steepest + 1] < found.smoothed[found.steepest - 1]
    assert found.noise == pytest.approx(noise, abs=max(0.5 * noise, 0.005))


def test_huge_losses_at_the_end_do_not_change_the_suggestion() -> None:
    losses = _valley()[:80]
    assert suggest([*losses, 1e4, 1e30]).steepest == suggest(losses).steepest


def test_noise_alone_gives_no_suggestion() -> None:
    draw, false_alarms = random.Random(0), 0
    for trend in (0.0, 0.01):
        for _ in range(100):
            losses = [2.3 + trend * step + draw.gauss(0, 0.1) for step in range(100)]
            false_alarms += suggest(losses).steepest is not None
    assert false_alarms <= 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_test_stops_when_the_loss_diverges(bad: float) -> None:
    rule, losses = StopRule(100), _valley()
    stop = next(step for step, loss in enumerate(losses) if rule.diverged(loss))
    assert 80 < stop < 99
    assert losses[stop] > 4 * min(losses)
    rule = StopRule(100)
    assert not rule.diverged(2.3)
    assert rule.diverged(bad)


def test_a_loss_that_returns_to_its_beginning_does_not_stop_the_test() -> None:
    rule = StopRule(100)
    assert not any(rule.diverged(loss) for loss in [2.3] * 10 + [0.01] * 30 + [2.2] * 60)


def test_the_test_has_the_first_phase_and_the_momentum_of_the_peak() -> None:
    words = ["--phases", "[{epochs: [0, 2], size: 128, lr: [1, 2]}, {epochs: [2, 9], size: 224, lr: [2, 0]}]"]
    tested = as_lr_test(load_recipe("imagenet-rn18-2ep", [*words, "--train.duration", "9ep"]), 30)
    timeline = Timeline.of(tested, 1281)
    assert (timeline.total, [(phase.size, phase.lr) for phase in timeline.phases]) == (30, [(128, None)])
    schedule = ("--optim.momentum_schedule", "{name: one-cycle, low: 0.8, high: 0.95}")
    recipe = load_recipe("digits", list(schedule))
    plan = LrPlan.of(recipe.optim, Timeline.of(recipe, 1437))
    short = as_lr_test(recipe, 30)
    constant = _with_momentum(LrPlan.of(short.optim, Timeline.of(short, 1437)), plan)
    assert {momentum_at(step, constant) for step in range(30)} == {0.8}
    assert max(lr_at(step, plan) for step in range(plan.total)) == pytest.approx(recipe.optim.lr)


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    assert log_ticks(1e-3, 10) == pytest.approx([1e-3, 1e-2, 0.1, 1, 10])
    assert log_ticks(1e-12, 1e3)[1] / log_ticks(1e-12, 1e3)[0] == pytest.approx(100)
    assert log_ticks(0.15, 3) == pytest.approx([0.2, 0.5, 1, 2])
    drawn = svg(Chart("title", [Line("loss", [(0.01, 1.0), (0.1, 2.0), (1.0, 1.5)])], log_x=True))
    assert 'points="64.0,' in drawn
    assert " 344.0," in drawn  # 0.1 is in the middle
    for label in ("0.01", "0.1", "1"):
        assert f">{label}</text>" in drawn


def _answer(monkeypatch: pytest.MonkeyPatch, losses: list[float | None], *more: dict, status: int = 0) -> None:
    """Let a test print these losses and records."""

    def run(self: Trials, command: str, words: object, on_record) -> Ended:  # type: ignore[no-untyped-def]
        for step, loss in enumerate(losses):
            on_record({"step": step, "loss": loss})
        for record in more:
            on_record(record)
        return Ended(status, reason="ValueError: as requested")

    monkeypatch.setattr(Trials, "run", run)


def _find(folder: Path, lrs: LrRange = LrRange(), *overrides: str) -> lr_finder.LrSearch:  # noqa: B008
    return lr_finder.find(load_recipe("digits", list(overrides)), folder, Nodes(), lrs, lambda *_: None)


def test_results_replace_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "find-lr.json").write_text("old")
    losses: list[float | None] = [*_valley()[:85], None]
    _answer(monkeypatch, losses, FACTS)
    found = _find(tmp_path)
    assert found.suggested
    assert found.suggested < found.minimum
    assert found.optim_lr == pytest.approx(found.suggested / 2)
    assert found.diverged
    assert [point.loss for point in found.points] == losses[:-1]
    stored = json.loads((tmp_path / "find-lr.json").read_text())
    assert (stored["suggested"], stored["range"]["steps"]) == (found.suggested, 100)
    chart = (tmp_path / "find-lr.svg").read_text()
    assert f"suggested: {found.suggested:.3g}" in chart
    assert chart in found._repr_html_()
    assert load_recipe(str(tmp_path / "recipe.yaml")).name == "digits"


@pytest.mark.parametrize(
    ("losses", "facts", "code"),
    [
        ([None], [FACTS], "first-loss-not-finite"),
        ([2.3] * 100, [FACTS], "no-suggested-lr"),
        ([2.3 + 0.1 * step for step in range(40)], [FACTS], "no-suggested-lr"),
        ([2.3, None], [FACTS], "no-suggested-lr"),
        ([2.3, 2.2], [], "lr-test-failed"),
        ([], [], "lr-test-failed"),
        ([2.3, 2.2], [FACTS | {"ranks": "many"}], "lr-test-failed"),
        ([2.3, 2.2], [FACTS | {"peak_factor": 0}], "lr-test-failed"),
    ],
)
def test_losses_without_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float | None], facts: list[dict], code: str
) -> None:
    _answer(monkeypatch, losses, *facts)
    with raises(code):
        _find(tmp_path)
    assert (tmp_path / "find-lr.json").exists() == (code == "no-suggested-lr")


def test_bad_options(here) -> None:
    for words, code in (
        (("--min-lr", 1, "--max-lr", 0.1), "range-reversed"),
        (("--steps", 0), "usage"),
        (("--min-lr", 0), "usage"),
        (("--steps", 19), "too-few-steps"),
        (("--stepps", 19), "unknown-option"),
        (("--train.global_batch", 15, "--procs", 2), "batch-not-divisible"),
        (("--strategy", "single", "--procs", 2), "strategy-needs-one-rank"),
        (("--hosts", ""), "missing-option"),
    ):
        assert f"[{code}]" in here("find-lr", "digits", *words).stderr, words
    assert not Path("runs").exists()


def test_the_command_to_train_keeps_the_overrides(here, monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, [*_valley()], FACTS)
    words = ("--optim.lr", "0.3", "--optim.weight_decay=0.001", "--name", "x y")
    answer = here("find-lr", "digits", *words)
    found = json.loads(Path("runs/find-lr-x y/find-lr.json").read_text())
    command = f"paceline train digits --optim.weight_decay 0.001 --name 'x y' --optim.lr {found['optim_lr']:.2g}"
    assert command in answer.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "name"), [({"min_lr": 0}, "min_lr"), ({"max_lr": math.inf}, "max_lr"), ({"steps": 1.5}, "steps")]
)
def test_bad_arguments(arguments: dict[str, Any], name: str) -> None:
    with raises("invalid-argument") as caught:
        find_lr("digits", **arguments)
    assert caught.value.fields["argument"] == name
