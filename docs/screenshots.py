"""Take the screenshot of the documentation with Chromium, from runs of your own.

paceline train digits --name one-process
paceline train digits --name two-processes --procs 2
python docs/screenshots.py runs/one-process runs/two-processes
"""

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver

from paceline import report

IMAGES = Path(__file__).with_name("images")
_WIDTH, _HEIGHT = 1100, 1280
_MAX_BYTES = 300_000


def main() -> int:
    """Write docs/images/report.png: the top of a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        picture = _screenshot(report(runs, Path(folder) / "report.html"))
    IMAGES.mkdir(exist_ok=True)
    target = IMAGES / "report.png"
    picture.quantize(128).save(target, optimize=True)  # a page has few colors
    size = target.stat().st_size
    print(f"{target}: {size / 1000:.0f} kB")
    return int(size > _MAX_BYTES)


def _screenshot(page: Path) -> Image.Image:
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        metrics = {"width": _WIDTH, "height": _HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(page.as_uri())
        return Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    finally:
        browser.quit()


if __name__ == "__main__":
    sys.exit(main())
