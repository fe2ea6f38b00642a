"""States of nodes, parsed in one place, and of jobs: as `paceline status` and `paceline jobs` show them."""

import json
import re
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import raises
from fake_backend import FINISHED, RUNNING, FakeBackend, Run, finished_run, nodes, runner, saved_job, use_backend

from paceline.launch import backends, sessions
from paceline.launch import job as jobs
from paceline.launch.final_state import clear_final_state, record_final_state
from paceline.launch.job import Job
from paceline.launch.job_states import overall, states_of
from paceline.launch.states import NodeState, NodeStatus, parse_node, parse_squeue, unreachable

GONE = NodeStatus("7", NodeState.GONE, text="gone: SLURM no longer lists it")


@pytest.fixture
def run(here, tmp_path: Path, monkeypatch) -> Run:
    return runner(here, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("line", "state", "exit_status", "shown"),
    [
        (b"running", NodeState.RUNNING, None, "running"),
        (b"lost", NodeState.LOST, None, "lost: its processes no longer exist"),
        (b"absent", NodeState.NOT_STARTED, None, "not started"),
        (b"ended 0", NodeState.FINISHED, 0, "finished"),
        (b"ended 130", NodeState.STOPPED, 130, "stopped"),
        (b"ended 143", NodeState.STOPPED, 143, "stopped"),
        (b"ended 137", NodeState.FAILED, 137, "failed with exit status 137"),
        (b"ended 3", NodeState.FAILED, 3, "failed with exit status 3"),
    ],
)
def test_states_that_nodes_report(line: bytes, state: NodeState, exit_status: int | None, shown: str) -> None:
    status = parse_node("n1", line)
    assert (status.name, status.state, status.exit_status, str(status)) == ("n1", state, exit_status, shown)


@pytest.mark.parametrize("line", [b"", b"ended", b"ended -1", b"ended 9999", b"running ", b"\xff", b"finished"])
def test_other_text_of_nodes_is_an_error(line: bytes) -> None:
    with raises("host-state-invalid") as caught:
        parse_node("n1", line)
    assert caught.value.fields == {"host": "n1"}


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("7_0 COMPLETED None", NodeState.FINISHED),
        ("7_1 PENDING (Resources)", NodeState.PENDING),
        ("7 COMPLETING n1", NodeState.RUNNING),
        ("7 CANCELLED None", NodeState.STOPPED),
        ("7 OUT_OF_MEMORY None", NodeState.FAILED),
        ("7 NEW_IN_SLURM_99 None", NodeState.UNKNOWN),
    ],
)
def test_states_that_slurm_reports(line: str, state: NodeState) -> None:
    status = parse_squeue(line)
    assert status.state is state
    assert f"{status.name} {status}" == line


