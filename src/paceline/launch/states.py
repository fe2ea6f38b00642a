"""The state of a job as a whole, from the states of its nodes and from what is known on this machine."""

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
from paceline.track.checks import Summary, is_valid
from paceline.track.records import RunFolder

PENDING, RUNNING, FINISHED, FAILED, STOPPED = "pending", "running", "finished", "failed", "stopped"
LOST, NOT_STARTED, UNREACHABLE, GONE, UNKNOWN = "lost", "not started", "unreachable", "gone", "unknown"
FINAL = (FINISHED, FAILED, STOPPED)
HAS_RUN = (RUNNING, FINISHED, FAILED, STOPPED, LOST)
"""States of nodes that may have a run folder."""

_SIGNALLED = ("130", "143")
_OF_SLURM = {
    "PENDING": PENDING, "REQUEUED": PENDING, "REQUEUE_HOLD": PENDING, "CONFIGURING": PENDING,
    "RUNNING": RUNNING, "COMPLETING": RUNNING, "SUSPENDED": RUNNING, "STOPPED": RUNNING, "SIGNALING": RUNNING,
    "COMPLETED": FINISHED, "CANCELLED": STOPPED,
}  # fmt: skip
_TAIL = 1 << 16


def kind_of(state: str) -> str:
    """Return one of the states above for the state that a backend reports."""
    first, _, rest = state.partition(" ")
    if first in slurm.ENDED and first not in _OF_SLURM:
        return FAILED
    if first == "ended":
        return FINISHED if rest == "0" else STOPPED if rest in _SIGNALLED else FAILED
    known = {"running": RUNNING, "lost": LOST, "absent": NOT_STARTED, "gone": GONE, "unreachable": UNREACHABLE}
    return (known | _OF_SLURM).get(first.rstrip(":"), UNKNOWN)


def described(state: str) -> str:
    """Return the state of a node for the user."""
    kind, rest = kind_of(state), state.partition(" ")[2]
    if state.startswith("ended"):
        return f"failed with exit status {rest}" if kind == FAILED else kind
    return {"lost": "lost: its processes no longer exist", "absent": NOT_STARTED}.get(state, printable(state))


def overall(job: Job, parts: Sequence[tuple[str, str]]) -> str:
    """Return the state of the whole job, given the states of its nodes."""
    kinds = {kind_of(state) for _, state in parts}
    for kind in (RUNNING, PENDING):
        if kind in kinds:
            return kind
    # one node that finished is enough, except in a SLURM array, where every task trains its own run
    if kinds == {FINISHED} or (FINISHED in kinds and job.backend != "slurm"):
        return FINISHED
    if (known := known_here(job)) != UNKNOWN:
        return known
    if control.is_stopped(job) and UNREACHABLE not in kinds:
        return STOPPED
    return next((kind for kind in (UNREACHABLE, FAILED, STOPPED, LOST, GONE, NOT_STARTED) if kind in kinds), UNKNOWN)


def known_here(job: Job) -> str:
    """Return how the job ended if that is known without asking its nodes, else UNKNOWN."""
    if state := control.final_state(job):
        return state
    wanted = len(slurm.folders(job)) if job.backend == "slurm" else 1
    finished = [folder for folder in _folders_here(job) if RunFolder(folder).finished]
    return FINISHED if len(finished) == wanted else UNKNOWN


def _folders_here(job: Job) -> list[Path]:
    """Return the run folders of the job on this machine; with SLURM they are on a shared file system."""
    if job.backend == "slurm":
        return [folder for folder in slurm.folders(job) if RunFolder(folder).exists]
    fetched = control.fetched_folder(job)
    return [fetched] if fetched else []


def states_of(
    jobs: Sequence[Job], ask: Callable[[Job], list[tuple[str, str]]], seconds: float, quick: bool
) -> dict[str, str]:
    """Return the states of many jobs by id, asked in parallel; jobs that do not answer in time are unreachable.

    `quick`: only what is known on this machine.
    """
    states = {job.id: known_here(job) for job in jobs}
    open_jobs = [job for job in jobs if states[job.id] not in FINAL and (not quick or job.backend == "local")]

    def ask_one(job: Job) -> None:
        try:
            states[job.id] = overall(job, ask(job))
        except (UserError, OSError):  # OSError: squeue or ssh is not installed
            states[job.id] = UNREACHABLE

    # daemon threads: one that hangs must not delay the end of this process
    threads = [threading.Thread(target=ask_one, args=(job,), daemon=True) for job in open_jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for job, thread in zip(open_jobs, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            states[job.id] = UNREACHABLE
    return dict(states)


def runs_of(job: Job, names: Sequence[str]) -> list[Snapshot]:
    """Return the progress of the run according to these nodes; for a SLURM array, one per task."""
    if job.backend == "slurm":
        return list(map(snapshot, _folders_here(job)))
    hosts = [host for name, host in control.hosts_of(job).items() if name in names]
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        snapshots = [one for one in pool.map(lambda host: _run_on(job, host), hosts) if one]
    snapshots = snapshots or list(map(snapshot, _folders_here(job)))
    return [max(snapshots, key=lambda one: one.step)] if snapshots else []  # other nodes have older copies


def _run_on(job: Job, host: Host) -> Snapshot | None:
    folder = shlex.quote(f"runs/{job.name}")
    script = f"cat {folder}/summary.json 2> /dev/null && printf '\\000' && tail -c {_TAIL} {folder}/metrics.jsonl"
    try:
        result = host.run(script, timeout=30)
    except HostError:
        return None
    text, separator, records = result.out.partition(b"\0")
    if not separator:
        return None
    summary = _parsed(text)
    return of_records(job.name, str(summary.get("status", "")), summary, records.splitlines())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        summary = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) and is_valid(summary, Summary) else {}


def advice(job: Job, state: str, resume: str) -> str:
    """Return what the user can do with a job in this state; `resume` describes how to resume it."""
    folders = _folders_here(job)
    # a folder that was fetched before the end may be older than the one on the nodes
    is_final = folders and (job.backend in ("ec2", "slurm") or all(RunFolder(folder).finished for folder in folders))
    names = ", ".join(map(str, folders))
    folder = f"its run folder is {names}" if is_final else f"`paceline fetch {job.id}` fetches its run folder"
    follow = f"`paceline attach {job.id}` follows it, `paceline stop {job.id}` stops it"
    return {
        FINISHED: folder,
        FAILED: resume,
        STOPPED: f"{resume}; {folder}",
        LOST: resume,
        RUNNING: follow,
        PENDING: follow,
        NOT_STARTED: resume,
        GONE: f"{resume}; {folder}" if is_final else resume,
    }.get(state, f"`paceline status {job.id}` asks its nodes again")
