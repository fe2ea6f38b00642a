"""Two nodes that are started by hand, as two processes on this machine."""

import json
import subprocess
from pathlib import Path

from conftest import HANG, PRECISIONS, TINY, command, environment
from processes import free_port, run_ranks

from paceline.track.records import RunFolder


def _final(run: Path) -> dict:
    summary = RunFolder(run).read_summary()
    assert summary["status"] == "finished"
    return summary


@PRECISIONS
def test_two_nodes_started_by_hand(tmp_path: Path, precision: str, distance: float) -> None:
    """Two commands that share only the rendezvous address; gradients are all-reduced over TCP."""
    # rounding differences grow with the learning rate
    slow = ("--optim.lr", "0.01", "--precision", precision, "--model.options.widths", "[32, 64]")
    words = ("train", "digits", "--train.duration", "1ep", *slow, "--nodes", 2)
    for dtype in ("fp32", "bf16"):
        place = ("--rendezvous", f"127.0.0.1:{free_port()}")
        nodes = [
            subprocess.Popen(
                command(*words, *place, "--node-rank", rank, "--grad_sync.dtype", dtype, "--name", dtype),
                cwd=tmp_path,
                env=environment(),
            )
            for rank in range(2)
        ]
        assert [node.wait(timeout=HANG) for node in nodes] == [0, 0]
        assert _final(tmp_path / "runs" / dtype)["ranks"] == 2
    starts = json.loads((tmp_path / "runs" / "fp32" / "environment.json").read_text())["starts"]
    assert sum(starts[0]["hosts"].values()) == 2
    run_ranks(tmp_path, 1, "train", "digits", "--train.duration", "1ep", *slow)
    losses = {name: _final(tmp_path / "runs" / name)["final"]["loss"] for name in ("digits", "fp32", "bf16")}
    assert abs(losses["fp32"] - losses["digits"]) < distance
    assert abs(losses["bf16"] - losses["digits"]) < 1e-2


def test_nodes_with_different_options_are_refused(tmp_path: Path) -> None:
    place = ("--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}")
    nodes = [
        subprocess.Popen(
            command("train", "digits", *TINY, *place, "--node-rank", rank, "--seed", rank),
            cwd=tmp_path,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=HANG)
        assert node.returncode == 1
        assert "rank 1 was started with a different recipe than rank 0: seed is 0 on rank 0, 1 on rank 1" in errors
        assert "[rank-recipe-mismatch]" in errors
    assert not list(tmp_path.glob("runs/*"))
