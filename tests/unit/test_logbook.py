"""Reading runs, comparing them, finding what limits them, writing them down. All from made-up run folders."""

import json
import os
import re
from pathlib import Path

import pytest
from made_runs import make_run

import paceline
from paceline.cli.main import main
from paceline.errors import UserError
from paceline.logbook.book import write_logbook
from paceline.logbook.charts import Chart, Line, svg, thinned, ticks
from paceline.logbook.compare import compare, fairness
from paceline.logbook.live import snapshot
from paceline.logbook.page import report
from paceline.logbook.read import read
from paceline.logbook.tables import as_csv, as_json, markdown, table
from paceline.logbook.verdict import verdict


def test_a_killed_run_is_marked_partial_and_cut_lines_are_left_out(tmp_path: Path) -> None:
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


def test_the_same_experiment_on_more_ranks_is_a_speed_up(tmp_path: Path) -> None:
    one = read(make_run(tmp_path, "one", seconds={"compute": 0.1}))
    two = read(make_run(tmp_path, "two", ranks=2, seconds={"compute": 0.05}))
    comparison = compare([one, two], price=3.6)
    assert comparison.fairness.sentence == "the same experiment"
    assert comparison.speedup_counts
    row = comparison.rows[1]
    assert (row["ratio"], row["ratio_of"]) == (pytest.approx(0.103 / 0.058, rel=1e-6), "times")
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
    assert not half.speedup_counts  # half a run proves nothing
    assert half.sentence == "the same experiment, but two not whole from end to end: no speed-up can be told"


def test_what_matters_makes_another_experiment_of_it(tmp_path: Path) -> None:
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
    assert "a ratio of their times is not a speed-up" in found.sentence
    assert any("no speed-up" in line[0] for line in table(compare(runs)))


def test_what_is_no_run_is_named_and_the_rest_is_shown(tmp_path: Path, capsys) -> None:
    (tmp_path / "poem.txt").write_text("roses are red\n")
    with pytest.raises(UserError, match=r"poem.txt is neither a run folder nor a log that can be imported; known are"):
        read(tmp_path / "poem.txt")
    good = make_run(tmp_path, "good")
    assert main(["compare", str(good), str(tmp_path / "nothing"), str(tmp_path / "poem.txt")]) == 1
    printed = capsys.readouterr()
    assert "left out: " in printed.err
    assert "there is no such run" in printed.err
    assert f"skipped: {tmp_path / 'poem.txt'} (neither a run" in printed.err
    assert "good" in printed.out
    assert main(["compare", str(tmp_path / "nothing"), str(good)]) == 1  # nothing to compare with
    assert main(["compare", str(good)]) == 1
    assert "compare needs two runs or more" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])


