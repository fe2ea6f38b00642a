"""The comparison of two models by their predictions of the same images."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_details import make_details
from made_runs import make_run
from scipy.stats import binomtest

from paceline.analysis.compare import compare
from paceline.analysis.details.paired import _settings, holm, mcnemar
from paceline.analysis.details.paired_text import paired_html
from paceline.analysis.details.read import Details
from paceline.analysis.read import read
from paceline.analysis.tables import as_json, as_text, markdown

LABELS = np.repeat(np.arange(3), 40)


def _logits(wrong: list[int]) -> np.ndarray:
    predicted = LABELS.copy()
    predicted[wrong] = (LABELS[wrong] + 1) % 3
    return np.eye(3, dtype=np.float32)[predicted] * 4


def test_mcnemar_and_holm() -> None:
    first, second = np.array([0, 1, 5, 10, 3]), np.array([0, 9, 5, 0, 2])
    expected = [1.0, *(binomtest(a, a + b).pvalue for a, b in zip(first[1:], second[1:], strict=True))]
    np.testing.assert_allclose(mcnemar(first, second), expected)
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm(np.array([0.9, 0.8])), [1.0, 1.0])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return make_run(tmp_path, "one"), make_run(tmp_path, "two")


def test_other_variants_are_told(tmp_path: Path) -> None:
    same = {"tta": "none", "weights": "ema", "precision": "fp32"}
    a, b = (Details(tmp_path, same | {"data": {"variant": name}}) for name in ("original", "short-352-q90"))
    assert _settings(a, a) == ""
    assert _settings(a, b) == "variants original and short-352-q90"


def test_classes_that_changed_are_named(runs: tuple[Path, Path]) -> None:
    # of class 0 the second run gets 15 more right, of class 1 one less, of class 2 as many, but others
    make_details(runs[0], LABELS, _logits([*range(20), *range(80, 85)]))
    make_details(runs[1], LABELS, _logits([*range(5), 40, *range(90, 95)]))
    comparison = compare([read(run) for run in runs])
    (pair,) = comparison.paired
    assert pair.overall
    assert (pair.overall.only_first, pair.overall.only_second) == (6, 20)
    assert pair.overall.p == pytest.approx(binomtest(6, 26).pvalue)
    assert [(each.only_first, each.only_second) for each in pair.classes] == [(0, 15), (1, 0), (5, 5)]
    assert pair.classes[0].corrected == pytest.approx(3 * binomtest(0, 15).pvalue)
    assert [each.name for each in pair.changed(better=True)] == ["class 0"]
    assert pair.changed(better=False) == []
    sentence = "1 class is better in two (p < 0.05 after Holm's correction for 3 classes): class 0 (50.00% to 87.50%)"
    assert sentence in as_text(comparison)
    assert "| class 0 | 50.00% | 87.50% | +37.50 points | 0 | 15 |" in markdown(comparison)
    assert "| class | one | two | difference | only one right | only two right | p (Holm) |" in markdown(comparison)
    assert '<th scope="col">only two right</th>' in paired_html(comparison.paired)
    found = json.loads(as_json(comparison))["paired"][0]
    assert found["classes"][0]["only_second_correct"] == 15
    assert found["overall"]["p_holm"] == found["overall"]["p"]


def test_no_significant_difference_is_said(runs: tuple[Path, Path]) -> None:
    make_details(runs[0], LABELS, _logits([1, 2]))
    make_details(runs[1], LABELS, _logits([3]))
    text = as_text(compare([read(run) for run in runs]))
    assert "no significant difference" in text
    assert "No class is significantly better or worse in two" in text


def test_different_samples_are_not_compared(runs: tuple[Path, Path]) -> None:
    make_details(runs[0], LABELS, _logits([]))

    def reason() -> str:
        (pair,) = compare([read(run) for run in runs]).paired
        assert not pair.classes
        return pair.reason

    make_details(runs[1], LABELS, _logits([]), fingerprint="d2")
    assert "different data (fingerprints d1 and d2)" in reason()
    make_details(runs[1], LABELS, _logits([]), class_names=["a", "b", "c"])
    assert "different classes" in reason()
    make_details(runs[1], LABELS[1:], _logits([])[1:], ids=np.arange(1, 120), names=["x"] * 120)
    assert "1 image was left out" in reason()
    (runs[1] / "evaluations" / "made-val" / "predictions.parquet").unlink()
    assert "[details-corrupt]" in reason()
    (runs[1] / "evaluations" / "made-val" / "details.json").unlink()
    make_details(runs[1], LABELS, _logits([]), split="test")
    assert "one has details of made, val split, but two has details of made, test split" in reason()


def test_data_of_the_same_name_is_told_apart(runs: tuple[Path, Path]) -> None:
    for run, wrong in zip(runs, ([1], [2]), strict=True):
        for fingerprint in ("d1", "d2"):
            folder = make_details(run, LABELS, _logits(wrong), fingerprint=fingerprint)
            # in one run d1 comes first, in the other d2
            folder.rename(folder.with_name("a" if (fingerprint == "d1") == (run == runs[0]) else "b"))
    assert [pair.reason for pair in compare([read(run) for run in runs]).paired] == ["", ""]


def test_the_same_data_in_another_folder_is_compared(runs: tuple[Path, Path]) -> None:
    for name in ("copy", "made"):
        make_details(runs[0], LABELS, _logits([1]), name=name)
    make_details(runs[1], LABELS, _logits([2]), name="moved")
    make_details(runs[1], LABELS, _logits([2]), name="made", fingerprint="d2")
    pairs = compare([read(run) for run in runs]).paired
    assert {pair.title: pair.reason[:15] for pair in pairs} == {
        "moved, val split": "",
        "made, val split": "they were evalu",
    }


def test_comparisons_of_several_splits_are_apart(runs: tuple[Path, Path], here) -> None:
    for run, wrong in zip(runs, (range(20), range(5)), strict=True):
        for split in ("val", "test"):
            make_details(run, LABELS, _logits([*wrong]), split=split)
    lines = here("compare", *runs).stdout.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("one and two on made, ")]
    assert [lines[number - 1] for number in heads] == ["", ""]


def test_runs_without_details_are_not_mentioned(runs: tuple[Path, Path]) -> None:
    assert compare([read(run) for run in runs]).paired == []
    make_details(runs[0], LABELS, _logits([]))
    assert compare([read(run) for run in runs]).paired == []


def test_corrupt_details_are_noted(runs: tuple[Path, Path]) -> None:
    folder = make_details(runs[0], LABELS, _logits([]))
    (folder / "details.json").write_text("{}")
    assert any("[details-corrupt]" in note for note in read(runs[0]).notes)
