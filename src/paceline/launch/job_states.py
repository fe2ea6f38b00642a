"""The state of a job as a whole, from the states of its nodes and from what is known on this machine."""

import json
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from paceline.analysis.live import Snapshot, of_records, snapshot
from paceline.errors import UserError
from paceline.launch.backends import slurm
from paceline.launch.fetching import fetched_folders
from paceline.launch.final_state import final_state, is_stopped
from paceline.launch.hosts import Host, HostError
from paceline.launch.job import Job
from paceline.launch.job_hosts import hosts_of
from paceline.launch.specs import Ec2Spec, LocalSpec, SlurmSpec
from paceline.launch.states import FINAL, NodeState, NodeStatus
from paceline.track.checks import Summary, is_valid
from paceline.track.records import RunFolder

_TAIL = 1 << 16
_BY_PRIORITY = (
    NodeState.UNREACHABLE, NodeState.FAILED, NodeState.STOPPED, NodeState.LOST, NodeState.GONE, NodeState.NOT_STARTED,
)  # fmt: skip


def overall(job: Job, nodes: Sequence[NodeStatus]) -> NodeState:
    """Return the state of the whole job, given the states of its nodes."""
    states = {node.state for node in nodes}
    for state in (NodeState.RUNNING, NodeState.PENDING):
        if state in states:
            return state
    # one node that finished is enough, except in a SLURM array, where every task trains its own run
    if states == {NodeState.FINISHED} or (NodeState.FINISHED in states and not isinstance(job.spec, SlurmSpec)):
        return NodeState.FINISHED
    if (known := known_here(job)) is not NodeState.UNKNOWN:
        return known
    if is_stopped(job) and NodeState.UNREACHABLE not in states:
        return NodeState.STOPPED
    return next((state for state in _BY_PRIORITY if state in states), NodeState.UNKNOWN)


def known_here(job: Job) -> NodeState:
    """Return how the job ended if that is known without asking its nodes, else UNKNOWN."""
    if state := final_state(job):
        return state
    finished = [folder for folder in _folders_here(job) if RunFolder(folder).finished]
    return NodeState.FINISHED if len(finished) == len(job.spec.run_names) else NodeState.UNKNOWN


def _folders_here(job: Job) -> list[Path]:
    """Return the run folders of the job on this machine; with SLURM they are on a shared file system."""
    if isinstance(job.spec, SlurmSpec):
        return [folder for folder in slurm.folders(job) if RunFolder(folder).exists]
    return fetched_folders(job)


def states_of(
    jobs: Sequence[Job], ask: Callable[[Job], list[NodeStatus]], seconds: float, quick: bool
) -> dict[str, NodeState]:
    """Return the states of many jobs by id, asked in parallel; jobs that do not answer in time are unreachable.

    `quick`: only what is known on this machine.
    """
    states = {job.id: known_here(job) for job in jobs}
    open_jobs = [job for job in jobs if states[job.id] not in FINAL and (not quick or isinstance(job.spec, LocalSpec))]

    def ask_one(job: Job) -> None:
        try:
            states[job.id] = overall(job, ask(job))
        except (UserError, OSError):  # OSError: squeue or ssh is not installed
            states[job.id] = NodeState.UNREACHABLE

    # daemon threads: one that hangs must not delay the end of this process
    threads = [threading.Thread(target=ask_one, args=(job,), daemon=True) for job in open_jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for job, thread in zip(open_jobs, threads, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            states[job.id] = NodeState.UNREACHABLE
    return dict(states)


def runs_of(job: Job, names: Sequence[str]) -> list[Snapshot]:
    """Return the progress of the runs, one per seed, according to these nodes."""
    if isinstance(job.spec, SlurmSpec):
        return list(map(snapshot, _folders_here(job)))
    hosts = [host for name, host in hosts_of(job).items() if name in names]
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        found = [list(filter(None, pool.map(partial(_run_on, name), hosts))) for name in job.spec.run_names]
    newest = [max(copies, key=lambda one: one.step) for copies in found if copies]  # other nodes have older copies
    return newest or list(map(snapshot, _folders_here(job)))


def _run_on(name: str, host: Host) -> Snapshot | None:
    folder = shlex.quote(f"runs/{name}")
    script = f"cat {folder}/summary.json 2> /dev/null && printf '\\000' && tail -c {_TAIL} {folder}/metrics.jsonl"
    try:
        result = host.run(script, timeout=30)
    except HostError:
        return None
    text, separator, records = result.out.partition(b"\0")
    if not separator:
        return None
    summary = _parsed(text)
    return of_records(name, str(summary.get("status", "")), summary, records.splitlines())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        summary = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) and is_valid(summary, Summary) else {}


def advice(job: Job, state: NodeState, resume: str) -> str:
    """Return what the user can do with a job in this state; `resume` describes how to resume it."""
    folders = _folders_here(job)
    # a folder that was fetched before the end may be older than the one on the nodes
    keeps_folder = isinstance(job.spec, Ec2Spec | SlurmSpec)
    is_final = folders and (keeps_folder or all(RunFolder(folder).finished for folder in folders))
    names = ", ".join(map(str, folders))
    several = "s" * (len(job.spec.run_names) > 1)
    folder = (
        f"its run folder{several} {'are' if several else 'is'} {names}"
        if is_final
        else f"`paceline fetch {job.id}` fetches its run folder{several}"
    )
    follow = f"`paceline attach {job.id}` follows it, `paceline stop {job.id}` stops it"
    return {
        NodeState.FINISHED: folder,
        NodeState.FAILED: resume,
        NodeState.STOPPED: f"{resume}; {folder}",
        NodeState.LOST: resume,
        NodeState.RUNNING: follow,
        NodeState.PENDING: follow,
        NodeState.NOT_STARTED: resume,
        NodeState.GONE: f"{resume}; {folder}" if is_final else resume,
    }.get(state, f"`paceline status {job.id}` asks its nodes again")
