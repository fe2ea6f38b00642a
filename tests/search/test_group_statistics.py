"""Simulated groups of 5 seeds: false alarms, detection and coverage of `paceline compare`, 200 times each."""

from pathlib import Path

import numpy as np
import pytest
from made_runs import make_run
from scipy import stats

from paceline.analysis.compare import compare
from paceline.analysis.groups import grouped_runs
from paceline.analysis.read import read
from paceline.analysis.run import LoggedRun
from paceline.analysis.statistics import LEVEL, POWER, measurements_needed, spread, welch, welch_power

SEEDS, TIMES = 5, 200
MEAN = 0.93
STDS = (0.002, 0.003)
"""Standard deviations of top-1 between the seeds of each group: as large as those of CIFAR-10 recipes."""
EFFECT = 0.005
READ = 12
"""Simulations whose runs are written to run folders and read again."""


def _draws(difference: float, generator: int) -> list[tuple[list[float], list[float]]]:
    """Return the top-1 of the seeds of both groups, in every simulation."""
    numbers = np.random.default_rng(generator)
    return [
        (numbers.normal(MEAN, STDS[0], SEEDS).tolist(), numbers.normal(MEAN + difference, STDS[1], SEEDS).tolist())
        for _ in range(TIMES)
    ]


def _number_seen(draws: list[tuple[list[float], list[float]]]) -> int:
    return sum(test.p < LEVEL for first, second in draws if (test := welch(first, second)))


def _is_plausible(count: int, probability: float) -> bool:
    """Return whether a count is between the 0.1% and the 99.9% quantile of the binomial distribution."""
    low, high = stats.binom.ppf([0.001, 0.999], TIMES, probability)
    return bool(low <= count <= high)


def test_false_alarms_are_about_five_percent() -> None:
    draws = _draws(0.0, generator=1)
    count = _number_seen(draws)
    assert count == sum(stats.ttest_ind(*draw, equal_var=False).pvalue < LEVEL for draw in draws)
    assert _is_plausible(count, LEVEL), count
    assert not _is_plausible(3 * count, LEVEL)  # the bounds are tight enough to notice


def test_a_known_effect_is_detected_as_often_as_computed() -> None:
    numbers, shape = np.random.default_rng(7), (50_000, SEEDS)
    groups = numbers.normal(0, STDS[0], shape), numbers.normal(EFFECT, STDS[1], shape)
    power = float(np.mean(stats.ttest_ind(*groups, axis=1, equal_var=False).pvalue < LEVEL))
    assert welch_power(EFFECT, STDS, SEEDS) == pytest.approx(power, abs=0.03)  # it is an approximation
    count = _number_seen(_draws(EFFECT, generator=2))
    assert _is_plausible(count, power), (count, power)
    assert not _is_plausible(count, power / 2)


def test_with_the_seeds_that_a_difference_needs_it_is_seen_four_times_of_five() -> None:
    needed = measurements_needed(EFFECT, STDS)
    assert needed
    assert needed > SEEDS
    numbers = np.random.default_rng(3)
    groups = [
        (numbers.normal(MEAN, STDS[0], needed).tolist(), numbers.normal(MEAN + EFFECT, STDS[1], needed).tolist())
        for _ in range(TIMES)
    ]
    assert _is_plausible(_number_seen(groups), welch_power(EFFECT, STDS, needed))
    assert welch_power(EFFECT, STDS, needed) >= POWER > welch_power(EFFECT, STDS, needed - 1)


@pytest.mark.parametrize("difference", [0.0, EFFECT])
def test_intervals_cover_the_truth(difference: float) -> None:
    draws = _draws(difference, generator=4)
    tests = [test for draw in draws if (test := welch(*draw))]
    assert _is_plausible(sum(test.low <= difference <= test.high for test in tests), 1 - LEVEL)
    means = [spread(first) for first, _ in draws]
    assert _is_plausible(sum(mean.low <= MEAN <= mean.high for mean in means if mean.low and mean.high), 1 - LEVEL)


def test_several_groups_raise_a_false_alarm_in_five_percent_of_comparisons() -> None:
    """Without Holm's correction, one of three groups would differ by chance in about 12%."""
    numbers, alarms, uncorrected = np.random.default_rng(5), 0, 0
    for _ in range(TIMES):
        groups = [numbers.normal(MEAN, STDS[0], SEEDS).tolist() for _ in range(4)]
        runs = [
            _run(f"group-{number}-seed{seed}", seed, 0.1 + number, top1)
            for number, group in enumerate(groups)
            for seed, top1 in enumerate(group)
        ]
        found = [each for each in grouped_runs(runs).differences if each.metric.name == "top1"]
        assert len(found) == 3
        alarms += any(each.is_significant for each in found)
        uncorrected += any(each.test.p < LEVEL for each in found)
    assert alarms <= stats.binom.ppf(0.999, TIMES, LEVEL)
    assert uncorrected > alarms


def _run(name: str, seed: int, lr: float, top1: float) -> LoggedRun:
    facts = {"seed": seed, "optim.lr": lr, "data": "d", "precision": "fp32", "code": "1", "model.name": "m"}
    facts |= {"global_batch": 8, "train.duration": "1ep"}
    record = {"kind": "eval", "step": 1, "top1": top1}
    return LoggedRun(name, Path(name), status="finished", facts=facts, records=[record])


@pytest.mark.parametrize("difference", [0.0, EFFECT])
def test_run_folders_lead_to_the_same_verdict(tmp_path: Path, difference: float) -> None:
    for number, draw in enumerate(_draws(difference, generator=6)[:READ]):
        folders = [
            make_run(
                tmp_path / str(number), f"{name}-seed{seed}", "--seed", str(seed), "--optim.lr", lr, top1=(0.5, top1)
            )
            for name, lr, values in (("base", "0.1", draw[0]), ("changed", "0.2", draw[1]))
            for seed, top1 in enumerate(values)
        ]
        grouped = compare([read(folder) for folder in folders]).grouped
        assert [(group.name, group.seeds) for group in grouped.groups] == [
            ("base", tuple(range(SEEDS))),
            ("changed", tuple(range(SEEDS))),
        ]
        found = next(each for each in grouped.differences if each.metric.name == "top1")
        expected = stats.ttest_ind(draw[1], draw[0], equal_var=False)
        assert found.test.p == pytest.approx(expected.pvalue)
        assert found.is_significant == (expected.pvalue < LEVEL)
