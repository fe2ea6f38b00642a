"""What a model gets wrong, against scikit-learn, scipy and direct implementations of the definitions."""

import builtins
import csv
import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import raises
from made_details import made_figures, made_logits, make_details
from scipy.special import softmax
from scipy.stats import binomtest
from sklearn import metrics as sk

from paceline.analysis.details.confusion import class_order, dense
from paceline.analysis.details.metrics import wilson
from paceline.analysis.details.read import details_of, read_details
from paceline.analysis.details.write import CSV, DETAILS, PARQUET
from paceline.track.sealed import write_sealed

CLASSES = 9


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    """Labels and logits; the last class has no images, and the one before it is never predicted."""
    labels, logits = made_logits(CLASSES, 400, strength=2.0)
    logits[:, -2] = -30
    return np.minimum(labels, CLASSES - 2), logits


def test_figures_equal_those_of_scikit_learn(data) -> None:
    labels, logits = data
    found = made_figures(labels, logits)
    predicted, p = logits.argmax(1), softmax(logits.astype(np.float64), axis=1)
    record, classes = found.record, list(range(CLASSES))
    assert record["overall"]["top1"] == sk.accuracy_score(labels, predicted)
    assert record["overall"]["top5"] == pytest.approx(sk.top_k_accuracy_score(labels, logits, k=5, labels=classes))
    assert record["overall"]["loss"] == pytest.approx(sk.log_loss(labels, p, labels=classes))
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert record["overall"]["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(labels, predicted))
    expected = sk.precision_recall_fscore_support(labels, predicted, labels=classes, zero_division=np.nan)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        column = [np.nan if row[name] is None else row[name] for row in record["per_class"]]
        np.testing.assert_allclose(column, values)
    present = classes[:-1]  # macro averages leave out classes without images, and count a missing precision as 0
    macro = sk.precision_recall_fscore_support(labels, predicted, labels=present, average="macro", zero_division=0)
    assert [record["overall"][name] for name in ("precision", "balanced_accuracy", "f1")] == pytest.approx(macro[:3])
    assert record["per_class"][-2]["precision"] is None
    assert record["per_class"][-1]["recall"] is None
    np.testing.assert_array_equal(dense(found.cells, CLASSES), sk.confusion_matrix(labels, predicted, labels=classes))


def test_figures_of_samples(data) -> None:
    labels, logits = data
    scores = made_figures(labels, logits).scores
    p = softmax(logits.astype(np.float64), axis=1)
    np.testing.assert_allclose(scores.p_label, p[np.arange(len(labels)), labels])
    np.testing.assert_allclose(scores.loss, -np.log(scores.p_label))
    np.testing.assert_allclose(scores.entropy, -(p * np.log(p)).sum(1))
    ordered = -np.sort(-p, axis=1)
    np.testing.assert_allclose(scores.top_probabilities, ordered[:, :5])
    np.testing.assert_allclose(scores.margin, ordered[:, 0] - ordered[:, 1])
    huge = made_figures(np.array([0, 1]), np.array([[800.0, 0.0], [800.0, 0.0]], np.float32))
    assert huge.scores.entropy.tolist() == [0.0, 0.0]
    assert huge.scores.loss.tolist() == [0.0, 800.0]


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (7, 7), (3, 10), (499, 500), (1, 1)])
def test_intervals_are_those_of_wilson(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(0.95, "wilson")
    assert wilson(successes, trials) == pytest.approx((expected.low, expected.high))
    assert wilson(0, 0) is None


def test_likely_label_errors_are_those_of_confident_learning(data) -> None:
    labels, logits = data
    found = made_figures(labels, logits)
    p = softmax(logits.astype(np.float64), axis=1)
    thresholds = {c: p[labels == c, c].mean() for c in range(CLASSES) if (labels == c).any()}
    expected = []
    for number, label in enumerate(labels):
        reached = [c for c in thresholds if p[number, c] >= thresholds[c]]
        best = max(reached, key=lambda c: p[number, c], default=label)
        if best != label and p[number].argmax() != label:
            expected.append(number)
    assert 0 < len(expected) < 100
    assert sorted(found.label_errors.tolist()) == expected
    assert found.record["num_label_errors"] == len(expected)


def test_equal_predictions_reach_the_mean_of_their_probabilities() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 300)
    found = made_figures(labels, np.tile(np.array([0.3, 0.1, 0.2, -0.1, 0.25], np.float32), (300, 1)))
    assert found.record["num_label_errors"] == (labels != 0).sum()


