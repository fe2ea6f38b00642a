"""Callbacks end a run early with a reason, log values of any kind, and fail with the line of the error."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, raises

import paceline as pl
from paceline import extensions
from paceline.analysis.compare import compare
from paceline.analysis.read import read
from paceline.engine.callbacks import RunInfo
from paceline.track.json_lines import JsonLines
from paceline.track.records import RunFolder

SHORT = (*TINY, "--train.duration", "6ba", "--evaluate.every", "2ba", "--callbacks", "{probe: {}}")


@pytest.fixture
def probe(monkeypatch) -> Callable[..., None]:
    """Register a callback with these methods as `probe`."""

    def register(**methods: Callable[..., None]) -> None:
        monkeypatch.setattr(extensions, "_registered", dict(extensions._registered))
        extensions._registered.pop(("callback", "probe"), None)
        pl.register_callback("probe")(type("Probe", (pl.Callback,), methods))

    return register


@pytest.fixture
def logged(tmp_path: Path) -> RunInfo:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    return RunInfo(tmp_path, None, 1, 0, 10, 1, lines)  # type: ignore[arg-type]


def _values(run: RunInfo) -> dict[str, Any]:
    assert run._sink
    run._sink.flush()
    values: dict[str, Any] = {}
    for record in RunFolder(run.path).records():
        values |= record["values"]
    return values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (torch.tensor(0.25), 0.25),
        ("text", "text"),
        (2**63 - 1, 2**63 - 1),
        *((bad, None) for bad in (float("nan"), float("inf"), 10**400, 10**5000, "x" * 2000, "\ud800", [1], None)),
        (torch.ones(2), None),
    ],
    ids=lambda value: type(value).__name__,  # pytest cannot print a number of 5000 digits
)
def test_a_value_that_cannot_be_recorded_is_left_out(logged: RunInfo, caplog, value: Any, expected: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for _ in range(2):
            logged.log(value=value, other=1)
    assert _values(logged) == ({"other": 1} if expected is None else {"other": 1, "value": expected})
    assert len(caplog.records) == (expected is None)


def test_a_name_that_cannot_be_recorded_is_left_out(logged: RunInfo) -> None:
    logged.log(**{"\ud800": 1, "other": 2})
    assert _values(logged) == {"other": 2}


def test_an_early_stop_is_not_a_partial_run(here, probe, tmp_path: Path) -> None:
    probe(on_evaluation=lambda self, run, metrics: run.stop())
    for name in ("first", "second"):
        answer = here("train", "digits", *SHORT, "--name", name)
        assert answer.returncode == 0, answer.stderr
        assert "(step 3 of 6) by probe: no reason given" in answer.stderr
    runs = [read(tmp_path / "runs" / name) for name in ("first", "second")]
    for run in runs:
        assert run.summary["total_steps"] == 3
        assert "stopped early at epoch 0.1034 by probe: no reason given" in run.notes
        assert not any(note.startswith("partial") for note in run.notes)
        assert run.complete
    assert compare(runs).is_comparable
    listed = json.loads(here("runs", "--json").stdout)
    assert [row["stop_reason"] for row in listed] == ["no reason given"] * 2


def _exit(self: Any, run: pl.RunInfo, step: pl.StepInfo) -> None:
    raise SystemExit(0)


def _fail(self: Any, run: pl.RunInfo, step: pl.StepInfo) -> None:
    raise KeyError("deep inside")


@pytest.mark.parametrize("method", [_exit, _fail])
def test_an_error_names_method_and_line_and_logs_the_traceback(here, probe, tmp_path: Path, method: Any) -> None:
    probe(on_step=method)
    answer = here("train", "digits", *SHORT)
    assert answer.returncode == 1
    assert "[extension-failed]" in answer.stderr
    assert "in on_step" in answer.stderr
    line = f"{__file__}:{method.__code__.co_firstlineno + 1}"
    assert line in answer.stderr
    assert "Traceback" not in answer.stderr
    text = (tmp_path / "runs" / "digits" / "log.txt").read_text()
    assert "Traceback" in text
    assert "raise " in text


@pytest.mark.usefixtures("one_thread")
def test_an_error_keeps_its_cause_in_this_process(probe, tmp_path: Path) -> None:
    probe(on_step=_fail)
    overrides = {"train.duration": "2ba", "log.tensorboard": False, "callbacks": {"probe": {}}}
    with raises("extension-failed") as caught:
        pl.train("digits", overrides, in_process=True, runs=tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)
