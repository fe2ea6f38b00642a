"""Phases, ramps, batch scaling, the batch finder and `paceline plan`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import complaint, raises
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_run

from paceline.config.io import load_recipe
from paceline.config.phases import Phase, problems
from paceline.config.recipe import Recipe, Train
from paceline.config.scaling import scaled
from paceline.config.timeline import Timeline
from paceline.config.tracking import ExpectedCurve
from paceline.data.load.order import Plan
from paceline.errors import ConfigError
from paceline.launch import batch_finder
from paceline.launch.batch_finder import Trial, outcome, search
from paceline.optim.schedules import LrPlan, lr_at

IMAGENET18 = tuple(f"imagenet-rn50-imagenet18-{nodes}" for nodes in (1, 2, 4, 8, 16))


@given(
    samples=st.integers(64, 5000),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    batches=st.lists(st.integers(1, 64), min_size=5, max_size=5),
)
def test_every_step_lies_in_one_phase_and_one_epoch(samples: int, lengths: list[int], batches: list[int]) -> None:
    edges = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    phases = tuple(
        Phase((begin, end), global_batch=batch) for begin, end, batch in zip(edges, edges[1:], batches, strict=False)
    )
    recipe = Recipe("any", train=Train(duration=f"{edges[-1]}ep", global_batch=1), phases=phases)
    assert list(problems(recipe.phases, edges[-1], 1)) == []
    timeline = Timeline.of(recipe, samples)
    assert timeline.total == sum(length * (samples // batch) for length, batch in zip(lengths, batches, strict=False))
    positions = [timeline.position(step) for step in range(timeline.total)]
    assert positions == sorted(positions)
    assert len(set(positions)) == len(positions)
    for number, phase in enumerate(phases):
        begin = timeline.step_at(phase.epochs[0])
        assert timeline.phase_at(begin).number == number
        assert timeline.position(begin) == (phase.epochs[0], 0)
        assert timeline.epoch_at(begin) == phase.epochs[0]


def test_an_epoch_sees_every_sample_at_most_once_even_if_the_batch_size_changes() -> None:
    phases = Phase((0, 2), global_batch=8), Phase((2, 3), global_batch=20)
    recipe = Recipe("any", train=Train(duration="3ep", global_batch=8), phases=phases)
    alone, first, second = (Plan.of(recipe, 100, ranks, rank) for ranks, rank in ((1, 0), (2, 0), (2, 1)))
    seen: dict[int, list[int]] = {}
    for _, (one, a, b) in zip(
        range(alone.timeline.total), zip(alone.steps(0), first.steps(0), second.steps(0), strict=False), strict=False
    ):
        assert one[2].flatten().tolist() == a[2].flatten().tolist() + b[2].flatten().tolist()
        seen.setdefault(one[1], []).extend(one[2].flatten().tolist())
    assert [len(keys) for keys in seen.values()] == [96, 96, 100]
    assert all(len(set(keys)) == len(keys) for keys in seen.values())


def test_repeated_augmentation_shows_fewer_images_more_often() -> None:
    recipe = load_recipe("digits", ["--data.aug_repeats", "3", "--train.global_batch", "30"])
    plan = Plan.of(recipe, 90)
    keys = [key for _, (_, _, rows) in zip(range(3), plan.steps(0), strict=False) for key in rows.flatten().tolist()]
    assert len(keys) == len(set(keys)) == 90
    assert len({key % 90 for key in keys}) == 30
    for left, right in zip(keys[::2], keys[1::2], strict=True):  # the pairs that mixup blends
        assert left % 90 != right % 90
    batches = [[key % 90 for key in keys[begin : begin + 30]] for begin in (0, 30, 60)]
    assert all(batch.count(sample) == 3 for batch in batches for sample in batch)
    assert all(len(set(batch[part : part + 10])) == 10 for batch in batches for part in (0, 10, 20))
    resumed = next(plan.steps(2))[2].flatten().tolist()  # in the middle of the epoch
    assert resumed == keys[60:]


def test_a_shorter_training_ends_within_a_phase() -> None:
    recipe = load_recipe("imagenet-rn50-imagenet18-4", ["--train.duration", "12ep"])
    timeline = Timeline.of(recipe, 1_281_167)
    assert [phase.epochs for phase in timeline.phases] == [(0, 6), (6, 11), (11, 12)]
    assert timeline.phases[-1].lr == pytest.approx((4.0, 3.0), rel=1e-3)  # part of the way along its line
    short = Timeline.of(replace(recipe, train=replace(recipe.train, duration="5ba")), 1_281_167)
    assert (short.total, short.phases[0].epochs) == (5, pytest.approx((0, 5 / 156)))


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (("--train.duration", "0ep"), "duration-too-short", "train.duration=0ep"),
        (("--phases", "[{epochs: [0, 1]}]", "--train.duration", "500ba"), "phases-too-short", "11ba"),
        (("--ramp", "{epochs: [1, 3], sizes: [8, 16]}"), "ramp-size-multiple", "ramp.sizes=8, 16: 8"),
        (("--ramp", "{epochs: [1, 3], sizes: [32, 0]}"), "ramp-size-multiple", "ramp.sizes=32, 0: 0"),
        (("--ramp", "{epochs: [3, 1], sizes: [32, 64]}"), "range-reversed", "ramp.epochs=3, 1"),
        (
            ("--train.mixup", "0.5", "--train.global_batch", "30", "--nodes", "2"),
            "mixup-odd-batch",
            "train.global_batch to a multiple of 4",
        ),
        (
            ("--train.mixup", "0.5", "--train.global_batch", "6", "--data.aug_repeats", "4"),
            "mixup-needs-two-images",
            "train.global_batch to at least 8",
        ),
        (("--train-images", "5"), "batch-too-large", "128"),
        (
            ("--optim.schedule", "{name: step, step_size: 0.00001ep, warmup: 0ep}"),
            "schedule-step-too-short",
            "step_size",
        ),
        (("--chart", "lr.txt"), "wrong-suffix", "--chart lr.txt"),
        (("--grad_sync", "{dtype: bf16, powersgd_rank: 2}"), "powersgd-and-dtype", "grad_sync.dtype=bf16"),
        (("--strategy", "fsdp", "--grad_sync.transport", "shm"), "shm-needs-ddp", "grad_sync.transport=shm"),
        (("--strategy", "fsdp", "--grad_sync.powersgd_rank", "2"), "powersgd-needs-ddp", "grad_sync.powersgd_rank=2"),
        (("--train.init_loss_scale", "1e39"), "invalid-value", "train.init_loss_scale"),
        (("--data.aug_repeats", "1000000"), "invalid-value", "data.aug_repeats"),
    ],
)
def test_invalid_plans_are_refused(here, words: tuple[str, ...], code: str, names: str) -> None:
    message = complaint(here("plan", "digits", *words))
    assert f"[{code}]" in message
    assert names in message


def test_a_phase_with_the_same_batch_size_may_begin_within_an_epoch() -> None:
    load_recipe("digits", ["--phases", "[{epochs: [0, 1.5]}, {epochs: [1.5, 20], global_batch: 128}]"])


@pytest.mark.parametrize(
    ("phases", "code", "names"),
    [
        ("[{epochs: [1, 20]}]", "phase-start", "phases.0 begins at epoch 1"),
        ("[{epochs: [0, 5]}, {epochs: [6, 20]}]", "phase-gap", "phases.1 begins at epoch 6"),
        ("[{epochs: [0, 5]}, {epochs: [4, 20]}]", "phase-overlap", "phases.1 begins at epoch 4"),
        ("[{epochs: [0, 5]}]", "phases-too-short", "5ep"),
        ("[{epochs: [5, 0]}]", "phase-empty", "phases.0.epochs=5, 0"),
        ("[{epochs: [0, 5.5]}, {epochs: [5.5, 20], global_batch: 7}]", "phase-batch-mid-epoch", "5 or 6"),
        ("[{epochs: [0, 5], lr: [1]}, {epochs: [5, 20]}]", "phase-lr-partial", "phases.0"),
        ("[{epochs: [0, 20], lr: [1, 2, 3]}]", "invalid-value", "at most 2"),
    ],
)
def test_invalid_phases_are_refused(phases: str, code: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits", ["--phases", phases])
    assert any(problem.code == code and names in problem.message for problem in caught.value.problems), caught.value


def test_a_phase_whose_batch_is_not_divisible_by_the_ranks_is_refused(here, tmp_path: Path) -> None:
    phases = "[{epochs: [0, 1]}, {epochs: [1, 20], global_batch: 33}]"
    message = complaint(here("plan", "digits", "--phases", phases, "--nodes", 2))
    assert "phases.1.global_batch=33" in message
    assert "[batch-not-divisible]" in message


@pytest.mark.parametrize("name", IMAGENET18)
def test_scaling_records_its_rule_and_the_original_values(name: str) -> None:
    recipe = load_recipe(name)
    doubled = scaled(recipe, 4, "sqrt")
    for old, new in zip(recipe.phases, doubled.phases, strict=True):
        assert new.global_batch == 4 * old.global_batch
        assert new.lr == pytest.approx(tuple(2 * lr for lr in old.lr))
    assert (doubled.scaled.by, doubled.scaled.rule) == (4, "sqrt")
    assert (doubled.scaled.from_batch, doubled.scaled.from_lr) == (recipe.train.global_batch, recipe.optim.lr)
    with raises("already-scaled"):
        scaled(doubled, 2, "linear")


def test_scaling_adds_a_warm_up() -> None:
    recipe = load_recipe("imagenet-rn50-torchvision-v1")
    larger = scaled(recipe, 8, "linear")
    assert (larger.train.global_batch, larger.optim.lr, larger.optim.schedule.warmup) == (2048, 0.8, "5ep")
    plan = LrPlan.of(larger.optim, Timeline.of(larger, 1_281_167))
    assert [lr_at(625 * epoch, plan) for epoch in (0, 5, 30, 60)] == pytest.approx([0.1, 0.8, 0.08, 0.008])


def test_an_expected_curve_is_interpolated() -> None:
    curve = ExpectedCurve(points=((1, 0.2), (3, 0.6)))
    assert [curve.expected(epoch) for epoch in (0.5, 1, 2, 3, 9)] == pytest.approx([None, 0.2, 0.4, 0.6, 0.6])


def test_a_run_below_its_expected_curve_warns_and_can_stop(here) -> None:
    words = ("--train.duration", "2ep", "--evaluate.every", "1ep", "--curve.points", "[[1, 0.99]]")
    words += ("--model.options", "{widths: [8, 16], norm: group}", "--log.tensorboard", "false")
    answer = here("train", "digits", *words)
    assert answer.returncode == 0, answer.stderr
    assert "99.00%" in answer.stderr
    name = ("--name", "stopped")
    assert "[below-expected-curve]" in complaint(here("train", "digits", *words, *name, "--curve.stop", "true"))
    answer = here("train", "--resume", "runs/stopped", "--curve.stop", "false")  # its checkpoint is intact
    assert "resuming from step 11" in answer.stderr
    assert answer.returncode == 0


@given(limit=st.integers(1, 5000), most=st.integers(1, 4096))
def test_the_search_finds_the_largest_batch_within_a_sixteenth(limit: int, most: int) -> None:
    tried: list[int] = []

    def attempt(batch: int) -> Trial:
        tried.append(batch)
        return Trial(batch, batch <= limit, images_per_second=float(batch % 7))

    largest, fastest = outcome(search(attempt, most))
    best = min(limit, most)
    assert best - max(1, best // 16) <= largest.per_rank_batch <= best
    assert fastest.fits
    assert len(tried) == len(set(tried)) <= 20


def test_chart_of_the_search_shows_what_fits() -> None:
    trials = [Trial(2, True, 5.0, (10**9,)), Trial(4, True, 8.0, (2 * 10**9,)), Trial(8, False, reason="out of memory")]
    chart = batch_finder._chart(trials, "digits")
    assert "memory (1 = 2.00 GB)" in chart
    assert "images/s (1 = 8.0)" in chart
    assert chart.count("<circle") == 4


def test_no_batch_fits() -> None:
    with raises("batch-does-not-fit") as caught:
        outcome(search(lambda batch: Trial(batch, False, reason="out of memory"), 64))
    assert "out of memory" in str(caught.value)


def test_plan_shows_the_peak_of_the_learning_rate(here) -> None:
    schedule = "{name: one-cycle, warmup: 5000ba, start_factor: 0.0}"
    answer = here("plan", "digits", "--train.duration", "100000ba", "--optim.schedule", schedule)
    assert "0 -> 0.05 -> 0" in answer.stdout


def test_plan_warns_of_a_speed_of_other_work(here, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    (run / "summary.json").write_text(
        json.dumps(
            {"status": "finished", "seconds": {"sync": 1.0}, "train_seconds": 10.0, "images_per_second": 90, "ranks": 1}
        )
    )
    recipe = run / "recipe.yaml"
    answer = here("plan", recipe, "--learn-from", run)
    assert answer.returncode == 0, answer.stderr
    assert "100 images/s per rank" in answer.stdout
    assert not answer.stderr
    words = ("--model.name", "resnet18", "--model.options", "{}", "--data.size", 96)
    answer = here("plan", recipe, "--learn-from", run, *words)
    assert answer.returncode == 0, answer.stderr
    assert f"warning: {run} has model airbench, not resnet18; image size that of digits, not 96 px." in answer.stderr


def test_plan_shows_phases_times_and_costs(here, tmp_path: Path) -> None:
    words = ("--nodes", 4, "--gpus-per-node", 8, "--images-per-second", 800, "--price", 24.48, "--chart", "lr.svg")
    answer = here("plan", "imagenet-rn50-imagenet18-4", *words)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert any(line.split()[:2] == ["6", "28"] and "288 px rectangular" in line for line in lines)
    assert "4,776 steps, 38,307,840 images" in answer.stdout
    row = next(line for line in lines if line.split()[:2] == ["4", "32"])
    assert row.split()[-2:] == ["0:29:49", "48.67"]
    assert "learning rate" in (tmp_path / "lr.svg").read_text()


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (("digits", "--data", "{name: folder, path: x, augment: null}"), "unknown-dataset-size", "--train-images"),
        (("digits", "--learn-from", "nowhere"), "run-without-speed", "nowhere"),
        (("digits", "--images-per-second", "9", "--bandwidth", "0"), "usage", "--bandwidth: '0'"),
        (("digits", "--overlap", "5"), "usage", "--overlap: '5'"),
        ((), "missing-recipe", "paceline recipes"),
    ],
)
def test_invalid_options_of_plan_are_refused(here, words: tuple[str, ...], code: str, names: str) -> None:
    message = complaint(here("plan", *words))
    assert f"[{code}]" in message
    assert names in message
