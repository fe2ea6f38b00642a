"""--profile: a trace, a record of the operators with the most time, and a table in the report. On the CPU."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, raises
from torch.autograd import DeviceType

from paceline.analysis.compare import compare
from paceline.analysis.page import report
from paceline.analysis.read import read
from paceline.config.duration import check_steps
from paceline.engine import profiling
from paceline.engine.profiling import Profiler, top_operators
from paceline.track.records import RunFolder


def test_steps_are_profiled_after_the_first_ones(here, tmp_path: Path) -> None:
    words = (*TINY, "--train.duration", "12ba", "--precision", "fp32", "--device", "cpu")
    answer = here("train", "digits", *words, "--profile", "3ba")
    assert answer.returncode == 0, answer.stderr
    run = tmp_path / "runs" / "digits"
    events = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {event["name"] for event in events if "ProfilerStep" in event["name"]} == {
        f"ProfilerStep#{n}" for n in (5, 6, 7)
    }
    (record,) = [record for record in RunFolder(run).records() if record["kind"] == "profile"]
    assert (record["steps"], record["step"]) == (3, 8)
    seconds = [top["seconds"] for top in record["operators"]]
    assert seconds == sorted(seconds, reverse=True)
    assert any("convolution" in top["name"] for top in record["operators"])
    page = report(compare([read(run)]), "title")
    assert "Profile of 3 steps up to step 8" in page
    assert record["operators"][0]["name"] in page


def test_nothing_is_profiled_without_the_option(here, tmp_path: Path) -> None:
    words = (*TINY, "--train.duration", "2ba", "--precision", "fp32", "--device", "cpu")
    assert here("train", "digits", *words).returncode == 0
    assert not (tmp_path / "runs" / "digits" / "profile").exists()


def test_more_steps_than_the_run_has_are_refused_before_it_starts(here, tmp_path: Path) -> None:
    words = (*TINY, "--train.duration", "12ba", "--precision", "fp32", "--device", "cpu")
    answer = here("train", "digits", *words, "--profile", "8ba")
    assert answer.returncode != 0
    assert "[profile-too-long]" in answer.stderr
    assert "at most 7ba" in answer.stderr
    shorter = here("train", "digits", *words, "--train.duration", "5ba", "--profile", "1ba")
    assert "[profile-too-long]" in shorter.stderr
    assert "at most" not in shorter.stderr  # no profile fits
    assert not (tmp_path / "runs" / "digits").exists()


@pytest.mark.parametrize(
    ("text", "code"), [("10", "invalid-duration"), ("9s", "seconds-not-allowed"), ("0ba", "zero-interval")]
)
def test_values_that_are_no_number_of_steps_are_refused(text: str, code: str) -> None:
    with raises(code):
        check_steps("--profile", text)


def test_kernels_are_ranked_on_gpus_and_operators_on_cpus() -> None:
    events = [
        SimpleNamespace(key=key, count=2, device_type=kind, self_device_time_total=device, self_cpu_time_total=cpu)
        for key, kind, device, cpu in (
            ("aten::mm", DeviceType.CPU, 30.0, 5.0),
            ("aten::relu", DeviceType.CPU, 10.0, 15.0),
            ("ProfilerStep*", DeviceType.CPU, 0.0, 900.0),
            ("sgemm", DeviceType.CUDA, 30.0, 0.0),
            ("elementwise", DeviceType.CUDA, 10.0, 0.0),
            ("ProfilerStep*", DeviceType.CUDA, 900.0, 0.0),
        )
    ]
    assert [(top["name"], top["fraction"]) for top in top_operators(events, True)] == [
        ("sgemm", 0.75),
        ("elementwise", 0.25),
    ]
    assert [(top["name"], top["fraction"]) for top in top_operators(events, False)] == [
        ("aten::relu", 0.75),
        ("aten::mm", 0.25),
    ]


def test_memory_is_recorded_on_gpus_during_the_profiled_steps(monkeypatch, tmp_path: Path) -> None:
    calls: list[object] = []
    monkeypatch.setattr(profiling, "record_memory", calls.append)
    monkeypatch.setattr(profiling, "write_memory_snapshot", lambda path: calls.append(path.name))
    monkeypatch.setattr(profiling, "top_operators", lambda *_: [])
    sink = SimpleNamespace(write=lambda record: calls.append(record["kind"]))
    profiler = Profiler(tmp_path / "profile", 2, torch.device("cuda"), sink)
    for step in range(1, 10):
        profiler.step(step)
        calls.append(step)
    assert calls == [1, 2, 3, 4, True, 5, 6, "memory.pickle", False, "profile", 7, 8, 9]