def test_status_shows_states_and_progress(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = saved_job(tmp_path, backend="local")
    folder = jobs.folder_of(job.id) / "n1" / "runs" / "j"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": "running", "total_steps": 400}))
    place = {"step": 100, "epoch": 2.5}
    train = place | {"kind": "train", "steps": 10, "images": 640, "seconds": {"compute": 2.0}, "loss": 0.5, "top1": 0.9}
    evaluated = place | {"kind": "eval", "top1": 0.8125, "top5": 1.0, "loss": 0.4, "seconds": 1.0}
    records = (train | {"images_per_second": 320.0}, evaluated)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    use_backend(monkeypatch, RUNNING, NodeState.LOST)
    status, output = run("status")
    assert status == 0
    assert re.search(r"n1 +running\n *n2 +lost", output)
    for figure in ("step 100 of 400 (25%)", "epoch 2.50", "validation top-1 81.25%", "images/s 320", "about 60.0 s"):
        assert figure in output
    use_backend(monkeypatch, NodeState.NOT_STARTED, NodeState.NOT_STARTED)
    assert re.search(r"n1 +not started", run("status")[1])
    use_backend(monkeypatch, FINISHED, 3)
    output = run("status")[1]
    assert re.search(r"n2 +failed with exit status 3", output)
    assert "j is finished; `paceline fetch j`" in output


def test_slurm_array(tmp_path: Path, run: Run, monkeypatch) -> None:
    job = saved_job(tmp_path, backend="slurm", seeds=(0, 1))
    completed, failed = parse_squeue("7_0 COMPLETED None"), parse_squeue("7_1 FAILED NonZero")
    for tasks, state in (
        ((completed, failed), NodeState.FAILED),
        ((completed, parse_squeue("7_1 CANCELLED None")), NodeState.STOPPED),
        ((completed, parse_squeue("7_1 PENDING (Resources)")), NodeState.PENDING),
        ((parse_squeue("7_0 TIMEOUT None"), parse_squeue("7_1 RUNNING n1")), NodeState.RUNNING),
        ((completed, completed), NodeState.FINISHED),
        ((GONE,), NodeState.GONE),
    ):
        assert overall(job, tasks) is state, tasks
    backend = use_backend(monkeypatch, completed, failed)
    run("resume")
    assert "resume" in backend.calls  # only one task of the array is finished
    clear_final_state(job)
    backend = use_backend(monkeypatch, GONE)
    for seed in (0, 1):
        finished_run(tmp_path / "runs" / f"j-seed{seed}", job)
    assert "[job-finished]" in run("resume")[1]
    assert "j is already finished" in run("stop")[1]
    assert backend.calls == ["clean_up"]


def test_jobs_are_listed_with_their_states(tmp_path: Path, run: Run, monkeypatch) -> None:
    assert "no jobs in" in run("jobs")[1]
    parts = dict(zip("abcd", nodes(RUNNING, FINISHED, 2, unreachable("n4", "no route")), strict=True))
    for name in parts:
        saved_job(tmp_path, name)
    record_final_state(saved_job(tmp_path, "e"), NodeState.STOPPED)
    backend = FakeBackend([])
    monkeypatch.setattr(backend, "status", lambda job: [parts[job.id]])
    monkeypatch.setattr(backends, "backend_of", lambda spec: backend)
    status, output = run("jobs")
    rows = {line.split()[0]: line.split()[1:3] for line in output.splitlines()[1:]}
    wanted = {"a": "running", "b": "finished", "c": "failed", "d": "unreachable", "e": "stopped"}
    assert (status, rows) == (0, {name: [state, "ssh"] for name, state in wanted.items()})
    assert "n1, n2" in output
    quick = {line.split()[0]: line.split()[1] for line in run("jobs", "--quick")[1].splitlines()[1:]}
    assert quick == dict.fromkeys("abcd", "unknown") | {"e": "stopped"}


@pytest.mark.parametrize(("file", "text"), [("job.json", "{"), ("final_state", "exploded")])
def test_corrupt_job_does_not_hide_the_others(tmp_path: Path, run: Run, monkeypatch, file: str, text: str) -> None:
    for name in ("a", "b"):
        saved_job(tmp_path, name)
    use_backend(monkeypatch, RUNNING, RUNNING)
    (jobs.folder_of("a") / file).write_text(text)
    status, output = run("jobs")
    assert status == 0
    assert {tuple(line.split()[:2]) for line in output.splitlines()[1:3]} == {("a", "unreadable"), ("b", "running")}
    assert "[job-corrupt]" in output
    assert str(jobs.folder_of("a") / file) in output


def test_host_that_does_not_answer_does_not_delay_the_list(tmp_path: Path, run: Run) -> None:
    known, never = [saved_job(tmp_path, name) for name in ("a", "b")], threading.Event()

    def status(job: Job) -> list[NodeStatus]:
        if job.id == "a":
            never.wait(60)
        return nodes(RUNNING)

    assert states_of(known, status, 1.0, quick=False) == {"a": NodeState.UNREACHABLE, "b": NodeState.RUNNING}
    never.set()


def test_a_node_that_ends_while_it_is_asked_has_ended(tmp_path: Path) -> None:
    ends = "alive() { echo 0 > node.exit; rm -f node.pid; return 1; }"
    before, ended, after = sessions._STATUS.partition("ended()")
    script = f"{before}{ends}\n{ended}{after}"
    answer = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout == "ended 0\n"
