"""The SLURM backend: one sbatch file, which checkpoints and requeues itself at its time limit or on preemption.

The current folder must be shared by all nodes: it holds recipe, log and run folder.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from paceline.errors import NoRunFolder, UserError
from paceline.launch import job as jobs
from paceline.launch.execution import passed_variables
from paceline.launch.final_state import clear_final_state
from paceline.launch.job import Job
from paceline.launch.sbatch import extensions_folder, sbatch_file
from paceline.launch.specs import SlurmSpec
from paceline.launch.states import FINAL, NodeState, NodeStatus, parse_squeue
from paceline.system.files import make_folder, printable, say, write_text
from paceline.track.records import RunFolder

_POLL_INTERVAL = 2.0


def plan(spec: SlurmSpec) -> list[str]:
    """Return the sbatch file."""
    return [sbatch_file(_spec(jobs.draft(spec)))]


def _spec(job: Job) -> SlurmSpec:
    assert isinstance(job.spec, SlurmSpec)
    return job.spec


def launch(spec: SlurmSpec) -> Job:
    """Submit a new job; return it with its SLURM job id."""
    with jobs.new_job(spec) as job:
        return resume(job)


def resume(job: Job) -> Job:
    """Submit a job; an unfinished run of that name continues from its last checkpoint."""
    spec = _spec(job)
    folder, text = Path(spec.runs), sbatch_file(spec)
    if not shutil.which("sbatch"):
        message = "sbatch is not installed. Launch on a login node of the cluster, or use --dry-run > job.sbatch."
        raise UserError("slurm-not-installed", message)
    passed_variables(spec)  # raises if one is not set
    make_folder(folder)
    write_text(folder / f"{spec.name}.yaml", spec.recipe)
    for path, content in spec.extensions.items():
        make_folder((folder / extensions_folder(spec) / path).parent)
        write_text(folder / extensions_folder(spec) / path, content)
    script = folder / f"{spec.name}.sbatch"
    write_text(script, text)
    # sbatch passes on the environment, so that no secret has to be written to a file
    job_id = _run("sbatch", "--parsable", str(script)).split(";")[0]
    if not job_id.isdecimal():
        message = f"sbatch printed {printable(job_id[:100])!r} instead of a job id"
        raise UserError("slurm-output-invalid", message)
    job = replace(job, slurm_id=job_id)
    jobs.save(job)
    clear_final_state(job)
    return job


def _run(*words: str) -> str:
    """Return the output of a SLURM command; raise UserError if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1]
        raise UserError("slurm-command-failed", f"{words[0]} failed: {printable(reason)}", command=words[0])
    return done.stdout.strip()


def status(job: Job) -> list[NodeStatus]:
    """Return the status of the job, or of each task of an array."""
    done = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job.slurm_id}", "--states=all", "--format=%i %T %R"],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode and "Invalid job id" not in done.stderr:
        reason = (done.stderr.strip() or "squeue failed").splitlines()[-1]
        message = f"SLURM does not answer: {printable(reason)}. Try again later."
        raise UserError("slurm-unreachable", message)
    lines = [line for line in done.stdout.splitlines() if len(line.split()) > 1]
    tasks = [_with_seed(parse_squeue(line), _spec(job).seeds) for line in lines]
    return tasks or [NodeStatus(job.slurm_id, NodeState.GONE, text="gone: SLURM no longer lists it")]


def _with_seed(task: NodeStatus, seeds: Sequence[int]) -> NodeStatus:
    """Return the status of a task of an array with the seed that it trains."""
    number = task.name.rpartition("_")[2]
    if not seeds or not number.isdecimal() or int(number) >= len(seeds):  # tasks that wait are listed as 7_[0-2]
        return task
    return replace(task, text=f"seed {seeds[int(number)]}: {task}")


def _have_ended(tasks: Iterable[NodeStatus]) -> bool:
    return all(task.state in (*FINAL, NodeState.GONE) for task in tasks)


def follow(job: Job, *, until: Callable[[], bool] = lambda: False, restart_lost: bool = True) -> int:
    """Print logs and states until the job ends; return its exit status. SLURM itself restarts what is lost."""
    offsets: dict[Path, int] = {}
    before: list[NodeStatus] = []
    while not until():
        now = status(job)
        for task in now:
            if task not in before:
                say(f"{task.name} | ({task})")
        before = now
        for path in filter(Path.exists, _logs(job)):
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                for line in takewhile(lambda line: line.endswith(b"\n"), file):
                    offsets[path] = offsets.get(path, 0) + len(line)
                    say(f"{path.stem} | {line.decode(errors='replace').rstrip()}")
        if _have_ended(now):
            break
        time.sleep(_POLL_INTERVAL)
    if any(task.state is NodeState.GONE for task in before):
        return 0 if all(RunFolder(folder).finished for folder in folders(job)) else 1
    return 0 if all(task.state is NodeState.FINISHED for task in before) else 1


def folders(job: Job) -> list[Path]:
    """Return the run folders of the job, one per seed."""
    spec = _spec(job)
    return [Path(spec.runs) / name for name in spec.run_names]


def _logs(job: Job) -> list[Path]:
    spec = _spec(job)
    names = [f"{spec.name}-{number}" for number in range(len(spec.seeds))] or [spec.name]
    return [Path(spec.runs) / f"{name}.log" for name in names]


def stop(job: Job, grace: float) -> list[str]:
    """Cancel the job, which checkpoints first; return what did not end."""
    if not _have_ended(status(job)):
        _run("scancel", job.slurm_id)
    deadline = time.monotonic() + grace + 60
    while not _have_ended(status(job)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"{task.name}: {task}" for task in status(job) if not _have_ended([task])]


def fetch(job: Job) -> list[Path]:
    """Return the run folders, which are on a shared file system."""
    if found := [folder for folder in folders(job) if folder.exists()]:
        return found
    folder = folders(job)[0]
    message = f"{folder} does not exist yet. `paceline logs {job.id}` shows why."
    raise NoRunFolder("no-run-folder", message, path=folder)


def clean_up(job: Job) -> None:
    """Do nothing: SLURM releases the nodes."""
