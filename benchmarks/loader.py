"""Paceline's loader against others on the same images: images per CPU second on one core, and images/s on all cores.

    python benchmarks/loader.py --images DIR_OR_TAR [--out loader-benchmark] [--rounds 5]

Every loader applies RandomResizedCrop and flip in batches of 256 from a warm page cache. Each measurement runs in its
own process, pinned to its cores. Loaders alternate round by round, so that noise affects all of them. Reports medians
over rounds; ratios are within a round. Loaders that are not installed are skipped and listed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loader_contestants import BASELINE, BATCH, contestants
from loader_data import COPIES, prepare


def processor_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def measure(name: str, work: Path, size: int, cores: int, seconds: float) -> dict[str, float]:
    """Return images per second of wall time and of CPU time; called in a separate process."""
    available = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, available)
    batches = contestants()[name][1](work, size, cores)
    _draw(batches, seconds / 2)  # warm-up: start, compilation, page cache, buffers
    begin, used = time.perf_counter(), processor_seconds()
    images = _draw(batches, seconds)
    wall, processor = time.perf_counter() - begin, processor_seconds() - used
    return {"wall": images / wall, "processor": images / processor}


def _draw(batches: Iterator[Any], seconds: float) -> int:
    """Take batches for that many seconds. Returns the number of images."""
    begin, images = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        next(batches)
        images += BATCH
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder or tar of JPEG images")
    parser.add_argument("--out", type=Path, default=Path("loader-benchmark"), help="where data and results go")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 128])
    parser.add_argument("--only", nargs="+", default=[], help="only loaders whose names contain one of these words")
    parser.add_argument("--measure", nargs=3, metavar=("NAME", "SIZE", "CORES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.out / "data"
    if options.measure:
        name, size, cores = options.measure
        print(json.dumps(measure(name, work, int(size), int(cores), options.seconds)))
        os._exit(0)  # ends the workers of other loaders
    if not options.images:
        parser.error("--images DIR_OR_TAR is required")
    work.mkdir(parents=True, exist_ok=True)
    chosen: list[str] = []
    missing: list[str] = []
    for name, (module, _) in contestants().items():
        if options.only and name != BASELINE and not any(word in name for word in options.only):
            continue
        (chosen if _installed(module) else missing).append(name)
    for name in missing:
        print(f"skipped, not installed: {name}")
    print(f"{prepare(options.images, work, set(chosen))} images, {COPIES} copies of each file")
    results = _rounds(options, chosen)
    _report(results, options.out)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _rounds(options: argparse.Namespace, chosen: list[str]) -> dict[str, dict[str, list[dict[str, float]]]]:
    everything = len(os.sched_getaffinity(0))
    settings = [(size, cores) for size in options.sizes for cores in sorted({1, everything})]
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(options.rounds):
        for size, cores in settings:
            for name in chosen:
                words = [sys.executable, __file__, "--out", str(options.out), "--seconds", str(options.seconds)]
                words += ["--measure", name, str(size), str(cores)]
                answer = subprocess.run(words, capture_output=True, text=True, check=False)
                if answer.returncode:
                    print(f"{name} failed: {answer.stderr.strip().splitlines()[-1]}")
                    continue
                key = f"{size} px, {cores} core{'s' if cores > 1 else ''}"
                results.setdefault(key, {}).setdefault(name, []).append(json.loads(answer.stdout.splitlines()[-1]))
        print(f"round {number + 1} of {options.rounds}", flush=True)
    return results


def _report(results: dict[str, dict[str, list[dict[str, float]]]], out: Path) -> None:
    table: dict[str, dict[str, dict[str, float]]] = {}
    for key, rows in results.items():
        kind = "processor" if key.endswith("1 core") else "wall"
        print(f"\n{key}: images per {'CPU second' if kind == 'processor' else 'second'}, ratio to {BASELINE}")
        for name, rounds in rows.items():
            base = rows.get(BASELINE, rounds)
            ratios = [own[kind] / other[kind] for own, other in zip(rounds, base, strict=False)]
            figures = {
                "images_per_second": statistics.median(r[kind] for r in rounds),
                "ratio": statistics.median(ratios),
            }
            table.setdefault(key, {})[name] = figures
            print(f"  {name:36}{figures['images_per_second']:10,.0f}{figures['ratio']:9.2f}x")
    (out / "results.json").write_text(json.dumps({"table": table, "rounds": results}, indent=1) + "\n")
    print(f"\n{out / 'results.json'}, {_chart(table, out)}")


def _chart(table: dict[str, dict[str, dict[str, float]]], out: Path) -> str:
    """Write a bar chart with Pillow, which saves a dependency on a plotting library. Returns its path."""
    from PIL import Image, ImageDraw

    rows = [(key, name, row["ratio"]) for key, names in table.items() for name, row in names.items()]
    longest = max(ratio for _, _, ratio in rows)
    image = Image.new("RGB", (1000, 24 * (len(rows) + len(table)) + 20), "white")
    draw = ImageDraw.Draw(image)
    y, last = 10, ""
    for key, name, ratio in rows:
        if key != last:
            draw.text((10, y + 4), f"{key}: times {BASELINE}", fill="black")
            y, last = y + 24, key
        color = "#1f5fa8" if name.startswith("paceline") else "#9a9a9a"
        draw.rectangle((260, y + 3, 260 + int(660 * ratio / longest), y + 19), fill=color)
        draw.text((20, y + 4), name, fill="black")
        draw.text((268 + int(660 * ratio / longest), y + 4), f"{ratio:.1f}", fill="black")
        y += 24
    image.save(out / "results.png")
    return str(out / "results.png")


if __name__ == "__main__":
    main()