def test_many_runs_stay_readable(tmp_path: Path, capsys) -> None:
    runs = [str(make_run(tmp_path, f"run-{number:02d}-with-a-name", "--seed", str(number))) for number in range(12)]
    assert main(["compare", *runs, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if " s " in line) <= 80
    assert all(f"run-{number:02d}-with-a-name" in printed for number in range(12))  # not one is folded
    page = (tmp_path / "out" / "comparison.md").read_text()
    assert "| run-11-with-a-name | 90.00% of 360 | 90.00% (epoch 3.636) |" in page
    drawn = (tmp_path / "out" / "loss.svg").read_text()
    assert drawn.count("<polyline") == 24
    height = float(re.search(r'viewBox="0 0 640 (\d+)"', drawn)[1])
    assert all(float(level) <= height for level in re.findall(r' y="([\d.]+)"', drawn))


def test_chance_and_targets_are_told_as_they_are(tmp_path: Path) -> None:
    runs = [read(make_run(tmp_path, name)) for name in ("one", "two")]
    for run in runs:
        run.final["top1"] = 1.0
    comparison = compare(runs, target=0.8765)
    assert comparison.rows[1]["top1_standard_error"] == pytest.approx(0.0039, abs=1e-4)
    assert "time to 87.65% top-1" in [line[0] for line in table(comparison)]
    for run in runs:
        run.summary, run.recipe = {}, {}
    assert fairness(runs).unknown.count("global batch") == 1
    with pytest.raises(UserError, match="compare needs runs"):
        paceline.compare()
    with pytest.raises(UserError, match=r"'93' is no accuracy; write e\.g\. 0\.93 or 93%"):
        paceline.compare(tmp_path / "one", to="93")
    assert paceline.compare(tmp_path / "one", to="70%").target == pytest.approx(0.7)


def test_all_that_costs_time_is_named(tmp_path: Path) -> None:
    both = read(make_run(tmp_path, "both", ranks=2, seconds={"data": [0.01, 0.2], "compute": [0.1, 1.0], "sync": 0.0}))
    assert [found.cause for found in verdict(both)][:2] == ["compute on one rank", "data on one rank"]
    all_wait = {"data": [0.5, 0.5, 0.5, 0.65], "sync": [0.15, 0.15, 0.15, 0.0]}
    causes = [found.cause for found in verdict(read(make_run(tmp_path, "all", ranks=4, seconds=all_wait)))]
    assert causes[0] == "data"
    one_fast = {"compute": [0.01, 0.4, 0.4, 0.4], "sync": [0.4, 0.01, 0.01, 0.01]}
    assert verdict(read(make_run(tmp_path, "fast", ranks=4, seconds=one_fast)))[0].cause == "compute"


def test_nothing_in_a_run_reaches_a_page_as_it_is(tmp_path: Path) -> None:
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


def test_a_logbook_overwrites_nobodys_files(tmp_path: Path) -> None:
    book, run = tmp_path / "docs", read(make_run(tmp_path, "one"))
    book.mkdir()
    (book / "index.md").write_text("# My own\n")
    with pytest.raises(UserError, match=r"index.md is not a page of a logbook"):
        write_logbook([run], book)
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


def test_two_runs_of_one_name_have_pages_of_their_own(tmp_path: Path) -> None:
    book = tmp_path / "book"
    first, second = make_run(tmp_path / "a", "same"), make_run(tmp_path / "b", "same")
    page = write_logbook([read(first)], book)[0]
    page.write_text(page.read_text().replace("again -->\n", "again --> \nMine: <!-- end of notes --> and more.\n"))
    other = write_logbook([read(second)], book)[0]
    write_logbook([read(first)], book)
    assert other != page
    assert "and more." in page.read_text()
    assert "Mine" not in other.read_text()
    assert (book / "index.md").read_text().count("README.md") == 2


CASES = {
    "slow loader": (2, {"data": 0.9}, {}, "data", r"8\d% of training is waiting for data; without that"),
    "slow loader on one rank": (
        4,
        {"data": [0.02, 0.02, 0.02, 1.4], "sync": [1.4, 1.4, 1.4, 0.02]},
        {},
        "data on one rank",
        r"rank 3 on host-1 waits for data 1\.4 s a step, the others 20 ms",
    ),
    "slow rank": (
        2,
        {"compute": [0.1, 0.3], "sync": [0.2, 0.01]},
        {},
        "compute on one rank",
        r"rank 1 on host-0 computes 0\.3 s a step, the others 0\.1 s",
    ),
    "limited link": (
        2,
        {"sync": 0.9},
        {},
        "exchange",
        r"gradient exchange is 90% of a step at 0\.89 Gbit/s or less; accumulate",
    ),
    "tiny batch": (1, {"compute": 0.04, "optimizer": 0.04}, {}, "tiny batch", "the optimizer is 49% of a step"),
    "evaluation too often": (1, {}, {"eval_seconds": 2.0}, "evaluation", "66% of the run is evaluation: 4 of 2 s"),
    "blocking checkpoints": (
        1,
        {},
        {"save_seconds": 1.0},
        "checkpoints",
        "checkpoints held training up for 47% of the run: 4 of 1 s",
    ),
    "nothing but computing": (2, {}, {}, "compute", "limited by computing: 84% of the time is forward and backward"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_the_cause(tmp_path: Path, case: str) -> None:
    ranks, seconds, more, cause, text = CASES[case]
    found = verdict(read(make_run(tmp_path, "run", ranks=ranks, seconds=seconds, **more)))
    assert found[0].cause == cause, found
    assert re.search(text, found[0].text), found[0].text


def test_notes_in_the_logbook_survive_and_the_index_grows(tmp_path: Path) -> None:
    book = tmp_path / "book"
    page = write_logbook([read(make_run(tmp_path, "first"))], book)[0]
    page.write_text(page.read_text().replace("again -->\n", "again -->\nThe fan was broken.\n"))
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


def test_the_report_is_one_page_without_a_network(tmp_path: Path) -> None:
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


def test_a_run_is_watched_from_the_ends_of_its_files(tmp_path: Path, capsys) -> None:
    folder = make_run(tmp_path, "two", ranks=2, every=5, steps=2000, status="running")
    (folder / "summary.json").write_text(json.dumps({"status": "running", "total_steps": 4000}))
    now = snapshot(folder)  # host-0 is another machine, and has just written
    assert (now.status, now.step, now.ranks) == ("running", 2000, 2)
    assert now.seconds_left == pytest.approx(2000 * 0.108)
    assert main(["watch", str(folder), "--once"]) == 0
    text = capsys.readouterr().out
    assert "step 2,000 of 4,000 (50%)" in text
    assert "time left about 0:03:36" in text
    assert "host-0  50 %  1.0 GB" in text
    assert "rank 1: data 1.0 ms, compute 100.0 ms, sync 5.0 ms, optimizer 2.0 ms" in text
    assert main(["watch", str(tmp_path)]) == 1
    assert "is no run folder" in capsys.readouterr().err
    _make_old(folder)
    assert snapshot(folder).status == "killed"
    assert main(["watch", str(folder)]) == 0  # it ends with the run
