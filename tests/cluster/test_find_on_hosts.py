"""`paceline find-batch --hosts` and `find-lr --hosts` on two hosts with a real sshd each."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
from conftest import command, complaint
from jobs import Launcher, all_idle, launch_environment, paceline_in, wait_for
from machines import Cluster, cluster_of

import paceline
from paceline.config.batch import memory_key
from paceline.config.io import load_recipe
from paceline.track.records import largest_batch

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
PLENTY, LITTLE = "64GB", "1GB"  # a gigabyte is more than an idle rank needs, and much less than a large batch needs
RECIPE = "{name: tiny, data: {name: imagenet}, precision: fp32, device: cpu, model: {name: resnet18}}"
NETS = """import paceline as pl
from torch import nn

@pl.register_model("mine")
def mine(num_classes, in_chans):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_chans, 32), nn.ReLU(), nn.Linear(32, num_classes))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    # the hosts import the code under test, also if another checkout is installed
    variables = {"PYTHONPATH": str(Path(paceline.__file__).parents[1])}
    with cluster_of(tmp_path_factory.mktemp("finders"), "n1", "n2", variables=variables) as made:
        yield made


def _on(cluster: Cluster, hosts: str = "n1,n2") -> tuple[object, ...]:
    return ("--hosts", hosts, "--ssh-config", cluster.config, "--python", sys.executable)


def _find_batch(
    cluster: Cluster, tmp_path: Path, *words: object, hosts: str = "n1,n2"
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return paceline_in(tmp_path, "find-batch", "tiny.yaml", "--steps", 1, *words, *_on(cluster, hosts))


def _left(cluster: Cluster) -> list[Path]:
    return [*cluster.folder.glob("*.root/.paceline/trials/*")]


def _result(tmp_path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "runs" / name).read_text())
    return found


def test_the_batch_fits_on_the_host_with_the_least_memory(cluster: Cluster, tmp_path: Path) -> None:
    """The data is on neither host. The trials that run out of memory on one host end on both."""
    answer = _find_batch(cluster, tmp_path, "--max-batch", 64, "--memory-limit", f"{PLENTY},{LITTLE}")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = _result(tmp_path, "find-batch-tiny/find-batch.json")
    assert (found["ranks"], found["hosts"]) == (2, ["n1", "n2"])
    assert 1 <= found["largest"] < 64
    assert found["largest_global"] == 2 * found["largest"]
    assert {trial["reason"] for trial in found["trials"] if not trial["fits"]} == {"out of memory"}
    assert all(len(trial["memory"]) == 2 for trial in found["trials"] if trial["fits"])
    recipe = load_recipe(str(tmp_path / "tiny.yaml"))
    quoted = largest_batch(tmp_path / "runs", memory_key(recipe, 2))
    assert quoted
    assert quoted["largest"] == found["largest"]
    assert largest_batch(tmp_path / "runs", memory_key(recipe, 1)) is None
    wait_for(lambda: all_idle(cluster))
    assert not _left(cluster)


def test_a_launched_run_quotes_the_batch_of_as_many_ranks(cluster: Cluster, tmp_path: Path) -> None:
    words = ("digits", "--device", "cpu", "--precision", "fp32")
    answer = paceline_in(tmp_path, "find-batch", *words, "--max-batch", 2, "--steps", 1, *_on(cluster))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    short = ("--train.duration", "2ba", "--name", "two")
    answer = paceline_in(tmp_path, "launch", "ssh", *_on(cluster), *words, *short)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert paceline_in(tmp_path, "logbook", "runs/two", "--out", "book").returncode == 0
    assert "2 (4 over all ranks" in (tmp_path / "book" / "two" / "README.md").read_text()


def test_the_losses_on_two_hosts_are_those_on_one(cluster: Cluster, tmp_path: Path) -> None:
    """With a model in a module of the current folder, which is copied to the hosts."""
    (tmp_path / "nets.py").write_text(NETS)
    words: tuple[object, ...] = ("find-lr", "digits", "--device", "cpu", "--precision", "fp32")
    words += ("--min-lr", 1e-3, "--max-lr", 1)
    words += ("--import", "nets", "--model.name", "mine", "--model.options", "{}")
    losses = []
    for more in ((), _on(cluster)):
        answer = paceline_in(tmp_path, *words, "--steps", 30, *more)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        losses.append([point["loss"] for point in _result(tmp_path, "find-lr-digits/find-lr.json")["points"]])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert not _left(cluster)


def test_bad_hosts_are_named(cluster: Cluster, tmp_path: Path) -> None:
    assert "[host-not-found]" in complaint(_find_batch(cluster, tmp_path, "--procs", 1, hosts="n1,n3"))
    assert "[host-not-found]" in complaint(_find_batch(cluster, tmp_path, hosts="n1,n3"))
    assert "[duplicate-hosts]" in complaint(_find_batch(cluster, tmp_path, hosts="n1,n1"))
    too_many = complaint(_find_batch(cluster, tmp_path, "--memory-limit", "1GB,2GB,3GB"))
    assert "[too-many-limits]" in too_many
    relative = ("find-lr", "digits", "--data", "photos", "--data.name", "folder", "--data.augment.translate", 0)
    assert "[data-path-relative]" in complaint(paceline_in(tmp_path, *relative, *_on(cluster)))
    assert not _left(cluster)


def test_different_code_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    code = tmp_path / "other" / "paceline"
    code.parent.mkdir(exist_ok=True)
    subprocess.run(["cp", "-r", Path(paceline.__file__).parent, code.parent], check=True)
    (code / "more.py").write_text("")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={code.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    hosts = ("--hosts", "n1", "--ssh-config", cluster.config, "--python", python)
    answer = paceline_in(tmp_path, "find-batch", "tiny.yaml", *hosts)
    assert "[code-differs]" in complaint(answer)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_nothing_on_the_hosts(cluster: Cluster, tmp_path: Path, signum: int) -> None:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    words = command("find-batch", "tiny.yaml", "--steps", 1000000, *_on(cluster))
    job = Launcher(words, tmp_path, launch_environment(tmp_path))
    wait_for(lambda: all(host.processes("python") or host.ranks() for host in cluster.machines.values()), job)
    wait_for(lambda: len([rank for host in cluster.machines.values() for rank in host.ranks()]) == 2, job)
    os.kill(job.process.pid, signum)
    job.wait()
    assert job.status != 0
    wait_for(lambda: all_idle(cluster))
    if signum != signal.SIGKILL:
        assert not _left(cluster)
