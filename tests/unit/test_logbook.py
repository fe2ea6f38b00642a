"""Compare runs, find their bottlenecks, write the logbook and the report: all from generated run folders."""

import json
import os
import re
from pathlib import Path

import pytest
from conftest import raises
from made_runs import make_run

import paceline
from paceline.analysis.book import write_logbook
from paceline.analysis.charts import Chart, Line, svg, thinned, ticks
from paceline.analysis.compare import compare, fairness
from paceline.analysis.page import report
from paceline.analysis.read import read
from paceline.analysis.tables import as_csv, as_json, markdown, table
from paceline.analysis.verdict import verdict
from paceline.cli.main import main
from paceline.system import tables as terminal


def test_killed_run_is_partial_and_truncated_lines_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "killed", status="running")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 50, "lo')
    with (folder / "telemetry" / "host-0.jsonl").open("a") as file:
        file.write('{"kind": "sam')
    (folder / "environment.json").write_text((folder / "environment.json").read_text().replace("host-0", "elsewhere"))
    _make_old(folder)
    run = read(folder)
    assert run.status == "killed"
    assert run.trained[-1]["step"] == 40
    pages = write_logbook([run], tmp_path / "book")
    text = pages[0].read_text()
    assert "partial: the run was killed" in text
    assert "90.00% of 360" in text


def _make_old(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))


def test_same_experiment_on_more_ranks_is_a_speedup(tmp_path: Path) -> None:
    one = read(make_run(tmp_path, "one", seconds={"compute": 0.1}))
    two = read(make_run(tmp_path, "two", ranks=2, seconds={"compute": 0.05}))
    comparison = compare([one, two], price=3.6)
    assert comparison.fairness.summary == "the same experiment"
    assert comparison.is_comparable
    row = comparison.rows[1]
    assert (row["ratio"], row["ratio_of"]) == (pytest.approx(0.103 / 0.058, rel=1e-6), "training time")
    assert row["efficiency"] == pytest.approx(row["ratio"] / 2)
    assert row["top1_difference"] == 0
    assert row["cost"] == pytest.approx(0.001 * two.total_seconds)
    labels = [line[0] for line in table(comparison)]
    assert "speed-up" in labels
    assert json.loads(as_json(comparison))["same_experiment"] is True
    assert as_csv(comparison).count("\n") == 3
    assert "| speed-up | - | 1.78x |" in markdown(comparison)
    two.status = "killed"
    half = compare([one, two])
    assert not half.is_comparable
    assert half.summary == "the same experiment, but two is incomplete, so there is no speed-up"


def test_deciding_differences_make_another_experiment(tmp_path: Path) -> None:
    runs = [
        read(make_run(tmp_path, "a")),
        read(make_run(tmp_path, "b", "--optim.lr", "0.2", "--seed", "3", "--strategy", "ddp")),
    ]
    found = fairness(runs)
    assert not found.same
    assert {difference.fact: difference.matters for difference in found.differences} == {
        "learning rate": True,
        "seed": True,
        "strategy": False,
    }
    assert not compare(runs).is_comparable
    assert any("not a speed-up" in line[0] for line in table(compare(runs)))


def test_summary_counts_many_differences(tmp_path: Path) -> None:
    words = ("--optim.lr", "0.2", "--seed", "3", "--optim.weight_decay", "0.1", "--train.label_smoothing", "0.3")
    one = make_run(tmp_path, "one")
    other = make_run(tmp_path, "other_run", *words, "--optim.momentum", "0.5", "--optim.schedule.end_factor", "0.1")
    comparison = paceline.compare(one, other)
    assert comparison.summary.startswith("not the same experiment: 6 settings differ,")
    shown = repr(comparison)
    assert "other_run" in shown
    assert "\\" not in shown
    assert "- optim.schedule.end_factor: " in shown


def test_other_paths_are_named_and_the_runs_are_compared(tmp_path: Path, capsys) -> None:
    (tmp_path / "poem.txt").write_text("roses are red\n")
    with raises("not-a-run") as caught:
        read(tmp_path / "poem.txt")
    assert caught.value.fields["path"] == tmp_path / "poem.txt"
    good = make_run(tmp_path, "good")
    assert main(["compare", str(good), str(tmp_path / "nothing"), str(tmp_path / "poem.txt")]) == 1
    printed = capsys.readouterr()
    assert f"left out: {tmp_path / 'nothing'} " in printed.err
    assert "[run-not-found]" in printed.err
    assert f"skipped: {tmp_path / 'poem.txt'} (" in printed.err
    assert "good" in printed.out
    assert main(["compare", str(tmp_path / "nothing"), str(good)]) == 1  # the first run is the reference
    assert "[run-not-found]" in capsys.readouterr().err
    assert main(["compare", str(good)]) == 1
    assert "[too-few-runs]" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])


