"""What the verbs that look after jobs say in every state of a job, with machines that only say so."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import jobs as verbs
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
class Backend:
    """Machines in given states; remembers what was asked of it."""

    parts: list[tuple[str, str]]
    then: list[tuple[str, str]] | None = None
    """Their states after a stop."""
    left: list[str] = field(default_factory=list)
    folder: Path | None = None
    asked: list[str] = field(default_factory=list)

    def status(self, job: Job) -> list[tuple[str, str]]:
        return self.parts

    def stop(self, job: Job, grace: float) -> list[str]:
        self.asked.append("stop")
        (jobs.folder_of(job.id) / control.STOPPED).touch()
        self.parts = self.then or self.parts
        return self.left

    def resume(self, job: Job) -> Job:
        self.asked.append("resume")
        control.reopen(job)
        self.parts = [(name, "ended 0") for name, _ in self.parts]
        return job

    def follow(self, job: Job, **options: Any) -> int:
        self.asked.append("follow")
        return 0 if any(state == "ended 0" for _, state in self.parts) else 1

    def fetch(self, job: Job) -> Path:
        if self.folder is None:
            raise NoRunFolder(f"no machine of {job.id} has a run folder")
        return self.folder

    def tidy(self, job: Job) -> None:
        self.asked.append("tidy")


Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))

    def run(*words: str) -> tuple[int, str]:
        status = main(list(words))
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return status, printed.out + printed.err

    return run


def _job(tmp_path: Path, name: str = "j", backend: str = "ssh", **more: Any) -> Job:
    job = Job(name, backend, name, RECIPE, ("n1", "n2"), runs=str(tmp_path / "runs"), **more)
    jobs.save(job)
    return job


def _with(monkeypatch: pytest.MonkeyPatch, *parts: str, **more: Any) -> Backend:
    made = Backend([(f"n{number}", state) for number, state in enumerate(parts, 1)], **more)
    monkeypatch.setattr(verbs, "backend_of", lambda job: made)
    return made


def _is_marked(job: Job) -> bool:
    return (jobs.folder_of(job.id) / control.STOPPED).exists()


def _finished(folder: Path, job: Job) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "summary.json").write_text('{"status": "finished"}')
    (folder / ".job").write_text(job.id)
    return folder


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_a_finished_job_is_not_stopped(backend: str, tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job, back = _job(tmp_path, backend=backend), _with(monkeypatch, "ended 0", "lost")
    for _ in range(2):
        status, told = ask("stop")
        assert status == 0
        assert "j is already finished; `paceline fetch j` brings its run folder here" in told
        assert "resume" not in told
        assert not _is_marked(job)
    assert "stop" not in back.asked
    status, told = ask("resume")
    assert status == 1
    assert "j is finished; `paceline fetch j`" in told
    assert "resume" not in back.asked


def test_the_run_folder_of_a_finished_job_that_is_here_is_named(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path)
    _with(monkeypatch, "lost", "unreachable: no route")
    folder = _finished(tmp_path / "runs" / "j", job)
    assert f"j is already finished; its run folder is {folder}" in ask("stop")[1]


def test_stopping_and_stopping_again(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path)
    then = [("n1", "ended 143"), ("n2", "lost")]
    back = _with(monkeypatch, "running", "running", then=then, folder=tmp_path / "runs" / "j")
    status, told = ask("stop")
    assert status == 0
    how = "`paceline resume j` starts it again, from its last checkpoint if there is one"
    assert f"j is stopped; {how}; `paceline fetch j`" in told
    assert _is_marked(job)
    status, told = ask("stop")
    assert (status, back.asked) == (0, ["stop"])
    assert "j is already stopped; `paceline resume j`" in told
    assert "is stopped; `paceline resume j`" in ask("attach")[1]
    status, _ = ask("resume")
    assert (status, "resume" in back.asked) == (0, True)
    assert not _is_marked(job)
    assert "j is already finished" in ask("stop")[1]


def test_a_job_that_finishes_while_it_is_stopped_is_finished(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path)
    _with(monkeypatch, "running", "running", then=[("n1", "ended 0"), ("n2", "ended 0")])
    status, told = ask("stop")
    assert status == 0
    assert "j is finished; `paceline fetch j`" in told
    assert not _is_marked(job)


def test_machines_that_cannot_be_reached_may_still_train(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path)
    back = _with(monkeypatch, "ended 1", "unreachable: n2: no route", left=["n2: no route"])
    status, told = ask("resume")
    assert status == 1
    assert "n2 (unreachable: n2: no route), where it may still be training" in told
    assert "resume" not in back.asked
    status, told = ask("stop")
    assert status == 1
    assert "not all of it could be stopped; `paceline stop j` tries again" in told
    assert control.concluded(job) == ""
    assert states.overall(job, back.parts) == "unreachable"


def test_a_failed_job_is_said_to_have_failed(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job, back = _job(tmp_path), _with(monkeypatch, "ended 1", "ended 1")
    status, told = ask("stop")
    assert status == 0
    assert "j has already failed; `paceline logs j` shows why, `paceline resume j`" in told
    assert not _is_marked(job)
    assert "stop" not in back.asked


def test_a_failed_job_that_somebody_may_bring_back_is_stopped(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job, back = _job(tmp_path), _with(monkeypatch, "ended 1", "ended 1")
    lock = FolderLock(jobs.folder_of(job.id))
    assert "j is stopped" in ask("stop")[1]
    assert _is_marked(job)
    assert back.asked == ["stop"]
    lock.release()


def test_a_running_job(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    _job(tmp_path)
    _with(monkeypatch, "running", "lost")
    assert "still runs on n1; `paceline attach j` follows it" in ask("resume")[1]
    status, told = ask("fetch")
    assert status == 1
    assert "j is running, but has no run folder yet; fetch again in a while" in told


def test_a_job_that_another_terminal_starts(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job, back = _job(tmp_path), _with(monkeypatch, "absent", "absent")
    lock = FolderLock(jobs.folder_of(job.id))
    assert "another terminal is starting j" in ask("resume")[1]
    lock.release()
    assert "resume" not in back.asked


def test_following_to_the_end_says_how_it_ended(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path)
    back = _with(monkeypatch, "ended 1", "ended 1", folder=tmp_path / "runs" / "j")
    status, told = ask("attach")
    assert status == 1
    assert "j has failed; `paceline logs j` shows why" in told
    assert control.concluded(job) == "failed"
    back.asked.clear()
    status, told = ask("attach")  # its logs, and nothing is started
    assert (status, back.asked) == (1, ["follow"])
    assert "j has failed" in told


def test_an_error_while_following_leaves_the_job_alone(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job, back = _job(tmp_path), _with(monkeypatch, "running", "running")

    def broken(job: Job, **options: Any) -> int:
        raise UserError("SLURM does not answer")

    monkeypatch.setattr(back, "follow", broken)
    assert ask("attach")[0] == 1
    assert back.asked == []
    assert control.concluded(job) == ""


def test_status_tells_states_and_progress(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path, backend="local")
    run = jobs.folder_of(job.id) / "n1" / "runs" / "j"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"status": "running", "total_steps": 400}))
    place = {"step": 100, "epoch": 2.5}
    train = place | {"kind": "train", "steps": 10, "images": 640, "seconds": {"compute": 2.0}, "loss": 0.5, "top1": 0.9}
    evaluated = place | {"kind": "eval", "top1": 0.8125, "top5": 1.0, "loss": 0.4, "seconds": 1.0}
    records = (train | {"images_per_second": 320.0}, evaluated)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    _with(monkeypatch, "running", "lost")
    status, told = ask("status")
    assert status == 0
    assert "  n1: running\n  n2: lost: its processes are gone\n" in told
    for figure in ("step 100 of 400 (25%)", "epoch 2.50", "validation top-1 81.25%", "images/s 320", "about 60.0 s"):
        assert figure in told
    _with(monkeypatch, "absent", "absent")
    assert "n1: not started" in ask("status")[1]
    _with(monkeypatch, "ended 0", "ended 3")
    told = ask("status")[1]
    assert "n2: failed with exit status 3" in told
    assert "j is finished; `paceline fetch j`" in told


def test_slurm(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path, backend="slurm", extra={"slurm": {"seeds": [0, 1], "number": "7"}})
    for parts, state in (
        (("COMPLETED None", "FAILED NonZero"), "failed"),
        (("COMPLETED None", "CANCELLED None"), "stopped"),
        (("COMPLETED None", "PENDING (Resources)"), "pending"),
        (("TIMEOUT None", "RUNNING n1"), "running"),
        (("COMPLETED None", "COMPLETED None"), "finished"),
        (("gone: SLURM has forgotten it",), "gone"),
    ):
        assert states.overall(job, [("7", own) for own in parts]) == state, parts
    back = _with(monkeypatch, "COMPLETED None", "FAILED NonZero")
    ask("resume")
    assert "resume" in back.asked  # only one of the array is finished
    control.reopen(job)
    back = _with(monkeypatch, "gone: SLURM has forgotten it")
    for seed in (0, 1):
        _finished(tmp_path / "runs" / f"j-seed-{seed}", job)
    assert "j is finished" in ask("resume")[1]
    assert "j is already finished" in ask("stop")[1]
    assert back.asked == ["tidy"]


def test_machines_of_ec2_are_given_back_and_not_resumed(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    _job(tmp_path, backend="ec2", extra=EC2, results="s3://bucket/runs")
    back = _with(monkeypatch, "ended 0", "ended 0", folder=tmp_path / "runs" / "j")
    told = ask("stop")[1]
    assert f"run folder: {tmp_path / 'runs' / 'j'}" in told
    assert back.asked == ["tidy"]
    _job(tmp_path, "k", backend="ec2", extra=EC2, results="s3://bucket/runs")
    _with(monkeypatch, "running", "running", then=[("n1", "gone"), ("n2", "gone")])
    told = ask("stop", "k")[1]
    assert "`paceline logs" not in told
    assert "`paceline launch ec2 --resume s3://bucket/runs/k`" in told
    assert "`paceline resume" not in told


def test_jobs_are_listed_with_their_states(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    assert "no jobs in" in ask("jobs")[1]
    parts = {"a": "running", "b": "ended 0", "c": "ended 2", "d": "unreachable: no route"}
    for name in parts:
        _job(tmp_path, name)
    control.conclude(_job(tmp_path, "e"), "stopped")
    made = Backend([])
    monkeypatch.setattr(made, "status", lambda job: [("n1", parts[job.id])])
    monkeypatch.setattr(verbs, "backend_of", lambda job: made)
    status, told = ask("jobs")
    rows = {line.split()[0]: line.split()[1:3] for line in told.splitlines()[1:]}
    wanted = {"a": "running", "b": "finished", "c": "failed", "d": "unreachable", "e": "stopped"}
    assert (status, rows) == (0, {name: [state, "ssh"] for name, state in wanted.items()})
    assert "n1, n2" in told
    quick = {line.split()[0]: line.split()[1] for line in ask("jobs", "--quick")[1].splitlines()[1:]}
    assert quick == dict.fromkeys("abcd", "unknown") | {"e": "stopped"}
    (jobs.folder_of("a") / "job.json").write_text("{")
    status, told = ask("jobs")
    assert status == 0
    assert "a  " in told
    assert "unreadable" in told
    assert "job.json is corrupt" in told


def test_a_machine_that_does_not_answer_does_not_hold_up_the_list(tmp_path: Path, ask: Ask) -> None:
    known, never = [_job(tmp_path, name) for name in ("a", "b")], threading.Event()

    def status(job: Job) -> list[tuple[str, str]]:
        if job.id == "a":
            never.wait(60)
        return [("n1", "running")]

    assert states.states_of(known, status, 1.0, quick=False) == {"a": "unreachable", "b": "running"}
    never.set()


def test_cleaning_up_is_not_a_stop(tmp_path: Path, ask: Ask) -> None:
    job = _job(tmp_path, backend="local")
    control.tidy(job)
    assert not _is_marked(job)


def test_fetching_before_there_is_anything(tmp_path: Path, ask: Ask, monkeypatch) -> None:
    job = _job(tmp_path, backend="local")
    for name in job.hosts:
        (jobs.folder_of(job.id) / name).mkdir()
    with pytest.raises(NoRunFolder):
        control.fetch(job)

    def silent(host: Host, *_: object, **__: object) -> None:
        raise HostError(f"{host.name}: no route")

    monkeypatch.setattr(Host, "run", silent)
    with pytest.raises(HostError, match="n1: no route; n2: no route; fetch again when its machines can be reached"):
        control.fetch(job)


def test_a_run_folder_without_telemetry_is_fetched(tmp_path: Path, ask: Ask) -> None:
    job = _job(tmp_path, backend="local")
    for number, name in enumerate(job.hosts):
        run = jobs.folder_of(job.id) / name / "runs" / "j"
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"status": "running", "step": number}, indent=1))
    assert json.loads((control.fetch(job) / "summary.json").read_text())["step"] == 1


class _Slow(Host):
    """Sends the last block of an archive, which only pads it, when the rest has been read."""

    def argv(self, command: str) -> list[str]:
        return ["sh", "-c", f"{command} > all.tar; head -c 10240 all.tar; sleep 0.2; tail -c +10241 all.tar"]


def test_an_archive_is_taken_to_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = bytes(18 * 512)  # with its header, and the first of two empty blocks that end it, a whole record
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "here").mkdir()
    _Slow("slow", str(tmp_path)).fetch(["file"], tmp_path / "here")
    assert (tmp_path / "here" / "file").read_bytes() == content
