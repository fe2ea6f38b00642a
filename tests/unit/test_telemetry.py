"""The sampler with and without GPUs. NVML is a fake library behind the real bindings."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from conftest import HANG

from paceline.track.telemetry import HostSampler

SAMPLE = """
import json, sys, time
from pathlib import Path
from paceline.track.telemetry import HostSampler
folder = Path(sys.argv[1])
sampler = HostSampler(folder, interval=0.01, gpus=sys.argv[2:] or None)
while sum(path.read_text().count("\\n") for path in folder.glob("*.jsonl")) < 4:
    time.sleep(0.01)
sampler.stop()
"""


def _lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in next(folder.glob("*.jsonl")).read_text().splitlines()]


def test_host_without_gpus(tmp_path: Path) -> None:
    sampler = HostSampler(tmp_path, interval=0.01)
    deadline = time.monotonic() + HANG
    while len(_lines(tmp_path)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sampler.stop()
    host, *samples = _lines(tmp_path)
    assert (host["kind"], host["gpus"]) == ("host", [])
    assert all(sample["kind"] == "sample" and 0 <= sample["cpu_percent"] <= 100 for sample in samples)
    assert samples[-1]["time"] > samples[0]["time"]
    assert "host  CPU" in next(tmp_path.glob("*.txt")).read_text()


def test_gpus_are_sampled_through_nvml(tmp_path: Path, nvml: Path) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": str(nvml)}
    subprocess.run([sys.executable, "-c", SAMPLE, str(tmp_path)], env=environment, check=True)
    host, *samples = _lines(tmp_path)
    assert [gpu["name"] for gpu in host["gpus"]] == ["Stand-in 0", "Stand-in 1"]
    assert host["gpus"][0]["memory_total_bytes"] == 16 << 30
    first, second = samples[0]["gpus"]
    assert first == {"use_percent": 90, "memory_bytes": 4 << 30, "watts": 250.0, "celsius": 61, "megahertz": 1410}
    assert (second["use_percent"], second["watts"]) == (91, None)
    text = next(tmp_path.glob("*.txt")).read_text()
    assert "Stand-in 0" in text
    assert "250 / 250 W" in text
    assert "90 / 90 %" in text
    assert len({len(line) for line in text.splitlines()[1:]}) == 1  # all lines of the table have the same width


def test_only_the_gpus_of_the_run_are_sampled(tmp_path: Path, nvml: Path) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": str(nvml)}
    subprocess.run([sys.executable, "-c", SAMPLE, str(tmp_path), "0000-1"], env=environment, check=True)
    host, first, *_ = _lines(tmp_path)
    assert [gpu["name"] for gpu in host["gpus"]] == ["Stand-in 1"]
    assert [gpu["use_percent"] for gpu in first["gpus"]] == [91]
    # CPU ranks sample no GPUs
    none = SAMPLE.replace("sys.argv[2:] or None", "[]")
    subprocess.run([sys.executable, "-c", none, str(tmp_path / "cpu")], env=environment, check=True)
    assert _lines(tmp_path / "cpu")[0]["gpus"] == []
