import math
from dataclasses import replace

import pytest
import torch
from conftest import raises
from torch import nn

from paceline import extensions
from paceline.config.io import load_recipe
from paceline.config.optim import MomentumPoint, MomentumSchedule, Optim, ParamGroup, Schedule, SchedulePoint
from paceline.config.phases import Phase
from paceline.config.recipe import Recipe, Train
from paceline.config.scaling import scaled
from paceline.config.timeline import Timeline, phase_table
from paceline.errors import ConfigError
from paceline.optim.groups import create, groups, set_lr, set_momentum
from paceline.optim.schedules import LrPlan, lr_at, momentum_at


def plan(total: int = 100, momentum_schedule: MomentumSchedule | None = None, **schedule: object) -> LrPlan:
    given = schedule.pop("schedule", None) or Schedule(**schedule)  # type: ignore[arg-type]
    optim = Optim(lr=2.0, schedule=given, momentum_schedule=momentum_schedule or MomentumSchedule())
    recipe = Recipe("any", optim=optim, train=Train(duration=f"{total}ba", global_batch=10))
    return LrPlan.of(optim, Timeline.of(recipe, 100))


@pytest.mark.parametrize(("warmup", "total"), [(30, 100), (2, 7), (0, 10)])
def test_one_cycle_is_that_of_torch(warmup: int, total: int) -> None:
    """Learning rate and momentum of every step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=total, pct_start=warmup / total)
    schedule = Schedule(name="one-cycle", warmup=f"{warmup}ba", start_factor=1 / 25, end_factor=1 / 25e4)
    ours = plan(total, schedule=schedule, momentum_schedule=MomentumSchedule("one-cycle"))
    for step in range(total):
        assert lr_at(step, ours) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        assert momentum_at(step, ours) == pytest.approx(optimizer.param_groups[0]["momentum"], rel=1e-9)
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("power", [1.0, 0.9, 2.0])
def test_polynomial_is_that_of_torch(power: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    reference = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=power)
    ours = plan(50, schedule=Schedule(name="polynomial", power=power))
    for step in range(50):
        assert lr_at(step, ours) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        reference.step()


def test_the_learning_rate_changes_per_epoch_as_in_the_script_of_torchvision() -> None:
    """SequentialLR of LinearLR and CosineAnnealingLR, stepped after every epoch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=3)
    main = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.02)
    reference = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[3])
    schedule = Schedule(name="cosine", interval="epoch", warmup="3ep", start_factor=0.01, end_factor=0.01)
    ours = plan(100, schedule=schedule)
    for epoch in range(10):
        expected = reference.get_last_lr()[0]
        assert [lr_at(10 * epoch + step, ours) for step in (0, 5, 9)] == pytest.approx([expected] * 3)
        optimizer.step()
        reference.step()


