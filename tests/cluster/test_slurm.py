"""Jobs on a real SLURM: a controller and two logical machines of this one."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import TINY, command, environment

from paceline.checkpoint import store
from paceline.track.records import RunFolder

NEEDED = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _missing() -> str:
    if os.geteuid():
        return "needs root, to run SLURM's daemons"
    lacking = [package for name, package in NEEDED.items() if not shutil.which(name, path=_PATH)]
    return f"needs {', '.join(lacking)}: apt-get install {' '.join(lacking)}" if lacking else ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing())

CONFIG = """ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=500
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=500
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands reach it."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=_free_ports(3)))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    places = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    variables = environment() | {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    # logical machines have names that nothing resolves
    variables |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *places],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    running = []
    try:
        for words in daemons:
            running.append(subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            deadline = time.monotonic() + 10
            while words[0] == "munged" and not (folder / "munge.socket").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        deadline = time.monotonic() + 60
        while _ask(variables, "sinfo", "--noheader", "--format=%T").split() != ["idle"]:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield variables
    finally:
        subprocess.run(["scancel", "--user=root"], env=variables, check=False, capture_output=True)
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(20)


def _ask(variables: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=variables, capture_output=True, text=True, check=False).stdout


def _launch(slurm: dict[str, str], tmp_path: Path, *words: object) -> subprocess.Popen[str]:
    options = ("--nodes", 2, "--sbatch", "mem=100", "--time", "0:30:00")
    return subprocess.Popen(
        command("launch", "slurm", *options, "digits", *TINY, "--train.duration", "200ba", *words),
        cwd=tmp_path, env=slurm | {"PACELINE_HOME": str(tmp_path / "home"), "WANDB_API_KEY": "canary-slurm"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _weights(run: Path) -> dict[str, torch.Tensor]:
    """What is trained; statistics of batch norm are averaged over ranks once more where a run stops, and rounded."""
    newest = next(store.committed(run / "checkpoints"))
    assert newest.name == "step-00000200"
    tensors = safetensors.torch.load_file(newest / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "running_" not in name}


@pytest.fixture(scope="module")
def whole(slurm: dict[str, str], tmp_path_factory) -> dict[str, torch.Tensor]:
    """Weights of a job that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    job = _launch(slurm, folder, "--name", "whole")
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert "finished: top-1" in output
    assert RunFolder(folder / "runs" / "whole").read_summary()["ranks"] == 2
    assert not [path for path in folder.rglob("*") if path.is_file() and b"canary-slurm" in path.read_bytes()]
    return _weights(folder / "runs" / "whole")


NOTICE = ("scancel", "--batch", "--signal=USR1")
URGENT = ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true", "--comment")


@pytest.mark.parametrize("how", [NOTICE, URGENT], ids=["time is up", "preempted"])
def test_told_to_leave_it_saves_requeues_and_ends_with_the_same_weights(
    slurm: dict[str, str], tmp_path: Path, whole: dict[str, torch.Tensor], how: tuple[str, ...]
) -> None:
    told = _launch(slurm, tmp_path, "--name", "told", "--checkpoint.every", "1000ba")
    run, deadline = tmp_path / "runs" / "told", time.monotonic() + 120
    while not any(record["step"] >= 20 for record in RunFolder(run).records()):
        assert time.monotonic() < deadline
        assert told.poll() is None, told.stdout.read()
        time.sleep(0.02)
    number = _ask(slurm, "squeue", "--noheader", "--format=%i").strip()
    _ask(slurm, *how, number)
    while _ask(slurm, "squeue", "--noheader", f"--jobs={number}", "--format=%T").strip() != "PENDING":
        assert time.monotonic() < deadline + 60, (tmp_path / "runs" / "told.log").read_text()
        time.sleep(0.2)
    assert RunFolder(run).read_summary()["status"] == "interrupted"
    _ask(slurm, "scontrol", "update", f"jobid={number}", "starttime=now")  # it would wait two minutes
    output, _ = told.communicate(timeout=200)
    assert told.returncode == 0, output
    assert "told to leave: saving" in output
    assert "resuming from step" in output
    there = _weights(run)
    assert there.keys() == whole.keys()
    assert all(torch.equal(there[name], whole[name]) for name in there)


def test_of_an_array_one_is_told_to_leave_and_not_the_others(slurm: dict[str, str], tmp_path: Path) -> None:
    words = ("--nodes", 1, "--seeds", "7,8", "--train.duration", "20000ba", "--name", "many", "--detach")
    job = _launch(slurm, tmp_path, *words)
    assert job.wait(60) == 0, job.stdout.read()
    runs, deadline = [RunFolder(tmp_path / "runs" / f"many-seed-{seed}") for seed in (7, 8)], time.monotonic() + 120
    while not all(run.records() for run in runs):
        assert time.monotonic() < deadline, _ask(slurm, "squeue")
        time.sleep(0.1)
    # the task that has the number of the whole array as its own
    names = _ask(slurm, "squeue", "--noheader", "--array", "--format=%A %F_%K %F").splitlines()
    told = next(task for number, task, array in map(str.split, names) if number == array)
    _ask(slurm, "scancel", "--batch", "--signal=USR1", told)

    def states() -> dict[str, str]:
        lines = _ask(slurm, "squeue", "--noheader", "--array", "--format=%F_%K %T").splitlines()
        return dict(line.split() for line in lines)

    while states()[told] != "PENDING":
        assert time.monotonic() < deadline + 60, states()
        time.sleep(0.1)
    assert sorted(states().values()) == ["PENDING", "RUNNING"]
    logs = [path.read_text() for path in (tmp_path / "runs").glob("many-*.log")]
    assert sorted("told to leave" in log for log in logs) == [False, True]
    own = slurm | {"PACELINE_HOME": str(tmp_path / "home")}
    subprocess.run(command("stop"), env=own, cwd=tmp_path, check=True, capture_output=True)
    while states():
        assert time.monotonic() < deadline + 120, states()
        time.sleep(0.1)


def test_sbatch_takes_the_file_and_says_what_it_does_not_like(slurm: dict[str, str], tmp_path: Path) -> None:
    shown = _launch(slurm, tmp_path, "--dry-run", "--seeds", "0,1,2")
    script, _ = shown.communicate(timeout=60)
    (tmp_path / "job.sbatch").write_text(script)
    tested = subprocess.run(
        ["sbatch", "--test-only", tmp_path / "job.sbatch"], env=slurm, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stderr
    assert not (tmp_path / "runs").exists()
    refused = _launch(slurm, tmp_path, "--partition", "nowhere")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "sbatch refused" in output
    assert "Invalid partition" in output
