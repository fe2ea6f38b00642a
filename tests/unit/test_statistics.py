"""Statistics of groups of seeds: compared with scipy, and shown in tables, pages and files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import make_run
from scipy import stats

import paceline as pl
from paceline.analysis.book import write_logbook
from paceline.analysis.compare import compare
from paceline.analysis.groups import METRICS
from paceline.analysis.groups_text import sentences
from paceline.analysis.read import read
from paceline.analysis.run import LoggedRun
from paceline.analysis.statistics import LEVEL, MAX_NEEDED, POWER, measurements_needed, spread, welch, welch_power


def test_welch_and_intervals_equal_scipy() -> None:
    numbers = np.random.default_rng(0)
    for _ in range(50):
        first, second = (
            numbers.normal(numbers.uniform(-1, 1), numbers.uniform(0.1, 3), numbers.integers(2, 9)).tolist()
            for _ in range(2)
        )
        test, known = welch(first, second), stats.ttest_ind(second, first, equal_var=False)
        interval = known.confidence_interval(1 - LEVEL)
        found = (test.difference, test.p, test.low, test.high, test.degrees)
        assert found == pytest.approx((np.mean(second) - np.mean(first), known.pvalue, *interval, known.df))
        own, mean = spread(first), np.mean(first)
        low, high = stats.t.interval(1 - LEVEL, len(first) - 1, mean, stats.sem(first))
        assert (own.mean, own.std, own.low, own.high) == pytest.approx((mean, np.std(first, ddof=1), low, high))


def _power(difference: float, stds: tuple[float, float], n: int) -> float:
    """Return the power of Welch's test by integrating over the chi-squared distribution of the variance."""
    variances = np.square(stds) / n
    degrees = variances.sum() ** 2 / (variances**2 / (n - 1)).sum()
    center, critical = difference / np.sqrt(variances.sum()), stats.t.ppf(1 - LEVEL / 2, degrees)
    places = (np.arange(20_000) + 0.5) / 20_000
    limits = critical * np.sqrt(stats.chi2.ppf(places, degrees) / degrees)
    return float(np.mean(stats.norm.sf(limits - center) + stats.norm.cdf(-limits - center)))


