"""The Python API trains, resumes, evaluates and explains what is wrong."""

import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import psutil
import pytest
import torch
from conftest import HANG, raises
from PIL import Image
from processes import wait_for_step

import paceline as pl

SHORT = {"train.duration": "2ep", "evaluate.every": "1ep", "precision": "fp32", "log.tensorboard": False}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_THREADS", "1")


def test_runs_in_this_process_and_in_others_are_equal() -> None:
    """Threads are the same, so the losses are bit-identical."""
    recipe = pl.load_recipe("digits", SHORT)
    here = pl.train(recipe, name="here", in_process=True)
    Path("safetensors.py").write_text("raise RuntimeError('a module of the current folder')\n")  # must not be imported
    there = pl.train(recipe, name="there")
    assert here.status == there.status == "finished"
    assert [record["loss"] for record in here.trained] == [record["loss"] for record in there.trained]
    assert here.path.resolve() == Path("runs/here").resolve()
    assert here.best["top1"] >= here.last["top1"] > 0.5
    metrics = pl.evaluate(there, checkpoint="last")
    assert metrics["top1"] == pytest.approx(there.last["top1"])
    assert pl.evaluate(there, checkpoint="last", in_process=True) == metrics
    assert "the same experiment" in pl.compare(here, there).summary


def test_the_model_of_a_run_predicts_as_the_evaluation_does() -> None:
    from paceline.config.data import Data
    from paceline.data import sets

    run = pl.train("digits", SHORT, in_process=True)
    model = run.load_model("last")
    val = sets.load(Data(name="digits")).val
    images = torch.stack([model.preprocess(Image.fromarray(image[..., 0].numpy())) for image in val.images])
    with torch.no_grad():
        correct = (model(images).argmax(1) == val.labels).sum().item()
    assert correct / len(val) == pytest.approx(run.last["top1"], abs=0.01)
    assert model.classes == tuple("0123456789")
    assert not model.training
    assert "size=8x8" in repr(model.preprocess)


def test_errors_have_the_codes_of_the_commands() -> None:
    for in_process in (True, False):
        with raises("unknown-model"):
            pl.train("digits", SHORT | {"model.name": "resnet1888"}, in_process=in_process)
    with raises("in-process-needs-one-rank"):
        pl.train("digits", procs=2, in_process=True)
    with raises("unknown-checkpoint"):
        pl.evaluate("runs/none", checkpoint="newest")
    assert "RANK" not in os.environ


def test_errors_of_ranks_keep_message_and_fields() -> None:
    overrides = SHORT | {"data.name": "cifar10"}
    with raises("data-not-found") as here:
        pl.train("digits", overrides, in_process=True)
    with raises("data-not-found") as there:
        pl.train("digits", overrides, procs=2)
    assert here.value.fields
    assert (str(there.value), there.value.fields) == (str(here.value), here.value.fields)


def test_metrics_as_a_data_frame() -> None:
    run = pl.train("digits", SHORT, in_process=True)
    frame = run.dataframe("eval")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["top1"].tolist() == [record["top1"] for record in run.evaluated]


