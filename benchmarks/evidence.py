"""Time of compare and report for long runs on many ranks, size of the page, and cost of the telemetry sampler.

    python benchmarks/evidence.py [--records 100000] [--ranks 64]

Uses two generated run folders with that many logged steps and per-rank values in each step.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from paceline.analysis.compare import compare
from paceline.analysis.page import report
from paceline.analysis.read import read
from paceline.analysis.tables import table
from paceline.config.io import dump_recipe, load_recipe
from paceline.track.telemetry import HostSampler


def generate(folder: Path, records: int, ranks: int) -> None:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("digits")))
    start = {"ranks": ranks, "host_of_rank": [f"host-{rank // 8}" for rank in range(ranks)], "precision": "fp32"}
    (folder / "environment.json").write_text(
        json.dumps({"starts": [start | {"data": "x", "packages": {"paceline": "1"}}]})
    )
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "global_batch": 128}))
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, records + 1):
            split = {
                part: [round(draw.random(), 9) for _ in range(ranks)]
                for part in ("data", "compute", "sync", "optimizer")
            }
            record = {
                "kind": "train",
                "step": step,
                "epoch": step / 1000,
                "phase": 0,
                "steps": 1,
                "lr": 0.1,
                "images": 128,
            }
            record |= {"loss": draw.random(), "top1": draw.random(), "images_per_second": 1000 * draw.random()}
            record |= {"seconds": {part: sum(each) / ranks for part, each in split.items()}}
            record |= {"seconds_per_rank": split, "memory_per_rank": [10**9] * ranks, "time": 1.7e9 + step}
            file.write(json.dumps(record) + "\n")
            if step % 1000 == 0:
                place = {"kind": "eval", "step": step, "epoch": step / 1000, "phase": 0, "seconds": 1.0}
                file.write(
                    json.dumps(place | {"top1": step / records, "top5": 1.0, "loss": 1.0, "samples": 50000}) + "\n"
                )


def sampler_cost(folder: Path, seconds: float) -> float:
    """Return the fraction of a core that the sampler uses, measured at a higher rate and scaled back."""
    often = 20
    begin = time.process_time()
    sampler = HostSampler(folder / "telemetry", interval=1 / often)
    time.sleep(seconds)
    sampler.stop()
    return (time.process_time() - begin) / seconds / often


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the sampler is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / name for name in ("a", "b")]
        for folder in folders:
            generate(folder, options.records, options.ranks)
        size = sum((folder / "metrics.jsonl").stat().st_size for folder in folders)
        begin = time.perf_counter()
        comparison = compare([read(folder) for folder in folders])
        table(comparison)
        compared = time.perf_counter()
        page = report(comparison, "benchmark")
        written = time.perf_counter()
        sampler = sampler_cost(Path(root), options.seconds)
    print(f"two runs of {options.records:,} records and {options.ranks} ranks, {size / 1e6:,.0f} MB")
    print(f"  read and compared in {compared - begin:.1f} s, report in {written - compared:.1f} s more")
    print(f"  page of {len(page.encode()) / 1e6:.2f} MB")
    print(f"the telemetry sampler of a host uses {sampler:.2%} of a core")


if __name__ == "__main__":
    main()
