"""The command watch, on generated run folders."""

import json
import os
from pathlib import Path

import pytest
from made_runs import make_run

from paceline.analysis.live import snapshot
from paceline.cli.main import main


def test_watch_reads_the_ends_of_the_files(tmp_path: Path, capsys) -> None:
    folder = make_run(tmp_path, "two", ranks=2, every=5, steps=2000, status="running")
    (folder / "summary.json").write_text(json.dumps({"status": "running", "total_steps": 4000}))
    now = snapshot(folder)  # host-0 is another host, which has just written
    assert (now.status, now.step, now.ranks) == ("running", 2000, 2)
    assert now.seconds_left == pytest.approx(2000 * 0.108)
    assert main(["watch", str(folder), "--once"]) == 0
    text = capsys.readouterr().out
    assert "step 2,000 of 4,000 (50%)" in text
    assert "time left about 0:03:36" in text
    assert "host-0  50%  1.0 GB" in text
    assert "rank 1: data 1.0 ms, compute 100.0 ms, sync 5.0 ms, optimizer 2.0 ms" in text
    assert main(["watch", str(tmp_path)]) == 1
    assert "[not-a-run]" in capsys.readouterr().err
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    assert snapshot(folder).status == "killed"
    assert main(["watch", str(folder)]) == 0  # ends with the run


def test_watch_waits_for_a_run_that_starts(tmp_path: Path, capsys, monkeypatch) -> None:
    def start(_seconds: float) -> None:
        make_run(tmp_path, "one")

    monkeypatch.setattr("paceline.cli.watch.time.sleep", start)
    assert main(["watch", str(tmp_path / "one"), "--once"]) == 0
    assert "status finished" in capsys.readouterr().out
