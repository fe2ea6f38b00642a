"""The temperature of predictions: logits are divided by it (CPU, fp32)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import complaint, raises
from PIL import Image
from trained_model import CPU, colored, train_model

import paceline as pl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    train_model(path)
    return path


def test_logits_are_divided_by_the_temperature(folder: Path, tmp_path: Path, one_thread, here) -> None:
    """With test-time augmentation the mean of the logits is, as in the evaluation that fits the temperature."""
    run, image = folder / "runs" / "colors", tmp_path / "image.png"
    colored("red", 0).save(image)
    model = pl.Run(run).load_model()
    pixels = model.preprocess(Image.open(image))[None]
    with torch.no_grad():
        logits = {"none": model(pixels), "flip": (model(pixels) + model(pixels.flip(-1))) / 2}
    for tta, temperature in ((tta, temperature) for tta in logits for temperature in (1.0, 2.5)):
        classify = pl.load_classifier(run, device="cpu", tta=tta, temperature=temperature)
        (topk,) = classify([image], top=3)
        expected = (logits[tta] / temperature).softmax(1).sort(descending=True).values[0]
        np.testing.assert_allclose([each.probability for each in topk], expected, rtol=1e-4)
    words = ("--evaluate.tta", "flip", "--temperature", 2.5, *CPU)
    answer = here("predict", run, image, "--top", 3, "--out", "p.jsonl", *words)
    found = json.loads((tmp_path / "p.jsonl").read_text())["top"]
    np.testing.assert_allclose([each["probability"] for each in found], expected, rtol=1e-4, err_msg=answer.stderr)
    (one,) = pl.predict(run, image, top=3, tta="flip", temperature=2.5, device="cpu", procs=1)
    np.testing.assert_allclose([each.probability for each in one.top], expected, rtol=1e-4)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e-40", "x"])
def test_invalid_temperatures_are_refused(tmp_path: Path, here, value: str) -> None:
    for command in ("predict", "serve"):
        assert "is not a number from 0.001 to 1000" in complaint(here(command, "run", f"--temperature={value}"))
    for function in (pl.load_classifier, pl.serve, lambda run, **more: pl.predict(run, "x.jpg", **more)):
        with raises("invalid-argument"):
            function("run", temperature=value if value == "x" else float(value))
