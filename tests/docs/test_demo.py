"""`paceline demo`, the first command of the README."""

from pathlib import Path

from paceline.track.records import RunFolder


def test_demo(paceline, tmp_path: Path) -> None:
    answer = paceline("demo")
    assert answer.returncode == 0, answer.stderr
    runs = sorted((tmp_path / "runs").glob("demo-*"))
    summaries = [RunFolder(run).read_summary() for run in runs]
    assert [(summary["status"], summary["ranks"]) for summary in summaries] == [("finished", 1), ("finished", 2)]
    assert min(summary["final"]["top1"] for summary in summaries) > 0.97
    assert "no speed-up is expected here" in answer.stdout.replace("\n", " ")
    assert "the same experiment" in answer.stdout
    assert (tmp_path / "runs" / "report.html").exists()
    assert (tmp_path / "runs" / "logbook" / runs[0].name / "README.md").exists()
    assert all(str(run.name) in answer.stdout.replace("\n", "") for run in runs)
