"""The page of `paceline serve` in a real browser: choose, drop and paste images, themes, a phone (CPU, fp32)."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import chromium, needs_chromium
from sample_images import jpeg
from trained_model import colored

from paceline.api.serving import ModelServer
from paceline.data.classes import Class
from paceline.inference.classifier import Classifier, ModelMetadata
from paceline.system.http_server import HttpServer

pytestmark = needs_chromium
LONG = "a very long name of a class, " * 8
# a file in the browser, as a drop or paste would have it
PUT = """
const bytes = Uint8Array.from(atob(arguments[1]), (letter) => letter.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], "image.jpg", { type: "image/jpeg" }));
const event = arguments[0] === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true })
  : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
document.getElementById("drop").dispatchEvent(event);
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    classes = tuple(Class(name, name) for name in ("red", "green", "<b>blue</b>", LONG))

    def forward(images: torch.Tensor) -> torch.Tensor:
        means = 20 * images.mean((2, 3))
        return torch.cat([means, means[:, :1] - 3], 1)

    metadata = ModelMetadata(classes, 16, 1.0, (0.0,) * 3, (1.0,) * 3)
    model = ModelServer(Classifier("runs/colors", metadata, forward, torch.device("cpu")))
    server = HttpServer("127.0.0.1", 0, model.site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.port}/"
    server.shutdown()
    thread.join()
    server.server_close()
    model.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        browser.implicitly_wait(60)
        yield browser


@pytest.fixture
def page(browser: Any, address: str) -> Any:
    browser.get(address)
    return browser


def _names(page: Any) -> list[str]:
    return [name.text for name in page.find_elements("css selector", "#classes .name")]


def _status(page: Any, word: str) -> str:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(page, 60).until(lambda page: word in page.find_element("id", "status").text)
    return page.find_element("id", "status").text


def test_a_chosen_image_is_classified(page: Any, tmp_path: Path) -> None:
    (tmp_path / "red.jpg").write_bytes(jpeg(colored("red", 1)))
    page.find_element("id", "file").send_keys(str(tmp_path / "red.jpg"))
    assert _status(page, "red,").endswith("%")
    assert _names(page)[0] == "red"
    assert "<b>blue</b>" in _names(page)  # names are text, not HTML
    widths = [bar.size["width"] for bar in page.find_elements("css selector", ".bar")]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]
    assert page.find_element("id", "preview").is_displayed()
    assert "colors: 4 classes" in page.find_element("id", "model").text
    assert "/predict" in page.find_element("id", "curl").text
    assert page.get_log("browser") == []


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_an_image_is_dropped_or_pasted(page: Any, way: str) -> None:
    import base64

    page.execute_script(PUT, way, base64.b64encode(jpeg(colored("green", 1))).decode())
    _status(page, "green,")
    assert _names(page)[0] == "green"


def test_a_file_that_is_not_an_image_is_an_error_and_the_next_one_works(page: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    (tmp_path / "red.jpg").write_bytes(jpeg(colored("red", 2)))
    page.find_element("id", "file").send_keys(str(tmp_path / "bad.jpg"))
    assert "cannot be read" in _status(page, "Error")
    page.find_element("id", "file").send_keys(str(tmp_path / "red.jpg"))
    _status(page, "red,")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_fits_a_phone_in_both_themes(page: Any, tmp_path: Path, theme: str) -> None:
    phone = {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    (tmp_path / "red.jpg").write_bytes(jpeg(colored("red", 3)))
    page.find_element("id", "file").send_keys(str(tmp_path / "red.jpg"))
    _status(page, "red,")
    assert LONG.strip() in _names(page)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 375
    ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")
    page.save_screenshot(str(tmp_path / f"{theme}.png"))
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_keyboard_reaches_the_file_input(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    page.find_element("tag name", "body").send_keys(Keys.TAB)
    assert page.switch_to.active_element.get_attribute("id") == "file"
    assert page.find_element("id", "status").get_attribute("aria-live") == "polite"