def test_momentum_is_linear_between_points_and_set_in_every_group() -> None:
    points = (MomentumPoint("0ba", 0.85), MomentumPoint("10ba", 0.95))
    ours = plan(momentum_schedule=MomentumSchedule("piecewise", points=points))
    assert [momentum_at(step, ours) for step in (0, 5, 50)] == pytest.approx([0.85, 0.9, 0.95])
    assert momentum_at(5, plan()) is None
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for name, field, value in (("sgd", "momentum", 0.7), ("adamw", "betas", (0.7, 0.999))):
        optimizer = create(model, Optim(name=name, weight_decay=0.1))
        set_momentum(optimizer, 0.7)
        assert [group[field] for group in optimizer.param_groups] == [value, value]
        set_momentum(optimizer, None)
        assert optimizer.param_groups[0][field] == value
    cycled = Optim(name="adafactor", momentum_schedule=MomentumSchedule("piecewise", points=points))
    with raises("optimizer-field-unused"):
        create(model, cycled)


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        (
            ("--optim.momentum_schedule.name", "one-cycle", "--optim.schedule.name", "cosine"),
            ["momentum-schedule-unmatched"],
        ),
        (("--optim.momentum_schedule.name", "piecewise"), ["schedule-points-missing"]),
        (("--optim.momentum_schedule.low", "0.5"), ["schedule-field-unused"]),
        (("--optim.schedule.power", "2"), ["schedule-field-unused"]),
        (("--ema.lookahead", "true"), ["ema-field-unused"]),
        (("--ema", "{decay: 0.9, decay_schedule: cubic, start: 1ep}"), ["ema-start-and-cubic"]),
        (("--optim.groups", "[{match: head.*, lr: 3}]"), ["unknown-field"]),
        (("--optim.groups", "[{lr_factor: 3}]"), ["missing-field"]),
    ],
)
def test_settings_without_a_meaning_are_refused(words: tuple[str, ...], codes: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe("digits", list(words))
    assert [problem.code for problem in error.value.problems] == codes


def test_cosine_and_linear_with_warmup() -> None:
    cosine = plan(name="cosine", warmup="1ep", start_factor=0.1)
    assert lr_at(0, cosine) == pytest.approx(0.2)
    assert lr_at(5, cosine) == pytest.approx(0.2 + 1.8 / 2)
    assert lr_at(10, cosine) == 2.0
    assert lr_at(55, cosine) == pytest.approx(1 + math.cos(math.pi / 2))
    linear = plan(name="linear", warmup="20ba", end_factor=0.5)
    assert [lr_at(step, linear) for step in (0, 10, 20, 60)] == pytest.approx([0.0, 1.0, 2.0, 1.5])
    assert lr_at(99, plan(name="constant")) == 2.0


def test_piecewise_is_linear_between_points() -> None:
    points = (
        SchedulePoint("1ep", 0.5),
        SchedulePoint("3ep", 1.0),
        SchedulePoint("3ep", 0.1),
        SchedulePoint("5ep", 0.0),
    )
    piecewise = plan(name="piecewise", points=points)
    expected = {0: 1.0, 10: 1.0, 20: 1.5, 29: 1.95, 30: 0.2, 40: 0.1, 50: 0.0, 99: 0.0}
    assert {step: lr_at(step, piecewise) for step in expected} == pytest.approx(expected)


_SPIKE = (
    SchedulePoint("0ba", 0.1),
    SchedulePoint("3332ba", 0.1),
    SchedulePoint("3333ba", 3.0),
    SchedulePoint("3334ba", 0),
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"name": "piecewise", "points": _SPIKE}, 6.0),
        ({"name": "piecewise", "points": (SchedulePoint("0ba", 0.5), SchedulePoint("10000ba", 5.0))}, 2.0 * 2.75),
        ({"name": "polynomial", "power": 2.0, "warmup": "1234ba"}, 2.0),
        ({"name": "one-cycle", "warmup": "777ba"}, 2.0),
        ({"name": "step", "warmup": "33.33ep", "step_size": "100ep"}, 2.0),
        ({"name": "cosine", "warmup": "33.3ep", "interval": "epoch"}, None),
        ({"name": "constant", "start_factor": 1.5, "warmup": "10ep"}, 3.0),
        ({"name": "plateau", "warmup": "10ep"}, 2.0),
        ({"name": "root"}, None),
    ],
)
def test_the_peak_is_the_highest_learning_rate_of_the_run(registered, schedule, expected) -> None:
    """What `paceline plan` and the log show, also for a run that ends before the schedule does."""
    ours = plan(5000, **schedule)
    rates = [lr_at(step, ours) for step in range(5000)]
    assert ours.highest == max(rates)
    assert expected is None or ours.highest == pytest.approx(expected, rel=1e-3)
    for begin, end in ((0, 1), (3000, 3001), (17, 4711), (3334, 5000)):
        assert ours.highest_between(begin, end) == max(rates[begin:end])


def test_the_peak_of_phases_is_that_of_their_lines() -> None:
    phases = (Phase((0, 2), lr=(0.1, 3.0)), Phase((2, 5), lr=(2.0,)))
    recipe = Recipe("any", train=Train(duration="5ep", global_batch=10), phases=phases)
    timeline = Timeline.of(recipe, 100)
    ours = LrPlan.of(recipe.optim, timeline)
    assert ours.highest == 3.0
    heads, first, second = phase_table(
        timeline, 1, 1, lambda step: lr_at(step, ours), ours.highest_between, lambda _: ""
    )
    assert [row[heads.index("lr")] for row in (first, second)] == ["0.1 -> 3", "2"]


def test_the_peak_is_shown_in_the_middle_of_a_phase() -> None:
    ours = plan(5000, name="piecewise", points=_SPIKE)
    timeline = Timeline.of(Recipe("any", train=Train(duration="5000ba", global_batch=10)), 100)
    heads, row = phase_table(timeline, 1, 1, lambda step: lr_at(step, ours), ours.highest_between, lambda _: "")
    assert row[heads.index("lr")] == "0.2 -> 6 -> 0"


@pytest.fixture
def registered(monkeypatch) -> None:
    """Schedules of a user, for the time of a test."""
    monkeypatch.setattr(extensions, "_registered", {})
    extensions.register_schedule("root")(lambda step, total_steps, power=0.5: (step / total_steps) ** power)
    for name, value in (("text", "1"), ("infinite", math.inf), ("negative", -1.0), ("nan", math.nan), ("flag", True)):
        extensions.register_schedule(name)(lambda step, total_steps, value=value: value)
    extensions.register_schedule("broken")(lambda step, total_steps: 1 / 0)


