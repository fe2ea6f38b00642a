"""`paceline recipes --record` writes the results of runs into the file of a recipe, and nothing else."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import raises
from made_runs import make_run

import paceline as pl
from paceline.cli.main import main
from paceline.config.edit import write_measured
from paceline.config.io import load_recipe, recipe_file, shipped
from paceline.config.tracking import Measured

RESULT = Measured(
    seeds=(0, 1),
    top1=(0.9, 0.92),
    seconds=(600.0, 784.0),
    hardware="2 threads of a: 'CPU'",
    precision="fp32",
    torch="2",
)
RECIPE = """# my digits
name: mine
base: digits   # the shipped one
about:
  # found by hand
  source: >-
    a notebook,
    on two lines
  deviations: [another seed]  # the only one

train: {duration: 20ep}  # as there
"""


def test_runs_are_recorded_and_recorded_again(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    runs = [make_run(tmp_path, f"run-{seed}", "--seed", str(seed), top1=(0.5, 0.9 + seed / 100)) for seed in (0, 1, 2)]
    assert main(["recipes", str(path), "--record", *map(str, reversed(runs))]) == 0
    assert "91.00 ± 1.00 / 99.00 ± 0.00%" in capsys.readouterr().out
    measured = load_recipe(str(path)).about.measured
    assert (measured.seeds, measured.top1) == ((0, 1, 2), (0.9, 0.91, 0.92))
    assert measured.seconds == (pytest.approx(40 * 0.103),) * 3
    assert (measured.hardware, measured.precision, measured.torch) == ("1 thread of cpu", "fp32", "2")
    assert (measured.date, measured.disturbed) == ("2026-01-01", False)
    pl.record_measured(runs[:1], path)
    assert load_recipe(str(path)).about.measured.seeds == (0,)
    lines = path.read_text().splitlines()
    start = lines.index("  measured:")
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith("    "))
    assert "\n".join([*lines[:start], *lines[end:], ""]) == RECIPE


def test_only_speed_defaults_and_commits_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    shutil.copy(shipped()["digits"], path)
    run = make_run(tmp_path, "run", "--evaluate.every", "1ep", "--log.every", "5ba", "--precision", "fp32")
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("tf32: true\n", ""))  # as written before the field existed
    other = make_run(tmp_path, "other", "--seed", "1")
    for folder, code in ((run, {"commit": "a", "changed": True}), (other, {"commit": "b", "changed": False})):
        _edit(folder / "environment.json", lambda tree, code=code: tree["starts"][0].update(code=code))
    measured = pl.record_measured([run, other], path).about.measured
    assert (measured.top1, measured.commits) == ((0.9, 0.9), ("a+", "b"))


def _edit(path: Path, change: Callable[[Any], object]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def _killed(run: Path) -> None:
    _edit(run / "summary.json", lambda summary: summary.update(status="killed"))


def _resumed(run: Path) -> None:
    """With another precision."""
    _edit(
        run / "environment.json",
        lambda tree: tree["starts"].append(tree["starts"][0] | {"precision": "bf16", "first_step": 20}),
    )


def _not_evaluated(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"kind": "eval"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[:last] + lines[last + 1 :]))


def _changed(run: Path) -> None:
    sha256 = hashlib.sha256((run / "recipe.yaml").read_bytes()).hexdigest()
    _edit(run / "environment.json", lambda tree: tree["starts"][0].update(recipe_sha256=sha256))
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text() + "# changed\n")


def _other_lr(run: Path) -> None:
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("lr: 0.05\n", "lr: 0.06\n"))


def _corrupt(run: Path) -> None:
    (run / "recipe.yaml").write_text("{")


def _other_torch(run: Path) -> None:
    _edit(run / "environment.json", lambda tree: tree["starts"][0]["packages"].update(torch="3"))


def _same_seed(run: Path) -> None:
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("seed: 1\n", "seed: 0\n"))


def _log(run: Path) -> None:
    shutil.rmtree(run)
    run.write_text(
        "# global_batch: 64\nEpoch: [0][1/2]\tTime 6.1 ( 6.5)\tAcc@1 20.0 ( 12.0)\n * Acc@1 35.1 Acc@5 60.5\n"
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_killed, "record-incomplete-run"),
        (_resumed, "record-incomplete-run"),
        (_corrupt, "record-incomplete-run"),
        (_not_evaluated, "record-not-evaluated"),
        (_changed, "record-changed-recipe"),
        (_other_lr, "record-other-recipe"),
        (_other_torch, "record-other-conditions"),
        (_same_seed, "record-same-seed"),
        (_log, "record-needs-run-folder"),
    ],
)
def test_other_runs_are_refused(change: Callable[[Path], None], code: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    shutil.copy(shipped()["digits"], path)
    first, second = (make_run(tmp_path, f"run-{seed}", "--seed", str(seed)) for seed in (0, 1))
    change(second)
    before = path.read_bytes()
    with raises(code):
        pl.record_measured([first, second], path)
    assert path.read_bytes() == before


def test_runs_on_part_of_imagenet_or_on_other_images_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nbase: digits\ndata: {name: imagenet, path: data, augment: {translate: 0}}\n")
    words = ("--data.name", "imagenet", "--data.path", "data", "--data.augment.translate", "0")
    run = make_run(tmp_path, "run", *words)
    with raises("record-part-of-data"):
        pl.record_measured([run], path)
    path.write_text("name: mine\nbase: digits\ndata: {name: '', path: data, augment: {translate: 0}}\n")
    words = ("--data.name", "", "--data.path", "other", "--data.augment.translate", "0")
    with raises("record-other-recipe"):
        pl.record_measured([make_run(tmp_path, "other", *words)], path)


def test_the_recipe_of_the_runs_is_found(tmp_path: Path, monkeypatch) -> None:
    run = make_run(tmp_path, "run")
    copy = tmp_path / "src" / "paceline" / "recipes" / "digits.yaml"
    copy.parent.mkdir(parents=True)
    shutil.copy(recipe_file("digits"), copy)
    for module in ("paceline.config.io", "paceline.api.recording"):
        monkeypatch.setattr(f"{module}.shipped", lambda: {"digits": copy})
    with raises("recipe-installed"):
        pl.record_measured([run])
    (tmp_path / "pyproject.toml").touch()
    assert pl.record_measured([run]).about.measured.top1 == (0.9,)
    assert "measured:" in copy.read_text()
    with raises("record-needs-recipe"):
        pl.record_measured([make_run(tmp_path, "mine", "--name", "mine")])
    with raises("record-without-runs"):
        pl.record_measured([])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("base: digits\nname: a # a comment\nseed: 3\n", ["# a comment", "seed: 3"]),
        ("name: a\nbase: digits", ["base: digits"]),
        ("name: a\nabout:\nbase: digits\n", ["base: digits"]),
        ("name: a\r\nabout:\r\n  source: b\r\nbase: digits\r\n", ["source: b\r\n", "base: digits\r\n"]),
        (
            "name: a\nabout:\n    measured: {seeds: [1]} # old\n    # kept\n    source: b\nbase: digits\n",
            ["# kept", "# old"],
        ),
        (
            "about:\n  measured:\n    seeds: [1]\n    top1: [0.1]\n    seconds: [1]\n\n# kept\nname: a\nbase: digits\n",
            ["\n\n# kept"],
        ),
        ("name: a\nbase: digits\nabout:\n  source: |\n    x\n\n    y\n\n# end\n", ["\n# end\n", "x\n\n    y\n"]),
        ("\ufeffname: a\nbase: digits\n", ["\ufeffname: a\n"]),
    ],
)
def test_comments_and_layout_are_kept(text: str, kept: list[str], tmp_path: Path) -> None:
    path, link = tmp_path / "a.yaml", tmp_path / "link.yaml"
    path.write_bytes(text.encode())
    path.chmod(0o640)
    link.symlink_to(path)
    for result in (RESULT, RESULT):
        write_measured(link, result)
        assert load_recipe(str(path)).about.measured == result
    written = path.read_bytes().decode()
    assert [part for part in kept if part not in written] == []
    assert written.count("measured:") == 1
    assert written.count("\r\n") in (0, written.count("\n"))
    assert (link.is_symlink(), path.stat().st_mode & 0o777) == (True, 0o640)


@pytest.mark.parametrize(
    "text",
    [
        "{name: a, base: digits}\n",
        "name: a\nbase: digits\nabout: {source: b}\n",
        "name: a\nbase: digits\nabout: {}\n",
        "name: a\nbase: digits\nmodel: &x {name: resnet18}\nabout: *x\n",
        "name: a\nbase: digits\nabout:\n  <<: {source: b}\n  measured: &m {seeds: [1]}\nema: *m\n",
    ],
)
def test_a_layout_that_cannot_be_kept_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with raises("recipe-not-editable"):
        write_measured(path, RESULT)
    assert path.read_text() == text


def test_results_are_not_inherited_and_must_be_consistent(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("name: one\nbase: digits\nabout: {published: 99%, source: here}\n")
    (tmp_path / "two.yaml").write_text("name: two\nbase: one.yaml\n")
    about = load_recipe(str(tmp_path / "two.yaml")).about
    assert (about.source, about.published, about.measured) == ("here", "", Measured())
    with pytest.raises(pl.UserError, match="measured-inconsistent"):
        load_recipe("digits", ["--about.measured", "{seeds: [0, 1], top1: [0.9], seconds: [1, 2]}"])


def test_a_result_is_one_sentence() -> None:
    text = str(RESULT)
    assert text.startswith("91.00 ± 1.41% (mean and standard deviation of seeds 0, 1) in 11:32 min on 2 threads of a")
    assert (str(Measured()), Measured().accuracy) == ("", "")
    one = Measured(seeds=(4,), top1=(0.5,), top5=(0.75,), seconds=(7200.0,), disturbed=True)
    assert str(one).startswith("50.00 / 75.00% (seed 4) in 2:00 h (slowed down by other processes)")
