"""The commands that manage jobs: jobs, status, logs, attach, resume, stop, fetch."""

import argparse
import sys
from datetime import datetime
from typing import TYPE_CHECKING

from paceline.cli.options import make_parser, positive
from paceline.errors import NoRunFolder, UserError
from paceline.system.files import say

if TYPE_CHECKING:
    from paceline.launch.job import Backend, Job
    from paceline.system.files import FolderLock

_JOBS = """List the jobs that were launched from this machine, newest last.

The nodes of jobs that may still run are asked in parallel; a job that does not answer within 10 seconds is
unreachable. The state is pending, running, finished, failed, stopped, lost (its processes no longer exist),
unreachable, gone (its instances are terminated, or SLURM no longer lists it), not started, or unknown."""
_ANSWER_SECONDS = 10.0


def backend_of(job: "Job") -> "Backend":
    """Return the backend of a job."""
    from paceline.launch import ec2, slurm, ssh

    backends: dict[str, Backend] = {"slurm": slurm, "ec2": ec2}
    return backends.get(job.backend, ssh)


def follow_to_end(job: "Job") -> int:
    """Follow a job until it ends, fetch its run folder, and clean up; return its exit status."""
    from paceline.launch import control, states

    backend = backend_of(job)
    try:
        status = backend.follow(job)
    except KeyboardInterrupt:
        hint = f"`paceline attach {job.id}` follows it again, `paceline stop {job.id}` stops it"
        print(f"{job.id} continues; {hint}", file=sys.stderr)
        return 130
    state = states.FINISHED if status == 0 else _state(job)
    state = state if state in states.FINAL else states.FAILED
    try:
        print(f"run folder: {backend.fetch(job)}", file=sys.stderr)
    except NoRunFolder as error:
        print(f"paceline: error: {error.report}", file=sys.stderr)
        status = status or 1
    except UserError:
        if job.backend != "ec2":  # terminating the instances would delete the run folder
            control.record_final_state(job, state)
            backend.clean_up(job)
        raise
    control.record_final_state(job, state)
    backend.clean_up(job)
    if state != states.FINISHED:
        print(f"paceline: {_summary(job, state)}", file=sys.stderr)
    return status


def _state(job: "Job") -> str:
    """Return the state of the whole job; if the backend does not answer, what is known here."""
    from paceline.launch import states

    try:
        return states.overall(job, backend_of(job).status(job))
    except UserError:
        return states.known_here(job)


def _summary(job: "Job", state: str, already: bool = False) -> str:
    """Return the state of a job, and what the user can do with it."""
    from paceline.launch import control, ec2, states

    how = "starts it" if state == states.NOT_STARTED else "starts it again, from its last checkpoint if there is one"
    resume = f"`paceline resume {job.id}` {how}"
    if state == states.FAILED:
        resume = f"`paceline logs {job.id}` shows why, {resume}"
    over = state == states.FAILED and control.final_state(job) and not job.extra.get("ec2", {}).get("keep")
    if job.backend == "ec2" and (over or state in (states.STOPPED, states.GONE)):
        resume = ec2.resume_hint(job)  # its instances are terminated
    verb = "has" if state == states.FAILED else "is"
    return f"{job.id} {verb} {'already ' if already else ''}{state}; {states.advice(job, state, resume)}"


def _job_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = make_parser(command, "[JOB]", description)
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="its id or the start of it (default: the newest job)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def jobs(arguments: list[str]) -> int:
    """List the jobs that were launched from this machine."""
    parser = make_parser("jobs", "[--quick]", _JOBS)
    parser.add_argument("--quick", action="store_true", help="do not ask other hosts; show what is known here")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.launch.job import all_ids, home, load
    from paceline.launch.states import states_of
    from paceline.system.tables import print_list

    jobs: dict[str, Job | UserError] = {}
    for job_id in all_ids():
        try:
            jobs[job_id] = load(job_id)
        except UserError as error:
            jobs[job_id] = error
    if not jobs:
        print(f"no jobs in {home() / 'jobs'}; `paceline launch --help` shows how to launch one")
        return 0
    readable = [job for job in jobs.values() if not isinstance(job, UserError)]
    states = states_of(readable, lambda job: backend_of(job).status(job), _ANSWER_SECONDS, options.quick)
    rows = [
        [job_id, "unreadable", "?", "?", "?"]
        if isinstance(job, UserError)
        else [job_id, states[job_id], job.backend, _when(job.created), ", ".join(job.hosts)]
        for job_id, job in jobs.items()
    ]
    print_list(("job", "state", "backend", "created", "hosts"), rows, ("hosts", "created"))
    for job in jobs.values():
        if isinstance(job, UserError):
            print(f"paceline: error: {job.report}", file=sys.stderr)
    return 0


def _when(created: str) -> str:
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created


def status(arguments: list[str]) -> int:
    """Show the state of a job."""
    description = "Show the states of the nodes of a job, and the progress of its run."
    options = _job_parser("status", description).parse_args(arguments)
    from paceline.cli.watch import figures
    from paceline.launch.job import load
    from paceline.launch.states import HAS_RUN, RUNNING, described, kind_of, overall, runs_of
    from paceline.system.tables import new_table, show

    job = load(options.job)
    parts = backend_of(job).status(job)
    print(job.id)
    show(new_table(("node", "state"), [(name, described(state)) for name, state in parts]))
    for now in runs_of(job, [name for name, state in parts if kind_of(state) in HAS_RUN]):
        progress = ", ".join(f"{label} {value}" for label, value in figures(now)[1:])
        say(f"run {now.name}: {progress or 'no step yet'}")
    if (state := overall(job, parts)) != RUNNING:
        print(_summary(job, state))
    return 0