def test_swapped_labels_are_found() -> None:
    labels, logits = made_logits(10, 1000, strength=12.0)
    swapped = labels.copy()
    swapped[:20] = (labels[:20] + 3) % 10
    found = made_figures(swapped, logits).label_errors.tolist()
    assert len(found) >= 15  # those that reach the mean probability of their class
    assert set(found) <= set(range(20))


def test_worst_and_least_certain_images(data) -> None:
    labels, logits = data
    found = made_figures(labels, logits, ids=np.arange(len(labels)) * 2, names=["x"] * 2 * len(labels))
    scores, examples = found.scores, found.record["examples"]
    wrong = np.flatnonzero(~scores.correct)
    assert examples["worst"] == (2 * wrong[np.argsort(-scores.loss[wrong])][:24]).tolist()
    assert examples["least_certain"] == (2 * np.argsort(scores.margin)[:24]).tolist()
    shown = {image["index"] for image in found.record["images"]}
    assert shown >= {index for listed in examples.values() for index in listed}
    assert len(shown) <= 24 + 24 + 48 + 12 * 4


def test_confused_classes_are_side_by_side_and_pairs_are_counted() -> None:
    labels = np.repeat(np.arange(8), 10)
    predicted = labels.copy()
    predicted[0:6] = 5  # 0 is often taken for 5, 3 for 6
    predicted[30:34] = 6
    logits = np.eye(8, dtype=np.float32)[predicted] * 5
    found = made_figures(labels, logits)
    order = class_order(found.cells, 8)
    assert sorted(order) == list(range(8))
    assert abs(order.index(0) - order.index(5)) == abs(order.index(3) - order.index(6)) == 1
    pairs = [(pair["label"], pair["predicted"], pair["count"]) for pair in found.record["confused_pairs"]]
    assert pairs == [(0, 5, 6), (3, 6, 4)]
    assert found.record["confused_pairs"][0]["fraction"] == 0.6
    assert class_order(made_figures(labels, np.eye(8, dtype=np.float32)[labels]).cells, 8) == list(range(8))


def test_slices(data) -> None:
    labels, logits = data
    values = [None if number % 5 == 0 else "abc"[number % 3] for number in range(len(labels))]
    slices = made_figures(labels, logits, slices=values, slice_by="x").record["slices"]
    assert [row["slice"] for row in slices["rows"]] == ["a", "b", "c", None]
    assert slices["unmatched"] == values.count(None)
    chosen = [value == "b" for value in values]
    assert slices["rows"][1]["top1"] == sk.accuracy_score(labels[chosen], logits.argmax(1)[chosen])


def test_files_hold_all_figures_and_are_read_again(data, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    labels, logits = data
    folder = make_details(tmp_path, labels, logits, slices=["s"] * len(labels), slice_by="s")
    (details,), problems = details_of(tmp_path)
    assert not problems
    assert details.path == folder
    found = made_figures(labels, logits)
    np.testing.assert_array_equal(details.confusion(), found.cells)
    np.testing.assert_array_equal(details.predictions()["predicted"], logits.argmax(1))
    table = parquet.read_table(folder / PARQUET).to_pydict()
    np.testing.assert_array_equal(np.stack(table["top5"]), found.scores.top_ids)
    np.testing.assert_allclose(table["loss"], found.scores.loss, rtol=1e-6)
    assert table["path"][3] == "folder/3.jpg"
    assert sum(table["likely_label_error"]) == found.record["num_label_errors"]
    classes, slices = (
        list(csv.DictReader((folder / name).read_text().splitlines())) for name in ("classes.csv", "slices.csv")
    )
    assert [float(row["recall"]) for row in classes[:-1]] == [row["recall"] for row in found.record["per_class"][:-1]]
    assert classes[-1]["recall"] == ""
    assert [row["samples"] for row in slices] == [str(len(labels))]
    assert (folder / "thumbnails" / f"{found.shown()[0]}.webp").is_file()


def test_predictions_are_csv_without_pyarrow(data, tmp_path: Path, monkeypatch) -> None:
    original = builtins.__import__

    def without(name: str, *more: object) -> object:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *more)

    make_details(tmp_path, *data)
    monkeypatch.setattr(builtins, "__import__", without)
    with raises("missing-package"):
        read_details(tmp_path / "evaluations" / "made-val").predictions()
    folder = make_details(tmp_path, *data)
    assert not (folder / PARQUET).exists()
    head, first, *_ = (folder / CSV).read_text().splitlines()
    assert head.split(",")[:3] == ["index", "path", "label"]
    assert first.split(",")[1] == "folder/0.jpg"
    np.testing.assert_array_equal(read_details(folder).predictions()["predicted"], data[1].argmax(1))


