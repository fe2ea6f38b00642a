"""The number of processes: the visible GPUs by default, on the command line and in the Python API. GPUs are stubs."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, TINY, environment, raises

import paceline as pl
from paceline.cli.ranks import add_process_options, choose_procs, enter_rank, needs_agent, world_size
from paceline.config.batch import layouts, procs_per_node
from paceline.config.io import load_recipe
from paceline.distributed.world import World
from paceline.engine.resume import how_to_resume
from paceline.system import gpus
from paceline.system.gpus import Gpu
from paceline.track.records import RunFolder


@pytest.fixture
def eight(monkeypatch) -> None:
    """Eight visible GPUs."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(gpus, "installed_gpus", lambda: [Gpu("nvidia", "Some GPU", f"GPU-{i}") for i in range(8)])


def _options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False)
    add_process_options(parser)
    options = parser.parse_args(words)
    choose_procs(options, lambda: procs_per_node(load_recipe("digits")))
    return options


@pytest.mark.usefixtures("eight")
def test_one_process_per_visible_gpu(monkeypatch) -> None:
    assert (_options().procs, _options().chosen) == (8, "one per visible GPU")
    assert _options("--procs", "auto").procs == 8
    assert (_options("--procs", "2").procs, _options("--procs", "2").chosen) == (2, "")
    assert needs_agent(_options())
    assert world_size(_options("--nodes", "2", "--rendezvous", "a:1")) == 16
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert _options().procs == 2


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 8),
        (("--device", "cuda"), 8),
        (("--device", "cpu"), 1),
        (("--strategy", "single"), 1),
    ],
)
def test_other_devices_use_one_process(overrides: tuple[str, ...], expected: int) -> None:
    assert procs_per_node(load_recipe("digits", list(overrides))) == expected


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("overrides", "ranks", "option"),
    [
        ((), 1, " --procs 1"),  # otherwise eight would resume it
        ((), 4, " --procs 4"),
        (("--strategy", "single"), 1, ""),
        (("--device", "cpu"), 1, ""),
    ],
)
def test_a_run_is_resumed_in_as_many_processes(
    monkeypatch, tmp_path: Path, overrides: tuple[str, ...], ranks: int, option: str
) -> None:
    monkeypatch.delenv("PACELINE_JOB", raising=False)
    world = World(0, ranks, local_size=ranks)
    hint = how_to_resume(RunFolder(tmp_path), load_recipe("digits", list(overrides)), world)
    assert hint == f"resume with: paceline train --resume {tmp_path}{option}"


def test_without_gpus_there_is_one_process(monkeypatch) -> None:
    monkeypatch.setattr(gpus, "installed_gpus", list)
    assert _options().procs == 1
    assert not needs_agent(_options())


@pytest.mark.usefixtures("eight")
def test_a_launcher_decides_about_the_processes(monkeypatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    options = _options()
    assert (options.procs, world_size(options)) == ("auto", 2)
    enter_rank(options)
    with raises("procs-mismatch"):
        enter_rank(_options("--procs", "8"))


@pytest.mark.usefixtures("eight")
def test_a_batch_that_the_gpus_do_not_divide_is_refused_with_choices(here) -> None:
    with raises("batch-not-divisible") as caught:
        layouts(load_recipe("digits", ["--train.global_batch", "500"]), 8)
    assert caught.value.fields["choices"] == [496, 504]
    assert "5 ranks" in str(caught.value)
    answer = here("train", "digits", "--train.global_batch", "500", "--device", "cuda")
    assert "[batch-not-divisible]" in answer.stderr


@pytest.mark.usefixtures("eight")
def test_the_plan_is_that_of_this_machine(here) -> None:
    assert "8 ranks (1 node x 8 processes)" in here("plan", "digits", "--train.global_batch", "512").stdout
    assert "1 rank (1 node x 1 process)" in here("plan", "digits", "--device", "cpu").stdout
    assert "4 ranks (2 nodes x 2 processes)" in here("plan", "digits", "--nodes", "2", "--gpus-per-node", "2").stdout
    assert pl.plan("digits", {"train.global_batch": 512}).ranks == 8
    assert pl.plan("digits", gpus_per_node=1).ranks == 1


def test_the_launcher_starts_a_rank_per_gpu_without_importing_cuda(tmp_path: Path, nvml: Path) -> None:
    """NVML lists two GPUs, so two ranks start; each reports that this torch cannot use them."""
    visible = {name: value for name, value in environment().items() if "VISIBLE_DEVICES" not in name}
    words = [sys.executable, "-m", "paceline", "train", "digits", *TINY]
    answer = subprocess.run(
        words, cwd=tmp_path, env=visible | {"LD_LIBRARY_PATH": str(nvml)}, capture_output=True, text=True, timeout=HANG
    )
    assert "starting 2 processes (one per visible GPU)" in answer.stderr
    assert answer.returncode == 1
    assert os.listdir(tmp_path) == []  # nothing was trained on the CPU
