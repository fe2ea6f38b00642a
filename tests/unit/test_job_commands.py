"""The commands that manage jobs (stop, resume, attach, fetch) in every state of a job, with a fake backend."""

from pathlib import Path
from typing import Any

import pytest
from fake_backend import FINISHED, RUNNING, Run, finished_run, is_marked_stopped, nodes, runner, saved_job, use_backend

from paceline.errors import UserError
from paceline.launch import job as jobs
from paceline.launch.final_state import final_state
from paceline.launch.job import Job
from paceline.launch.job_states import overall
from paceline.launch.states import NodeState, unreachable
from paceline.system.files import FolderLock


@pytest.fixture
def run(here, tmp_path: Path, monkeypatch) -> Run:
    return runner(here, tmp_path, monkeypatch)


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_finished_job_is_not_stopped(backend: str, tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = saved_job(tmp_path, backend=backend), use_backend(monkeypatch, FINISHED, NodeState.LOST)
    for _ in range(2):
        status, output = run("stop")
        assert status == 0
        assert "j is already finished; `paceline fetch j`" in output
        assert "resume" not in output
        assert not is_marked_stopped(job)
    assert "stop" not in backend.calls
    status, output = run("resume")
    assert status == 1
    assert "[job-finished]" in output
    assert "`paceline fetch j`" in output
    assert "resume" not in backend.calls


def test_fetched_run_folder_of_finished_job_is_named(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = saved_job(tmp_path)
    use_backend(monkeypatch, NodeState.LOST, NodeState.UNREACHABLE)
    folder = finished_run(tmp_path / "runs" / "j", job)
    output = run("stop")[1]
    assert "j is already finished" in output
    assert str(folder) in output


def test_stop_twice_then_resume(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = saved_job(tmp_path)
    then = nodes(143, NodeState.LOST)
    backend = use_backend(monkeypatch, RUNNING, RUNNING, then=then, folder=tmp_path / "runs" / "j")
    status, output = run("stop")
    assert status == 0
    for part in ("j is stopped", "`paceline resume j`", "`paceline fetch j`"):
        assert part in output
    assert is_marked_stopped(job)
    status, output = run("stop")
    assert (status, backend.calls) == (0, ["stop"])
    assert "j is already stopped; `paceline resume j`" in output
    assert "is stopped; `paceline resume j`" in run("attach")[1]
    status, _ = run("resume")
    assert (status, "resume" in backend.calls) == (0, True)
    assert not is_marked_stopped(job)
    assert "j is already finished" in run("stop")[1]


def test_job_that_finishes_during_stop_is_finished(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = saved_job(tmp_path)
    use_backend(monkeypatch, RUNNING, RUNNING, then=nodes(FINISHED, FINISHED))
    status, output = run("stop")
    assert status == 0
    assert "j is finished; `paceline fetch j`" in output
    assert not is_marked_stopped(job)


def test_job_on_unreachable_nodes_is_not_resumed(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = saved_job(tmp_path)
    backend = use_backend(monkeypatch, 1, unreachable("n2", "n2: no route"), not_stopped=["n2: no route"])
    status, output = run("resume")
    assert status == 1
    assert "[nodes-unreachable]" in output
    assert "n2 (unreachable: n2: no route)" in output
    assert "resume" not in backend.calls
    status, output = run("stop")
    assert status == 1
    assert "[job-not-stopped]" in output
    assert "n2: no route" in output
    assert final_state(job) is None
    assert overall(job, backend.parts) is NodeState.UNREACHABLE


def test_failed_job_is_not_stopped(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = saved_job(tmp_path), use_backend(monkeypatch, 1, 1)
    status, output = run("stop")
    assert status == 0
    for part in ("j has already failed", "`paceline logs j`", "`paceline resume j`"):
        assert part in output
    assert not is_marked_stopped(job)
    assert "stop" not in backend.calls


def test_failed_job_that_another_terminal_may_restart_is_stopped(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = saved_job(tmp_path), use_backend(monkeypatch, 1, 1)
    lock = FolderLock(jobs.folder_of(job.id))
    assert "j is stopped" in run("stop")[1]
    assert is_marked_stopped(job)
    assert backend.calls == ["stop"]
    lock.release()


def test_running_job_is_not_resumed_and_has_nothing_to_fetch_yet(tmp_path: Path, run: Run, monkeypatch) -> None:
    saved_job(tmp_path)
    use_backend(monkeypatch, RUNNING, NodeState.LOST)
    output = run("resume")[1]
    assert "[job-running]" in output
    assert "n1" in output
    assert "`paceline attach j`" in output
    status, output = run("fetch")
    assert status == 1
    assert "[no-run-folder]" in output
    assert "j is running" in output


def test_job_that_another_terminal_starts(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = saved_job(tmp_path), use_backend(monkeypatch, NodeState.NOT_STARTED, NodeState.NOT_STARTED)
    lock = FolderLock(jobs.folder_of(job.id))
    assert "[job-in-use]" in run("resume")[1]
    lock.release()
    assert "resume" not in backend.calls


def test_attach_shows_how_the_job_ended(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = saved_job(tmp_path)
    backend = use_backend(monkeypatch, 1, 1, folder=tmp_path / "runs" / "j")
    status, output = run("attach")
    assert status == 1
    assert "j has failed; `paceline logs j`" in output
    assert final_state(job) is NodeState.FAILED
    backend.calls.clear()
    status, output = run("attach")  # shows its logs, and starts nothing
    assert (status, backend.calls) == (1, ["follow"])
    assert "j has failed" in output


def test_error_while_following_does_not_end_the_job(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = saved_job(tmp_path), use_backend(monkeypatch, RUNNING, RUNNING)

    def fail(job: Job, **options: Any) -> int:
        raise UserError("slurm-unreachable", "SLURM does not answer")

    monkeypatch.setattr(backend, "follow", fail)
    status, output = run("attach")
    assert status == 1
    assert "[slurm-unreachable]" in output
    assert backend.calls == []
    assert final_state(job) is None


def test_ec2_instances_are_terminated_and_not_resumed(tmp_path: Path, run: Run, monkeypatch) -> None:
    saved_job(tmp_path, backend="ec2", instance_type="x", results="s3://bucket/runs")
    backend = use_backend(monkeypatch, FINISHED, FINISHED, folder=tmp_path / "runs" / "j")
    output = run("stop")[1]
    assert f"run folder: {tmp_path / 'runs' / 'j'}" in output
    assert backend.calls == ["clean_up"]
    saved_job(tmp_path, "k", backend="ec2", instance_type="x", results="s3://bucket/runs")
    use_backend(monkeypatch, RUNNING, RUNNING, then=nodes(NodeState.GONE, NodeState.GONE))
    output = run("stop", "k")[1]
    assert "`paceline logs" not in output
    assert "`paceline launch ec2 --resume s3://bucket/runs/k`" in output
    assert "`paceline resume" not in output
