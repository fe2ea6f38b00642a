"""The report in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium, needs_chromium
from made_runs import make_run

from paceline.analysis.compare import compare
from paceline.analysis.page import report
from paceline.analysis.read import read

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:
    """A report of two runs."""
    return _opened(browser, tmp_path, [make_run(tmp_path, "one"), make_run(tmp_path, "two", ranks=2)])


@pytest.fixture
def many(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A report of twelve runs with long names, in a window 1000 pixels wide."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1000, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    )
    folders = [
        make_run(tmp_path, f"digits-on-one-process-2026-11-16-{number:02d}", "--seed", str(number), top1=(0.97, 0.99))
        for number in range(12)
    ]
    yield _opened(browser, tmp_path, folders)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def _opened(browser: Any, folder: Path, runs: list[Path]) -> Any:
    path = folder / "report.html"
    path.write_text(report(compare([read(run) for run in runs]), "a title"))
    browser.get(path.as_uri())
    return browser


def _all(page: Any, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def test_page_opens_without_errors_and_draws_every_chart(page: Any) -> None:
    assert page.get_log("browser") == []
    assert len(_all(page, "#charts figure:not([hidden])")) == 6
    assert len(_all(page, "#charts figure:first-child path")) == 4  # training and validation of both
    assert "The same experiment" in page.find_element("id", "verdict").text
    assert len(_all(page, "#ranks .bar")) == 3


def test_runs_can_be_hidden(page: Any) -> None:
    button = _all(page, "#runs button")[1]
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert len(_all(page, "#charts figure:first-child path")) == 2
    assert len(_all(page, "#ranks .bar")) == 1
    button.click()
    assert len(_all(page, "#charts figure:first-child path")) == 4


def test_keys_move_zoom_and_reset(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    chart = _all(page, "#charts svg")[0]
    labels = lambda: [text.text for text in chart.find_elements("css selector", "text")]  # noqa: E731
    before = labels()
    page.execute_script("arguments[0].focus()", chart)
    chart.send_keys(Keys.ARROW_RIGHT)
    tip = _all(page, "#charts figure:first-child .tip")[0]
    assert tip.is_displayed()
    assert "validation" in tip.text
    chart.send_keys("+")
    assert labels() != before
    chart.send_keys(Keys.ESCAPE)
    assert labels() == before


def test_axis_and_theme_change(page: Any) -> None:
    from selenium.webdriver.support.select import Select

    Select(page.find_element("id", "x-axis")).select_by_visible_text("images")
    assert "images" in [text.text for text in _all(page, "#charts figure:first-child text.axis")]
    before = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    page.find_element("id", "theme").click()
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    assert page.get_log("browser") == []


def test_page_fits_a_phone(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    )
    width = page.execute_script("return document.documentElement.scrollWidth")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= 375


def _marks(page: Any, selector: str) -> list[tuple[str, str]]:
    """Return color and dashes of lines as drawn."""
    script = """return [...document.querySelectorAll(arguments[0])].map(line =>
        [getComputedStyle(line).stroke, getComputedStyle(line).strokeDasharray])"""
    return [tuple(mark) for mark in page.execute_script(script, selector)]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_run_has_its_own_line_style_in_charts_buttons_and_table(many: Any, theme: str) -> None:
    many.execute_script("setTheme(arguments[0] === 'dark')", theme)
    legend = _marks(many, "#runs .mark line")
    assert len(set(legend)) == len(legend) == 12
    assert _marks(many, "#charts figure:first-child path.curve.thin") == legend
    assert _marks(many, "#charts figure:first-child path.curve:not(.thin)") == legend
    assert _marks(many, "#results tbody .mark line") == legend


def test_top1_of_many_runs_is_visible(many: Any) -> None:
    script = """return [...document.querySelectorAll("#results tbody tr")].map(row => {
        const cell = row.querySelector("td"), box = cell.getBoundingClientRect();
        return [cell.textContent, box.left, box.right]; })"""
    cells = many.execute_script(script)
    assert [text for text, _, _ in cells] == ["99.00% of 360"] * 12
    assert all(left >= 0 and right <= 1000 for _, left, right in cells)
    assert many.execute_script("return document.documentElement.scrollWidth") <= 1000


def test_tooltips_of_many_lines_are_short_and_within_the_window(many: Any) -> None:
    script = """const plot = document.querySelectorAll("#charts svg.plot")[arguments[0]];
        plot.scrollIntoView({block: "end"});
        const box = plot.getBoundingClientRect(), clientX = box.left + arguments[1] * box.width;
        plot.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY: box.top + 20}));
        const tip = plot.parentElement.querySelector(".tip"), area = tip.getBoundingClientRect();
        const values = [...tip.querySelectorAll("b")].map(value => parseFloat(value.textContent));
        return [values, tip.textContent, area.left, area.top, area.right, area.bottom];"""
    for chart in range(6):
        for position in (0.2, 0.6, 0.95):
            values, text, left, top, right, bottom = many.execute_script(script, chart, position)
            assert len(values) == 10
            assert values == sorted(values, reverse=True)
            assert "more" in text
            assert left >= 0
            assert top >= 0
            assert right <= 1000
            assert bottom <= 700


def test_accuracy_axis_fits_the_curves(many: Any) -> None:
    labels = "#charts figure:first-child text[text-anchor=end]"
    percents = [float(label.text.removesuffix("%")) for label in _all(many, labels)]
    assert len(percents) >= 3
    assert 97 <= min(percents) < max(percents) <= 100
    many.find_element("css selector", "#uncut input").click()
    percents = [float(label.text.removesuffix("%")) for label in _all(many, labels)]
    assert min(percents) <= 60  # the training curves at 50% are visible
    many.find_element("css selector", "#thin input").click()
    assert _all(many, "#charts path.thin") == []


def test_captions_of_many_runs_are_short(many: Any) -> None:
    labels = [plot.get_attribute("aria-label") for plot in _all(many, "#charts svg.plot")]
    assert labels[0] == "top-1 by epoch: 12 runs"
    assert max(map(len, labels)) < 60
    script = """return [...document.querySelectorAll("figure")].every(box =>
        box.querySelector("figcaption").scrollWidth <= box.clientWidth)"""
    assert many.execute_script(script)


def test_groups_of_seeds_have_charts_that_fit(many: Any) -> None:
    assert many.get_log("browser") == []
    charts = _all(many, "#groups .intervals svg")
    assert len(charts) == 3
    assert len(_all(charts[0], "circle")) == 12
    assert all(0 < chart.size["width"] <= 1000 for chart in charts)
    assert many.execute_script("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
