"""Nodes that fail during a job, and come back."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import machines
import pytest
from jobs import (
    all_idle,
    last_step,
    launch,
    metadata_service,
    ranks_now,
    rendezvous_stores,
    slow_variables,
    slowed,
    starts,
    wait_for,
)  # fmt: skip
from machines import Cluster, cluster_of

import paceline

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
WORDS = ("--checkpoint.every", "10ba", "--log.every", "1ba", "--log.tensorboard", "false", "--evaluate.every", "1000ba")


@pytest.fixture
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with cluster_of(folder, "n1", "n2", variables=slow_variables(folder)) as made:
        yield made


@pytest.mark.parametrize(("how", "what"), [("power", "rank 0"), ("cable", "rank 0"), ("power", "rendezvous")])
def test_training_continues_without_a_lost_node_which_rejoins(
    cluster: Cluster, tmp_path: Path, how: str, what: str
) -> None:
    """The node with rank 0, which writes the run folder, or the one with the rendezvous store."""
    words = ("--train.duration", "200ba", *WORDS, *(("--rendezvous-host", "n1") if what == "rendezvous" else ()))
    with slowed(cluster.folder) as at_full_speed, launch(cluster, tmp_path, "n1,n2", *words) as job:
        wait_for(lambda: last_step(cluster) >= 25 and ranks_now(cluster) == 2, job)
        lost = "n1" if what == "rendezvous" else _rank_zero(cluster)
        if how == "power":
            cluster.machines[lost].lose()
        else:
            cluster.cut(lost)
        wait_for(lambda: ranks_now(cluster) == 1, job)
        if how == "power":
            cluster.start(lost)
        else:
            cluster.plug_in(lost)
        wait_for(lambda: ranks_now(cluster) == 2, job)
        at_full_speed()
        output = job.wait()
    assert job.status == 0, output
    (run,) = (tmp_path / "runs").iterdir()
    records = _records(run)
    steps = [record["step"] for record in records if record["kind"] == "train"]
    assert steps == list(range(1, 201))  # each batch of each epoch once
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    ranks = [start["ranks"] for start in json.loads((run / "environment.json").read_text())["starts"]]
    assert ranks[0] == ranks[-1] == 2
    assert 1 in ranks


def test_node_checkpoints_on_interruption_notice(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--train.duration", "200ba", "--pass", "PACELINE_SPOT", *WORDS, "--checkpoint.every", "1000ba")
    with (
        slowed(cluster.folder) as at_full_speed,
        metadata_service(cluster, "n2", tmp_path) as notice,
        launch(cluster, tmp_path, "n1,n2", *words, PACELINE_SPOT="1") as job,
    ):
        wait_for(lambda: last_step(cluster) >= 25, job)
        notice.touch()
        wait_for(lambda: ranks_now(cluster) == 1, job)
        at_full_speed()
        output = job.wait()
    assert job.status == 0, output
    assert "spot interruption notice" in output
    assert "resuming from step" in output  # without a checkpoint, it would start again
    (run,) = (tmp_path / "runs").iterdir()
    assert [record["step"] for record in _records(run) if record["kind"] == "train"] == list(range(1, 201))


def _rank_zero(cluster: Cluster) -> str:
    hosts = cluster.machines.values()
    return next(host.name for host in hosts if any(rank.name() == "paceline-rank-0" for rank in host.ranks()))


def _records(run: Path) -> list[dict]:
    from paceline.track.records import RunFolder

    return RunFolder(run).records()


def test_killed_rank_is_restarted(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--train.duration", "120ba", *WORDS)
    with slowed(cluster.folder) as at_full_speed, launch(cluster, tmp_path, "n1,n2", *words) as job:
        wait_for(lambda: last_step(cluster) >= 25, job)
        count = len(starts(cluster))
        cluster.machines["n2"].ranks()[0].kill()
        wait_for(lambda: starts(cluster)[count:][-1:] == [2], job)
        at_full_speed()
        output = job.wait()
    assert job.status == 0, output
    (run,) = (tmp_path / "runs").iterdir()
    assert [record["step"] for record in _records(run) if record["kind"] == "train"] == list(range(1, 121))


def test_user_error_ends_the_job_without_retries(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--train.duration", "20ba", "--data.name", "cifar10", "--data.path", "/nowhere")
    with launch(cluster, tmp_path, "n1,n2", *words) as job:
        output = job.wait()
        wait_for(lambda: all_idle(cluster))
    assert job.status == 1
    assert "/nowhere" in output
    assert output.count("starting 1 process") == 2  # no node tried again


def test_full_disk_of_a_node_is_reported_with_its_name(cluster: Cluster, tmp_path: Path) -> None:
    folder, pid = str(cluster.machines["n2"].root / ".paceline"), cluster.machines["n2"].pid
    for words in (["mkdir", "-p", folder], ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", folder]):
        subprocess.run(["nsenter", "--target", str(pid), "--mount", *words], check=True)
    with launch(cluster, tmp_path, "n1,n2", "--train.duration", "60ba", *WORDS) as job:
        output = job.wait()
    assert job.status == 1
    rank_zero = re.search(r"(n[12]) \| \S+ recipe: ", output)  # the node that joined first
    assert rank_zero
    if rank_zero[1] == "n1":
        line = r"n2 \| paceline: error: .* on n2 \(No space left on device\).* \[replica-not-written\]"
    else:
        line = r"n1 \| paceline: error: .* on n2: .* No space left on device.* \[checkpoint-not-written\]"
    assert re.search(line, output)
    assert "Traceback" not in output


def _changed_package(folder: Path) -> Path:
    """Return a folder with a changed copy of the package."""
    shutil.copytree(Path(paceline.__file__).parent, folder / "other" / "paceline")
    with (folder / "other" / "paceline" / "errors.py").open("a") as file:
        file.write("# changed\n")
    return folder / "other"


def test_errors_of_hosts_are_reported(cluster: Cluster, tmp_path: Path) -> None:
    def message(hosts: str, *words: str) -> str:
        with launch(cluster, tmp_path, hosts, *words) as job:
            output = job.wait()
            assert not rendezvous_stores(tmp_path)
        assert job.status == 1
        assert "Traceback" not in output
        return output

    def assert_reported(host: str, code: str, output: str) -> None:
        assert re.search(rf"{re.escape(host)}: .*\[{code}\]", output), output

    assert_reported("nobody.invalid", "host-not-found", message("n1,nobody.invalid"))
    known_hosts = cluster.folder / "known_hosts"
    original = known_hosts.read_text()
    known_hosts.write_text("")
    assert_reported("n1", "host-key-unknown", message("n1"))
    keys = original.splitlines()
    known_hosts.write_text(f"{keys[0].split()[0]} {' '.join(keys[1].split()[1:])}\n")
    assert_reported("n1", "host-key-changed", message("n1"))
    known_hosts.write_text(original)
    key = (cluster.folder / "key.pub").read_text()
    (cluster.folder / "key.pub").write_text("")
    assert_reported("n1", "ssh-permission-denied", message("n1"))
    (cluster.folder / "key.pub").write_text(key)
    for name, code in (("n1", ""), ("n2", _changed_package(tmp_path))):
        program = cluster.machines[name].root / "python"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={code} exec {sys.executable} "$@"\n')
        program.chmod(0o700)
    assert "[code-differs]" in message("n1,n2", "--python", "$HOME/python")
    cluster.machines["n2"].lose()
    assert_reported("n2", "ssh-connection-refused", message("n2"))
    assert not list((tmp_path / "runs").glob("*"))
