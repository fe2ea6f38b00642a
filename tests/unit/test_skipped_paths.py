"""Give runs as `runs/*`: paths that are not runs are skipped and listed, corrupt runs are errors."""

import json
import re
from pathlib import Path

import pytest
from conftest import complaint, raises
from made_runs import make_run

from paceline.analysis.book import write_logbook
from paceline.analysis.compare import compare
from paceline.analysis.page import report
from paceline.analysis.read import read
from paceline.analysis.run import NotARun
from paceline.cli.main import main

SKIPPED = {
    "empty": "empty-folder",
    "find-batch-digits": "is-a-batch-search",
    "find-lr-digits": "is-a-learning-rate-search",
    "logbook": "is-a-logbook",
    "old": "not-a-run",
    "report.html": "is-a-web-page",
    "searched": "is-a-batch-search",
    "swept": "is-a-sweep",
}


def test_paths_beside_runs_are_skipped_and_listed(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(Path("runs"), name) for name in ("one", "two")]
    write_logbook([read(run) for run in runs], Path("runs/logbook"))
    for name in ("find-batch-digits", "find-lr-digits", "searched"):
        Path("runs", name).mkdir()
        Path("runs", name, "recipe.yaml").write_text((runs[0] / "recipe.yaml").read_text())
    Path("runs/searched/find-batch.json").write_text("{}")
    Path("runs/swept").mkdir()
    Path("runs/swept/sweep.json").write_text("{}")
    Path("runs/empty").mkdir()
    Path("runs/old/notes").mkdir(parents=True)
    Path("runs/old/notes/poem.txt").write_text("roses are red\n")
    Path("runs/logbook").rename("runs/old/logbook")  # a logbook in a subfolder is not a run either
    write_logbook([read(run) for run in runs], Path("runs/logbook"))
    Path("runs/report.html").write_text(report(compare([read(runs[0])]), "title"))
    everything = sorted(map(str, Path("runs").iterdir()))
    for words in (["report", *everything], ["compare", *everything], ["logbook", *everything, "--out", "book"]):
        assert main(words) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
        assert len(lines) == 1
        skipped = dict(re.findall(r"runs/(\S+) \(([^)]*)\)", lines[0]))
        assert skipped.keys() == SKIPPED.keys()
        for name, code in SKIPPED.items():
            with raises(code, NotARun) as caught:
                read(Path("runs", name))
            assert caught.value.fields["reason"] == skipped[name]
    data = json.loads(Path("report.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    tsv = Path("runs/logbook/one/dawnbench.tsv")
    assert read(tsv).final["top1"] == pytest.approx(0.9)  # given by name, it is imported


def test_unreadable_runs_are_errors(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("."), "one")
    write_logbook([read(Path("one"))], Path("logbook"))
    Path("empty").mkdir()
    assert main(["report", "logbook", "empty"]) == 1
    assert "[no-runs]" in capsys.readouterr().err
    assert main(["compare", "logbook", "one"]) == 1
    errors = capsys.readouterr().err
    assert "[too-few-runs]" in errors
    assert "only one is a run" in errors
    (make_run(Path("."), "corrupt") / "recipe.yaml").unlink()
    assert main(["report", "one", "corrupt", "gone", "logbook"]) == 1
    errors = capsys.readouterr().err
    assert re.search(r"left out: corrupt .*recipe\.yaml.*\[run-incomplete\]", errors)
    assert re.search(r"left out: gone .*\[run-not-found\]", errors)
    assert Path("report.html").is_file()
    with raises("is-a-logbook", NotARun):
        read(Path("logbook"))
    with raises("folder-of-runs"):
        read(Path("."))


def test_a_report_replaces_no_file_of_a_run(tmp_path: Path, here) -> None:
    make_run(tmp_path, "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("recipe.yaml", "metrics.jsonl"):
        assert "[wrong-suffix]" in complaint(here("report", "run", "--out", f"run/{name}"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
