"""`doctor` on this machine and its installation."""

import json
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.cli.main import main
from paceline.launch import installation, machine
from paceline.launch.installation import Finding

CPU_BUILD = {
    "torch": {"version": "2.13.0+cpu"},
    "torchvision": {"version": "0.28.0"},
    "timm": {"version": "1.0.9"},
    "devices": {"cuda": None, "gpus": 0, "bf16": False, "gpu_bf16": []},
    "codec": {"paths": ["portable", "avx2"]},
}
NO_GPU = {"gpus": [], "gpu_processes": [], "driver": None}
TWO_GPUS = {"gpus": [{"name": "A100"}, {"name": "A100"}], "gpu_processes": [], "driver": "570"}


def _cuda(gpus: int) -> dict[str, dict[str, Any]]:
    return CPU_BUILD | {"devices": {"cuda": "13.0", "gpus": gpus, "bf16": False, "gpu_bf16": [True] * gpus}}


def _only(findings: Any) -> Finding:
    (found,) = findings
    return found


def test_each_check_prints_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    status = main(["doctor", "--quick"])
    *lines, last = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(ok|note|problem) +(\S.{13})  (\S.*)", line) for line in lines]
    assert all(found), lines
    subjects = {match[2].strip() for match in found if match}
    wanted = {"Python", "torch", "torchvision", "timm", "native codec", "processor", "memory", "GPUs", "bf16"}
    wanted |= {"runs folder", "temporary", "/dev/shm", "open files", "other work", "loopback", "host name"}
    assert subjects >= wanted | {"obstore", "boto3", "wandb", "mlflow"}
    problems = sum(match[1] == "problem" for match in found if match)
    assert status == (1 if problems else 0)
    assert last == (f"{problems} problem{'s' * (problems > 1)} found" if problems else "no problems found")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_run_an_all_reduce() -> None:
    found = _only(installation.all_reduce(CPU_BUILD))
    assert (found.level, found.subject) == ("ok", "all-reduce"), found
    assert "GB/s" in found.text


@pytest.mark.parametrize(("gpus", "words"), [(8, "--procs 8 --device cuda"), (1, "--procs 2 --device cpu")])
def test_all_gpus_take_part_in_the_all_reduce(monkeypatch: pytest.MonkeyPatch, gpus: int, words: str) -> None:
    """Two ranks cannot share one GPU, so a machine with one tests CPU processes."""
    calls: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(" ".join(command))
        pairs = [[0, 1, 3e11], [1, 2, 1e9]]
        return subprocess.CompletedProcess(command, 0, json.dumps({"bus_bytes_per_second": 2e11, "pairs": pairs}), "")

    monkeypatch.setattr(installation.subprocess, "run", run)
    found = _only(installation.all_reduce(_cuda(gpus)))
    assert words in calls[0]
    assert "bus bandwidth 200 GB/s" in found.text
    assert ("slowest pair 1 - 2 1 GB/s" in found.text) == (gpus > 2)


def test_failed_all_reduce_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert _only(installation.all_reduce(CPU_BUILD)).level == "problem"


def test_cpu_build_of_torch_with_gpus_is_a_problem() -> None:
    found = _only(installation.gpus(CPU_BUILD, TWO_GPUS))
    assert found.level == "problem"
    assert "2 x A100" in found.text
    assert "2.13.0+cpu" in found.text


