"""Two nodes that are started by hand, as two processes on this machine."""

import json
import os
import subprocess
from pathlib import Path

from conftest import HANG, PRECISIONS, TINY, command, environment
from processes import free_port, run_ranks, start
from sample_images import tree

from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.system.host import host_name
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


_CALLBACK = """
import paceline as pl

@pl.register_callback("quiet")
class Quiet(pl.Callback):
    node = {}
"""


def test_nodes_with_different_code_are_refused(tmp_path: Path) -> None:
    rendezvous = ("--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}")
    nodes = []
    for rank in range(2):
        (module := tmp_path / f"node-{rank}" / "differing" / "__init__.py").parent.mkdir(parents=True)
        module.write_text(_CALLBACK.format(rank))
        words = command("train", "digits", *TINY, *rendezvous, "--node-rank", rank, "--import", "differing")
        path = os.pathsep.join(filter(None, [str(module.parents[1]), os.environ.get("PYTHONPATH", "")]))
        more = {"env": environment() | {"PYTHONPATH": path}, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen(words, cwd=tmp_path, **more))
    for node in nodes:
        _, errors = node.communicate(timeout=HANG)
        assert node.returncode == 1
        assert "[rank-imports-mismatch]" in errors
        assert f"rank 1 ({host_name()}): differing/__init__.py" in errors
    assert not list(tmp_path.glob("runs/*"))


def test_nodes_with_different_data_are_rejected(tmp_path: Path) -> None:
    rendezvous = ("--nodes", 2, "--rendezvous", f"127.0.0.1:{free_port()}")
    nodes = []
    for rank in range(2):
        data = tmp_path / f"data-{rank}"
        images = tree(tmp_path / f"images-{rank}", classes=4, images=20 - rank)
        prepare(source(images, "folder"), data, [Variant()], 2)
        fields = ("--data", "null", "--data.path", data, "--data.size", 24)
        nodes.append(start(tmp_path, "train", "digits", *TINY, *fields, *rendezvous, "--node-rank", rank))
    for node in nodes:
        _, errors = node.communicate(timeout=HANG)
        assert node.returncode == 1
        assert "[rank-data-mismatch]" in errors
        assert "rank 1" in errors
    assert not list(tmp_path.glob("runs/*"))
