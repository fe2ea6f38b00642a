"""Jobs on a real SLURM: a controller and two nodes on this machine."""

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
    """A cluster in its own namespaces: its ports do not collide with others, and its processes end with it."""

    folder: Path
    space: str
    variables: dict[str, str]

    def output(self, *words: object) -> str:
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
    # the names of these nodes do not resolve
    variables = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "PACELINE_THREADS": "1"}
    variables |= {"SLURM_CONF": str(folder / "slurm.conf")} | slow_variables(folder)
    with network() as net, TemporaryDirectory(dir="/tmp") as short:  # socket names are limited to about 100 characters
        Path(short).chmod(0o755)
        paths = {"folder": folder, "socket": f"{short}/munge"}
        (folder / "slurm.conf").write_text(CONFIG.format(**paths))
        # getaddrinfo() gives SLURM no address to listen on if there are only loopback addresses
        networks.run(f"ip -n {net.mark} address add {net.address(1)}/32 dev lo")
        # cgroups are not used here; without this file, slurmd queries the kernel and systemd
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        cluster = Slurm(folder, net.mark, environment() | variables)
        log = folder / "daemons.log"
        daemons = networks.start(net.mark, DAEMONS.format(**paths), log, ["--uts"], cluster.variables)
        try:
            wait_for(lambda: cluster.output("sinfo", "--noheader", "--format=%T").split() == ["idle"])
            yield cluster
        finally:
            networks.kill(daemons)
            for path in (log, folder / "slurmctld.log"):
                print(path.read_text() if path.exists() else "")  # pytest shows it


def _slurm_job_id(tmp_path: Path) -> str:
    """Return the SLURM id of the only job of the test."""
    (file,) = (tmp_path / "home" / "jobs").glob("*/job.json")
    return json.loads(file.read_text())["slurm_id"]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the trained weights, without batch norm statistics: each stop averages and rounds them once more."""
    newest = next(store.committed(run / "checkpoints"))
    assert newest.name == "step-00000200"
    tensors = safetensors.torch.load_file(newest / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "running_" not in name}


@pytest.fixture(scope="module")
def uninterrupted(slurm: Slurm, tmp_path_factory) -> dict[str, torch.Tensor]:
    """Weights of a job without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = slurm.launch(folder, "--name", "whole")
    output = job.wait()
    assert job.status == 0, output
    assert "finished: top-1" in output
    assert RunFolder(folder / "runs" / "whole").read_summary()["ranks"] == 2
    assert not [path for path in folder.rglob("*") if path.is_file() and b"canary-slurm" in path.read_bytes()]
    return _weights(folder / "runs" / "whole")


NOTICE = ("scancel", "--batch", "--signal=USR1")
URGENT = ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true", "--comment")


@pytest.mark.parametrize("how", [NOTICE, URGENT], ids=["time limit", "preemption"])
def test_interrupted_job_checkpoints_requeues_and_ends_with_the_same_weights(
    slurm: Slurm, tmp_path: Path, uninterrupted: dict[str, torch.Tensor], how: tuple[str, ...]
) -> None:
    run = RunFolder(tmp_path / "runs" / "interrupted")
    with slowed(slurm.folder) as at_full_speed:
        job = slurm.launch(tmp_path, "--name", "interrupted", "--checkpoint.every", "1000ba")
        wait_for(lambda: any(record["step"] >= 20 for record in run.records()), job)
        job_id = _slurm_job_id(tmp_path)
        slurm.output(*how, job_id)
        state = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%T")
        wait_for(lambda: slurm.output(*state).strip() == "PENDING", job)
        assert run.read_summary()["status"] == "interrupted"
        at_full_speed()
        # otherwise it waits two minutes; nodes refuse to start it within the second in which it ended
        slurm.output("scontrol", "update", f"jobid={job_id}", "starttime=now+2")
        output = job.wait()
    assert job.status == 0, output
    assert "checkpointing" in output
    assert "resuming from step" in output
    weights = _weights(run.path)
    assert weights.keys() == uninterrupted.keys()
    assert all(torch.equal(weights[name], uninterrupted[name]) for name in weights)


def test_only_the_signaled_task_of_an_array_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    words = ("--nodes", 1, "--seeds", "7,8", "--train.duration", "20000ba", "--name", "many", "--detach")
    runs = [RunFolder(tmp_path / "runs" / f"many-seed{seed}") for seed in (7, 8)]

    def states() -> dict[str, str]:
        lines = slurm.output("squeue", "--noheader", "--array", "--format=%F_%K %T").splitlines()
        return dict(line.split() for line in lines if line.startswith(f"{job_id}_"))

    with slowed(slurm.folder):
        job = slurm.launch(tmp_path, *words)
        output = job.wait()
        assert job.status == 0, output
        job_id = _slurm_job_id(tmp_path)
        wait_for(lambda: all(run.records() for run in runs))
        # the task whose own id is that of the whole array
        names = slurm.output("squeue", "--noheader", "--array", "--format=%A %F_%K %F").splitlines()
        signaled = next(task for own_id, task, array in map(str.split, names) if own_id == array == job_id)
        slurm.output("scancel", "--batch", "--signal=USR1", signaled)
        wait_for(lambda: states().get(signaled) == "PENDING")
        assert sorted(states().values()) == ["PENDING", "RUNNING"]
        logs = [path.read_text() for path in (tmp_path / "runs").glob("many-*.log")]
        assert sorted("checkpointing" in log for log in logs) == [False, True]
        slurm.stop(tmp_path)
        wait_for(lambda: not states())


def test_sbatch_accepts_the_file_and_its_errors_are_shown(slurm: Slurm, tmp_path: Path) -> None:
    script = slurm.launch(tmp_path, "--dry-run", "--seeds", "0,1,2").wait()
    (tmp_path / "job.sbatch").write_text(script)
    tested = slurm.run("sbatch", "--test-only", tmp_path / "job.sbatch")
    assert tested.returncode == 0, tested.stderr
    assert not (tmp_path / "runs").exists()
    refused = slurm.launch(tmp_path, "--partition", "nowhere")
    output = refused.wait()
    assert refused.status == 1
    assert "[slurm-command-failed]" in output
    assert "Invalid partition" in output
