"""Jobs on a real SLURM: a controller and two logical machines of this one."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import networks
import pytest
import safetensors.torch
import torch
from conftest import HANG, TINY, command, environment
from jobs import Launcher, slow_variables, slowed, wait_for
from networks import network

from paceline.checkpoint import store
from paceline.track.records import RunFolder

MISSING = networks.missing(slurmctld="slurmctld", slurmd="slurmd", sbatch="slurm-client", munged="munge")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

CONFIG = """ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=6817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
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
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=6818 CPUs=2 RealMemory=500
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=6819 CPUs=2 RealMemory=500
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


DAEMONS = """hostname localhost
munged --foreground --force --socket={socket} --key-file={folder}/munge.key --pid-file={folder}/munge.pid \\
    --log-file={folder}/munge.log --seed-file={folder}/munge.seed &
until [ -S {socket} ]; do sleep 0.05; done
slurmctld -D -i &
slurmd -D -N n1 &
slurmd -D -N n2 &
wait"""


@dataclass(frozen=True)
class Slurm:
    """In namespaces of its own: its ports and those of its jobs meet no others, and all its processes end with it."""

    folder: Path
    space: str
    variables: dict[str, str]

    def ask(self, *words: object) -> str:
        return self.run(*words).stdout

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self._inside(words), env=self.variables, capture_output=True, text=True, timeout=HANG)

    def launch(self, tmp_path: Path, *words: object) -> Launcher:
        options = ("--nodes", 2, "--sbatch", "mem=100", "--time", "0:30:00")
        train = ("digits", *TINY, "--train.duration", "200ba", "--precision", "fp32", "--device", "cpu")
        variables = self.variables | {"PACELINE_HOME": str(tmp_path / "home"), "WANDB_API_KEY": "canary-slurm"}
        return Launcher(self._inside(command("launch", "slurm", *options, *train, *words)), tmp_path, variables)

    def stop(self, tmp_path: Path) -> None:
        variables = self.variables | {"PACELINE_HOME": str(tmp_path / "home")}
        subprocess.run(self._inside(command("stop")), env=variables, cwd=tmp_path, check=True, capture_output=True)

    def _inside(self, words: Sequence[object]) -> list[str]:
        return ["ip", "netns", "exec", self.space, *map(str, words)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    # logical machines have names that nothing resolves
    variables = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "PACELINE_THREADS": "1"}
    variables |= {"SLURM_CONF": str(folder / "slurm.conf")} | slow_variables(folder)
    with network() as net, TemporaryDirectory(dir="/tmp") as short:  # names of sockets must not be long
        Path(short).chmod(0o755)
        places = {"folder": folder, "socket": f"{short}/munge"}
        (folder / "slurm.conf").write_text(CONFIG.format(**places))
        # getaddrinfo() gives SLURM no address to listen at where there are only those of loopback
        networks.run(f"ip -n {net.mark} address add {net.address(1)}/32 dev lo")
        # none are used here; without this slurmd asks the kernel and systemd for those that it finds
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        made = Slurm(folder, net.mark, environment() | variables)
        log = folder / "daemons.log"
        daemons = networks.start(net.mark, DAEMONS.format(**places), log, ["--uts"], made.variables)
        try:
            wait_for(lambda: made.ask("sinfo", "--noheader", "--format=%T").split() == ["idle"])
            yield made
        finally:
            networks.kill(daemons)
            for path in (log, folder / "slurmctld.log"):
                print(path.read_text() if path.exists() else "")  # pytest shows it


def _number(tmp_path: Path) -> str:
    """SLURM's own of the test's only job."""
    (file,) = (tmp_path / "home" / "jobs").glob("*/job.json")
    return json.loads(file.read_text())["extra"]["slurm"]["number"]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    """What is trained; statistics of batch norm are averaged over ranks once more where a run stops, and rounded."""
    newest = next(store.committed(run / "checkpoints"))
    assert newest.name == "step-00000200"
    tensors = safetensors.torch.load_file(newest / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "running_" not in name}


