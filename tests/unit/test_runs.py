"""List runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import make_run

from paceline.analysis.compare import compare
from paceline.analysis.read import read
from paceline.analysis.settings import settings
from paceline.analysis.tables import as_text
from paceline.cli.main import main
from paceline.config.data import dataset_name
from paceline.system import tables
from paceline.system.files import FolderLock
from paceline.system.logs import Screen

Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answer:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        status = main(["runs", *words])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def _set_start(folder: Path, when: str) -> None:
    environment = json.loads((folder / "environment.json").read_text())
    environment["starts"][0]["started"] = when
    (folder / "environment.json").write_text(json.dumps(environment))


def _summarize(folder: Path, **more: object) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.fixture
def some(tmp_path: Path) -> Path:
    """Runs in every state, and folders that are not runs."""
    root = tmp_path / "runs"
    best = {"kind": "eval", "top1": 0.9917, "epoch": 15.0}
    done = make_run(root, "b-finished", "--train.duration", "20ep")
    _summarize(done, step=220, total_steps=220, epoch=20.0, train_seconds=9.1, best=best)
    _set_start(done, "2026-01-03T10:00:00+00:00")
    _set_start(make_run(root, "a-newest", status="failed"), "2026-01-04T10:00:00+00:00")
    _set_start(make_run(root, "z-oldest", status="interrupted"), "2026-01-01T10:00:00+00:00")
    killed = make_run(root, "killed", "--train.duration", "400ba", status="running")
    _summarize(killed, total_steps=400)
    for path in (*killed.iterdir(), *(killed / "telemetry").iterdir()):
        os.utime(path, (0, 0))  # old enough not to be running
    _set_start(killed, "2026-01-02T10:00:00+00:00")
    os.utime(killed / "environment.json", (0, 0))
    (root / "find-batch-1").mkdir()
    (root / "only-a-recipe").mkdir()
    (root / "only-a-recipe" / "recipe.yaml").write_text("name: a\n")
    (root / "a file").touch()
    return root


def test_one_line_per_run_newest_last(some: Path, ask: Answer) -> None:
    status, out, _ = ask()
    head, *lines = out.splitlines()
    assert status == 0
    assert head.split()[:2] == ["name", "status"]
    assert [line.split()[:2] for line in lines] == [
        ["z-oldest", "interrupted"],
        ["killed", "killed"],
        ["b-finished", "finished"],
        ["a-newest", "failed"],
    ]
    assert "20/20 epochs" in lines[2]
    assert "99.17% (epoch 15)" in lines[2]
    assert "9.1 s" in lines[2]
    assert "airbench" in lines[2]
    assert "digits" in lines[2]
    # from the records: a killed run has no final summary
    assert "40/400 steps" in lines[1]
    assert "90.00% (epoch 3.636)" in lines[1]


def test_data_is_shown_by_name_not_by_kind(tmp_path: Path, ask: Answer) -> None:
    shards = ("--data.augment.translate", "0", "--data.name", "shards", "--data.path")
    new = make_run(tmp_path / "runs", "new", *shards, "data/flowers/")
    _summarize(new, data=None)  # a run that has just started
    named = make_run(tmp_path / "runs", "named", *shards, ".")
    _summarize(named, data={"name": "birds", "classes": 3})
    data = {row["name"]: row["data"] for row in json.loads(ask("--json")[1])}
    assert data == {"new": "flowers", "named": "birds"}
    assert [settings(read(run))["data"] for run in (new, named)] == ["flowers", "birds"]


@pytest.mark.parametrize(("classes", "shown"), [(5, False), (6, True)])
def test_top5_is_shown_only_if_it_can_be_wrong(tmp_path: Path, classes: int, shown: bool) -> None:
    run = make_run(tmp_path, "run")
    _summarize(run, data={"name": "birds", "classes": classes})
    assert ("top-5" in as_text(compare([read(run)]))) == shown


@pytest.mark.parametrize(
    ("kind", "place", "name"),
    [
        ("digits", "", "digits"),
        ("cifar10", "/data/c10", "cifar10"),
        ("shards", "/data/flowers/", "flowers"),
        ("imagenet", "/data/imagenet-500", "imagenet-500"),
        ("list", "/data/flowers.v2.csv", "flowers.v2"),
        ("folder", "/data/flowers/../birds", "birds"),
        ("shards", "s3://bucket/some/flowers", "flowers"),
        ("shards", "https://host/flowers?X-Amz-Signature=secret", "flowers"),
    ],
)
def test_names_of_datasets(kind: str, place: str, name: str) -> None:
    assert dataset_name(kind, place) == name


def test_locked_run_is_running(some: Path, ask: Answer) -> None:
    lock = FolderLock(some / "killed")
    assert ask()[1].splitlines()[2].split()[:2] == ["killed", "running"]
    lock.release()


def test_json_has_all_fields(some: Path, ask: Answer) -> None:
    rows = json.loads(ask("--json")[1])
    assert [row["status"] for row in rows] == ["interrupted", "killed", "finished", "failed"]
    assert rows[2]["best_top1"] == 0.9917
    assert rows[2]["started"] == "2026-01-03T10:00:00+00:00"
    assert rows[1]["step"] == 40


def test_run_folder_is_a_list_of_one(some: Path, ask: Answer) -> None:
    assert len(ask(str(some / "b-finished"))[1].splitlines()) == 2


def test_folder_without_runs(tmp_path: Path, ask: Answer) -> None:
    assert "paceline train digits" in ask()[1]
    assert ask("--json")[1].strip() == "[]"
    status, _, errors = ask("nowhere")
    assert status == 1
    assert "nowhere is not a folder" in errors
    assert "[folder-not-found]" in errors


def test_corrupt_files_do_not_stop_the_list(some: Path, ask: Answer) -> None:
    (some / "a-newest" / "recipe.yaml").write_text("{")
    _summarize(some / "b-finished", best="x", train_seconds="y", epoch=[1])
    _set_start(some / "z-oldest", "yesterday")
    status, out, _ = ask()
    assert status == 0
    assert len(out.splitlines()) == 5


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_lines_fit_the_terminal(some: Path, ask: Answer, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (some / "b-finished").rename(some / ("b-finished-" + 100 * "x"))
    monkeypatch.setattr(tables, "output", lambda: Screen(width=width))
    lines = ask()[1].splitlines()
    assert max(map(len, lines)) <= width
    assert "finished" in lines[3]
    assert "99.17%" in lines[3]
