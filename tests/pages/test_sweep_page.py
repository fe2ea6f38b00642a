"""The results of a sweep: reading them, the table, and the page in a real browser."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium, needs_chromium
from conftest import raises

from paceline.analysis.sweeps.page import sweep_page
from paceline.analysis.sweeps.record import RESULTS, SWEEP, SweepRecord, SweepTrial, read_sweep
from paceline.analysis.sweeps.text import summary_line, trial_table
from paceline.config.io import load_recipe
from paceline.search.spec import make_spec
from paceline.search.worker import devices_of
from paceline.system.gpus import Gpu
from paceline.track.records import RunFolder


def _trial(number: int, state: str, value: float | None, **more: Any) -> SweepTrial:
    values = {"optim.lr": repr(0.01 * 1.5**number), "optim.name": ("sgd", "adamw")[number % 2]}
    epoch = None if value is None else 10.0
    return SweepTrial(number, state, values, f"trial-{number:04}", value, epoch, epoch, **more)  # type: ignore[arg-type]


TRIALS = [
    *(_trial(number, "complete", 0.9 - 0.01 * (number - 3) ** 2, curve=[(1, 0.5), (2, 0.6)]) for number in range(8)),
    _trial(8, "pruned", 0.95, reason="pruned: </script><b>x</b>"),
    _trial(9, "failed", None, reason="out of memory [rank-failed]"),
    _trial(10, "running", None),
]
RECORD = SweepRecord(
    name="lr",
    recipe="digits",
    metric="top1",
    space={"optim.lr": "log:0.01..1", "optim.name": "sgd,adamw"},
    sampler="tpe",
    pruner="median",
    planned=11,
    trials=TRIALS,
    importance={"optim.lr": 0.9, "optim.name": 0.1},
)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / SWEEP).write_text("{}")
    RECORD.write(tmp_path)
    assert read_sweep(tmp_path) == RECORD


def test_corrupt_results_are_refused(tmp_path: Path) -> None:
    with raises("sweep-not-found"):
        read_sweep(tmp_path)
    (tmp_path / SWEEP).write_text("{}")
    with raises("sweep-results-corrupt"):
        read_sweep(tmp_path)
    RECORD.write(tmp_path)
    text = (tmp_path / RESULTS).read_text()
    for content in (
        *("", "[]", "{}", "null", "[" * 100_000, text[:-40], text.replace("0.9", "0.8", 1)),
        text.partition('"crc"')[0].rstrip(", ").replace('"planned": 11', '"planned": 1e999') + "}",
        text.partition('"crc"')[0].rstrip(", ").replace('"complete"', '"done"') + "}",
    ):
        (tmp_path / RESULTS).write_text(content)
        with raises("sweep-results-corrupt"):
            read_sweep(tmp_path)


def test_the_best_trial_is_complete_and_first_in_the_table() -> None:
    assert RECORD.best == TRIALS[3]
    head, *rows = trial_table(RECORD)
    assert head == ["trial", "top-1", "epoch", "optim.lr", "optim.name", "state", "time"]
    assert rows[0] == ["3", "90.00%", "10", "0.03375", "adamw", "complete", "10.0 s"]
    assert [row[0] for row in rows[-3:]] == ["8", "9", "10"]
    by_loss = replace(RECORD, metric="loss")
    assert by_loss.best == min(TRIALS[:8], key=lambda trial: trial.value or 0)
    assert trial_table(by_loss)[1][0] == str(by_loss.best.number)
    assert "8 complete, 1 pruned, 1 failed, 1 running" in summary_line(RECORD)


def test_a_request_to_stop_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.requested_stop() is None
    folder.request_stop("sweep", "it is worse than others")
    assert folder.requested_stop() == ("sweep", "it is worse than others")
    text = folder.stop_request.read_text()
    for content in ("", "[]", "{}", '{"by": 1, "reason": "x"}', text[:20], text.replace("worse", "wurse")):
        folder.stop_request.write_text(content)
        assert folder.requested_stop() is None


def test_trials_side_by_side_have_their_own_gpus_or_cores(tmp_path: Path, monkeypatch) -> None:
    recipe = load_recipe("digits")
    spec = make_spec(recipe, ["seed=0,1"], tmp_path, parallel=2, procs=2)
    monkeypatch.delenv("PACELINE_THREADS", raising=False)
    monkeypatch.setattr("paceline.search.worker.cores", lambda: 16)
    assert devices_of(spec) == [{"PACELINE_THREADS": "4"}] * 2
    gpus = [Gpu("nvidia", "A100", f"GPU-{number}") for number in range(4)]
    monkeypatch.setattr("paceline.search.worker.visible_gpus", lambda: gpus)
    names = [{"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}, {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3"}]
    assert devices_of(spec) == names
    with raises("too-few-gpus"):
        devices_of(replace(spec, parallel=3))
    assert devices_of(replace(spec, parallel=1)) == [{}]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def _opened(browser: Any, folder: Path, record: SweepRecord, width: int = 1000) -> Any:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    (folder / "page.html").write_text(sweep_page(record))
    browser.get((folder / "page.html").as_uri())
    return browser


def _count(page: Any, selector: str) -> int:
    return len(page.find_elements("css selector", selector))


@needs_chromium
@pytest.mark.parametrize("width", [1000, 375])
def test_the_page_shows_every_trial(browser: Any, tmp_path: Path, width: int) -> None:
    page = _opened(browser, tmp_path, RECORD, width)
    assert page.get_log("browser") == []
    assert _count(page, "#history circle") == _count(page, "#parallel path.trial") == 9
    assert _count(page, "#parallel path.pruned") == _count(page, "#history .pruned") == 1
    assert _count(page, "#parallel line.axis") == 3
    assert _count(page, "#trials tbody tr") == 11
    assert _count(page, "#importance .bar") == 2
    assert _count(page, "b") == 2, "reasons are text: the only <b> are bars"
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    outside = """return [...document.querySelectorAll('svg.plot')].filter(svg => [...svg.children].some(part => {
        const box = part.getBoundingClientRect(), all = svg.getBoundingClientRect();
        return box.left < all.left - 6 || box.right > all.right + 6 || box.bottom > all.bottom + 6;
    })).length"""
    assert page.execute_script(outside) == 0


@needs_chromium
def test_a_trial_is_marked_in_all_charts(browser: Any, tmp_path: Path) -> None:
    page = _opened(browser, tmp_path, RECORD)
    page.execute_script(
        "document.querySelector('#parallel .hit[data-trial=\"3\"]')"
        ".dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 300, clientY: 500}))"
    )
    assert {node.get_attribute("data-trial") for node in page.find_elements("css selector", ".chosen")} == {"3"}
    assert _count(page, ".chosen") == 3
    tip = page.find_element("css selector", "#parallel .tip")
    assert "90%" in tip.text
    assert "optim.name" in tip.text
    page.find_element("id", "theme").click()
    assert page.execute_script("return document.documentElement.dataset.theme") in ("dark", "light")


@needs_chromium
@pytest.mark.parametrize("trials", [[], TRIALS[9:], TRIALS[:1], [TRIALS[0]] * 2])
def test_the_page_of_a_sweep_with_few_results(browser: Any, tmp_path: Path, trials: list[SweepTrial]) -> None:
    page = _opened(browser, tmp_path, replace(RECORD, trials=trials, importance=None))
    assert page.get_log("browser") == []
    assert _count(page, "#trials tbody tr") == len(trials)
    assert "NaN" not in page.execute_script("return document.querySelector('main').innerHTML")