@pytest.fixture(scope="module")
def whole(slurm: Slurm, tmp_path_factory) -> dict[str, torch.Tensor]:
    """Weights of a job that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    job = slurm.launch(folder, "--name", "whole")
    output = job.wait()
    assert job.status == 0, output
    assert "finished: top-1" in output
    assert RunFolder(folder / "runs" / "whole").read_summary()["ranks"] == 2
    assert not [path for path in folder.rglob("*") if path.is_file() and b"canary-slurm" in path.read_bytes()]
    return _weights(folder / "runs" / "whole")


NOTICE = ("scancel", "--batch", "--signal=USR1")
URGENT = ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true", "--comment")


@pytest.mark.parametrize("how", [NOTICE, URGENT], ids=["time is up", "preempted"])
def test_told_to_leave_it_checkpoints_requeues_and_ends_with_the_same_weights(
    slurm: Slurm, tmp_path: Path, whole: dict[str, torch.Tensor], how: tuple[str, ...]
) -> None:
    run = RunFolder(tmp_path / "runs" / "told")
    with slowed(slurm.folder) as at_full_speed:
        told = slurm.launch(tmp_path, "--name", "told", "--checkpoint.every", "1000ba")
        wait_for(lambda: any(record["step"] >= 20 for record in run.records()), told)
        number = _number(tmp_path)
        slurm.ask(*how, number)
        wait_for(
            lambda: slurm.ask("squeue", "--noheader", f"--jobs={number}", "--format=%T").strip() == "PENDING", told
        )
        assert run.read_summary()["status"] == "interrupted"
        at_full_speed()
        # it would wait two minutes; within the second in which it ended, machines refuse to start it
        slurm.ask("scontrol", "update", f"jobid={number}", "starttime=now+2")
        output = told.wait()
    assert told.status == 0, output
    assert "told to leave: saving" in output
    assert "resuming from step" in output
    there = _weights(run.path)
    assert there.keys() == whole.keys()
    assert all(torch.equal(there[name], whole[name]) for name in there)


def test_of_an_array_one_is_told_to_leave_and_not_the_others(slurm: Slurm, tmp_path: Path) -> None:
    words = ("--nodes", 1, "--seeds", "7,8", "--train.duration", "20000ba", "--name", "many", "--detach")
    runs = [RunFolder(tmp_path / "runs" / f"many-seed-{seed}") for seed in (7, 8)]

    def states() -> dict[str, str]:
        lines = slurm.ask("squeue", "--noheader", "--array", "--format=%F_%K %T").splitlines()
        return dict(line.split() for line in lines if line.startswith(f"{number}_"))

    with slowed(slurm.folder):
        job = slurm.launch(tmp_path, *words)
        output = job.wait()
        assert job.status == 0, output
        number = _number(tmp_path)
        wait_for(lambda: all(run.records() for run in runs))
        # the task that has the number of the whole array as its own
        names = slurm.ask("squeue", "--noheader", "--array", "--format=%A %F_%K %F").splitlines()
        told = next(task for own, task, array in map(str.split, names) if own == array == number)
        slurm.ask("scancel", "--batch", "--signal=USR1", told)
        wait_for(lambda: states().get(told) == "PENDING")
        assert sorted(states().values()) == ["PENDING", "RUNNING"]
        logs = [path.read_text() for path in (tmp_path / "runs").glob("many-*.log")]
        assert sorted("told to leave" in log for log in logs) == [False, True]
        slurm.stop(tmp_path)
        wait_for(lambda: not states())


def test_sbatch_takes_the_file_and_says_what_it_does_not_like(slurm: Slurm, tmp_path: Path) -> None:
    script = slurm.launch(tmp_path, "--dry-run", "--seeds", "0,1,2").wait()
    (tmp_path / "job.sbatch").write_text(script)
    tested = slurm.run("sbatch", "--test-only", tmp_path / "job.sbatch")
    assert tested.returncode == 0, tested.stderr
    assert not (tmp_path / "runs").exists()
    refused = slurm.launch(tmp_path, "--partition", "nowhere")
    output = refused.wait()
    assert refused.status == 1
    assert "sbatch refused" in output
    assert "Invalid partition" in output
