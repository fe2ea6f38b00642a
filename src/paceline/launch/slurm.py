"""Jobs for SLURM: one readable sbatch file, which saves and requeues itself when its time is up or it is preempted.

The folder one launches from is shared by all machines, as it is on such clusters: recipe, log and run folder are in it.
"""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from paceline.errors import NoRunFolder, UserError
from paceline.launch import job as jobs
from paceline.launch.control import reopen, say
from paceline.launch.job import Job
from paceline.launch.nodes import data_folders, passed_of
from paceline.launch.values import operand, plain
from paceline.system.files import make_folder, printable, write_text
from paceline.track.records import RunFolder

_EVERY = 2.0
ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
)  # fmt: skip


def plan(job: Job) -> list[str]:
    """The sbatch file."""
    slurm, name = job.extra["slurm"], job.name
    seeds = slurm["seeds"]
    head = {
        "job-name": name,
        "nodes": len(job.hosts),
        "ntasks-per-node": job.procs,
        "requeue": None,
        "open-mode": "append",
        "signal": f"B:USR1@{slurm['notice']}",
        "output": f"{_in_pattern(job.runs)}/{name}{'-%a' if seeds else ''}.log",
        **({"array": f"0-{len(seeds) - 1}"} if seeds else {}),
        **slurm["options"],
    }
    lines = [_directive(key, value) for key, value in head.items()]
    program = ["paceline"] if job.container else [operand("--python", job.python), "-m", "paceline"]
    words = [*program, "train", f"{job.runs}/{name}.yaml", "--runs", job.runs]
    words += ["--results", job.results] if job.results else []
    train = list(map(shlex.quote, words))
    if seeds:
        lines += ["", f"seeds=({' '.join(map(str, seeds))})", "seed=${seeds[$SLURM_ARRAY_TASK_ID]}"]
        train += ["--seed", '"$seed"', "--name", f'"{name}-seed-$seed"']
    else:
        train += ["--name", shlex.quote(name)]
    return ["#!/bin/bash\n" + "\n".join(lines) + _BODY.format(command=" ".join([*_step(job), *train]))]


def _directive(key: str, value: object) -> str:
    """A line for sbatch, in which a backslash also counts within quotes; no other line may begin in it."""
    if not re.fullmatch("[a-z][a-z0-9-]*", key):
        raise UserError(f"--sbatch {key!r} is not an option of sbatch; write option=value, as sbatch takes it")
    if value is None:
        return f"#SBATCH --{key}"
    text = plain(f"--{key}", str(value))
    inside = re.sub(r'(["\\])', r"\\\1", text)
    return f"#SBATCH --{key}=" + (text if shlex.quote(text) == text else f'"{inside}"')


def _in_pattern(path: str) -> str:
    """SLURM fills in what follows a percent sign in names of files, unless there is a backslash, which it drops."""
    if "\\" in path:
        raise UserError(f"--runs {path}: SLURM cannot write to a path with a backslash; choose another folder")
    return path.replace("%", "%%")


_BODY = """

# of an array this one, not all of it
me=$SLURM_JOB_ID
[ -z "$SLURM_ARRAY_JOB_ID" ] || me=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID

# when the time is nearly up, or the job is preempted: save, then go on in another allocation
again() {{
    trap '' USR1 TERM
    echo "told to leave: saving"
    scancel --signal=TERM "$me"
    wait "$step" && exit 0  # it had ended meanwhile
    case $(squeue --noheader --jobs="$me" --format=%T) in
        CANCELLED | COMPLETING) ;;  # by its user
        *) scontrol requeue "$me" ;;
    esac
    exit
}}
trap again USR1 TERM

# the secret by which the ranks of this allocation recognize each other
PACELINE_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export PACELINE_TOKEN

{command} &
step=$!
wait "$step"
status=$?
[ $status != 143 ] || again  # preempted with a time of grace, only the ranks are told
exit $status
"""


