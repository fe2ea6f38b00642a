"""Jobs on local nodes: detached, managed from other processes, stopped, and resumed."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import HANG, TINY, command, environment
from object_store import ObjectStore, object_store

from paceline.track.records import RunFolder

STEPS = 300
INTERVALS = ("--train.duration", f"{STEPS}ba", "--evaluate.every", f"{STEPS}ba", "--checkpoint.every", "15ba")
WORDS = ("digits", *TINY, *INTERVALS, "--import", "slow")
SLOW = """
import time
from pathlib import Path
import paceline as pl

@pl.register_callback("slow")
class Slow(pl.Callback):
    def __init__(self, until):
        self.until = Path(until)

    def on_step(self, *_):
        time.sleep(0 if self.until.exists() else 0.3)
"""
Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[ObjectStore]:
    with object_store(tmp_path / "store") as made:
        yield made


@pytest.fixture
def ask(tmp_path: Path, bucket: ObjectStore) -> Ask:
    """Run the command line as a user of a machine, each with its own folder and home."""
    (tmp_path / "slow.py").write_text(SLOW)

    def run(machine: str, *words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / machine
        folder.mkdir(exist_ok=True)
        env = environment() | bucket.variables | {"PACELINE_HOME": str(folder / "home"), "PYTHONPATH": str(tmp_path)}
        answer = subprocess.run(command(*words), cwd=folder, env=env, capture_output=True, text=True, timeout=HANG)
        assert answer.returncode == status, answer.stdout + answer.stderr
        return answer

    return run


def _processes(folder: Path) -> list[psutil.Process]:
    """Return the processes whose working directory is below a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd().startswith(f"{folder}/"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_job_is_stopped_and_resumed_here_and_elsewhere(ask: Ask, bucket: ObjectStore, tmp_path: Path) -> None:
    fast = tmp_path / "fast"  # steps are slow until the job is stopped, whatever the machine
    words = (*WORDS, "--callbacks", f"{{slow: {{until: {fast}}}}}")
    names = ("--pass", ",".join(bucket.variables))
    results = ("--results", "s3://results/runs", "--name", "mine")
    launched = ask("a", "launch", "local", "--nodes", 2, *words, *names, *results, "--detach")
    assert "node-0, node-1" in launched.stderr
    deadline = time.monotonic() + HANG
    while not any((tmp_path / "a").rglob("COMMIT")):
        assert time.monotonic() < deadline, ask("a", "logs").stdout
        time.sleep(0.1)
    status = ask("a", "status").stdout
    assert status.count("running") == 2
    assert re.search(rf"run mine: step [\d,]+ of {STEPS} .*, epoch .*, images/s ", status)
    assert re.search(r"mine-\S+ +running +local +.*node-0, node-1", ask("a", "jobs").stdout)
    running = ask("a", "resume", status=1).stderr
    assert "[job-running]" in running
    assert "node-0, node-1" in running
    assert "is stopped; `paceline resume mine-" in ask("a", "stop").stdout
    assert "is already stopped; `paceline resume mine-" in ask("a", "stop").stdout
    assert re.search(r"mine-\S+ +stopped ", ask("a", "jobs", "--quick").stdout)
    assert _processes(tmp_path / "a") == []
    assert "node-0 | " in ask("a", "logs").stdout
    stopped = json.loads((Path(ask("a", "fetch").stdout.strip()) / "summary.json").read_text())["step"]
    assert 0 < stopped < STEPS
    fast.touch()
    # from the object store, on a machine that does not know the job
    ask("b", "launch", "local", "--nodes", 1, "--resume", "s3://results/runs/mine", *names)
    # and where it was
    ask("a", "resume")
    for machine in ("a", "b"):
        run = RunFolder(tmp_path / machine / "runs" / "mine")
        assert [record["step"] for record in run.records() if record["kind"] == "train"] == list(range(1, STEPS + 1))
        assert run.read_starts()[-1]["first_step"] == stopped
    folder = str(tmp_path / "a" / "runs" / "mine")
    finished = ask("a", "resume", status=1).stderr
    assert "[job-finished]" in finished
    assert folder in finished
    stopped_again = ask("a", "stop").stdout
    assert "is already finished" in stopped_again
    assert folder in stopped_again
    assert "paceline resume" not in stopped_again
    assert not list((tmp_path / "a" / "home").rglob("stopped"))
    assert "is finished" in ask("a", "attach").stderr
    assert re.search(r"mine-\S+ +finished ", ask("a", "jobs").stdout)
    summary = tmp_path / "a" / "runs" / "mine" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"step": 9999}))
    newer = ask("a", "fetch", status=1).stderr
    assert "[local-run-newer]" in newer
    assert "9999" in newer
    again = ("--nodes", 1, "--name", "mine", "--runs", "others", *results[:2], *names)
    assert "[results-of-another-run]" in ask("b", "launch", "local", *words, *again, status=1).stdout
    everything = [path for path in tmp_path.rglob("*") if path.is_file() and "store" not in path.parts]
    assert not [path for path in everything if b"canary" in path.read_bytes()]


def test_seeds_continue_after_the_loss_of_a_node(ask: Ask, tmp_path: Path) -> None:
    fast = tmp_path / "fast"  # steps are slow until a node is lost, whatever the machine
    words = (
        "digits",
        *TINY,
        "--train.duration",
        "30ba",
        "--import",
        "slow",
        "--callbacks",
        f"{{slow: {{until: {fast}}}}}",
    )
    ask("a", "launch", "local", "--nodes", 2, "--seeds", "3,5", "--name", "mine", *words, "--detach")
    (job,) = (tmp_path / "a" / "home" / "jobs").iterdir()
    deadline = time.monotonic() + HANG
    while not any(job.glob("*/runs/mine-seed5/checkpoints/*/COMMIT")):
        assert time.monotonic() < deadline, ask("a", "logs").stdout
        time.sleep(0.1)
    status = ask("a", "status").stdout
    assert re.findall(r"run (mine-seed\d): step (?:30 of 30)?", status) == ["mine-seed3", "mine-seed5"]
    nodes = [job / f"node-{number}" for number in range(2)]
    (other,) = [node for node in nodes if not (node / "runs" / "mine-seed5" / "log.txt").exists()]  # not that of rank 0
    for process in [process for process in _processes(job) if process.cwd() == str(other)]:
        process.kill()
    fast.touch()
    followed = ask("a", "attach")
    runs = [RunFolder(tmp_path / "a" / "runs" / f"mine-seed{seed}") for seed in (3, 5)]
    for run in runs:
        assert str(run.path) in followed.stderr
        assert [record["step"] for record in run.records() if record["kind"] == "train"] == list(range(1, 31))
    logs = ask("a", "logs").stdout
    assert "runs/mine-seed3 is finished" in logs
    assert re.search(r"resuming from step \d+ \(runs/mine-seed5/", logs)
