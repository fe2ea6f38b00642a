"""The calibration of a model: expected error, temperature, and what is recommended."""

import json
from pathlib import Path

import numpy as np
import pytest
from made_details import made_figures, made_logits, make_details
from scipy.optimize import brute
from scipy.special import log_softmax, softmax

from paceline.analysis.details.calibration import BINS, best_temperature, negative_log_likelihood
from paceline.analysis.details.text import summary_lines

CLASSES = 9


def test_calibration_error_is_that_of_its_definition() -> None:
    labels, logits = made_logits(CLASSES, 400, strength=2.0)
    found = made_figures(labels, logits).record["calibration"]
    for temperature, bins, ece in ((1.0, "bins", "ece"), (found["temperature"], "bins_after", "ece_after")):
        p = softmax(logits.astype(np.float64) / temperature, axis=1)
        confidence, correct = p.max(1), p.argmax(1) == labels
        error = 0.0
        for number, each in enumerate(found[bins]):
            inside = (confidence > number / BINS) & (confidence <= (number + 1) / BINS)
            assert each["count"] == inside.sum()
            if inside.any():
                assert each["accuracy"] == pytest.approx(correct[inside].mean())
                assert each["confidence"] == pytest.approx(confidence[inside].mean())
                error += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
        assert len(found[bins]) == BINS
        assert found[ece] == pytest.approx(error)
    assert found["temperature"] != 1


def test_the_temperature_minimizes_the_loss() -> None:
    labels, logits = made_logits(CLASSES, 400, strength=2.0)

    def loss(temperature: float) -> float:
        return -log_softmax(logits / temperature, axis=1)[np.arange(len(labels)), labels].mean()

    found = best_temperature(labels, logits)
    assert found == pytest.approx(brute(loss, [(0.2, 5.0)], Ns=40)[0], rel=1e-2)
    assert negative_log_likelihood(labels, logits, found) == pytest.approx(loss(found), rel=1e-5)
    assert best_temperature(np.array([0, 1]), np.array([[3.0, 0], [0, 3.0]], np.float32)) is None  # all are right
    assert best_temperature(np.array([0, 1]), np.array([[0, 3.0], [3.0, 0]], np.float32)) is None  # none is
    record = made_figures(labels, logits).record["calibration"]
    assert record["temperature"] == found
    assert record["ece_after"] < record["ece"]
    assert record["loss_after"] < negative_log_likelihood(labels, logits, 1.0)
    record = made_figures(np.array([0, 1]), np.array([[3.0, 0], [0, 3.0]], np.float32)).record
    assert record["calibration"]["temperature"] is None
    assert "bins_after" not in record["calibration"]


def test_the_temperature_of_large_logits_is_found() -> None:
    labels, logits = made_logits(CLASSES, 400, strength=2.0)
    assert best_temperature(labels, logits * 300) == pytest.approx(300 * best_temperature(labels, logits), rel=1e-3)
    huge = np.array([[3e38, -3e38], [-3e38, 3e38], [3e38, -3e38]], np.float32)  # twice as much is infinite in fp32
    record = made_figures(np.array([0, 1, 1]), huge).record
    json.dumps(record, allow_nan=False)
    assert record["calibration"]["temperature"] is None


def test_a_temperature_of_test_images_is_not_recommended(tmp_path: Path) -> None:
    labels, logits = made_logits(CLASSES, 400, strength=2.0)
    for split in ("val", "test"):
        record = json.loads((make_details(tmp_path, labels, logits, split=split) / "details.json").read_text())
        option = f"--temperature {record['calibration']['temperature']:.3g}"
        assert any(option in line for line in summary_lines(record)) == (split == "val")
