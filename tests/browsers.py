"""A real browser for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_BROWSER, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (_BROWSER and _DRIVER), reason="no Chromium here; Debian: apt-get install chromium chromium-driver"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless browser without a page."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    words = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1000,900")
    for word in words:
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    try:
        yield browser
    finally:
        browser.quit()
