"""Runs given as `runs/*`: paths that are not runs are skipped and listed, what is corrupt is an error."""

import json
import re
from pathlib import Path

import pytest
from made_runs import make_run

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.logbook.book import write_logbook
from paceline.logbook.compare import compare
from paceline.logbook.page import report
from paceline.logbook.read import NotARun, read


def test_what_lies_beside_runs_is_skipped_by_name(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(Path("runs"), name) for name in ("one", "two")]
    write_logbook([read(run) for run in runs], Path("runs/logbook"))
    for name in ("find-batch-digits", "searched"):
        Path("runs", name).mkdir()
        Path("runs", name, "recipe.yaml").write_text((runs[0] / "recipe.yaml").read_text())
    Path("runs/searched/find-batch.json").write_text("{}")
    Path("runs/empty").mkdir()
    Path("runs/old/notes").mkdir(parents=True)
    Path("runs/old/notes/poem.txt").write_text("roses are red\n")
    Path("runs/logbook").rename("runs/old/logbook")  # nor is a logbook in a folder taken for a run
    write_logbook([read(run) for run in runs], Path("runs/logbook"))
    Path("runs/report.html").write_text(report(compare([read(runs[0])]), "title"))
    everything = sorted(map(str, Path("runs").iterdir()))
    for words in (["report", *everything], ["compare", *everything], ["logbook", *everything, "--out", "book"]):
        assert main(words) == 0
        told = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
        assert len(told) == 1
        skipped = re.findall(r"runs/(\S+) \(([^)]*)\)", told[0])
        assert dict(skipped) == {
            "empty": "an empty folder",
            "find-batch-digits": "a find-batch search, not a run",
            "logbook": "a logbook, not a run",
            "old": "neither a run folder nor a log that can be imported",
            "report.html": "a web page, not a run",
            "searched": "a find-batch search, not a run",
        }
    data = json.loads(Path("report.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    tsv = Path("runs/logbook/one/dawnbench.tsv")
    assert read(tsv).final["top1"] == pytest.approx(0.9)  # given by name, it is a log like any other


def test_what_cannot_be_read_is_still_an_error(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("."), "one")
    write_logbook([read(Path("one"))], Path("logbook"))
    Path("empty").mkdir()
    assert main(["report", "logbook", "empty"]) == 1
    assert "none of these is a run" in capsys.readouterr().err
    assert main(["compare", "logbook", "one"]) == 1
    assert "compare needs two runs or more, and only one is a run" in capsys.readouterr().err
    (make_run(Path("."), "corrupt") / "recipe.yaml").unlink()
    assert main(["report", "one", "corrupt", "gone", "logbook"]) == 1
    errors = capsys.readouterr().err
    assert "left out: corrupt is an incomplete run folder" in errors
    assert "gone: there is no such run" in errors
    assert Path("report.html").is_file()
    with pytest.raises(NotARun, match="logbook is a logbook, not a run"):
        read(Path("logbook"))
    with pytest.raises(UserError, match="holds runs"):
        read(Path("."))