def test_gpus_that_torch_detects_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _only(installation.gpus(_cuda(2), TWO_GPUS)).level == "ok"
    undetected = _only(installation.gpus(_cuda(0), TWO_GPUS))
    assert (undetected.level, "driver 570" in undetected.text) == ("problem", True)
    assert [one.level for one in installation.gpus(_cuda(2), TWO_GPUS | {"gpu_processes": [7]})] == ["ok", "note"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    hidden = _only(installation.gpus(_cuda(1), TWO_GPUS))
    assert (hidden.level, "CUDA_VISIBLE_DEVICES=0" in hidden.text) == ("note", True)


def test_import_that_crashes_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho \'{"part": "torch", "version": "2.13.0"}\'\nkill -SEGV $$\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    parts = installation.import_all()
    assert parts["torch"]["version"] == "2.13.0"
    assert "status -11" in parts["torchvision"]["error"]
    found = {one.subject: one for one in installation.packages(parts)}
    assert (found["torch"].level, found["torchvision"].level) == ("ok", "problem")
    assert "pip install --upgrade torchvision" in found["torchvision"].text
    assert found["native codec"].level == "problem"


def test_versions_that_do_not_match_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        metadata, "requires", lambda _: ["torch<2.14,>=2.13", "timm<1.0.20,>=1.0.9", "rich>=13", "x>=1; extra == 's3'"]
    )
    versions = {"torch": "2.9.1+cpu", "timm": "1.0.30"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    found = {one.subject: one for one in installation.packages(CPU_BUILD)}
    assert "torch<2.14,>=2.13 is required" in found["torch"].text
    assert "pip install --upgrade 'timm<1.0.20,>=1.0.9'" in found["timm"].text
    assert {found[name].level for name in ("torch", "timm", "rich")} == {"problem"}
    assert found["torchvision"].level == "ok"
    assert "x" not in found
    assert [one.level for one in installation.extras()] == ["note"] * 4
    assert "pip install 'paceline[s3]'" in next(installation.extras()).text


def test_codec_without_avx2_is_noted() -> None:
    parts = CPU_BUILD | {"codec": {"paths": ["portable"]}}
    (found,) = [one for one in installation.packages(parts) if one.subject == "native codec"]
    assert (found.level, "portable path" in found.text) == ("note", True)


class _Usage(NamedTuple):
    free: int


@pytest.mark.parametrize(("free", "level"), [(10**8, "problem"), (5 * 10**9, "note"), (10**12, "ok")])
def test_free_space_for_runs(free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: _Usage(free))
    assert _only(machine.folder("runs folder", tmp_path / "not" / "yet", 1e10, "")).level == level


def test_folder_that_is_not_writable_is_a_problem() -> None:
    found = _only(machine.folder("runs folder", Path("/proc/runs"), 1e10, "choose another"))
    assert found.level == "problem"
    assert "/proc/runs" in found.text
    assert "choose another" in found.text


def test_limits(tmp_path: Path) -> None:
    assert _only(machine.open_files(256)).level == "problem"
    assert _only(machine.open_files(-1)).text == "no limit"
    assert _only(machine.memory(10**9, 10**11)).level == "note"
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n")
    assert machine.cpu_quota(quota) == 1.5
    found = _only(machine.processor(8, 8, 1.5))
    assert (found.level, "--threads 1" in found.text) == ("note", True)
    quota.write_text("max 100000\n")
    assert machine.cpu_quota(quota) is None
    assert "4 of 8 cores (affinity)" in _only(machine.processor(4, 8, None)).text


def test_little_shared_memory_is_a_problem_for_several_gpus(tmp_path: Path) -> None:
    levels = [
        list(machine.folders(tmp_path, shared, gpus))[-1].level for shared, gpus in ((64e6, 0), (64e6, 2), (2e9, 2))
    ]
    assert levels == ["note", "problem", "ok"]


def test_busy_processes_are_named() -> None:
    busy = [(1.5, 77, "compiler"), (0.01, 78, "shell")]
    found = _only(machine.other_processes(busy, 2))
    assert found.level == "note"
    assert "compiler (77, 1.5 cores)" in found.text
    assert "shell" not in found.text
    assert _only(machine.other_processes(busy, 64)).level == "ok"


def test_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "odd")
    monkeypatch.setattr(machine.socket, "getaddrinfo", unresolved)
    found = {one.subject: one for one in machine.network()}
    assert found["host name"].level == "note"
    assert "`ADDRESS odd` to /etc/hosts" in found["host name"].text


def test_problem_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(
        machine, "check", lambda runs, quick: iter([Finding("ok", "a", "b"), Finding("problem", "c", "d")])
    )
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 problem found"


def test_doctor_checks_one_kind_at_a_time(capsys) -> None:
    assert main(["doctor", "runs/x", "--quick"]) == 1
    assert "[conflicting-options]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    printed = capsys.readouterr().out
    for usage in ("paceline doctor    ", "paceline doctor --hosts A,B", "paceline doctor RUN"):
        assert usage in printed