def test_tables_of_many_runs_fit_the_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    runs = [str(make_run(tmp_path, f"run-{number:02d}-with-a-name", "--seed", str(number))) for number in range(12)]
    assert main(["compare", *runs, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if " s " in line) <= 80
    assert all(f"run-{number:02d}-with-a-name" in printed for number in range(12))  # no name is folded
    page = (tmp_path / "out" / "comparison.md").read_text()
    assert "| run-11-with-a-name | 90.00% of 360 | 90.00% (epoch 3.636) |" in page
    drawn = (tmp_path / "out" / "loss.svg").read_text()
    assert drawn.count("<polyline") == 24
    height = float(re.search(r'viewBox="0 0 640 (\d+)"', drawn)[1])
    assert all(float(level) <= height for level in re.findall(r' y="([\d.]+)"', drawn))


def test_standard_errors_and_targets(tmp_path: Path) -> None:
    runs = [read(make_run(tmp_path, name)) for name in ("one", "two")]
    for run in runs:
        run.final["top1"] = 1.0
    comparison = compare(runs, target=0.8765)
    assert comparison.rows[1]["top1_standard_error"] == pytest.approx(0.0039, abs=1e-4)
    assert "time to 87.65% top-1" in [line[0] for line in table(comparison)]
    for run in runs:
        run.summary, run.recipe = {}, {}
    assert fairness(runs).unknown.count("global batch") == 1
    with raises("missing-run"):
        paceline.compare()
    with raises("invalid-accuracy") as caught:
        paceline.compare(tmp_path / "one", to="93")
    assert caught.value.fields["value"] == "93"
    assert paceline.compare(tmp_path / "one", to="70%").target == pytest.approx(0.7)


def test_several_bottlenecks_are_reported_most_expensive_first(tmp_path: Path) -> None:
    both = read(make_run(tmp_path, "both", ranks=2, seconds={"data": [0.01, 0.2], "compute": [0.1, 1.0], "sync": 0.0}))
    assert [found.cause for found in verdict(both)][:2] == ["compute-straggler", "input-straggler"]
    all_wait = {"data": [0.5, 0.5, 0.5, 0.65], "sync": [0.15, 0.15, 0.15, 0.0]}
    causes = [found.cause for found in verdict(read(make_run(tmp_path, "all", ranks=4, seconds=all_wait)))]
    assert causes[0] == "input-bound"
    one_fast = {"compute": [0.01, 0.4, 0.4, 0.4], "sync": [0.4, 0.01, 0.01, 0.01]}
    assert verdict(read(make_run(tmp_path, "fast", ranks=4, seconds=one_fast)))[0].cause == "compute-bound"


def test_texts_of_a_run_are_escaped_on_pages(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "evil")
    evil = "<script>alert(1)</script>|x\x1b[31m"
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "message": evil, "global_batch": 128}))
    (folder / "telemetry" / "host.txt").write_text("```\n<script>")
    other = read(make_run(tmp_path, "plain"))
    other.name = evil
    for page in write_logbook([read(folder), other], tmp_path / "book"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        assert "<script" not in text.replace("\\<script", "")
        assert "\x1b" not in text
    assert "\x1b" not in svg(Chart(evil, [Line(evil, [(0, 1), (1, 2)])], note=evil))


def test_logbook_does_not_overwrite_other_files(tmp_path: Path) -> None:
    book, run = tmp_path / "docs", read(make_run(tmp_path, "one"))
    book.mkdir()
    (book / "index.md").write_text("# My own\n")
    with raises("not-a-logbook-page") as caught:
        write_logbook([run], book)
    assert caught.value.fields["path"] == book / "index.md"
    assert (book / "index.md").read_text() == "# My own\n"
    (book / "index.md").unlink()
    page = write_logbook([run], book)[0]
    page.write_text(page.read_text().replace("<!-- end of notes -->", "Precious."))
    kept = write_logbook([run], book)[0]
    assert kept.name == "README.old-1.md"
    assert "Precious." in kept.read_text()
    (book / "one" / "facts.json").write_text('{"run": "one", "folder": "../elsewhere", "top1": 1e999}')
    write_logbook([read(make_run(tmp_path, "two"))], book)
    assert not (tmp_path / "elsewhere").exists()


def test_runs_with_the_same_name_have_separate_pages(tmp_path: Path) -> None:
    book = tmp_path / "book"
    first, second = make_run(tmp_path / "a", "same"), make_run(tmp_path / "b", "same")
    page = write_logbook([read(first)], book)[0]
    page.write_text(page.read_text().replace("page -->\n", "page --> \nMine: <!-- end of notes --> and more.\n"))
    other = write_logbook([read(second)], book)[0]
    write_logbook([read(first)], book)
    assert other != page
    assert "and more." in page.read_text()
    assert "Mine" not in other.read_text()
    assert (book / "index.md").read_text().count("README.md") == 2


STRAGGLER = {"data": [0.02, 0.02, 0.02, 1.4], "sync": [1.4, 1.4, 1.4, 0.02]}
SLOW_RANK = {"compute": [0.1, 0.3], "sync": [0.2, 0.01]}
# ranks, seconds per step, other arguments of make_run; the cause, and values that the text must name
CASES = {
    "slow loader": (2, {"data": 0.9}, {}, "input-bound", [r"8\d%", r"\d images/s", "data.decode_threads"]),
    "slow loader on one rank": (4, STRAGGLER, {}, "input-straggler", ["rank 3 on host-1", "1.4 s", "20 ms"]),
    "slow rank": (2, SLOW_RANK, {}, "compute-straggler", ["rank 1 on host-0", "0.3 s", "0.1 s"]),
    "slow link": (2, {"sync": 0.9}, {}, "communication-bound", ["90%", "0.89 Gbit/s", "train.grad_accumulation"]),
    "small batch": (1, {"compute": 0.04, "optimizer": 0.04}, {}, "small-batch", ["49%", "128 images per rank"]),
    "frequent evaluation": (1, {}, {"eval_seconds": 2.0}, "frequent-evaluation", ["66%", "4 evaluations of 2 s"]),
    "slow checkpoints": (1, {}, {"checkpoint_seconds": 1.0}, "blocking-checkpoints", ["47%", "4 checkpoints of 1 s"]),
    "compute only": (2, {}, {}, "compute-bound", ["84%", r"\d images/s"]),
}


@pytest.mark.parametrize("case", CASES)
def test_verdict_names_the_cause(tmp_path: Path, case: str) -> None:
    ranks, seconds, more, cause, values = CASES[case]
    found = verdict(read(make_run(tmp_path, "run", ranks=ranks, seconds=seconds, **more)))
    assert found[0].cause == cause, found
    for value in values:
        assert re.search(value, found[0].text), found[0].text


def test_advice_for_registered_datasets(tmp_path: Path) -> None:
    run = read(make_run(tmp_path, "run", seconds={"data": 0.9}))
    run.recipe["data"]["name"] = "mine"
    (found,) = verdict(run)
    assert "__getitem__ of the registered dataset 'mine'" in found.text
    assert "Prepare the data" not in found.text


def test_verdict_is_that_of_the_last_number_of_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", ranks=2, seconds={"sync": 0.9})
    lines = (run / "metrics.jsonl").read_text().splitlines()
    alone = (make_run(tmp_path, "alone") / "metrics.jsonl").read_text().splitlines()
    resume = json.dumps({"kind": "resume", "step": 20, "epoch": 20 / 11, "phase": 0, "ranks": 1})
    (run / "metrics.jsonl").write_text("\n".join([*lines[:6], resume, *alone[6:]]) + "\n")
    assert [found.cause for found in verdict(read(run))] == ["compute-bound"]


def test_notes_in_the_logbook_are_kept_and_the_index_grows(tmp_path: Path) -> None:
    book = tmp_path / "book"
    page = write_logbook([read(make_run(tmp_path, "first"))], book)[0]
    page.write_text(page.read_text().replace("page -->\n", "page -->\nThe fan was broken.\n"))
    write_logbook([read(tmp_path / "first"), read(make_run(tmp_path, "second", "--optim.lr", "0.2"))], book)
    assert "The fan was broken." in page.read_text()
    index = (book / "index.md").read_text()
    assert "[first](first/README.md)" in index
    assert "[second](second/README.md)" in index
    assert "Not the same experiment: learning rate differs" in (book / "comparison.md").read_text()
    assert f"paceline train {tmp_path / 'first'}/recipe.yaml --name first-again" in page.read_text()
    assert (book / "first" / "loss.svg").read_text().startswith("<svg")
    tsv = (book / "first" / "dawnbench.tsv").read_text().splitlines()
    assert tsv[0] == "epoch\thours\ttop1Accuracy\ttop5Accuracy"
    assert len(tsv) == 5


def test_report_is_one_self_contained_page(tmp_path: Path) -> None:
    evil = make_run(tmp_path, "evil</script>".replace("/", "_"))
    runs = [read(evil), read(make_run(tmp_path, "two", ranks=2))]
    runs[0].name = "</script><b>evil"
    page = report(compare(runs), "<i>title</i>")
    assert "<b>evil" not in page
    assert "&lt;i&gt;title" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [run["name"] for run in data["runs"]] == ["</script><b>evil", "two"]
    assert {chart["title"] for chart in data["charts"]} >= {
        "loss",
        "top-1",
        "learning rate",
        "images/s",
        "device utilization",
        "peak memory per rank, GB",
    }
    assert len(data["runs"][1]["ranks"]) == 2


def test_thinning_keeps_spikes() -> None:
    points = [(float(x), 1000.0 if x == 4321 else 0.0) for x in range(100_000)]
    kept = thinned(points, 500)
    assert len(kept) <= 510
    assert (4321.0, 1000.0) in kept
    assert kept == sorted(kept)


def test_ticks_are_round_numbers() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3, 3) == [3]
    assert svg(Chart("empty", [Line("nothing", [])])) == ""
