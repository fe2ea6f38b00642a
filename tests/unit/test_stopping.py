"""The plateau schedule decays as torch's does, and early stopping counts evaluations without an improvement."""

import math
from typing import Any

import pytest
import torch
from conftest import raises
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.checkpoint import schema
from paceline.config.io import load_recipe
from paceline.config.optim import Optim, Schedule
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.engine.evaluation.history import History, early_stop_reason, follow_plateau
from paceline.engine.interval import IntervalTrigger
from paceline.errors import ConfigError
from paceline.optim.schedules import LrPlan, lr_at


def _recipe(*words: object) -> Recipe:
    return load_recipe("digits", list(map(str, words)))


def _history(*values: float, metric: str = "top1", every: int = 10) -> History:
    history = History()
    for number, value in enumerate(values, start=1):
        history.add({"top1": 0.0, "top5": 0.0, "loss": 0.0, metric: value, "step": number * every})
    return history


@given(
    values=st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.50004, 0.55, 0.9]) | st.floats(0, 1), max_size=60),
    metric=st.sampled_from(["top1", "loss"]),
    factor=st.floats(0.01, 0.99),
    patience=st.integers(0, 4),
    threshold=st.sampled_from([0.0, 1e-4, 0.1]),
    mode=st.sampled_from(["rel", "abs"]),
    cooldown=st.integers(0, 3),
    end_factor=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_plateau_equals_torch(
    values: list[float],
    metric: str,
    factor: float,
    patience: int,
    threshold: float,
    mode: str,
    cooldown: int,
    end_factor: float,
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    torchs = ReduceLROnPlateau(
        optimizer,
        "min" if metric == "loss" else "max",
        factor,
        patience,
        threshold,
        mode,  # type: ignore[arg-type]
        cooldown,
        0.3 * end_factor,
    )
    schedule = Schedule("plateau", gamma=factor, patience=patience, threshold=threshold, end_factor=end_factor)
    schedule = Schedule(**{**vars(schedule), "threshold_mode": mode, "cooldown": cooldown, "metric": metric})
    recipe = Recipe("some", optim=Optim(lr=0.3, schedule=schedule))
    history, plan = History(), LrPlan.of(recipe.optim, Timeline.of(recipe, 2560))
    for step, value in enumerate(values, start=1):
        torchs.step(value)
        history.add({"step": step, "top1": 0.0, "top5": 0.0, "loss": 0.0, metric: value})
        plan = follow_plateau(plan, recipe, history)
        assert lr_at(step, plan) == optimizer.param_groups[0]["lr"]


def test_evaluations_during_the_warmup_do_not_count() -> None:
    recipe = _recipe(
        "--optim.schedule", "{name: plateau, patience: 1, warmup: 20ba, start_factor: 0}", "--optim.lr", 0.5
    )
    plan = LrPlan.of(recipe.optim, Timeline.of(recipe, 12_800))
    assert lr_at(10, plan) == pytest.approx(0.25)
    assert lr_at(20, follow_plateau(plan, recipe, _history(0.9, 0.1))) == 0.5
    assert lr_at(40, follow_plateau(plan, recipe, _history(0.9, 0.1, 0.1, 0.1))) == pytest.approx(0.05)
    assert lr_at(10, follow_plateau(plan, recipe, _history(0.9, 0.1, 0.1, 0.1))) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([], {}, False),
        ([0.5], {}, False),
        ([0.5, 0.5], {}, False),
        ([0.5, 0.5, 0.4], {}, True),
        ([0.5, 0.4, 0.51, 0.5], {}, False),
        ([0.5, 0.4, 0.51, 0.5, 0.51], {}, True),
        ([0.5, 0.51, 0.52], {"min_delta": 0.1}, True),
        ([0.5, 0.55, 0.61], {"min_delta": 0.1}, False),  # compared with the best, not with the last
        ([0.5, 0.4, 0.3], {"metric": "loss"}, False),
        ([0.3, 0.4, 0.3], {"metric": "loss"}, True),
        ([0.0, 0.0, 0.0], {"patience": 0}, False),
        ([0.0] * 100, {"patience": 100}, False),
    ],
)
def test_training_stops_after_some_evaluations_without_an_improvement(
    values: list[float], settings: dict[str, Any], stops: bool
) -> None:
    settings = {"patience": 2, "metric": "top1"} | settings
    words = [word for name, value in settings.items() for word in (f"--early_stop.{name}", value)]
    if not settings["patience"]:
        words = []
    assert bool(early_stop_reason(_recipe(*words), _history(*values, metric=settings["metric"]))) == stops


