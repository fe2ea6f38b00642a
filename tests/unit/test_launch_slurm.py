"""SLURM jobs: the processes per node, the cores of each, and how long srun waits for them."""

import os
import subprocess
from pathlib import Path

import pytest

from paceline.checkpoint import results


@pytest.fixture(autouse=True)
def own_home(here, monkeypatch, tmp_path: Path) -> None:
    """Runs after `here`, which clears such variables."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def _plan(here, *words: object) -> str:
    answer = here("launch", "slurm", "--nodes", 2, *words, "digits", "--train.global_batch", 240, "--dry-run")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.parametrize(
    ("words", "count", "source"),
    [
        ("--gpus-per-node 4", 4, "--gpus-per-node"),
        ("--sbatch gpus-per-node=a100:8", 8, "--gpus-per-node"),
        ("--sbatch gres=gpu:2", 2, "--gres"),
        ("--sbatch gres=lustre:1,gpu:a100:4(S:0-1)", 4, "--gres"),
        ("--sbatch gres=gpu:a100", 1, "--gres"),
        ("--sbatch gpus=16", 8, "--gpus"),
        ("--sbatch gpus-per-task=1 --procs 4", 4, "--procs"),
        ("--sbatch ntasks-per-node=6", 6, "--sbatch ntasks-per-node"),
        ("--gpus-per-node 4 --procs 2", 2, "--procs"),
        ("--gpus-per-node 4 --device cpu", 1, "device=cpu"),
    ],
)
def test_slurm_options_say_the_gpus(here, words: str, count: int, source: str) -> None:
    plan = _plan(here, *words.split())
    assert f"# processes per node: {count} ({source})" in plan
    assert plan.count(f"#SBATCH --ntasks-per-node={count}\n") == 1
    assert "nvidia-smi" not in plan


def _srun(here, tmp_path: Path, variables: dict[str, str], *words: object, status: int = 0) -> list[list[str]]:
    """Run the sbatch file with a stand-in for srun; return the arguments of each srun, and check its exit status."""
    script = _plan(here, "--python", "python3", *words)
    stub = tmp_path / "bin" / "srun"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$*" in *selftest*) exit {status} ;; esac\n')
    stub.chmod(0o700)
    (tmp_path / "calls").unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CUDA_"))}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "32"} | variables
    path = {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script, text=True, env=kept | path | slurm, check=False, capture_output=True)
    assert done.returncode == status, done.stderr
    return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


def test_srun_gets_the_cpus_per_task(here, tmp_path: Path) -> None:
    """Since SLURM 22.05 it does not inherit them."""
    (call,) = _srun(here, tmp_path, {"SLURM_CPUS_PER_TASK": "6"}, "--gpus-per-node", 4, "--cpus-per-task", 6)
    assert "--cpus-per-task=6" in call
    assert call[call.index("python3") :][:4] == ["python3", "-m", "paceline", "train"]


@pytest.mark.parametrize(("cpus", "each"), [(32, 8), (34, 8), (4, 1), (2, 1)])
def test_tasks_divide_the_cores_of_a_node(here, tmp_path: Path, cpus: int, each: int) -> None:
    """Without --cpus-per-task srun would bind each of them to one core, also in exclusive jobs."""
    variables = {"SLURM_CPUS_ON_NODE": str(cpus)}
    (call,) = _srun(here, tmp_path, variables, "--sbatch", "gres=gpu:4 exclusive")
    assert call[0] == f"--cpus-per-task={each}"


def test_srun_waits_for_the_upload_of_results(here, tmp_path: Path) -> None:
    """Rank 0 uploads them after the others have ended."""
    (call,) = _srun(here, tmp_path, {}, "--gpus-per-node", 4)
    assert "--wait=60" in call
    (call,) = _srun(here, tmp_path, {}, "--gpus-per-node", 4, "--results", "s3://bucket/runs")
    (wait,) = (int(word.partition("=")[2]) for word in call if word.startswith("--wait="))
    assert wait > results._CLOSE_TIMEOUT


@pytest.mark.parametrize(
    ("variables", "gpus", "count", "cpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, 8, 4, 8),
        ({}, 8, 8, 4),  # a cluster without GRES
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 8, 1, 32),  # a job that was given none of the node's GPUs
        ({}, 0, 1, 32),
    ],
)
def test_job_counts_the_gpus_it_got(
    here, tmp_path: Path, variables: dict[str, str], gpus: int, count: int, cpus: int
) -> None:
    (tmp_path / "bin").mkdir()
    nvidia_smi = tmp_path / "bin" / "nvidia-smi"
    nvidia_smi.write_text(f"#!/bin/sh\nfor i in $(seq {gpus}); do echo GPU $i: A100; done\n")
    nvidia_smi.chmod(0o700)
    plan = _plan(here)
    assert "# processes per node: auto (the GPUs that SLURM allocates, counted in the job)" in plan
    assert "ntasks-per-node=1\n" not in plan
    (call,) = _srun(here, tmp_path, variables)
    assert call[:3] == [f"--ntasks={2 * count}", f"--ntasks-per-node={count}", f"--cpus-per-task={cpus}"]


@pytest.mark.parametrize("status", [0, 3])
def test_slurm_job_trains_only_after_the_selftest(here, tmp_path: Path, status: int) -> None:
    words = ("--selftest", "--gpus-per-node", 4)
    test, *train = _srun(here, tmp_path, {}, *words, status=status)
    assert test[:3] == ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32"]
    assert "--wait=0" in test  # a slow node is not killed after a fast one has passed
    # without the variable by which a rank recognizes srun
    assert " ".join(test[test.index("env") :]) == "env --unset=SLURM_STEP_NUM_TASKS python3 -m paceline selftest"
    assert len(train) == (1 if status == 0 else 0)