def test_corrupt_details_are_left_out(data, tmp_path: Path) -> None:
    folder = make_details(tmp_path, *data)
    whole = json.loads((folder / DETAILS).read_text())
    whole.pop("crc")
    damages = [
        {"class_order": [0] * CLASSES},
        {"images": [whole["images"][0] | {"label": CLASSES}]},
        {"confused_pairs": [{"label": 0}]},
        {"overall": whole["overall"] | {"top1": 2.0}},
        {"classes": []},
        {"version": 99},
    ]
    for damage in damages:
        write_sealed(folder / DETAILS, whole | damage)
        details, (problem,) = details_of(tmp_path)
        assert not details
        assert "details-" in problem
    (folder / DETAILS).write_bytes((folder / DETAILS).read_bytes().replace(b'"step": 40', b'"step": 41'))
    with raises("details-corrupt"):
        read_details(folder)
    write_sealed(folder / DETAILS, whole)
    cells = (folder / "confusion.csv").read_bytes()
    for content in (
        *(f"label,predicted,count\n0,{cell}\n".encode() for cell in ("99,400", "x,400", f"0,{10**30}")),
        *(b"nothing\n1\n", b"", b"\xff", cells[: cells.rindex(b"\n", 0, -1) + 1]),  # the last one lacks a line
    ):
        (folder / "confusion.csv").write_bytes(content)
        with raises("details-corrupt"):
            read_details(folder).confusion()
    (folder / PARQUET).unlink(missing_ok=True)
    for name, content in ((CSV, "index,label,predicted\n0,1,1\n"), (CSV, ""), (PARQUET, "PAR1 nothing PAR1")):
        (folder / name).write_text(content)
        with raises("details-corrupt"):
            read_details(folder).predictions()
    (folder / "thumbnails" / "0.webp").write_text("<script>")
    assert read_details(folder).thumbnail(0) is None


def test_links_and_special_files_are_not_read(data, tmp_path: Path) -> None:
    folder = make_details(tmp_path / "run", *data)
    details = read_details(folder)
    number = details.record["images"][0]["index"]
    outside = (folder / "thumbnails" / f"{number}.webp").rename(tmp_path / "outside.webp")
    (folder / "thumbnails" / f"{number}.webp").symlink_to(outside)
    assert details.thumbnail(number) is None
    (folder / "confusion.csv").unlink()
    os.mkfifo(folder / "confusion.csv")
    with raises("details-corrupt"):
        details.confusion()
    (folder / DETAILS).unlink()
    os.mkfifo(folder / DETAILS)
    with raises("details-corrupt"):
        read_details(folder)
    shutil.move(tmp_path / "run" / "evaluations", tmp_path / "elsewhere")
    (tmp_path / "run" / "evaluations").symlink_to(tmp_path / "elsewhere")
    assert details_of(tmp_path / "run") == ([], [])


def test_a_full_disk_is_reported_with_the_file(data, tmp_path: Path, monkeypatch) -> None:
    def refuse(_path: Path, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space") as caught:
        make_details(tmp_path / "run", *data)
    assert Path(caught.value.filename).parent.name == "thumbnails"
