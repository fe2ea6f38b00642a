"""At the end of a run, trackers and callbacks of rank 0 may take longer than ranks wait for each other."""

import os
import time
from pathlib import Path

from conftest import TINY
from processes import run_ranks

from paceline.track.records import RunFolder
from paceline.track.sinks import MultiSink


def _slow_tracker(rank: int) -> None:
    os.environ["PACELINE_RANK_TIMEOUT"] = "10"
    close = MultiSink.close

    def slow(self: MultiSink, status: str = "finished") -> None:
        if rank == 0:
            time.sleep(15)
        close(self, status)

    MultiSink.close = slow  # type: ignore[method-assign]


def test_a_tracker_that_closes_slowly_does_not_fail_a_finished_run(tmp_path: Path) -> None:
    words = ("train", "digits", *TINY, "--train.duration", "4ba", "--precision", "fp32", "--device", "cpu")
    run_ranks(tmp_path, 2, *words, before=_slow_tracker)
    assert RunFolder(tmp_path / "runs" / "digits").read_summary()["status"] == "finished"
