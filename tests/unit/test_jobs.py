"""The commands that manage jobs in every state of a job, with a fake backend."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import raises

from paceline.cli import jobs as commands
from paceline.cli.main import main
from paceline.errors import NoRunFolder, UserError
from paceline.launch import control, states
from paceline.launch import job as jobs
from paceline.launch.hosts import Host, HostError
from paceline.launch.job import Job
from paceline.system.files import FolderLock

RECIPE = "name: a\ndata: {name: digits}\n"
EC2 = {"ec2": {"keep": False, "region": ""}}


@dataclass
class FakeBackend:
    """Nodes in given states; records the calls."""

    parts: list[tuple[str, str]]
    then: list[tuple[str, str]] | None = None
    """Their states after a stop."""
    not_stopped: list[str] = field(default_factory=list)
    folder: Path | None = None
    calls: list[str] = field(default_factory=list)

    def status(self, job: Job) -> list[tuple[str, str]]:
        return self.parts

    def stop(self, job: Job, grace: float) -> list[str]:
        self.calls.append("stop")
        (jobs.folder_of(job.id) / control.STOPPED).touch()
        self.parts = self.then or self.parts
        return self.not_stopped

    def resume(self, job: Job) -> Job:
        self.calls.append("resume")
        control.clear_final_state(job)
        self.parts = [(name, "ended 0") for name, _ in self.parts]
        return job

    def follow(self, job: Job, **options: Any) -> int:
        self.calls.append("follow")
        return 0 if any(state == "ended 0" for _, state in self.parts) else 1

    def fetch(self, job: Job) -> Path:
        if self.folder is None:
            raise NoRunFolder("no-run-folder", f"no node of {job.id} has a run folder")
        return self.folder

    def clean_up(self, job: Job) -> None:
        self.calls.append("clean_up")


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))

    def run_command(*words: str) -> tuple[int, str]:
        status = main(list(words))
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return status, printed.out + printed.err

    return run_command


def _job(tmp_path: Path, name: str = "j", backend: str = "ssh", **more: Any) -> Job:
    job = Job(name, backend, name, RECIPE, ("n1", "n2"), runs=str(tmp_path / "runs"), **more)
    jobs.save(job)
    return job


def _with(monkeypatch: pytest.MonkeyPatch, *parts: str, **more: Any) -> FakeBackend:
    backend = FakeBackend([(f"n{number}", state) for number, state in enumerate(parts, 1)], **more)
    monkeypatch.setattr(commands, "backend_of", lambda job: backend)
    return backend


def _is_marked_stopped(job: Job) -> bool:
    return (jobs.folder_of(job.id) / control.STOPPED).exists()


def _finished(folder: Path, job: Job) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "summary.json").write_text('{"status": "finished"}')
    (folder / ".job").write_text(job.id)
    return folder


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_finished_job_is_not_stopped(backend: str, tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = _job(tmp_path, backend=backend), _with(monkeypatch, "ended 0", "lost")
    for _ in range(2):
        status, output = run("stop")
        assert status == 0
        assert "j is already finished; `paceline fetch j`" in output
        assert "resume" not in output
        assert not _is_marked_stopped(job)
    assert "stop" not in backend.calls
    status, output = run("resume")
    assert status == 1
    assert "[job-finished]" in output
    assert "`paceline fetch j`" in output
    assert "resume" not in backend.calls


def test_fetched_run_folder_of_finished_job_is_named(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path)
    _with(monkeypatch, "lost", "unreachable: no route")
    folder = _finished(tmp_path / "runs" / "j", job)
    output = run("stop")[1]
    assert "j is already finished" in output
    assert str(folder) in output


def test_stop_twice_then_resume(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path)
    then = [("n1", "ended 143"), ("n2", "lost")]
    backend = _with(monkeypatch, "running", "running", then=then, folder=tmp_path / "runs" / "j")
    status, output = run("stop")
    assert status == 0
    for part in ("j is stopped", "`paceline resume j`", "`paceline fetch j`"):
        assert part in output
    assert _is_marked_stopped(job)
    status, output = run("stop")
    assert (status, backend.calls) == (0, ["stop"])
    assert "j is already stopped; `paceline resume j`" in output
    assert "is stopped; `paceline resume j`" in run("attach")[1]
    status, _ = run("resume")
    assert (status, "resume" in backend.calls) == (0, True)
    assert not _is_marked_stopped(job)
    assert "j is already finished" in run("stop")[1]


def test_job_that_finishes_during_stop_is_finished(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path)
    _with(monkeypatch, "running", "running", then=[("n1", "ended 0"), ("n2", "ended 0")])
    status, output = run("stop")
    assert status == 0
    assert "j is finished; `paceline fetch j`" in output
    assert not _is_marked_stopped(job)


def test_job_on_unreachable_nodes_is_not_resumed(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path)
    backend = _with(monkeypatch, "ended 1", "unreachable: n2: no route", not_stopped=["n2: no route"])
    status, output = run("resume")
    assert status == 1
    assert "[nodes-unreachable]" in output
    assert "n2 (unreachable: n2: no route)" in output
    assert "resume" not in backend.calls
    status, output = run("stop")
    assert status == 1
    assert "[job-not-stopped]" in output
    assert "n2: no route" in output
    assert control.final_state(job) == ""
    assert states.overall(job, backend.parts) == "unreachable"


def test_failed_job_is_not_stopped(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = _job(tmp_path), _with(monkeypatch, "ended 1", "ended 1")
    status, output = run("stop")
    assert status == 0
    for part in ("j has already failed", "`paceline logs j`", "`paceline resume j`"):
        assert part in output
    assert not _is_marked_stopped(job)
    assert "stop" not in backend.calls


def test_failed_job_that_another_terminal_may_restart_is_stopped(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = _job(tmp_path), _with(monkeypatch, "ended 1", "ended 1")
    lock = FolderLock(jobs.folder_of(job.id))
    assert "j is stopped" in run("stop")[1]
    assert _is_marked_stopped(job)
    assert backend.calls == ["stop"]
    lock.release()


def test_running_job_is_not_resumed_and_has_nothing_to_fetch_yet(tmp_path: Path, run: Run, monkeypatch) -> None:
    _job(tmp_path)
    _with(monkeypatch, "running", "lost")
    output = run("resume")[1]
    assert "[job-running]" in output
    assert "n1" in output
    assert "`paceline attach j`" in output
    status, output = run("fetch")
    assert status == 1
    assert "[no-run-folder]" in output
    assert "j is running" in output


def test_job_that_another_terminal_starts(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = _job(tmp_path), _with(monkeypatch, "absent", "absent")
    lock = FolderLock(jobs.folder_of(job.id))
    assert "[job-in-use]" in run("resume")[1]
    lock.release()
    assert "resume" not in backend.calls


def test_attach_shows_how_the_job_ended(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path)
    backend = _with(monkeypatch, "ended 1", "ended 1", folder=tmp_path / "runs" / "j")
    status, output = run("attach")
    assert status == 1
    assert "j has failed; `paceline logs j`" in output
    assert control.final_state(job) == "failed"
    backend.calls.clear()
    status, output = run("attach")  # shows its logs, and starts nothing
    assert (status, backend.calls) == (1, ["follow"])
    assert "j has failed" in output


def test_error_while_following_does_not_end_the_job(tmp_path: Path, run: Run, monkeypatch) -> None:
    job, backend = _job(tmp_path), _with(monkeypatch, "running", "running")

    def fail(job: Job, **options: Any) -> int:
        raise UserError("slurm-unreachable", "SLURM does not answer")

    monkeypatch.setattr(backend, "follow", fail)
    status, output = run("attach")
    assert status == 1
    assert "[slurm-unreachable]" in output
    assert backend.calls == []
    assert control.final_state(job) == ""


def test_status_shows_states_and_progress(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path, backend="local")
    folder = jobs.folder_of(job.id) / "n1" / "runs" / "j"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": "running", "total_steps": 400}))
    place = {"step": 100, "epoch": 2.5}
    train = place | {"kind": "train", "steps": 10, "images": 640, "seconds": {"compute": 2.0}, "loss": 0.5, "top1": 0.9}
    evaluated = place | {"kind": "eval", "top1": 0.8125, "top5": 1.0, "loss": 0.4, "seconds": 1.0}
    records = (train | {"images_per_second": 320.0}, evaluated)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    _with(monkeypatch, "running", "lost")
    status, output = run("status")
    assert status == 0
    assert re.search(r"^n1 +running\nn2 +lost: its processes no longer exist$", output, re.MULTILINE)
    for figure in ("step 100 of 400 (25%)", "epoch 2.50", "validation top-1 81.25%", "images/s 320", "about 60.0 s"):
        assert figure in output
    _with(monkeypatch, "absent", "absent")
    assert re.search("^n1 +not started$", run("status")[1], re.MULTILINE)
    _with(monkeypatch, "ended 0", "ended 3")
    output = run("status")[1]
    assert re.search("^n2 +failed with exit status 3$", output, re.MULTILINE)
    assert "j is finished; `paceline fetch j`" in output


def test_slurm(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path, backend="slurm", extra={"slurm": {"seeds": [0, 1], "job_id": "7"}})
    for parts, state in (
        (("COMPLETED None", "FAILED NonZero"), "failed"),
        (("COMPLETED None", "CANCELLED None"), "stopped"),
        (("COMPLETED None", "PENDING (Resources)"), "pending"),
        (("TIMEOUT None", "RUNNING n1"), "running"),
        (("COMPLETED None", "COMPLETED None"), "finished"),
        (("gone: SLURM no longer lists it",), "gone"),
    ):
        assert states.overall(job, [("7", part) for part in parts]) == state, parts
    backend = _with(monkeypatch, "COMPLETED None", "FAILED NonZero")
    run("resume")
    assert "resume" in backend.calls  # only one task of the array is finished
    control.clear_final_state(job)
    backend = _with(monkeypatch, "gone: SLURM no longer lists it")
    for seed in (0, 1):
        _finished(tmp_path / "runs" / f"j-seed-{seed}", job)
    assert "[job-finished]" in run("resume")[1]
    assert "j is already finished" in run("stop")[1]
    assert backend.calls == ["clean_up"]


def test_ec2_instances_are_terminated_and_not_resumed(tmp_path: Path, run: Run, monkeypatch) -> None:
    _job(tmp_path, backend="ec2", extra=EC2, results="s3://bucket/runs")
    backend = _with(monkeypatch, "ended 0", "ended 0", folder=tmp_path / "runs" / "j")
    output = run("stop")[1]
    assert f"run folder: {tmp_path / 'runs' / 'j'}" in output
    assert backend.calls == ["clean_up"]
    _job(tmp_path, "k", backend="ec2", extra=EC2, results="s3://bucket/runs")
    _with(monkeypatch, "running", "running", then=[("n1", "gone"), ("n2", "gone")])
    output = run("stop", "k")[1]
    assert "`paceline logs" not in output
    assert "`paceline launch ec2 --resume s3://bucket/runs/k`" in output
    assert "`paceline resume" not in output


def test_jobs_are_listed_with_their_states(tmp_path: Path, run: Run, monkeypatch) -> None:
    assert "no jobs in" in run("jobs")[1]
    parts = {"a": "running", "b": "ended 0", "c": "ended 2", "d": "unreachable: no route"}
    for name in parts:
        _job(tmp_path, name)
    control.record_final_state(_job(tmp_path, "e"), "stopped")
    backend = FakeBackend([])
    monkeypatch.setattr(backend, "status", lambda job: [("n1", parts[job.id])])
    monkeypatch.setattr(commands, "backend_of", lambda job: backend)
    status, output = run("jobs")
    rows = {line.split()[0]: line.split()[1:3] for line in output.splitlines()[1:]}
    wanted = {"a": "running", "b": "finished", "c": "failed", "d": "unreachable", "e": "stopped"}
    assert (status, rows) == (0, {name: [state, "ssh"] for name, state in wanted.items()})
    assert "n1, n2" in output
    quick = {line.split()[0]: line.split()[1] for line in run("jobs", "--quick")[1].splitlines()[1:]}
    assert quick == dict.fromkeys("abcd", "unknown") | {"e": "stopped"}
    (jobs.folder_of("a") / "job.json").write_text("{")
    status, output = run("jobs")
    assert status == 0
    assert "a  " in output
    assert "unreadable" in output
    assert "[job-corrupt]" in output


def test_host_that_does_not_answer_does_not_delay_the_list(tmp_path: Path, run: Run) -> None:
    known, never = [_job(tmp_path, name) for name in ("a", "b")], threading.Event()

    def status(job: Job) -> list[tuple[str, str]]:
        if job.id == "a":
            never.wait(60)
        return [("n1", "running")]

    assert states.states_of(known, status, 1.0, quick=False) == {"a": "unreachable", "b": "running"}
    never.set()


def test_clean_up_does_not_mark_the_job_as_stopped(tmp_path: Path, run: Run) -> None:
    job = _job(tmp_path, backend="local")
    control.clean_up(job)
    assert not _is_marked_stopped(job)


def test_fetch_without_run_folder_or_reachable_hosts(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = _job(tmp_path, backend="local")
    for name in job.hosts:
        (jobs.folder_of(job.id) / name).mkdir()
    with raises("no-run-folder", NoRunFolder):
        control.fetch(job)

    def unreachable(host: Host, *_: object, **__: object) -> None:
        raise host.error("host-unreachable", "no route")

    monkeypatch.setattr(Host, "run", unreachable)
    with raises("nodes-unreachable", HostError) as caught:
        control.fetch(job)
    assert "n1: no route; n2: no route" in str(caught.value)


def test_run_folder_without_telemetry_is_fetched(tmp_path: Path, run: Run) -> None:
    job = _job(tmp_path, backend="local")
    for number, name in enumerate(job.hosts):
        folder = jobs.folder_of(job.id) / name / "runs" / "j"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"status": "running", "step": number}, indent=1))
    assert json.loads((control.fetch(job) / "summary.json").read_text())["step"] == 1


class _SlowHost(Host):
    """Sends the padding of an archive only after the rest has been read."""

    def argv(self, command: str) -> list[str]:
        return ["sh", "-c", f"{command} > all.tar; head -c 10240 all.tar; sleep 0.2; tail -c +10241 all.tar"]


def test_archive_is_read_to_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = bytes(18 * 512)  # fills a record, with its header and the first of the two empty blocks at the end
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "here").mkdir()
    _SlowHost("slow", str(tmp_path)).fetch(["file"], tmp_path / "here")
    assert (tmp_path / "here" / "file").read_bytes() == content
