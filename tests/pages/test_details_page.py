"""What models get wrong, in a real browser: with 10, 100 and 1000 classes, by mouse and keyboard, on a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import needs_chromium
from made_details import made_logits, make_details
from made_runs import make_run
from test_report_page import _all, browser  # noqa: F401

from paceline.analysis.compare import compare
from paceline.analysis.details.text import percent
from paceline.analysis.page import report
from paceline.analysis.read import read

pytestmark = needs_chromium
_AFTER_TOGGLE = "setTimeout(() => arguments[0](document.querySelectorAll('canvas').length), 100)"
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


@pytest.fixture(params=[10, 100, 1000])
def page(browser: Any, tmp_path: Path, request) -> Iterator[Any]:  # noqa: F811
    """A report of one run with its details; the first class and all paths have hostile names."""
    classes = request.param
    run, samples = make_run(tmp_path, "one"), max(400, 2 * classes)
    names = [HOSTILE, *(f"class {number}" for number in range(1, classes))]
    values = ["day" if number % 2 else None for number in range(samples)]
    paths = [f"{HOSTILE}/{number}.jpg" for number in range(samples)]
    folder = make_details(
        run, *made_logits(classes, samples), class_names=names, slices=values, slice_by="day", names=paths
    )
    assert (folder / "slices.csv").is_file()
    yield _opened(browser, tmp_path, [run])
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def _opened(driver: Any, folder: Path, runs: list[Path]) -> Any:
    path = folder / "report.html"
    path.write_text(report(compare([read(run) for run in runs]), "a title"))
    assert path.stat().st_size < 5_000_000
    driver.get(path.as_uri())
    return driver


def _classes(page: Any) -> list[str]:
    script = """return [...document.querySelectorAll("#details table")[0].querySelectorAll("tbody tr:not([hidden])")]
        .map(row => [...row.children].map(cell => cell.textContent))"""
    rows: list[str] = page.execute_script(script)
    return rows


def _width(page: Any, width: int) -> int:
    metrics = {"width": width, "height": 700, "deviceScaleFactor": 2, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    found: int = page.execute_script("return document.documentElement.scrollWidth")
    return found


def _status(page: Any) -> str:
    return str(page.execute_script("return document.querySelector('#details [role=status]').textContent"))


def test_details_are_shown_sorted_and_explained(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    assert page.get_log("browser") == []
    rows = _classes(page)
    recalls = [float(row[1].rstrip("%")) for row in rows if row[1]]
    assert recalls == sorted(recalls)
    assert HOSTILE in {row[0] for row in rows}
    head = _all(page, "#details th button")[5]
    page.execute_script("arguments[0].click()", head)
    supports = [int(row[5]) for row in _classes(page)]
    assert supports == sorted(supports)
    assert page.execute_script("return arguments[0].closest('th').getAttribute('aria-sort')", head) == "ascending"
    page.execute_script("arguments[0].focus()", head)
    head.send_keys(Keys.ENTER)
    assert [int(row[5]) for row in _classes(page)] == supports[::-1]
    assert page.execute_script("return arguments[0].closest('th').getAttribute('aria-sort')", head) == "descending"
    pictures = _all(page, "#details .picture img")
    assert len(pictures) > 20
    assert all(picture.get_attribute("alt").startswith(HOSTILE) for picture in pictures[:5])
    assert len(_all(page, "#details svg.reliability[role=img]")) == 2
    assert _width(page, 375) <= 375
    page.execute_script("setTheme(true)")
    assert _width(page, 1000) <= 1000
    assert page.get_log("browser") == []


def test_the_confusion_matrix_says_its_cells_and_zooms(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    canvas = _all(page, "#details canvas")[0]
    page.execute_script("""const choice = document.querySelector(".matrix select");
        choice.value = "given"; choice.dispatchEvent(new Event("change"));""")
    page.execute_script("arguments[0].focus()", canvas)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert _status(page).startswith(f"{HOSTILE} predicted as {HOSTILE}: ")
    canvas.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert _status(page).startswith("class 1 predicted as class 1: ")
    data = page.execute_script("return evaluations[0].cells.slice(0, 300)")
    counts = {tuple(data[at : at + 2]): data[at + 2] for at in range(0, len(data), 3)}
    assert _status(page).startswith(f"class 1 predicted as class 1: {counts.get((1, 1), 0)} image")
    canvas.send_keys("+", "+")
    assert "predicted as" in _hovered(page, canvas)
    before = page.execute_script("return arguments[0].toDataURL()", canvas)
    canvas.send_keys(Keys.ESCAPE)
    assert page.execute_script("return arguments[0].toDataURL()", canvas) != before
    assert canvas.get_attribute("aria-label").startswith("Confusion matrix of ")
    assert page.get_log("browser") == []


def _hovered(page: Any, canvas: Any) -> str:
    script = """const box = arguments[0].getBoundingClientRect();
        const [clientX, clientY] = [box.left + 0.7 * box.width, box.top + 0.6 * box.height];
        arguments[0].dispatchEvent(new PointerEvent("pointermove", {clientX, clientY}));"""
    before = _status(page)
    page.execute_script(script, canvas)
    assert _status(page) != before
    return _status(page)


def test_two_runs_are_compared_class_by_class(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    first, second = "resnet18-baseline", "resnet18-label-smoothing-0.1"
    runs = [make_run(tmp_path, first), make_run(tmp_path, second)]
    for run, strength in zip(runs, (1.0, 6.0), strict=True):
        names = [HOSTILE, *(f"class {number}" for number in range(1, 10))]
        make_details(run, *made_logits(10, 2000, strength=strength), class_names=names)
    page = _opened(browser, tmp_path, runs)
    heads = [cell.text for cell in _all(page, "#details > .scroll thead th")]
    assert heads[1:6] == [first, second, "difference", f"only {first} right", f"only {second} right"]
    assert _width(page, 390) <= 390
    shape = "const box = arguments[0].getBoundingClientRect(); return [box.width, box.height]"
    for cell in _all(page, "#details > .scroll :is(thead th, tbody tr:nth-child(2) th)"):
        width, height = page.execute_script(shape, cell)
        assert height < 2 * width  # words are not broken into letters
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert f"10 classes are better in {second}" in _all(page, "#details .paired")[0].text
    assert len(_all(page, "#details > .scroll tbody tr")) == 10
    assert [box.get_attribute("open") for box in _all(page, "#details .evaluation")] == ["true", None]
    page.execute_script("document.querySelectorAll('#details .evaluation')[1].open = true")
    assert page.execute_async_script(_AFTER_TOGGLE) == 2
    assert page.get_log("browser") == []


def test_percentages_are_those_of_the_terminal(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    run, correct = make_run(tmp_path, "one"), 32
    labels, logits = np.zeros(47, int), np.zeros((47, 2), np.float32)
    logits[:correct, 0] = logits[correct:, 1] = 1
    make_details(run, labels, logits)
    rows = _classes(_opened(browser, tmp_path, [run]))
    assert rows[0][1] == percent(correct / 47) == "68.09%"  # 0.68085 is rounded to 68.08%


@pytest.mark.parametrize(("classes", "shown"), [(5, False), (6, True)])
def test_top5_is_shown_only_if_it_can_be_wrong(browser: Any, tmp_path: Path, classes: int, shown: bool) -> None:  # noqa: F811
    run = make_run(tmp_path, "one")
    make_details(run, *made_logits(classes, 100), slices=["a"] * 100, slice_by="a")
    page = _opened(browser, tmp_path, [run])
    heads = [cell.text for cell in _all(page, "#details thead th button")]
    assert ("top-5" in heads) == shown