def test_registered_schedule_is_the_whole_curve(registered: None) -> None:
    root = plan(name="root")
    assert [lr_at(step, root) for step in (0, 25, 81)] == [0.0, 1.0, pytest.approx(1.8)]
    assert root.highest == lr_at(99, root)
    assert lr_at(50, plan(name="root", options={"power": 2.0})) == 0.5
    phases = (Phase((0.0, 5.0), lr=(0.25,)), Phase((5.0, 10.0), lr=(0.5,)))
    optim = Optim(schedule=Schedule(name="root"))
    recipe = Recipe("any", optim=optim, phases=phases, train=Train(duration="10ep", global_batch=10))
    assert lr_at(60, LrPlan.of(optim, Timeline.of(recipe, 100))) == 0.5
    assert scaled(recipe, 2, "linear").optim.schedule == optim.schedule


@pytest.mark.parametrize("name", ["text", "infinite", "negative", "nan", "flag", "broken"])
def test_results_of_registered_schedules_are_checked(registered: None, name: str) -> None:
    with raises("extension-failed") as caught:
        lr_at(7, plan(name=name))
    assert caught.value.fields["name"] == name


@pytest.mark.parametrize(
    "fields", [{"warmup": "1ep"}, {"start_factor": 0.1}, {"end_factor": 0.1}, {"gamma": 0.5}, {"step_size": "2ep"}]
)
def test_fields_that_a_registered_schedule_does_not_use_are_refused(
    registered: None, fields: dict[str, object]
) -> None:
    with raises("schedule-field-unused") as caught:
        plan(name="root", **fields)
    assert caught.value.fields["field"] == f"optim.schedule.{next(iter(fields))}"


@pytest.mark.parametrize("fields", [{"warmup": "0ep"}, {"warmup": "0.0ba"}, {"step_size": "30.0ep"}])
def test_default_durations_in_other_words_are_allowed_with_a_registered_schedule(
    registered: None, fields: dict[str, str]
) -> None:
    assert plan(name="root", **fields).registered


def test_unknown_schedules_are_refused_with_a_suggestion(registered: None) -> None:
    for name, close in (("cosin", "cosine"), ("onecycle", "one-cycle"), ("roto", "root")):
        with raises("unknown-schedule") as caught:
            plan(name=name)
        assert close in caught.value.fields["close"]
    with pytest.raises(ConfigError) as error:
        load_recipe("digits", ["--optim.schedule.options", "{power: 2}"])
    assert [problem.code for problem in error.value.problems] == ["schedule-options-unused"]


def test_norms_and_biases_do_not_decay_and_frozen_weights_are_left_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    model[1].weight.requires_grad_(False)
    config = Optim(weight_decay=0.1, groups=(ParamGroup(("1.bias",), lr_factor=64.0, weight_decay_factor=2.0),))
    decayed, plain, norm_biases = groups(model, config)
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[3].weight)}
    assert {id(p) for p in plain["params"]} == {id(model[0].bias), id(model[3].bias)}
    assert [id(p) for p in norm_biases["params"]] == [id(model[1].bias)]
    assert [group["weight_decay"] for group in (decayed, plain, norm_biases)] == [0.1, 0.0, 0.0]
    optimizer = create(model, config)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 32.0]
    decaying = groups(model, replace(config, no_weight_decay_on="nothing"))
    assert [(group["weight_decay"], group["scale"]) for group in decaying] == [(0.1, 1.0), (0.1, 1.0), (0.2, 64.0)]


def test_factors_of_several_groups_are_multiplied_and_unmatched_patterns_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    halves = (ParamGroup(("*.weight",), lr_factor=0.5), ParamGroup(("1.*",), lr_factor=0.1, weight_decay_factor=0.0))
    found = groups(model, Optim(weight_decay=0.1, groups=halves))
    settings = {id(p): (group["weight_decay"], group["scale"]) for group in found for p in group["params"]}
    assert [settings[id(p)] for p in model.parameters()] == [(0.1, 0.5), (0.0, 1.0), (0.0, 0.05), (0.0, 0.1)]
    model[0].bias.requires_grad_(False)
    for pattern in ("2.*", "0.bias"):
        with raises("param-group-unmatched") as caught:
            groups(model, Optim(groups=(ParamGroup((pattern,)),)))
        assert caught.value.fields["pattern"] == pattern


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizers_reduce_a_quadratic(name: str) -> None:
    layer = nn.Linear(4, 4)
    optimizer = create(layer, Optim(name=name, lr=0.05))
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(100):
        loss = (layer(inputs) - inputs).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 10
