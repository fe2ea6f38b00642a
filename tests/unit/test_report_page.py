"""The report in a real browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from made_runs import make_run

from paceline.logbook.compare import compare
from paceline.logbook.page import report
from paceline.logbook.read import read

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no Chromium here; Debian: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Any]:
    from selenium import webdriver

    folder = tmp_path_factory.mktemp("report")
    runs = [read(make_run(folder, "one")), read(make_run(folder, "two", ranks=2))]
    path = folder / "report.html"
    path.write_text(report(compare(runs), "one and two"))
    options = webdriver.ChromeOptions()
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1000,900",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    browser.get(path.as_uri())
    yield browser
    browser.quit()


def _all(page: Any, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def test_it_opens_without_errors_and_draws_every_chart(page: Any) -> None:
    assert page.get_log("browser") == []
    assert len(_all(page, "#charts figure:not([hidden])")) == 6
    assert len(_all(page, "#charts figure:first-child path")) == 4  # training and validation of both
    assert "The same experiment" in page.find_element("id", "verdict").text
    assert len(_all(page, "#ranks .bar")) == 3


def test_runs_can_be_left_out(page: Any) -> None:
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
    assert "one, validation" in tip.text
    chart.send_keys("+")
    assert labels() != before
    chart.send_keys(Keys.ESCAPE)
    assert labels() == before


def test_the_axis_and_the_theme_change(page: Any) -> None:
    from selenium.webdriver.support.select import Select

    Select(page.find_element("id", "across")).select_by_visible_text("images")
    assert "images" in _all(page, "#charts figcaption small")[0].text
    before = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    page.find_element("id", "theme").click()
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    assert page.get_log("browser") == []


def test_it_fits_a_phone(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    )
    width = page.execute_script("return document.documentElement.scrollWidth")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= 375