def logs(arguments: list[str]) -> int:
    """Show the logs of a job."""
    parser = _job_parser("logs", "Show the logs of all nodes of a job.")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    options = parser.parse_args(arguments)
    from paceline.launch.job import load

    job = load(options.job)
    if options.follow:
        return backend_of(job).follow(job, restart_lost=False)
    _show_logs(job)
    return 0


def _show_logs(job: "Job") -> None:
    """Print the current logs, once."""
    once = iter([False])
    backend_of(job).follow(job, until=lambda: next(once, True), restart_lost=False)


def attach(arguments: list[str]) -> int:
    """Follow a job that was launched before."""
    description = "Follow a job until it ends: print its logs, restart lost nodes, and fetch the run folder."
    options = _job_parser("attach", description).parse_args(arguments)
    from paceline.launch import control, states
    from paceline.launch.job import load

    job = load(options.job)
    state = control.final_state(job)
    if not state:
        return follow_to_end(job)
    _show_logs(job)
    print(f"paceline: {_summary(job, state)}", file=sys.stderr)
    return 0 if state == states.FINISHED else 1


def resume(arguments: list[str]) -> int:
    """Resume a failed or stopped job."""
    parser = _job_parser("resume", "Resume a failed or stopped job from its last checkpoint, and follow it.")
    options = parser.parse_args(arguments)
    from paceline.launch import states
    from paceline.launch.job import load

    job = load(options.job)
    backend = backend_of(job)
    lock = _lock(job)
    parts = backend.status(job)
    state = states.overall(job, parts)
    active = [name for name, part in parts if states.kind_of(part) in (states.RUNNING, states.PENDING)]
    unreachable = [f"{name} ({part})" for name, part in parts if states.kind_of(part) == states.UNREACHABLE]
    if active:
        message = f"{job.id} still runs on {', '.join(active)}. `paceline attach {job.id}` follows it."
        raise UserError("job-running", message, job=job.id, nodes=active)
    if state == states.FINISHED:
        raise UserError("job-finished", _summary(job, state), job=job.id)
    if unreachable:
        reason = f"it may still be training on {', '.join(unreachable)}"
        message = f"{job.id} cannot be resumed: {reason}. Resume it when all nodes are reachable."
        raise UserError("nodes-unreachable", message, job=job.id)
    job = backend.resume(job)
    lock.release()
    return follow_to_end(job)


def _lock(job: "Job") -> "FolderLock":
    """Lock a job: two terminals would start it twice."""
    from paceline.launch.job import folder_of
    from paceline.system.files import FolderLock

    try:
        return FolderLock(folder_of(job.id))
    except UserError:
        message = f"another terminal starts or follows {job.id}. `paceline status {job.id}` shows its state."
        raise UserError("job-in-use", message, job=job.id) from None


def stop(arguments: list[str]) -> int:
    """Stop a job on all nodes."""
    parser = _job_parser("stop", "Stop a job on all nodes, after a checkpoint.")
    parser.add_argument(
        "--grace", type=positive, default=60, metavar="S", help="seconds for the checkpoint (default: 60)"
    )
    options = parser.parse_args(arguments)
    from paceline.launch import control, states
    from paceline.launch.job import folder_of, load
    from paceline.system.files import is_locked

    job = load(options.job)
    before = _state(job)
    # a terminal that follows a failed job may restart it
    if before in (states.FINISHED, states.FAILED) and not (before == states.FAILED and is_locked(folder_of(job.id))):
        return _clean_up(job, before)
    if control.final_state(job) == states.STOPPED:
        print(_summary(job, states.STOPPED, already=True))
        return 0
    remaining = backend_of(job).stop(job, options.grace)
    if remaining:
        for line in remaining:
            print(f"paceline: {line}", file=sys.stderr)
        message = f"not all of {job.id} was stopped. `paceline stop {job.id}` tries again."
        raise UserError("job-not-stopped", message, job=job.id)
    after = states.FINISHED if _state(job) == states.FINISHED else states.STOPPED
    if after == states.FINISHED:  # before the stop took effect
        control.clear_final_state(job)
    control.record_final_state(job, after)
    print(_summary(job, after))
    return 0


def _clean_up(job: "Job", state: str) -> int:
    """Release what a job that has ended still holds; on EC2, fetch its run folder first."""
    from paceline.launch import control

    backend = backend_of(job)
    if job.backend == "ec2":
        try:
            print(f"run folder: {backend.fetch(job)}")
        except NoRunFolder as error:
            print(f"paceline: {error.report}", file=sys.stderr)
    control.record_final_state(job, state)
    backend.clean_up(job)
    print(_summary(job, state, already=True))
    return 0


def fetch(arguments: list[str]) -> int:
    """Copy the run folder of a job to this machine."""
    description = "Copy the run folder of a job to this machine, also while it is running."
    options = _job_parser("fetch", description).parse_args(arguments)
    from paceline.launch import states
    from paceline.launch.job import load

    job = load(options.job)
    try:
        print(backend_of(job).fetch(job))
    except NoRunFolder as error:
        if (state := _state(job)) in (states.RUNNING, states.PENDING):
            message = f"{job.id} is {state}, but has no run folder yet. Fetch again later."
            raise NoRunFolder("no-run-folder", message, job=job.id) from None
        raise error
    return 0
