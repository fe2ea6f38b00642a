"""Machines that are lost in the middle of a job, and come back."""

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
    meeting_places,
    noticed,
    ranks_now,
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


@pytest.mark.parametrize(("how", "what"), [("power", "leader"), ("cable", "leader"), ("power", "keeper")])
def test_training_goes_on_without_a_lost_machine_and_takes_it_back(
    cluster: Cluster, tmp_path: Path, how: str, what: str
) -> None:
    """The machine that holds the leader, and so the run folder that was written to; or the meeting place."""
    words = ("--train.duration", "200ba", *WORDS, *(("--meet", "n1") if what == "keeper" else ()))
    with slowed(cluster.folder) as at_full_speed, launch(cluster, tmp_path, "n1,n2", *words) as job:
        wait_for(lambda: last_step(cluster) >= 25 and ranks_now(cluster) == 2, job)
        lost = "n1" if what == "keeper" else _leader(cluster)
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


def test_a_machine_that_is_told_to_leave_saves_first(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--train.duration", "200ba", "--pass", "PACELINE_SPOT", *WORDS, "--checkpoint.every", "1000ba")
    with (
        slowed(cluster.folder) as at_full_speed,
        noticed(cluster, "n2", tmp_path) as note,
        launch(cluster, tmp_path, "n1,n2", *words, PACELINE_SPOT="1") as job,
    ):
        wait_for(lambda: last_step(cluster) >= 25, job)
        note.touch()
        wait_for(lambda: ranks_now(cluster) == 1, job)
        at_full_speed()
        output = job.wait()
    assert job.status == 0, output
    assert "this machine will be taken away" in output
    assert "resuming from step" in output  # without a save there would be none
    (run,) = (tmp_path / "runs").iterdir()
    assert [record["step"] for record in _records(run) if record["kind"] == "train"] == list(range(1, 201))


def _leader(cluster: Cluster) -> str:
    return next(
        machine.name
        for machine in cluster.machines.values()
        if any(rank.name() == "paceline-rank-0" for rank in machine.ranks())
    )


def _records(run: Path) -> list[dict]:
    from paceline.track.records import RunFolder

    return RunFolder(run).records()


def test_a_killed_rank_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--train.duration", "120ba", *WORDS)
    with slowed(cluster.folder) as at_full_speed, launch(cluster, tmp_path, "n1,n2", *words) as job:
        wait_for(lambda: last_step(cluster) >= 25, job)
        begun = len(starts(cluster))
        cluster.machines["n2"].ranks()[0].kill()
        wait_for(lambda: starts(cluster)[begun:][-1:] == [2], job)
        at_full_speed()
        output = job.wait()
    assert job.status == 0, output
    (run,) = (tmp_path / "runs").iterdir()
    assert [record["step"] for record in _records(run) if record["kind"] == "train"] == list(range(1, 121))


def test_a_mistake_of_the_user_ends_the_job_at_once(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--train.duration", "20ba", "--data.name", "cifar10", "--data.path", "/nowhere")
    with launch(cluster, tmp_path, "n1,n2", *words) as job:
        output = job.wait()
        wait_for(lambda: all_idle(cluster))
    assert job.status == 1
    assert "/nowhere" in output
    assert output.count("starting 1 process") == 2  # nobody tried again


def test_a_full_disk_of_one_machine_is_told_with_its_name(cluster: Cluster, tmp_path: Path) -> None:
    place = cluster.machines["n2"].root / ".paceline"
    inside = cluster.machines["n2"].pid
    for words in (["mkdir", "-p", str(place)], ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(place)]):
        subprocess.run(["nsenter", "--target", str(inside), "--mount", *words], check=True)
    with launch(cluster, tmp_path, "n1,n2", "--train.duration", "60ba", *WORDS) as job:
        output = job.wait()
    assert job.status == 1
    lines = {
        "n1": r"n2 \| paceline: n2: the copy of .* failed \(No space left on device\); make room there",
        "n2": r"n1 \| paceline: the checkpoint of step 60 was not written on n2: .* No space left on device",
    }
    leader = re.search(r"(n[12]) \| \S+ recipe: ", output)  # whichever reached the meeting place first
    assert leader
    assert re.search(lines[leader[1]], output)
    assert "Traceback" not in output


def other_code(folder: Path) -> Path:
    """The package, changed a little."""
    shutil.copytree(Path(paceline.__file__).parent, folder / "other" / "paceline")
    with (folder / "other" / "paceline" / "errors.py").open("a") as file:
        file.write("# changed\n")
    return folder / "other"


def test_what_is_wrong_with_a_host_is_said(cluster: Cluster, tmp_path: Path) -> None:
    def answer(hosts: str, *words: str) -> str:
        with launch(cluster, tmp_path, hosts, *words) as job:
            output = job.wait()
            assert not meeting_places(tmp_path)
        assert job.status == 1
        assert "Traceback" not in output
        return output

    assert "nobody.invalid: there is no machine of that name" in answer("n1,nobody.invalid")
    known = cluster.folder / "known_hosts"
    honest = known.read_text()
    known.write_text("")
    assert "n1: its host key is not known; `ssh n1` once" in answer("n1")
    keys = honest.splitlines()
    known.write_text(f"{keys[0].split()[0]} {' '.join(keys[1].split()[1:])}\n")
    assert "n1: its host key has changed" in answer("n1")
    known.write_text(honest)
    key = (cluster.folder / "key.pub").read_text()
    (cluster.folder / "key.pub").write_text("")
    assert "n1: it refuses your key" in answer("n1")
    (cluster.folder / "key.pub").write_text(key)
    for name, code in (("n1", ""), ("n2", other_code(tmp_path))):
        program = cluster.machines[name].root / "python"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={code} exec {sys.executable} "$@"\n')
        program.chmod(0o700)
    assert "the code of paceline differs" in answer("n1,n2", "--python", "$HOME/python")
    cluster.machines["n2"].lose()
    assert "n2: nothing listens at its ssh port" in answer("n2")
    assert not list((tmp_path / "runs").glob("*"))