def test_the_reason_names_metric_and_best() -> None:
    recipe = _recipe("--early_stop", "{patience: 2, min_delta: 0.001}")
    reason = early_stop_reason(recipe, _history(0.5, 0.5, 0.5005))
    assert reason == "top-1 has not improved by more than 0.1 points for 2 evaluations; the best is 50.00%"
    recipe = _recipe("--early_stop.patience", 1, "--checkpoint.best", "loss")
    reason = early_stop_reason(recipe, _history(0.5, 0.6, metric="loss"))
    assert reason == "the validation loss has not improved for 1 evaluation; the best is 0.5000"


def test_a_repeated_evaluation_counts_once() -> None:
    history = _history(0.5, 0.6)
    history.add({"step": 20, "top1": 0.7, "top5": 1.0, "loss": 0.0})
    assert history.since(0, "top1") == [0.5, 0.6]
    loaded = History()
    loaded.load(history.state())
    assert (loaded.state(), loaded.last_step) == (history.state(), 20)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--optim.schedule", "{name: plateau}", "--train.duration", "1ep", "--evaluate.every", "1ep"), "plateau-with"),
        (("--optim.schedule", "{name: plateau}", "--train.duration", "9ba", "--evaluate.every", "9ba"), "plateau-with"),
        (("--optim.schedule", "{name: plateau}", "--phases", "[{epochs: [0, 20], lr: [0.1]}]"), "plateau-and-phase-lr"),
        (("--optim.schedule", "{name: cosine, cooldown: 3}"), "schedule-field-unused"),
        (("--optim.schedule.metric", "loss"), "schedule-field-unused"),
        (("--early_stop.min_delta", "0.1"), "early-stop-without-patience"),
        (("--early_stop", "{patience: 3, min_delta: 1}"), "min-delta-too-large"),
    ],
)
def test_settings_without_effect_are_refused(words: tuple[str, ...], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _recipe(*words)
    assert code in str([problem.code for problem in caught.value.problems])


def test_the_schedule_works_with_phases_that_set_only_sizes() -> None:
    words = ("--optim.schedule", "{name: plateau}", "--phases", "[{epochs: [0, 10]}, {epochs: [10, 20]}]")
    assert _recipe(*words).optim.schedule.name == "plateau"


@pytest.mark.parametrize(
    ("every", "step", "times"), [("5ba", 20, 3), ("5ba", 21, 4), ("1ep", 20, 1), ("1ep", 21, 2), ("9s", 20, None)]
)
def test_number_of_evaluations_before_the_end(every: str, step: int, times: int | None) -> None:
    timeline = Timeline.of(_recipe("--train.duration", "40ba", "--train.global_batch", 100), 1000)  # 10 steps per epoch
    trigger = IntervalTrigger(every, timeline)
    assert trigger.times_before(step) == times
    assert times is None or times == sum(trigger.due(done, 0, 0.0) for done in range(1, step))


def _progress(**evaluations: list[Any]) -> dict[str, Any]:
    return {
        "step": 20,
        "epoch": 2.0,
        "scaler": {},
        "recipe": {"data": {}, "checkpoint": {}},
        "data": {"name": "some", "fingerprint": "", "splits": {"train": 100}},
        "precision": "fp32",
        "versions": {"torch": "2"},
        "evaluations": {"step": [10, 20], "top1": [0.1, 0.2], "top5": [0.3, 1.0], "loss": [2.0, 1.0]} | evaluations,
        "classes": [["a", "a"]],
        "preprocessing": {"mean": [0.0], "std": [1.0], "interpolation": "bilinear"},
        "model": {"name": "some", "num_classes": 1, "in_chans": 1, "options": {}},
    }


def test_saved_evaluations_are_validated() -> None:
    schema.check_progress(_progress(), 20)
    with pytest.raises(ValueError, match="evaluations"):
        schema.check_progress({key: value for key, value in _progress().items() if key != "evaluations"}, 20)
    for wrong in (
        {"step": [10]},
        {"step": [20, 10]},
        {"step": [10, 10]},
        {"step": [10, 21]},
        {"step": [-1, 10]},
        {"top1": [0.1, 1.5]},
        {"top5": ["0.1", 1.0]},
        {"loss": [math.nan, 1.0]},
        {"loss": [1e300, 1.0]},
        {"more": [1, 2]},
    ):
        with pytest.raises(ValueError, match=r"evaluations|not finite"):
            schema.check_progress(_progress(**wrong), 20)


def test_a_registered_schedule_has_no_patience(monkeypatch) -> None:
    import paceline as pl
    from paceline import extensions

    monkeypatch.setattr(extensions, "_registered", dict(extensions._registered))
    pl.register_schedule("flat")(lambda step, total: 1.0)
    recipe = Recipe("some", optim=Optim(schedule=Schedule("flat", metric="loss")))
    with raises("schedule-field-unused"):
        LrPlan.of(recipe.optim, Timeline.of(recipe, 2560))
