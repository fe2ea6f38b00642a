"""Predictions on two ranks are those of one, in the same order (CPU, fp32)."""

from pathlib import Path

from processes import run_ranks
from trained_model import CPU, train_model


def test_predictions_do_not_depend_on_the_number_of_ranks(tmp_path: Path, one_thread) -> None:
    run, val = train_model(tmp_path), tmp_path / "images" / "val"
    for name in ("0.jpg", "1.jpg", "2.jpg", "3.jpg", "5.jpg"):  # one batch has no image left
        (val / "blue" / name).write_bytes(b"no image")
    for procs in (1, 2):
        words = ("predict", run, val, tmp_path / "prepared", "--out", tmp_path / f"{procs}.csv", *CPU)
        log = run_ranks(tmp_path, procs, *words).stderr
        assert log.count("corrupt sample: ") == 5
        assert "skipped 5 of 102 images" in log
    one, two = ((tmp_path / f"{procs}.csv").read_bytes() for procs in (1, 2))
    assert one == two
    assert one.count(b"\n") == 1 + 27 - 5 + 48 + 27
