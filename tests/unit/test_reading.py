"""Read run folders that are complete, incomplete, corrupt or contradictory."""

import json
from pathlib import Path

import pytest
from made_runs import make_run

from paceline.analysis.book import write_logbook
from paceline.analysis.compare import compare, fairness
from paceline.analysis.read import read
from paceline.analysis.verdict import verdict
from paceline.cli.main import main


def test_figures_come_from_the_records(tmp_path: Path) -> None:
    run = read(make_run(tmp_path, "one", ranks=2, seconds={"data": [0.01, 0.03]}))
    assert (run.status, run.ranks, run.global_batch, run.images) == ("finished", 2, 128, 40 * 128)
    assert run.seconds["data"] == pytest.approx(40 * 0.02)
    assert run.seconds_per_rank["data"] == pytest.approx([0.4, 1.2])
    assert run.best["top1"] == pytest.approx(0.9)
    assert run.points("top1", x_axis="seconds")[-1][0] == pytest.approx(run.total_seconds - 0.01)
    assert run.seconds_to(0.8) < run.seconds_to(0.89)
    assert run.seconds_to(0.95) is None
    assert run.device_utilization() == pytest.approx(0.5)
    assert run.peak_memory == 10**9
    assert run.energy() is None


def test_missing_records_or_settings_are_not_a_speedup(tmp_path: Path) -> None:
    one = make_run(tmp_path, "one")
    holes = make_run(tmp_path, "holes", ranks=2, seconds={"compute": 0.05})
    lines = (holes / "metrics.jsonl").read_text().splitlines()
    (holes / "metrics.jsonl").write_text("\n".join(["garbage", *lines[3:]]) + "\n")
    found = compare([read(one), read(holes)])
    assert not found.is_comparable
    assert any("records are missing" in note for note in found.runs[1].notes)
    other = make_run(tmp_path, "other", "--model.options", "{}")
    assert "model.options" in fairness([read(one), read(other)]).summary


def test_corrupt_records_are_reported_in_one_line(tmp_path: Path, capsys) -> None:
    good = make_run(tmp_path, "good")
    for name, text in (("metrics.jsonl", '{"kind": "train", "step": 1, "seconds": "x"}\n'), ("environment.json", "[]")):
        bad = make_run(tmp_path, f"bad-{name}")
        (bad / name).write_text(text)
        assert main(["compare", str(good), str(bad)]) == 0
    printed = capsys.readouterr().out
    assert "bad-metrics.jsonl: 1 corrupt line was left out" in printed
    assert "bad-environment.json: environment.json is missing or corrupt" in printed
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["doctor", str(tmp_path / "binary")]) == 0
    assert "recipe.yaml is corrupt" in capsys.readouterr().out


INVALID = (
    '"steps": "10"',
    '"step": "x"',
    '"top1": 93.5',
    '"seconds": {"data": -1}',
    '"memory_per_rank": []',
    '"images": 1e400',
)


@pytest.mark.parametrize("invalid", INVALID)
def test_records_with_invalid_values_are_left_out(tmp_path: Path, invalid: str) -> None:
    folder = make_run(tmp_path, "invalid")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[0] = lines[0][:-1] + f", {invalid}}}"
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"kind": [], "step": 1}\n' + "[" * 100_000 + "\n")
    assert "3 corrupt lines were left out of metrics.jsonl" in read(folder).notes
    write_logbook([read(folder)], tmp_path / "book")


def test_run_that_changed_between_starts_is_not_a_speedup(tmp_path: Path) -> None:
    one, other = make_run(tmp_path, "one"), make_run(tmp_path, "other")
    starts = json.loads((other / "environment.json").read_text())["starts"]
    earlier = {**starts[0], "precision": "bf16", "recipe": "1"}
    resumed = {**starts[0], "recipe": "2", "first_step": 20}
    (other / "environment.json").write_text(json.dumps({"starts": [earlier, resumed]}))
    found = compare([read(one), read(other)])
    assert not found.is_comparable
    notes = "; ".join(found.runs[1].notes)
    assert "resumed with a different recipe: 1, then 2; resumed with a different precision: bf16, then fp32" in notes
    restarted = resumed | {"first_step": 0}
    (other / "environment.json").write_text(json.dumps({"starts": [earlier, restarted]}))
    assert read(other).complete


def _edit_start(run: Path, **values: object) -> dict:
    start = json.loads((run / "environment.json").read_text())["starts"][0] | values
    (run / "environment.json").write_text(json.dumps({"starts": [start]}))
    return start


def test_run_resumed_with_changed_code_is_not_a_speedup(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    first = _edit_start(run, import_files={f"mine/{name}.py": "1" for name in "abc"})
    changed = first["import_files"] | {"mine/b.py": "2", "mine/new.py": "1"}
    del changed["mine/c.py"]
    resumed = first | {"import_files": changed, "first_step": 20}
    (run / "environment.json").write_text(json.dumps({"starts": [first, resumed, resumed]}))
    notes = [note for note in read(run).notes if "changed code" in note]
    assert notes == ["resumed with changed code of imported modules: mine/b.py, mine/c.py, mine/new.py"]
    assert not read(run).complete


def test_comparison_reports_different_code_of_imports(tmp_path: Path) -> None:
    names = ("one", "same", "other")
    runs = [make_run(tmp_path, name, "--import", "mine.nets", "--import", "mine.data") for name in names]
    for run, digest in zip(runs, ("1" * 64, "1" * 64, "2" * 64), strict=True):
        _edit_start(
            run, imports={name: {"file": "/code/mine", "sha256": digest} for name in ("mine.nets", "mine.data")}
        )
    one, same, other = map(read, runs)
    assert compare([one, same]).fairness.same
    (difference,) = compare([one, other]).fairness.differences
    assert (difference.fact, difference.matters) == ("code of mine", True)
    assert difference.values == ("1" * 12, "2" * 12)
    without = read(make_run(tmp_path, "without"))
    assert [str(each) for each in compare([without, one]).fairness.differences] == [
        "imports: [] / ['mine.nets', 'mine.data']"
    ]


def test_truncated_records_make_a_run_incomplete(tmp_path: Path) -> None:
    cut = make_run(tmp_path, "cut")
    (cut / "summary.json").write_text(json.dumps({"status": "finished", "global_batch": 128, "total_steps": 40}))
    assert read(cut).complete
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    (cut / "metrics.jsonl").write_text("\n".join(lines[:6]) + "\n")
    assert "the run finished at step 40, but metrics.jsonl ends at step 20" in read(cut).notes[0]
    garbled = make_run(tmp_path, "garbled")
    (garbled / "metrics.jsonl").write_text("\n".join([*lines[:-2], lines[-2][:-20], lines[-1]]) + "\n")
    assert not read(garbled).complete
    assert "1 corrupt line was left out of metrics.jsonl" in read(garbled).notes


def test_long_runs_keep_figures_per_rank(tmp_path: Path) -> None:
    slow = {"data": [0.02, 0.02, 0.02, 1.4], "sync": [1.4, 1.4, 1.4, 0.02]}
    folder = make_run(tmp_path, "long", ranks=4, steps=20_100, seconds=slow)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text('{"kind": "resume", "step": 0, "ranks": 4}\n' + text)
    run = read(folder)
    assert sum("seconds_per_rank" in record for record in run.trained) == pytest.approx(2010, abs=10)
    assert verdict(run)[0].cause == "input-straggler"
    assert run.peak_memory == 10**9