@pytest.mark.parametrize("stds", [(1.0, 1.0), (0.5, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("difference", [0.3, 1.0, 4.0, 1000.0])
def test_power_and_seeds_needed(difference: float, stds: tuple[float, float]) -> None:
    for n in (2, 5, 40):
        assert welch_power(difference, stds, n) == pytest.approx(_power(difference, stds, n), abs=1e-4)
    needed = measurements_needed(difference, stds)
    assert needed == measurements_needed(-difference, stds)
    assert _power(difference, stds, needed) > POWER - 1e-4
    assert needed == 2 or _power(difference, stds, needed - 1) < POWER + 1e-4


def test_textbook_number_of_seeds() -> None:
    assert measurements_needed(1.0, (1.0, 1.0)) == 17  # per group, for an effect of one standard deviation


def test_values_that_do_not_vary() -> None:
    same, other = [0.5] * 3, [0.6] * 3
    assert (spread(same).std, spread(same).low, spread(same).high) == (0.0, 0.5, 0.5)
    assert welch(same, same).p == 1.0
    assert welch(same, other).p is None  # nothing is known about noise
    assert welch(same, [0.5, 0.6, 0.7]).p == pytest.approx(stats.ttest_1samp([0.5, 0.6, 0.7], 0.5).pvalue)
    assert measurements_needed(0.1, (0.0, 0.0)) is measurements_needed(0.0, (1.0, 1.0)) is None
    assert measurements_needed(1e-6, (1.0, 1.0)) is None
    assert welch([0.5], other) is None
    assert (spread([0.5]).n, spread([0.5]).std, spread([0.5]).low) == (1, None, None)


@given(*[st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=4)] * 2)
def test_any_values_have_statistics(first: list[float], second: list[float]) -> None:
    assert spread(first).mean <= 1e30
    if not (test := welch(first, second)):
        assert min(len(first), len(second)) == 1
        return
    assert test.p is None or 0 <= test.p <= 1
    stds = spread(first).std or 0.0, spread(second).std or 0.0
    needed = measurements_needed(test.difference, stds)
    assert needed is None or 2 <= needed <= MAX_NEEDED


def test_implausible_settings_and_values_are_left_out(tmp_path: Path) -> None:
    runs = _runs(tmp_path, "base", BASE)
    runs[0].facts["seed"], runs[1].facts["seed"] = [1], "two"
    runs[2].records[-2]["loss"] = 1e308
    groups = compare(runs).grouped.groups
    assert sorted(len(group.runs) for group in groups) == [1, 1, 2]
    assert [group.spreads["loss"].n for group in groups if group.seeds == (2, 3)] == [1]


def _runs(root: Path, name: str, accuracies: list[float], *words: str, first_seed: int = 0) -> list[LoggedRun]:
    return [
        read(make_run(root, f"{name}-seed{seed}", "--seed", str(seed), *words, top1=(0.5, top1)))
        for seed, top1 in enumerate(accuracies, first_seed)
    ]


BASE, BETTER = [0.930, 0.928, 0.931, 0.929], [0.941, 0.938, 0.940, 0.939]


def test_runs_of_one_experiment_are_one_group(tmp_path: Path) -> None:
    compared = compare(_runs(tmp_path, "base", BASE))
    (group,) = compared.grouped.groups
    assert (group.name, group.seeds, compared.fairness.same, compared.fairness.num_seeds) == (
        "base",
        (0, 1, 2, 3),
        True,
        4,
    )
    assert group.spreads["top1"].mean == pytest.approx(np.mean(BASE))
    assert compared.is_reliable  # the seed is no reason to doubt a speed-up
    assert not compared.grouped.differences
    assert not sentences(compared.grouped)


def test_groups_are_compared_with_the_first(tmp_path: Path) -> None:
    base = _runs(tmp_path, "base", BASE)
    fast = _runs(tmp_path, "fast", BETTER, "--optim.lr", "0.3")
    other = _runs(tmp_path, "other", BASE[::-1], "--optim.lr", "0.4", first_seed=10)
    grouped = compare([*base, *fast, *other]).grouped
    assert [group.name for group in grouped.groups] == ["base", "fast", "other"]
    seen = {each.group: each for each in grouped.differences if each.metric.name == "top1"}
    assert (seen["fast"].is_significant, seen["other"].is_significant) == (True, False)
    known = stats.ttest_ind(BETTER, BASE, equal_var=False)
    assert seen["fast"].test.p == pytest.approx(known.pvalue)
    assert seen["fast"].corrected == pytest.approx(2 * known.pvalue)  # Holm, for two comparisons
    assert seen["fast"].seeds_needed == measurements_needed(
        np.mean(BETTER) - np.mean(BASE), (np.std(BASE, ddof=1), np.std(BETTER, ddof=1))
    )
    assert "the difference is significant" in sentences(grouped)[0]
    assert "the difference is not significant" in sentences(grouped)[1]


def test_times_of_disturbed_runs_are_unreliable(tmp_path: Path) -> None:
    folders = [run.origin for run in _runs(tmp_path, "base", BASE)]
    busy = [
        {"kind": "sample", "memory_bytes": 1, "time": time, "cpu_percent": 100.0, "other_cpu_percent": 40.0}
        for time in range(20)
    ]
    (Path(folders[2]) / "telemetry" / "host-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in busy))
    texts = sentences(compare([read(Path(folder)) for folder in folders]).grouped)
    assert len(texts) == 1
    assert "base-seed2" in texts[0]


def test_what_does_not_count(tmp_path: Path) -> None:
    base = _runs(tmp_path, "base", BASE)
    killed = read(make_run(tmp_path, "base-seed9", "--seed", "9", status="failed"))
    again = read(make_run(tmp_path, "again", "--seed", "1"))
    alone = read(make_run(tmp_path, "alone", "--seed", "0", "--optim.lr", "0.3"))
    grouped = compare([*base, killed, again, alone]).grouped
    assert [len(group.runs) for group in grouped.groups] == [4, 1]
    assert ["base-seed9" in text or "again" in text for text in grouped.groups[0].left_out] == [True, True]
    assert not grouped.differences  # one seed says nothing about noise
    assert sum("one seed" in line for line in sentences(grouped)) == 1


def test_runs_without_seeds_of_their_own_are_no_groups(tmp_path: Path) -> None:
    one, two = read(make_run(tmp_path, "one")), read(make_run(tmp_path, "two", ranks=2))
    assert not compare([one, two]).grouped.groups  # the same seed on another number of ranks: a speed-up
    assert not sentences(compare([one, two]).grouped)
    other = read(make_run(tmp_path, "other", "--optim.lr", "0.3"))
    assert "one seed" in sentences(compare([one, other]).grouped)[0]
    unknown = read(make_run(tmp_path, "unknown", "--seed", "4"))
    del unknown.facts["data"]
    compared = compare([one, unknown])
    assert not compared.grouped.groups  # it may have been trained on other data
    assert not compared.is_comparable


def test_groups_reach_every_output(tmp_path: Path, here) -> None:
    runs = _runs(tmp_path, "base", BASE) + _runs(tmp_path, "fast", BETTER, "--optim.lr", "0.3")
    folders = [str(run.origin) for run in runs]
    answer = here("compare", *folders, "--out", tmp_path / "out")
    assert answer.returncode == 0, answer.stderr
    assert "the difference is significant" in answer.stdout
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())["seeds"]
    assert [group["name"] for group in found["groups"]] == ["base", "fast"]
    assert found["groups"][1]["figures"]["top1"]["values"] == pytest.approx(BETTER)
    assert {each["figure"] for each in found["differences"]} == {metric.name for metric in METRICS}
    lines = list(csv.DictReader((tmp_path / "out" / "seeds.csv").read_text().splitlines()))
    assert float(lines[1]["difference"]) == pytest.approx(np.mean(BETTER) - np.mean(BASE))
    drawn = (tmp_path / "out" / "seeds-top1.svg").read_text()
    assert drawn.count("<circle") == len(runs)
    page = pl.report(folders, tmp_path / "report.html").read_text()
    assert page.count("the difference is significant") == 1
    assert page.count('<div class="intervals">') == 1
    write_logbook(runs, tmp_path / "logbook")
    assert "the difference is significant" in (tmp_path / "logbook" / "comparison.md").read_text()
    comparison = pl.compare(folders)
    assert [group.name for group in comparison.groups] == ["base", "fast"]
    assert comparison.differences[0].is_significant
    assert "the difference is significant" in repr(comparison)
    assert "the difference is significant" in comparison._repr_html_()
