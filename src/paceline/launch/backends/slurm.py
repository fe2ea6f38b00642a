"""The SLURM backend: one sbatch file, which checkpoints and requeues itself at its time limit or on preemption.

The current folder must be shared by all nodes: it holds recipe, log and run folder.
"""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from paceline.errors import NoRunFolder, UserError
from paceline.launch import job as jobs
from paceline.launch.execution import passed_variables
from paceline.launch.final_state import clear_final_state
from paceline.launch.job import Job
from paceline.launch.planning import data_folders
from paceline.launch.specs import SlurmSpec
from paceline.launch.states import FINAL, NodeState, NodeStatus, parse_squeue
from paceline.launch.values import operand, plain
from paceline.system.files import make_folder, printable, say, write_text
from paceline.track.records import RunFolder

_POLL_INTERVAL = 2.0


def plan(spec: SlurmSpec) -> list[str]:
    """Return the sbatch file."""
    return [_sbatch_file(_spec(jobs.draft(spec)))]


def _spec(job: Job) -> SlurmSpec:
    assert isinstance(job.spec, SlurmSpec)
    return job.spec


def _sbatch_file(spec: SlurmSpec) -> str:
    name, seeds = spec.name, spec.seeds
    header = {
        "job-name": name,
        "nodes": len(spec.hosts),
        "ntasks-per-node": spec.procs_per_node,
        "requeue": None,
        "open-mode": "append",
        "signal": f"B:USR1@{spec.notice}",
        "output": f"{_escape_pattern(spec.runs)}/{name}{'-%a' if seeds else ''}.log",
        **({"array": f"0-{len(seeds) - 1}"} if seeds else {}),
        **({"export": ",".join(["ALL", *spec.pass_env])} if spec.pass_env else {}),
        **spec.sbatch_options,
    }
    lines = [_directive(key, value) for key, value in header.items()]
    program = ["paceline"] if spec.container else [operand("--python", spec.python), "-m", "paceline"]
    words = [*program, "train", f"{spec.runs}/{name}.yaml", "--runs", spec.runs]
    words += ["--results", spec.results] if spec.results else []
    train = list(map(shlex.quote, words))
    if seeds:
        lines += ["", f"seeds=({' '.join(map(str, seeds))})", "seed=${seeds[$SLURM_ARRAY_TASK_ID]}"]
        train += ["--seed", '"$seed"', "--name", f'"{name}-seed-$seed"']
    else:
        train += ["--name", shlex.quote(name)]
    if spec.extensions:
        found = shlex.quote(f"{spec.runs}/{_extensions(spec)}")
        lines += ["", *(f"# copied to {plain('--runs', found)}: {plain('imports', path)}" for path in spec.extensions)]
        lines += [f'export PYTHONPATH={found}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += ["", f"export PACELINE_RANK_TIMEOUT={spec.rank_timeout}"]
    return "#!/bin/bash\n" + "\n".join(lines) + _BODY.format(command=" ".join([*_step(spec), *train]))


def _extensions(spec: SlurmSpec) -> str:
    """Return the folder, next to the run, of the packages that the recipe imports."""
    return f"{spec.name}-extensions"


def _directive(key: str, value: object) -> str:
    """Return one #SBATCH line. Backslashes escape even in quotes; a line break would start another directive."""
    if not re.fullmatch("[a-z][a-z0-9-]*", key):
        message = f"--sbatch {key!r} is not an option of sbatch. Write option=value."
        raise UserError("invalid-sbatch-option", message, option=key)
    if value is None:
        return f"#SBATCH --{key}"
    text = plain(f"--{key}", str(value))
    inside = re.sub(r'(["\\])', r"\\\1", text)
    return f"#SBATCH --{key}=" + (text if shlex.quote(text) == text else f'"{inside}"')


def _escape_pattern(path: str) -> str:
    """Escape percent signs, which SLURM expands in file names; it removes backslashes."""
    if "\\" in path:
        message = f"--runs {path}: SLURM cannot write to a path with a backslash. Choose another folder."
        raise UserError("runs-path-invalid", message, path=path)
    return path.replace("%", "%%")


_BODY = """

# this task of an array, not the whole array
me=$SLURM_JOB_ID
[ -z "$SLURM_ARRAY_JOB_ID" ] || me=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID

# near the time limit or on preemption: checkpoint, then continue in another allocation
requeue() {{
    trap '' USR1 TERM
    echo "preempted or near the time limit: checkpointing"
    scancel --signal=TERM "$me"
    wait "$step" && exit 0  # it had just finished
    case $(squeue --noheader --jobs="$me" --format=%T) in
        CANCELLED | COMPLETING) ;;  # by the user
        *) scontrol requeue "$me" ;;
    esac
    exit
}}
trap requeue USR1 TERM

# the secret by which the ranks of this allocation authenticate each other
PACELINE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export PACELINE_TOKEN

{command} &
step=$!
wait "$step"
status=$?
[ $status != 143 ] || requeue  # with a grace time, preemption signals only the ranks
exit $status
"""


def _step(spec: SlurmSpec) -> list[str]:
    """Return the srun command, with a container if the job has one."""
    # --wait: a hanging rank does not block the nodes; --export=ALL: --sbatch export=... does not hide the token
    step = ["srun", "--wait=60", "--export=ALL"]
    if not spec.container:
        return step
    here = '"$PWD"'
    folders = [here, *map(shlex.quote, data_folders(spec))]
    image = shlex.quote(operand("--container", spec.container))
    if spec.container_runtime == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        return [*step, f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={here}"]
    return [*step, "apptainer", "exec", "--nv", "--bind", ",".join(folders), "--pwd", here, image]


def launch(spec: SlurmSpec) -> Job:
    """Submit a new job; return it with its SLURM job id."""
    with jobs.new_job(spec) as job:
        return resume(job)


def resume(job: Job) -> Job:
    """Submit a job; an unfinished run of that name continues from its last checkpoint."""
    spec = _spec(job)
    folder, text = Path(spec.runs), _sbatch_file(spec)
    if not shutil.which("sbatch"):
        message = "sbatch is not installed. Launch on a login node of the cluster, or use --dry-run > job.sbatch."
        raise UserError("slurm-not-installed", message)
    passed_variables(spec)  # raises if one is not set
    make_folder(folder)
    write_text(folder / f"{spec.name}.yaml", spec.recipe)
    for path, content in spec.extensions.items():
        make_folder((folder / _extensions(spec) / path).parent)
        write_text(folder / _extensions(spec) / path, content)
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
    tasks = [parse_squeue(line) for line in done.stdout.splitlines() if len(line.split()) > 1]
    return tasks or [NodeStatus(job.slurm_id, NodeState.GONE, text="gone: SLURM no longer lists it")]


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
    names = [f"{spec.name}-seed-{seed}" for seed in spec.seeds] or [spec.name]
    return [Path(spec.runs) / name for name in names]


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


def fetch(job: Job) -> Path:
    """Return the run folder, which is on a shared file system."""
    folder = folders(job)[0]
    if not folder.exists():
        message = f"{folder} does not exist yet. `paceline logs {job.id}` shows why."
        raise NoRunFolder("no-run-folder", message, path=folder)
    return folder


def clean_up(job: Job) -> None:
    """Do nothing: SLURM releases the nodes."""
