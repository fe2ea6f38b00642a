"""The number of ranks changes the speed, not the results. Every test starts real processes."""

import json
import re
from pathlib import Path

from conftest import PRECISIONS
from processes import run_ranks

from paceline.config.data import Data
from paceline.data import sets
from paceline.track.records import RunFolder


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(folder).records() if record["kind"] == "train"]


@PRECISIONS
def test_losses_agree_on_1_2_and_4_ranks(tmp_path: Path, precision: str, distance: float) -> None:
    """The whole loss curve of a model without batch norm, with augmentation."""
    words = (
        "--train.duration",
        "2ep",
        "--log.every",
        "1ba",
        "--evaluate.per_rank_batch",
        "50",
        "--data.augment.cutout",
        "2",
    )
    words += ("--precision", precision, "--model.options.widths", "[32, 64]")
    curves = {}
    for procs, accumulation in ((1, 1), (2, 1), (4, 1), (2, 4)):
        name = f"r{procs}a{accumulation}"
        answer = run_ranks(
            tmp_path, procs, "train", "digits", *words, "--name", name, "--train.grad_accumulation", accumulation
        )
        per_rank = 128 // procs // accumulation
        ranks = f"{procs} rank{'s' * (procs > 1)}"
        layout = f"per-rank batch {per_rank} x {ranks} x accumulation {accumulation} = global batch 128"
        assert layout in answer.stderr
        curves[name] = _losses(tmp_path / "runs" / name)
    alone = curves.pop("r1a1")
    assert len(alone) == 22
    for curve in curves.values():
        assert max(abs(ours - theirs) for ours, theirs in zip(curve, alone, strict=True)) < distance
    finals = [RunFolder(tmp_path / "runs" / name).read_summary()["final"] for name in ("r1a1", "r2a1", "r4a1")]
    labels = sets.load(Data(name="digits")).val.labels
    assert {final["chance"] for final in finals} == {round(labels.bincount().max().item() / len(labels), 9)}
    assert all(1 < final["predicted"] <= 10 for final in finals)
    if precision == "fp32":
        assert len({final["predicted"] for final in finals}) == 1
    records = [json.loads(line) for line in (tmp_path / "runs" / "r2a1" / "metrics.jsonl").read_text().splitlines()]
    times = records[0]["seconds_per_rank"]
    assert all(len(times[part]) == 2 and min(times[part]) >= 0 for part in ("data", "compute", "sync"))


def test_evaluation_counts_are_identical_on_1_2_3_and_7_ranks(tmp_path: Path) -> None:
    """360 samples in batches of 17, which do not divide evenly."""
    run_ranks(tmp_path, 1, "train", "digits", "--train.duration", "1ep")
    results = set()
    for procs in (1, 2, 3, 7):
        words = ("--evaluate.per_rank_batch", 17, "--evaluate.tta", "flip-translate")
        answer = run_ranks(tmp_path, procs, "evaluate", "runs/digits", *words)
        results.add(answer.stdout.partition(": ")[2])
    assert len(results) == 1, results
    assert re.search(r"top-1 [\d.]+% \(\d+ of 360\)", results.pop())