def test_model_of_photographs_predicts_as_the_evaluation_does(tmp_path: Path) -> None:
    """Preprocessing of PIL images matches that of prepared ones; the resampling filters differ a little."""
    rng = np.random.default_rng(0)
    for name, color in {"blue": (40, 40, 200), "red": (200, 40, 40)}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(24):
            pixels = np.clip(rng.normal(color, 60, (48, 64, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    folder = pl.prepare("photos", "data", max_side=48, val_fraction=0.25, workers=1)
    data = {"name": "shards", "path": str(folder), "size": 32, "augment": None}
    run = pl.train("digits", SHORT | {"data": data, "train.global_batch": 12}, in_process=True)
    prepared = pl.PreparedData(folder)
    prepared.verify()
    images = prepared.export_images("exported", ["val"])
    model, losses = run.load_model("last"), []
    for path in sorted(images.rglob("*.jpg")):
        label = torch.tensor([model.classes.index(path.parent.name)])
        losses.append(torch.nn.functional.cross_entropy(model(model.preprocess(Image.open(path))[None]), label).item())
    assert len(losses) == 12
    assert sum(losses) / 12 == pytest.approx(run.last["loss"], abs=0.05)
    assert prepared.write_contact_sheet("sheet.png", "val").is_file()


def test_runs_are_listed_exported_and_explained() -> None:
    run = pl.train("digits", SHORT, name="one", in_process=True)
    (row,) = pl.list_runs()
    assert (row.name, row.status, row.model) == ("one", "finished", "airbench")
    assert "tensors" in pl.export(run, "weights.safetensors", checkpoint="last")
    assert run.bottlenecks[0].cause in run.bottlenecks[0].text
    comparison = pl.compare(run, "runs/one")
    assert {path.name for path in comparison.write("out")} >= {"comparison.md", "comparison.json", "comparison.csv"}
    with raises("wrong-suffix"):
        pl.export(run, "weights.pth")
    with raises("folder-not-found"):
        pl.list_runs("nowhere")


def test_an_interrupt_ends_the_processes_after_a_checkpoint(tmp_path: Path) -> None:
    """The signal reaches only the process that called train, as from a notebook's interrupt button."""
    script = f"""
import paceline as pl
try:
    pl.train("digits", {SHORT | {"train.duration": "100000ba", "log.every": "1ba"}!r}, name="long")
except KeyboardInterrupt:
    print("interrupted", pl.Run("runs/long").status)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for_step(process, tmp_path / "runs" / "long", 3)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert printed.splitlines()[-1] == "interrupted interrupted"
    assert list((tmp_path / "runs" / "long" / "checkpoints").iterdir())


def test_an_error_is_raised_and_not_printed(capfd) -> None:
    with raises("unknown-model"):
        pl.train("digits", SHORT | {"model.name": "resnet1888"})
    printed = capfd.readouterr()
    assert "resnet1888" not in printed.out + printed.err


@pytest.fixture
def registered(tmp_path: Path, monkeypatch) -> Callable[[str, str], None]:
    """Import a new module that registers a loss."""
    folder = tmp_path / "extensions"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def register(module: str, name: str) -> None:
        (folder / f"{module}.py").write_text(
            f"import paceline as pl\nimport torch.nn.functional as F\n\n"
            f"@pl.register_loss('{name}')\ndef loss(logits, targets):\n    return F.cross_entropy(logits, targets)\n"
        )
        __import__(module)

    return register


def test_only_the_modules_that_a_recipe_uses_are_imported(registered) -> None:
    registered("used_loss", "used-loss")
    registered("unused_loss", "unused-loss")
    run = pl.train("digits", SHORT | {"train.loss": "used-loss", "train.label_smoothing": 0.0})
    assert run.recipe["imports"] == ["used_loss"]
    resumed = pl.resume(run, {"train.duration": "3ep"})
    assert resumed.recipe["imports"] == ["used_loss"]
    assert "has changed" not in (run.path / "log.txt").read_text()


def test_extensions_of_a_script_are_refused_in_other_processes() -> None:
    script = """
import paceline as pl

@pl.register_loss("mine")
def mine(logits, targets):
    return logits.sum()

try:
    pl.train("digits", {"train.loss": "mine", "train.label_smoothing": 0.0})
except pl.UserError as error:
    print(error.report)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG)
    assert "[extension-not-importable]" in answer.stdout
    assert "in_process=True" in answer.stdout


def test_training_in_this_process_restores_what_it_changes() -> None:
    def state() -> tuple[object, ...]:
        log = logging.getLogger("paceline")
        return (
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            (list(log.handlers), log.propagate, log.level),
            list(warnings.filters),
            dict(os.environ),
        )

    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        before = state()
        with torch.inference_mode():
            run = pl.train("digits", SHORT, in_process=True)
        after = state()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
    assert after == before
    plain = pl.train("digits", SHORT, name="plain", in_process=True)
    assert [record["loss"] for record in run.trained] == [record["loss"] for record in plain.trained]


def test_training_in_a_thread_or_a_forked_process_is_refused(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            pl.train("digits", SHORT, in_process=True)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert isinstance(caught[0], pl.UserError)
    assert caught[0].code == "in-process-needs-main-thread"
    assert list(tmp_path.iterdir()) == []
    pl.train("digits", SHORT, in_process=True)
    if not (child := os.fork()):
        attempt()
        os._exit(getattr(caught[-1], "code", "") != "in-process-after-fork")
    assert os.waitpid(child, 0)[1] == 0


def test_processes_are_killed_if_their_lines_cannot_be_printed(monkeypatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(ValueError, match="closed file"):
        pl.train("digits", SHORT | {"train.duration": "100000ba"}, name="endless")
    assert [child for child in psutil.Process().children() if "endless" in " ".join(child.cmdline())] == []
