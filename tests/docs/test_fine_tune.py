"""The whole way of examples/fine_tune.py, and a browser that asks the served model (CPU)."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium, needs_chromium
from selenium.webdriver.support.wait import WebDriverWait

SCRIPT = Path(__file__).parents[2] / "examples" / "fine_tune.py"
SHORT = ("--train.duration", "3ep", "--evaluate.every", "3ep", "--precision", "fp32", "--device", "cpu")
HANG = 900  # seconds


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("example") / "out"
    command = [sys.executable, str(SCRIPT), "--out", str(out), *SHORT]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=out.parent, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "same class for 648 of 648 images" in answer.stdout
    return out


def _predictions(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row["path"]: row["class_1"] for row in csv.DictReader(file)}


def test_every_image_is_predicted_and_onnx_runtime_agrees(out: Path) -> None:
    found = _predictions(out / "predictions.csv")
    assert found == _predictions(out / "predictions-onnx.csv")
    assert {Path(name) for name in found} == set((out / "images").rglob("*.jpg"))
    right = sum(Path(name).parent.name == predicted for name, predicted in found.items())
    assert right > 0.6 * len(found)  # three epochs; always the same class is right for at most 30%


def test_no_two_splits_have_parts_of_the_same_cell(out: Path) -> None:
    cells = [
        {re.match(r"\w+/cell-\d+-\d+", name)[0] for name in path.read_text().split()}  # type: ignore[index]
        for path in sorted((out / "data").glob("original/*/names.txt"))
    ]
    assert len(cells) == 3
    assert sum(map(len, cells)) == len(set.union(*cells)) == 72


def test_the_test_split_is_evaluated_in_detail(out: Path) -> None:
    (folder,) = (out / "runs" / "fine-tuned" / "evaluations").iterdir()
    details = json.loads((folder / "details.json").read_text())
    with (folder / "classes.csv").open(encoding="utf-8", newline="") as file:
        classes = list(csv.DictReader(file))
    assert {row["name"] for row in classes} == {"flower", "leaves", "sky", "temple", "trees"}
    assert "test" in json.dumps(details)
    assert "confusion" in (out / "report.html").read_text().lower()


@needs_chromium
def test_a_browser_asks_the_served_model(out: Path) -> None:
    name, predicted = next(iter(_predictions(out / "predictions.csv").items()))
    run = out / "runs" / "fine-tuned"
    command = [sys.executable, "-m", "paceline", "serve", str(run), "--port", "0", "--device", "cpu"]
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=unbuffered) as server:
        try:
            lines = iter(server.stdout or ())
            address = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            with chromium() as browser:
                browser.get(address)
                browser.find_element("id", "file").send_keys(name)
                shown = WebDriverWait(browser, HANG).until(lambda page: _answer(page))
                assert shown.startswith(f"{predicted},")
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0


def _answer(page: Any) -> str:
    text = page.find_element("id", "status").text
    return text if text.endswith("%") or "Error" in text else ""
