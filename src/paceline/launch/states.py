"""The state of a job as a whole: from what its machines say, and from what is known here."""

import json
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch import control, slurm
from paceline.launch.hosts import Host, HostError
from paceline.launch.job import Job
from paceline.logbook.live import Snapshot, of_records, snapshot
from paceline.system.files import printable
from paceline.track.checks import Summary, is_sound
from paceline.track.records import RunFolder

PENDING, RUNNING, FINISHED, FAILED, STOPPED = "pending", "running", "finished", "failed", "stopped"
LOST, NOT_STARTED, UNREACHABLE, GONE, UNKNOWN = "lost", "not started", "unreachable", "gone", "unknown"
FINAL = (FINISHED, FAILED, STOPPED)
HAS_RUN = (RUNNING, FINISHED, FAILED, STOPPED, LOST)
"""States of machines that can be asked for their run folder."""

_SIGNALLED = ("130", "143")
_OF_SLURM = {
    "PENDING": PENDING, "REQUEUED": PENDING, "REQUEUE_HOLD": PENDING, "CONFIGURING": PENDING,
    "RUNNING": RUNNING, "COMPLETING": RUNNING, "SUSPENDED": RUNNING, "STOPPED": RUNNING, "SIGNALING": RUNNING,
    "COMPLETED": FINISHED, "CANCELLED": STOPPED,
}  # fmt: skip
_TAIL = 1 << 16


def kind_of(state: str) -> str:
    """One of the states above, from the words of a backend."""
    first, _, rest = state.partition(" ")
    if first in slurm.ENDED and first not in _OF_SLURM:
        return FAILED
    if first == "ended":
        return FINISHED if rest == "0" else STOPPED if rest in _SIGNALLED else FAILED
    known = {"running": RUNNING, "lost": LOST, "absent": NOT_STARTED, "gone": GONE, "unreachable": UNREACHABLE}
    return (known | _OF_SLURM).get(first.rstrip(":"), UNKNOWN)


def described(state: str) -> str:
    """A machine's state for people."""
    kind, rest = kind_of(state), state.partition(" ")[2]
    if state.startswith("ended"):
        return f"failed with exit status {rest}" if kind == FAILED else kind
    return {"lost": "lost: its processes are gone", "absent": NOT_STARTED}.get(state, printable(state))


def overall(job: Job, parts: Sequence[tuple[str, str]]) -> str:
    """Of the whole job, given the states of its machines."""
    kinds = {kind_of(state) for _, state in parts}
    for kind in (RUNNING, PENDING):
        if kind in kinds:
            return kind
    # one machine that saw the end is enough; of an array of SLURM's every job has its own
    if kinds == {FINISHED} or (FINISHED in kinds and job.backend != "slurm"):
        return FINISHED
    if (here := known_here(job)) != UNKNOWN:
        return here
    if control.is_stopped(job) and UNREACHABLE not in kinds:
        return STOPPED
    return next((kind for kind in (UNREACHABLE, FAILED, STOPPED, LOST, GONE, NOT_STARTED) if kind in kinds), UNKNOWN)


def known_here(job: Job) -> str:
    """What needs no machine to be asked: how it ended, if somebody on this one saw that."""
    if ended := control.concluded(job):
        return ended
    wanted = len(slurm.folders(job)) if job.backend == "slurm" else 1
    finished = [folder for folder in _folders_here(job) if RunFolder(folder).finished]
    return FINISHED if len(finished) == wanted else UNKNOWN


def _folders_here(job: Job) -> list[Path]:
    """Run folders of the job on this machine; SLURM's are on a file system that it shares."""
    if job.backend == "slurm":
        return [folder for folder in slurm.folders(job) if RunFolder(folder).exists]
    brought = control.fetched(job)
    return [brought] if brought else []


def states_of(
    jobs: Sequence[Job], ask: Callable[[Job], list[tuple[str, str]]], seconds: float, quick: bool
) -> dict[str, str]:
    """Of many jobs at once, by their ids; machines that do not answer in time are unreachable.

    `quick`: only what is known here.
    """
    found = {job.id: known_here(job) for job in jobs}
    asked = [job for job in jobs if found[job.id] not in FINAL and (not quick or job.backend == "local")]

    def one(job: Job) -> None:
        try:
            found[job.id] = overall(job, ask(job))
        except (UserError, OSError):  # its machines, or a program that would ask them
            found[job.id] = UNREACHABLE

    # daemons: one that hangs must not hold up the end of this process
    threads = [threading.Thread(target=one, args=(job,), daemon=True) for job in asked]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for job, thread in zip(asked, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            found[job.id] = UNREACHABLE
    return dict(found)


def runs_of(job: Job, machines: Sequence[str]) -> list[Snapshot]:
    """How far its run is, as far as these machines can tell; of an array of SLURM's one for each job."""
    if job.backend == "slurm":
        return list(map(snapshot, _folders_here(job)))
    hosts = [host for name, host in control.hosts_of(job).items() if name in machines]
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        found = [one for one in pool.map(lambda host: _run_on(job, host), hosts) if one]
    found = found or list(map(snapshot, _folders_here(job)))
    return [max(found, key=lambda own: own.step)] if found else []  # the other machines have older copies


def _run_on(job: Job, host: Host) -> Snapshot | None:
    own = shlex.quote(f"runs/{job.name}")
    script = f"cat {own}/summary.json 2> /dev/null && printf '\\000' && tail -c {_TAIL} {own}/metrics.jsonl"
    try:
        answer = host.run(script, timeout=30)
    except HostError:
        return None
    text, found, records = answer.out.partition(b"\0")
    if not found:
        return None
    summary = _parsed(text)
    return of_records(job.name, str(summary.get("status", "")), summary, records.splitlines())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        summary = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) and is_sound(summary, Summary) else {}


def advice(job: Job, state: str, resume: str) -> str:
    """What can be done with a job in this state; `resume` says how it is resumed."""
    folders = _folders_here(job)
    # what was fetched before the end may be older than what the machines have
    whole = folders and (job.backend in ("ec2", "slurm") or all(RunFolder(folder).finished for folder in folders))
    names = ", ".join(map(str, folders))
    brought = f"its run folder is {names}" if whole else f"`paceline fetch {job.id}` brings its run folder here"
    follow = f"`paceline attach {job.id}` follows it, `paceline stop {job.id}` ends it"
    return {
        FINISHED: brought,
        FAILED: resume,
        STOPPED: f"{resume}; {brought}",
        LOST: resume,
        RUNNING: follow,
        PENDING: follow,
        NOT_STARTED: resume,
        GONE: f"{resume}; {brought}" if whole else resume,
    }.get(state, f"`paceline status {job.id}` asks its machines again")
