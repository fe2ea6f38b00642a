"""`paceline selftest` on CPU processes: passes on sound machines, and names faults that are injected."""

import getpass
import json
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.selftest.checks import CHECKS

TIMED = {"time-split", "step-time", "rank-speed", "loader", "bandwidth"}
"""Checks that may be slow on a busy machine."""
RANKS_ONLY = {"ranks", "rank-speed", "bandwidth"}

# a model and a callback with the faults that a machine, a driver or user code can have
FAULTS = """
import os, time
from torch import nn
import paceline as pl

RANK = os.environ.get("RANK")


class Net(nn.Module):
    def __init__(self, num_classes, in_chans, faults):
        super().__init__()
        self.faults = set(faults)
        self.body = nn.Sequential(nn.Conv2d(in_chans, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

    def forward(self, images):
        logits = self.head(self.body(images).mean((2, 3)))
        if "sync" in self.faults and logits.mean().item() > 1e9:
            logits = logits * 2
        if RANK == "1" and "loss" in self.faults:
            logits = logits * 1.01
        if RANK == "1" and "slow" in self.faults and self.training:
            time.sleep(0.2)
        if RANK == "1" and "crash" in self.faults:
            raise ValueError("the fault of rank 1")
        return logits


@pl.register_model("faulty")
def faulty(num_classes, in_chans, faults=()):
    return Net(num_classes, in_chans, faults)


@pl.register_callback("flip-bit")
class FlipBit(pl.Callback):
    def on_checkpoint(self, run, path):
        file = max(path.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
"""


def _selftest(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, *words: object) -> tuple[int, Any]:
    answer = run("selftest", "--device", "cpu", "--quick", "--out", "out", *words)
    content = json.loads((tmp_path / "out" / "selftest.json").read_text())
    rows = {row["name"]: row for row in content["checks"]}
    for row in rows.values():
        assert re.search(rf"^{row['status']} +{row['name']} ", answer.stdout, re.MULTILINE), answer.stdout
    return answer.returncode, (content, rows)


@pytest.mark.parametrize("procs", [1, 2])
def test_a_sound_machine_passes(paceline, tmp_path: Path, procs: int) -> None:
    status, (content, rows) = _selftest(paceline, tmp_path, "--procs", procs)
    assert list(rows) == list(CHECKS)
    for name, row in rows.items():
        skipped = procs == 1 and name in RANKS_ONLY
        allowed = {"skipped"} if skipped else {"pass", "slow"} if name in TIMED else {"pass"}
        assert row["status"] in allowed, row
        assert row["reason"]
    assert status == 0
    assert content["options"]["ranks"] == procs
    assert content["environment"]["packages"]["torch"]
    assert content["environment"]["cores"] >= 1
    page = (tmp_path / "out" / "selftest.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in CHECKS)
    assert not re.search(r"(src|href)=", page)  # it needs no other file
    for text in (page, (tmp_path / "out" / "selftest.json").read_text()):
        assert str(tmp_path) not in text
        for name in (socket.gethostname(), getpass.getuser()):
            assert not re.search(rf"\b{re.escape(name)}\b", text)


def test_more_than_two_ddp_ranks_resume_with_a_tolerance(paceline, tmp_path: Path) -> None:
    """DDP adds the gradients of a resumed process in another order."""
    words = ("--procs", 3, "--grad_sync.transport", "network", "--only", "resume")
    status, (_, rows) = _selftest(paceline, tmp_path, *words)
    assert rows["resume"]["status"] == "pass", rows["resume"]
    assert rows["resume"]["figures"]["whole_run"]["ddp_ranks"] == 3
    assert "3 ranks" in rows["resume"]["reason"]
    assert status == 0


@pytest.mark.parametrize(
    ("procs", "words"),
    [
        (1, ("--compile", "true", "--only", "precision", "--only", "sync", "--only", "resume")),
        (2, ("--model.activation_checkpointing", "full", "--only", "precision", "--only", "ranks", "--only", "memory")),
    ],
    ids=["compiled", "recomputed"],
)
def test_models_with_other_forward_passes_pass(paceline, tmp_path: Path, procs: int, words: tuple[str, ...]) -> None:
    status, (_, rows) = _selftest(paceline, tmp_path, "--procs", procs, *words)
    assert {row["status"] for row in rows.values()} == {"pass"}, rows
    assert len(rows) == 4
    assert status == 0


def test_faults_of_a_rank_are_named(paceline, tmp_path: Path) -> None:
    """A loss that differs, a slow rank and a read of a tensor in the step; each check names its own."""
    (tmp_path / "faults.py").write_text(FAULTS)
    model = ("--import", "faults", "--model.name", "faulty", "--model.options", "{faults: [loss, sync, slow]}")
    checks = ("--only", "ranks", "--only", "sync", "--only", "rank-speed")
    status, (_, rows) = _selftest(paceline, tmp_path, "--procs", 2, *checks, *model)
    for name, expected, reason in (
        ("ranks", "fail", r"rank 1 of 2 computes the loss"),
        ("sync", "fail", r"a step on rank 0 waits for the device: item in forward \(.*faults\.py:\d+\)"),
        ("rank-speed", "slow", r"rank 1 takes"),
    ):
        assert rows[name]["status"] == expected, rows[name]
        assert re.search(reason, rows[name]["reason"])
    assert status == 1


def test_a_corrupt_checkpoint_is_named(paceline, tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    words = ("--import", "faults", "--callbacks", "{flip-bit: {}}", "--only", "checkpoint", "--procs", 1)
    status, (_, rows) = _selftest(paceline, tmp_path, *words)
    assert rows["checkpoint"]["status"] == "fail"
    assert "safetensors" in rows["checkpoint"]["reason"]
    assert status == 1


def test_a_check_that_crashes_fails_and_the_others_run(paceline, tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    model = ("--import", "faults", "--model.name", "faulty", "--model.options", "{faults: [crash]}")
    status, (_, rows) = _selftest(
        paceline, tmp_path, "--procs", 2, "--only", "precision", "--only", "sync", "--only", "bandwidth", *model
    )
    assert [rows[name]["status"] for name in ("precision", "sync", "bandwidth")] == ["pass", "fail", "pass"]
    assert "the fault of rank 1" in rows["sync"]["reason"]
    assert status == 1
