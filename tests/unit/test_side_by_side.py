"""Many runs in one page, table or chart: distinct line styles, correct names and settings."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from made_runs import make_run

import paceline as pl
from paceline.analysis.book import write_logbook
from paceline.analysis.charts import COLORS, COLORS_ON_DARK, Chart, Line, svg
from paceline.analysis.compare import compare
from paceline.analysis.curves import charts_of
from paceline.analysis.page import report
from paceline.analysis.read import read
from paceline.analysis.run import LoggedRun
from paceline.analysis.settings import settings, shared_and_differing
from paceline.analysis.tables import page_table, table
from paceline.cli.main import main
from paceline.system import tables


def _data(page: str) -> dict:
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def _runs(root: Path, number: int) -> list[LoggedRun]:
    return [read(make_run(root, f"run-{place:02d}", "--seed", str(place))) for place in range(number)]


@pytest.mark.parametrize("number", [10, 20, 45])
def test_every_run_has_its_own_line_style(tmp_path: Path, number: int) -> None:
    runs = _runs(tmp_path, number)
    on_page = [(run["color"], run["dashes"]) for run in _data(report(compare(runs), "title"))["runs"]]
    assert len(set(on_page)) == number
    if number == 10:
        assert len({color for color, _ in on_page}) == 10
    drawn = svg(dict(charts_of(runs))["loss.svg"])
    strokes = [_stroke(line) for line in re.findall(r"<polyline[^>]*>", drawn)]
    training, validation = strokes[:number], strokes[number:]
    assert training == validation
    assert len(set(validation)) == number
    legend = [_stroke(line) for line in re.findall(r"<line[^>]*>", drawn) if "stroke-width" in line]
    assert legend == validation


def _stroke(line: str) -> tuple[str, str]:
    pattern = re.search(r'stroke-dasharray="([^"]*)"', line)
    return re.search(r'stroke="([^"]*)"', line)[1], pattern[1] if pattern else ""


@pytest.mark.parametrize(("colors", "ground"), [(COLORS, "#f8f9fa"), (COLORS_ON_DARK, "#1a2028")])
def test_colors_are_visible_and_distinct(colors: tuple[str, ...], ground: str) -> None:
    for color in colors:
        light, dark = sorted((_luminance(color), _luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3  # WCAG's minimum for graphics
    for one, other in combinations(colors, 2):
        assert sum(abs(a - b) for a, b in zip(_channels(one), _channels(other), strict=True)) > 90


def _channels(color: str) -> list[int]:
    return [int(color[place : place + 2], 16) for place in (1, 3, 5)]


def _luminance(color: str) -> float:
    scaled = [channel / 255 for channel in _channels(color)]
    red, green, blue = (value / 12.92 if value <= 0.04 else ((value + 0.055) / 1.055) ** 2.4 for value in scaled)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _percents(drawn: str) -> list[float]:
    return [float(label) for label in re.findall(r">([-\d.]+)%</text>", drawn)]


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.97, 0.98, 0.985, 0.99], 96, 100),
        ([0.995, 0.999, 1.0, 1.0], 99, 100),
        ([1.0, 1.0], 90, 100),
        ([0.0, 0.001, 0.002, 0.001], 0, 1),
        ([0.1, 0.5, 0.96, 0.97, 0.975, 0.98], 93, 100),  # the first epochs do not squeeze the rest
        ([0.1, 0.3, 0.5, 0.6, 0.7, 0.76], 0, 100),
    ],
)
def test_accuracy_axis_fits_the_values(values: list[float], low: float, high: float) -> None:
    drawn = svg(Chart("top-1", [Line("run", list(enumerate(values)))], percent=True))
    labels = _percents(drawn)
    assert len(labels) >= 2
    assert low <= min(labels) < max(labels) <= high
    assert ("The axis starts at" in drawn) == (values[0] == 0.1 and values[-1] > 0.9)


def test_page_shows_model_data_and_hyperparameters_of_each_run(tmp_path: Path) -> None:
    other = ("--optim.lr", "0.2", "--ema.decay", "0.99", "--train.mixup", "0.8")
    other += ("--data.name", "cifar10", "--data.path", "/data/cifar10")
    runs = [read(make_run(tmp_path, "one")), read(make_run(tmp_path, "two", *other))]
    second = settings(runs[1])
    assert second.items() >= {
        "model": "airbench", "parameters": "25 M", "weights": "random", "data": "cifar10", "data path": "/data/cifar10",
        "classes": "10", "training images": "1,437", "validation images": "360", "data fingerprint": "d1",
        "duration": "20 epochs", "global batch": "128", "optimizer": "sgd", "peak learning rate": "0.2",
        "schedule": "one-cycle, warmup 4 epochs", "weight decay": "0.0005", "label smoothing": "0.1", "mixup": "0.8",
        "precision": "fp32", "EMA decay": "0.99",
    }.items()  # fmt: skip
    assert "mixup" not in settings(runs[0])
    shared, differing = shared_and_differing(runs)
    assert differing["mixup"] == ["off", "0.8"]
    page = report(compare(runs), "title")
    for name, value in shared.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    for name, (first_value, second_value) in differing.items():
        assert f'<th scope="col">{name}</th>' in page
        assert name == "data path" or f"<td>{first_value}</td>" in page
        assert f"<td><mark>{second_value}</mark></td>" in page
    text = write_logbook(runs, tmp_path / "book")[1].read_text()
    assert all(f"| {name} | {value} |" in text.replace("\\_", "_") for name, value in second.items())


def test_title_of_a_report_names_the_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name) for name in ("one", "two", "three", "four")]
    titles = {1: "one", 2: "one and two", 3: "one, two, three", 4: "one, two, three, ..."}
    for count, title in titles.items():
        page = pl.report(runs[:count], tmp_path / "report.html").read_text()
        assert f"<title>{title}</title>" in page


def test_settings_of_fine_tuning_are_shown(tmp_path: Path) -> None:
    names = ("frozen", "drop path rate", "layer decay", "head learning rate", "class weights", "sampler", "test images")
    plain = make_run(tmp_path, "plain")
    assert not set(names) & settings(read(plain)).keys()
    weights = {str(number): 2.0 for number in range(7)}
    words = ("--model.freeze", "conv1", "layer1.*", "--model.drop_path", "0.1", "--optim.layer_decay", "0.75")
    words += ("--optim.head_lr_mult", "10", "--train.class_weights", json.dumps(weights), "--data.sampler", "balanced")
    tuned = make_run(tmp_path, "tuned", *words)
    summary = json.loads((tuned / "summary.json").read_text())
    (tuned / "summary.json").write_text(json.dumps(summary | {"data": summary["data"] | {"test_images": 75}}))
    found = settings(read(tuned))
    shown = "0: 2, 1: 2, 2: 2, 3: 2, 4: 2, ..."
    assert [found[name] for name in names] == ["conv1, layer1.*", "0.1", "0.75", "x 10", shown, "balanced", "75"]


def test_settings_of_phases_and_of_invalid_recipes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    phases = [{"size": 128, "lr": [0.5, 2.0], "global_batch": 64}, {"size": 224, "lr": [0.1]}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"phases": phases}))
    found = settings(read(folder))
    assert (found["image size"], found["peak learning rate"]) == ("128, then 224", "2")
    assert (found["schedule"], found["global batch"]) == ("by phase (2 phases)", "64, then 128")
    for points, peak in (([{"factor": 0.1}, {"factor": 3.0}], "0.15"), ([5, {"factor": "x"}], "0.05"), (7, "0.05")):
        schedule = {"name": "piecewise", "points": points}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"optim": {"lr": 0.05, "schedule": schedule}}))
        assert settings(read(folder))["peak learning rate"] == peak
    summary = json.loads((folder / "summary.json").read_text())
    for variants, shown in ((["short-160-q90", "original"], "short-160-q90, original"), ([], None), (3, None)):
        (folder / "summary.json").write_text(
            json.dumps(summary | {"data": summary["data"] | {"val_variants": variants}})
        )
        assert settings(read(folder)).get("validated on") == shown
    invalid = recipe | {
        "phases": [1, {"size": [], "global_batch": {}, "lr": ["x"]}],
        "optim": 5,
        "ema": [],
        "ramp": "no",
    }
    invalid["train"] = {"label_smoothing": "much", "mixup": [], "duration": 7, "loss": {}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(invalid))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "data": ["x"]}))
    assert "airbench" in report(compare([read(folder)]), "title")
    write_logbook([read(folder)], tmp_path / "book")


def test_best_epoch_is_shown_beside_the_last(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", top1=(0.95, 0.75))
    assert ["best top-1", "90.00% (epoch 0.9091)"] in table(compare([read(folder)]))
    index = write_logbook([read(folder)], tmp_path / "book")[-1].read_text()
    assert "| 75.00% | 90.00% (epoch 0.9091) |" in index


def test_names_of_losses_include_what_modifies_them(tmp_path: Path) -> None:
    soft = ("--train.label_smoothing", "0.2", "--train.mixup", "0.8")
    plain = ("--train.label_smoothing", "0")
    one, same, hard = (
        read(make_run(tmp_path, name, *words)) for name, words in (("one", soft), ("same", soft), ("hard", plain))
    )
    bce = read(make_run(tmp_path, "bce", "--train.loss", "bce", "--train.cutmix", "1"))
    recipe = make_run(tmp_path, "own", *plain) / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("loss: cross-entropy", "loss: focal"))
    own = read(recipe.parent)
    assert "training loss (focal)" in [row[0] for row in table(compare([own]))]
    assert settings(own)["loss"] == "focal"
    labels = [row[0] for row in table(compare([one, same]))]
    assert "training loss (label smoothing 0.2, mixup 0.8)" in labels
    assert "validation loss (cross entropy)" in labels
    charts = {chart["title"]: chart for chart in _data(report(compare([one, same]), "title"))["charts"]}
    assert "training loss (label smoothing 0.2, mixup 0.8), a running mean over augmented" in charts["loss"]["note"]
    assert "not comparable" in charts["loss"]["note"]
    assert "training top-1 (mixup 0.8)" in charts["top-1"]["note"]
    names = {line["name"] for line in _data(report(compare([bce]), "title"))["charts"][1]["lines"]}
    assert names == {"training loss (BCE, label smoothing 0.1, cutmix 1)", "validation loss (cross entropy)"}
    alone = {chart["title"]: chart for chart in _data(report(compare([hard]), "title"))["charts"]}
    assert "training loss (cross entropy)" in alone["loss"]["note"]
    assert "not comparable" not in alone["loss"]["note"] + alone["top-1"]["note"]
    assert "(not the same measure in all runs)" in " ".join(row[0] for row in table(compare([one, hard])))
    drawn = svg(dict(charts_of([one]))["loss.svg"])
    assert "training loss (label smoothing 0.2, mixup 0.8)" in re.sub(r"</text>\s*<text[^>]*>", " ", drawn)


def test_memory_is_per_rank(tmp_path: Path) -> None:
    run = read(make_run(tmp_path, "run", ranks=2, memory=[2 * 10**9, 3 * 10**9]))
    data = _data(report(compare([run]), "title"))
    chart = next(chart for chart in data["charts"] if chart["title"] == "peak memory per rank, GB")
    assert {point[-1] for point in chart["lines"][0]["points"]} == {3.0}
    assert [rank["gigabytes"] for rank in data["runs"][0]["ranks"]] == [2.0, 3.0]
    assert not any("memory of" in chart["title"] for chart in data["charts"])


def test_ten_runs_in_a_terminal_show_top1_first(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folders = [make_run(tmp_path, f"digits-with-seed-{number:02d}", top1=(0.5, 0.9)) for number in range(10)]
    assert main(["compare", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = [line for line in lines if line.strip().startswith("digits-with-seed-")][:10]
    assert [line.split()[0] for line in first] == [folder.name for folder in folders]
    assert all(line.split()[1] == "90.00%" for line in first)
    assert len(first) == sum("digits-with-seed-" in line for line in lines)  # not a terminal: one table of any width
    monkeypatch.setattr(tables, "is_terminal", lambda: True)
    assert main(["compare", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if line.startswith("digits-with-seed-")][:10] == ["90.00%"] * 10
    assert page_table(compare([read(folder) for folder in folders]))[0][1:3] == ["top-1", "best top-1"]