def _step(job: Job) -> list[str]:
    """srun, with a container if one is wanted."""
    # a rank that hangs after the others ended does not hold the machines; --sbatch export=... does not hide the token
    step = ["srun", "--wait=60", "--export=ALL"]
    if not job.container:
        return step
    here = '"$PWD"'
    seen, image = [here, *map(shlex.quote, data_folders(job))], shlex.quote(operand("--container", job.container))
    if job.extra["slurm"]["runtime"] == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in seen)
        return [*step, f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={here}"]
    return [*step, "apptainer", "exec", "--nv", "--bind", ",".join(seen), "--pwd", here, image]


def submit(job: Job) -> Job:
    """Hand it in; the job with SLURM's number."""
    if not shutil.which("sbatch"):
        raise UserError("there is no sbatch here; launch on a machine of the cluster, or use --dry-run > job.sbatch")
    folder, text = Path(job.runs), plan(job)[0]
    passed_of(job)  # refuses what is not set
    make_folder(folder)
    write_text(folder / f"{job.name}.yaml", job.recipe)
    script = folder / f"{job.name}.sbatch"
    write_text(script, text)
    # what sbatch passes on by itself is the environment, so that nothing secret has to be written
    number = _ask("sbatch", "--parsable", str(script)).split(";")[0]
    if not number.isdecimal():
        raise UserError(f"sbatch answered {printable(number[:100])!r}, where the number of a job was expected")
    job = replace(job, extra=job.extra | {"slurm": job.extra["slurm"] | {"number": number}})
    jobs.save(job)
    reopen(job)
    return job


resume = submit  # a run of that name that is not finished goes on


def _ask(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[-1]
        raise UserError(f"{words[0]} refused: {printable(reason)}")
    return done.stdout.strip()


def status(job: Job) -> list[tuple[str, str]]:
    number = job.extra["slurm"]["number"]
    done = subprocess.run(
        ["squeue", "--noheader", f"--jobs={number}", "--states=all", "--format=%i %T %R"],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode and "Invalid job id" not in done.stderr:
        reason = (done.stderr.strip() or "squeue failed").splitlines()[-1]
        raise UserError(f"SLURM does not answer: {printable(reason)}; try again")
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.strip()]
    return [(row[0], row[1]) for row in rows if len(row) == 2] or [(number, "gone: SLURM has forgotten it")]


def _over(states: Sequence[tuple[str, str]]) -> bool:
    return all(state.split()[0] in ENDED or state.startswith("gone") for _, state in states)


def follow(job: Job, *, until: Callable[[], bool] = lambda: False, bring_back: bool = True) -> int:
    """Show its logs and states until it is over; the exit status. What is lost SLURM itself brings back."""
    seen: dict[Path, int] = {}
    before: list[tuple[str, str]] = []
    while not until():
        now = status(job)
        for number, state in now:
            if (number, state) not in before:
                say(f"{number} | ({state})")
        before = now
        for path in filter(Path.exists, _logs(job)):
            with path.open("rb") as file:
                file.seek(seen.get(path, 0))
                for line in takewhile(lambda line: line.endswith(b"\n"), file):
                    seen[path] = seen.get(path, 0) + len(line)
                    say(f"{path.stem} | {line.decode(errors='replace').rstrip()}")
        if _over(now):
            break
        time.sleep(_EVERY)
    if any(state.startswith("gone") for _, state in before):
        return 0 if all(RunFolder(folder).finished for folder in folders(job)) else 1
    return 0 if all(state.startswith("COMPLETED") for _, state in before) else 1


def folders(job: Job) -> list[Path]:
    """Of its runs."""
    seeds = job.extra["slurm"]["seeds"]
    return [Path(job.runs) / name for name in ([f"{job.name}-seed-{seed}" for seed in seeds] or [job.name])]


def _logs(job: Job) -> list[Path]:
    numbers = range(len(job.extra["slurm"]["seeds"]))
    return [Path(job.runs) / f"{name}.log" for name in ([f"{job.name}-{number}" for number in numbers] or [job.name])]


def stop(job: Job, grace: float) -> list[str]:
    """Let it save, then end it; what is left over."""
    if not _over(status(job)):
        _ask("scancel", job.extra["slurm"]["number"])
    deadline = time.monotonic() + grace + 60
    while not _over(status(job)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"{name}: {state}" for name, state in status(job) if not _over([(name, state)])]


def fetch(job: Job) -> Path:
    """It is here already."""
    folder = folders(job)[0]
    if not folder.exists():
        raise NoRunFolder(f"{folder} is not there yet; `paceline logs {job.id}` shows why")
    return folder


def tidy(job: Job) -> None:
    """SLURM does."""


def options_of(given: dict[str, str | None], more: str) -> dict[str, str | None]:
    """For the head of the file: what the launch's own options say, and further words for sbatch."""
    found: dict[str, str | None] = {key: str(value) for key, value in given.items() if value}
    try:
        words = shlex.split(more)
    except ValueError as error:
        raise UserError(f"--sbatch {more!r}: {str(error).lower()}; close its quotes") from None
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        found[key] = value if equals else None
    return found
