"""Folders of jobs are private to their user, here and on other hosts; secrets are not recorded."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import HANG, raises

from paceline.launch import execution, planning, supervising
from paceline.launch import job as jobs
from paceline.launch.backends import local
from paceline.launch.final_state import record_final_state
from paceline.launch.hosts import Host, HostError, SshHost
from paceline.launch.job import Job
from paceline.launch.job_hosts import HERE, hosts_of
from paceline.launch.specs import LocalSpec
from paceline.launch.states import NodeState
from paceline.system.files import private_folder
from paceline.track import environment

RECIPE = "name: a\ndata: {name: digits}\n"


@pytest.fixture(autouse=True)
def umask_zero(tmp_path: Path, monkeypatch) -> Iterator[None]:
    """A user whose files are open to everyone by default."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    before = os.umask(0)
    yield
    os.umask(before)


def _job(**more: object) -> Job:
    return Job("j", LocalSpec(name="j", recipe=RECIPE, hosts=("n1",), **more))


def _open_to_others(folder: Path) -> list[Path]:
    return [path for path in (folder, *folder.rglob("*")) if stat.S_IMODE(path.lstat().st_mode) & 0o077]


class FakeSshHost(SshHost):
    """Another host, which is this machine."""

    def argv(self, command: str) -> list[str]:
        return ["sh", "-c", command]


def _remote(job: str = "j") -> FakeSshHost:
    return FakeSshHost("n1", f"$HOME/.paceline/jobs/{job}/n1")


def test_local_folder_of_a_job_is_private(tmp_path: Path) -> None:
    job = _job(runs=str(tmp_path / "runs"))
    jobs.save(job)
    record_final_state(job, NodeState.FINISHED)
    local.stop(job, 0)
    Host("n1", str(jobs.folder_of("j") / "n1")).send({"secrets": b"export A=1\n"})
    names = {path.name for path in jobs.folder_of("j").iterdir()}
    assert names >= {"job.json", "recipe.yaml", "stopped", "final_state", "n1"}
    assert not _open_to_others(tmp_path / "home")


def test_remote_folder_of_a_job_is_private(tmp_path: Path) -> None:
    """Copied files and code, and what its scripts write."""
    tree = tmp_path / "code"
    tree.mkdir()
    (tree / "a.py").write_text("")
    (tree / "run").write_text("")
    (tree / "run").chmod(0o777)
    _remote().send({"secrets": b"export A=1\n", "node.sh": b""}, tree)
    _remote().run_checked("mkdir -p runs/j && echo > runs/j/log.txt && echo > node.log", "writing")
    folder = tmp_path / "user" / ".paceline"
    assert not _open_to_others(folder)
    owners = {path.stat().st_uid for path in folder.rglob("*")}
    assert owners == {os.geteuid()}
    assert (folder / "jobs/j/n1/code/run").stat().st_mode & 0o100
    (folder / "jobs").chmod(0o755)  # the user may let others read it
    _remote("k").send({"node.sh": b""})
    assert stat.S_IMODE((folder / "jobs").stat().st_mode) == 0o755


@pytest.mark.parametrize("below", ["", "envs", "jobs", "jobs/j", "jobs/j/n1"])
def test_remote_folder_that_others_can_write_to_is_refused(tmp_path: Path, below: str) -> None:
    folder = tmp_path / "user" / ".paceline" / below
    for mode in (0o770, 0o707, 0o777):
        folder.mkdir(parents=True, exist_ok=True)
        for parent in (folder, *folder.parents):
            if parent.is_relative_to(tmp_path / "user" / ".paceline"):
                parent.chmod(0o700)
        folder.chmod(mode)
        with raises("folder-writable-by-others", HostError) as caught:
            _remote().send({"secrets": b"export A=1\n"})
        assert f"chmod go-w {folder}" in str(caught.value)
        assert not list((tmp_path / "user").rglob("secrets"))
    folder.chmod(0o755)
    _remote().send({"secrets": b"export A=1\n"})


def test_paceline_home_may_be_a_link(tmp_path: Path) -> None:
    """Home folders on clusters are small, so users link such folders to other disks."""
    (tmp_path / "scratch").mkdir(mode=0o700)
    (tmp_path / "user" / ".paceline").symlink_to(tmp_path / "scratch")
    _remote().send({"node.sh": b""})
    assert (tmp_path / "scratch" / "jobs" / "j" / "n1" / "node.sh").is_file()


def test_local_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    job = _job()
    for folder in (jobs.home(), jobs.home() / "jobs", jobs.folder_of("j")):
        jobs.save(job)
        folder.chmod(0o770)
        for action in (lambda: jobs.save(job), lambda: jobs.load("j")):
            with raises("folder-writable-by-others") as caught:
                action()
            assert f"chmod go-w {folder}" in str(caught.value)
        folder.chmod(0o700)
    assert jobs.load("j") == job


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "own"
    private_folder(folder)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with raises("folder-not-owned") as caught:
        private_folder(folder)
    assert caught.value.fields == {"path": folder}
    monkeypatch.undo()
    if os.geteuid() == 0:
        remote = tmp_path / "user" / ".paceline"
        remote.mkdir(mode=0o700)
        os.chown(remote, 12345, 12345)
        monkeypatch.setenv("HOME", str(tmp_path / "user"))
        with raises("folder-not-owned", HostError):
            _remote().send({"secrets": b"export A=1\n"})


def test_secrets_reach_processes_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    """A launch on this machine, with a program that waits instead of paceline."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf %s "$TOKEN" > "$PWD/got"; while sleep 0.1; do :; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("TOKEN", "canary")
    monkeypatch.setattr(sys, "executable", str(program))
    job = replace(_job(python=str(program), pass_env=("TOKEN",)), rendezvous="127.0.0.1:1")
    jobs.save(job)
    hosts = hosts_of(job)
    monkeypatch.delenv("TOKEN")
    try:
        execution.execute(planning.plan(job), hosts, {"TOKEN": "canary"}, lambda: False)
        for folder in (Path(hosts["n1"].folder), Path(hosts[HERE].folder)):
            _wait_for(folder / "got")
            assert (folder / "got").read_text() == "canary"
            (folder / "got").unlink()
        shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert "TOKEN=canary" not in shown
        files = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
        assert not [path for path in files if b"canary" in path.read_bytes()]
        assert not _open_to_others(tmp_path / "home")
        assert "canary" not in "".join(map(str, planning.plan(job)))
    finally:
        remaining = supervising.stop_sessions(job, grace=0)
    assert not remaining
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(program) in command]


def _wait_for(path: Path) -> None:
    subprocess.run(["sh", "-c", 'until [ -s "$0" ]; do sleep 0.05; done', path], check=True, timeout=HANG)


def test_no_secret_is_recorded_with_a_run(monkeypatch) -> None:
    import torch

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PACELINE_TOKEN"):
        monkeypatch.setenv(name, "canary")
    urls = ["https://me:canary@host/data", "--data.path=https://host/data?X-Amz-Signature=canary"]
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "digits", "--data.path", *urls])
    recorded = environment.collect(["here"], torch.device("cpu"))
    assert "canary" not in json.dumps(recorded)
    assert recorded["command"][-2:] == ["https://host/data", "--data.path=https://host/data"]


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_does_not_run_programs_of_the_repository(tmp_path: Path, monkeypatch) -> None:
    """core.fsmonitor names a program that git would run."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/CANARY\n")
    program.chmod(0o700)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"], ["config", "core.fsmonitor", program]):
        subprocess.run([*git, *words], check=True)
    assert environment._code()["commit"]
    assert not (tmp_path / "CANARY").exists()
