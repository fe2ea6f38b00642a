"""The GPUs that drivers list and variables leave visible, through stand-ins for NVML and AMD's kernel driver."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

from paceline.system import gpus
from paceline.system.gpus import Gpu, default_procs, installed_gpus, visible_gpus

FOUR = [Gpu("nvidia", f"GPU {number}", f"GPU-{number}000-abcd") for number in range(4)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("1,0", 2), ("0,7", 1), ("7,0", 0), ("0,0", 0), ("GPU-0000-1", 1)],
)
def test_nvml_is_counted_without_torch(nvml: Path, variable: str | None, expected: int) -> None:
    code = "import sys; from paceline.system.gpus import default_procs, visible_gpus\n"
    code += "print(len(visible_gpus()), default_procs('auto'), default_procs('cpu'), 'torch' in sys.modules)"
    inherited = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    environment = inherited | {"LD_LIBRARY_PATH": str(nvml)}
    environment |= {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(expected), str(max(1, expected)), "1", "False"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        ("2, 3", [2, 3]),
        ("GPU-3,GPU-1000", [3, 1]),
        ("GPU-", []),  # ambiguous
        ("1,GPU-1", []),  # the same twice
        ("1,-1,2", [1]),
        ("MIG-5,MIG-6", [0]),
        ("NoDevFiles", []),  # what SLURM sets in jobs without GPUs
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(monkeypatch, value: str, expected: list[int]) -> None:
    monkeypatch.setattr(gpus, "installed_gpus", lambda: FOUR)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == [FOUR[number] for number in expected]


def _node(root: Path, number: int, simd_count: int, minor: int) -> None:
    (root / "nodes" / str(number)).mkdir(parents=True)
    (root / "nodes" / str(number) / "name").write_text("gfx90a\n" if simd_count else "\n")
    lines = f"cpu_cores_count 8\nsimd_count {simd_count}\ndrm_render_minor {minor}\nunique_id {number}\n"
    (root / "nodes" / str(number) / "properties").write_text(lines)


def test_amd_gpus_are_counted_through_the_kernel_driver(tmp_path: Path, monkeypatch) -> None:
    for number, (simd_count, minor) in enumerate([(0, 0), (440, 128), (440, 129), (440, 130)]):
        _node(tmp_path, number, simd_count, minor)
    (tmp_path / "nodes" / "9").mkdir()  # of another container
    for minor in (128, 129):  # the last GPU was not given to this container
        (tmp_path / f"renderD{minor}").touch()
    monkeypatch.setattr(gpus, "_KFD", tmp_path / "nodes")
    monkeypatch.setattr(gpus, "_RENDER_NODES", tmp_path)
    monkeypatch.setattr(gpus, "_nvidia", list)
    assert [(gpu.vendor, gpu.name) for gpu in installed_gpus()] == [("amd", "gfx90a")] * 2
    assert [gpu.uuid[-1] for gpu in visible_gpus({"HIP_VISIBLE_DEVICES": "1"})] == ["2"]
    assert default_procs("auto", {}) == default_procs("cuda", {}) == 2
    assert default_procs("auto", {"HIP_VISIBLE_DEVICES": ""}) == default_procs("cpu", {}) == default_procs("mps") == 1


def test_amd_gpus_without_a_unique_id_are_told_apart_by_their_index(tmp_path: Path, monkeypatch) -> None:
    for number, minor in enumerate((128, 129)):
        _node(tmp_path, number, 440, minor)
        properties = tmp_path / "nodes" / str(number) / "properties"
        properties.write_text(properties.read_text().replace(f"unique_id {number}", "unique_id 0"))
        (tmp_path / f"renderD{minor}").touch()
    monkeypatch.setattr(gpus, "_KFD", tmp_path / "nodes")
    monkeypatch.setattr(gpus, "_RENDER_NODES", tmp_path)
    monkeypatch.setattr(gpus, "_nvidia", list)
    assert [gpu.uuid for gpu in visible_gpus({"HIP_VISIBLE_DEVICES": "0,1"})] == ["0", "1"]


def test_local_nodes_divide_the_gpus_that_nvml_lists(paceline, nvml: Path, tmp_path: Path) -> None:
    """The stand-in for NVML lists two."""
    visible = {name: value for name, value in environment().items() if "VISIBLE_DEVICES" not in name}
    variables = visible | {"LD_LIBRARY_PATH": str(nvml), "PACELINE_HOME": str(tmp_path / "home")}
    answer = paceline("launch", "local", "--nodes", 2, "digits", "--dry-run", env=variables)
    assert "# processes per node: 1 (2 visible GPUs on this machine)" in answer.stdout, answer.stderr
    assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", answer.stdout) == ["GPU-0000-0", "GPU-0000-1"]
