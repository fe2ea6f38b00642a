"""Take the pictures of the documentation with Chromium: python docs/screenshots.py [RUN ...].

Nothing is trained. Without runs, the report is about made-up ones, and its title says so.
"""

import argparse
import io
import json
import math
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
_STEPS = 220


def main() -> int:
    """Write docs/images/report.png: the top of a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        title = "" if runs else "One process and two (made-up figures)"
        page = report(runs or _made_up(Path(folder)), Path(folder) / "report.html", title=title)
        picture = _screenshot(page)
    IMAGES.mkdir(exist_ok=True)
    target = IMAGES / "report.png"
    picture.quantize(128).save(target, optimize=True)  # a page has few colors
    size = target.stat().st_size
    print(f"{target}: {size / 1000:.0f} kB")
    return int(size > _MAX_BYTES)


def _made_up(folder: Path) -> list[Path]:
    """Return two runs with curves that saturate; the second takes a bit more than half of the time."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from made_runs import make_run

    seconds = {"data": 0.004, "compute": 0.21, "optimizer": 0.006}
    halved = {"data": 0.002, "compute": 0.11, "sync": 0.012, "optimizer": 0.006}
    runs = [
        make_run(folder, "one-process", steps=_STEPS, every=11, seconds=seconds, memory=[6_100_000_000]),
        make_run(folder, "two-processes", ranks=2, steps=_STEPS, every=11, seconds=halved, memory=[3_400_000_000] * 2),
    ]
    for run in runs:
        path = run / "metrics.jsonl"
        records = [_saturating(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return runs


def _saturating(record: dict[str, object]) -> dict[str, object]:
    progress = float(str(record["step"])) / _STEPS
    left, wave = math.exp(-4 * progress), math.sin(40 * progress) * (1 - progress) * 0.01
    if record["kind"] == "train":
        record |= {"loss": 0.55 + 1.6 * left + 4 * wave, "top1": 0.96 - 0.75 * left - wave, "lr": 0.1 * (1 - progress)}
    elif record["kind"] == "eval":
        record |= {"loss": 0.16 + 1.2 * left + wave, "top1": 0.991 - 0.55 * left + wave, "correct": 350}
    return record


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
