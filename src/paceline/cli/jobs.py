"""The commands that manage jobs: jobs, status, logs, attach, resume, stop, fetch."""

import argparse
import sys
from datetime import datetime
from typing import TYPE_CHECKING

from paceline.cli.options import make_parser, positive
from paceline.errors import NoRunFolder, UserError
from paceline.system.files import say

if TYPE_CHECKING:
    from paceline.launch.job import Job

_JOBS = """List the jobs that were launched from this machine, newest last.

The nodes of jobs that may still run are asked in parallel; a job that does not answer within 10 seconds is
unreachable. The state is pending, running, finished, failed, stopped, lost (its processes no longer exist),
unreachable, gone (its instances are terminated, or SLURM no longer lists it), not started, or unknown."""
_ANSWER_SECONDS = 10.0


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
    from paceline.launch.backends import backend_of
    from paceline.launch.job import home
    from paceline.launch.job_states import states_of
    from paceline.system.tables import print_list

    found = _all_jobs()
    if not found:
        print(f"no jobs in {home() / 'jobs'}; `paceline launch --help` shows how to launch one")
        return 0
    readable = [job for job in found.values() if not isinstance(job, UserError)]
    states = states_of(readable, lambda job: backend_of(job.spec).status(job), _ANSWER_SECONDS, options.quick)
    rows = [
        [job_id, "unreadable", "?", "?", "?"]
        if isinstance(job, UserError)
        else [job_id, states[job_id], job.spec.backend, _when(job.created), ", ".join(job.spec.hosts)]
        for job_id, job in found.items()
    ]
    print_list(("job", "state", "backend", "created", "hosts"), rows, ("hosts", "created"))
    for error in (job for job in found.values() if isinstance(job, UserError)):
        print(f"paceline: error: {error.report}", file=sys.stderr)
    return 0


def _all_jobs() -> "dict[str, Job | UserError]":
    """Return all jobs by id, oldest first; an error in place of a job that cannot be read."""
    from paceline.launch.final_state import final_state
    from paceline.launch.job import all_ids, load

    found: dict[str, Job | UserError] = {}
    for job_id in all_ids():
        try:
            found[job_id] = job = load(job_id)
            final_state(job)  # its file may be corrupt as well
        except UserError as error:
            found[job_id] = error
    return found


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
    from paceline.launch.backends import backend_of
    from paceline.launch.job import load
    from paceline.launch.job_states import overall, runs_of
    from paceline.launch.lifecycle import summary
    from paceline.launch.states import HAS_RUN, NodeState
    from paceline.system.tables import new_table, show

    job = load(options.job)
    nodes = backend_of(job.spec).status(job)
    print(job.id)
    show(new_table(("node", "state"), [(node.name, str(node)) for node in nodes]))
    for now in runs_of(job, [node.name for node in nodes if node.state in HAS_RUN]):
        progress = ", ".join(f"{label} {value}" for label, value in figures(now)[1:])
        say(f"run {now.name}: {progress or 'no step yet'}")
    if (state := overall(job, nodes)) is not NodeState.RUNNING:
        print(summary(job, state))
    return 0


def logs(arguments: list[str]) -> int:
    """Show the logs of a job."""
    parser = _job_parser("logs", "Show the logs of all nodes of a job.")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    options = parser.parse_args(arguments)
    from paceline.launch.backends import backend_of
    from paceline.launch.job import load
    from paceline.launch.lifecycle import show_logs

    job = load(options.job)
    if options.follow:
        return backend_of(job.spec).follow(job, restart_lost=False)
    show_logs(job)
    return 0


def attach(arguments: list[str]) -> int:
    """Follow a job that was launched before."""
    description = "Follow a job until it ends: print its logs, restart lost nodes, and fetch the run folder."
    options = _job_parser("attach", description).parse_args(arguments)
    from paceline.launch.final_state import final_state
    from paceline.launch.job import load
    from paceline.launch.lifecycle import follow_to_end, show_logs, summary
    from paceline.launch.states import NodeState

    job = load(options.job)
    state = final_state(job)
    if not state:
        return follow_to_end(job)
    show_logs(job)
    print(f"paceline: {summary(job, state)}", file=sys.stderr)
    return 0 if state is NodeState.FINISHED else 1


def resume(arguments: list[str]) -> int:
    """Resume a failed or stopped job."""
    parser = _job_parser("resume", "Resume a failed or stopped job from its last checkpoint, and follow it.")
    options = parser.parse_args(arguments)
    from paceline.launch import lifecycle
    from paceline.launch.job import load

    return lifecycle.follow_to_end(lifecycle.resume(load(options.job)))


def stop(arguments: list[str]) -> int:
    """Stop a job on all nodes."""
    parser = _job_parser("stop", "Stop a job on all nodes, after a checkpoint.")
    parser.add_argument(
        "--grace", type=positive, default=60, metavar="S", help="seconds for the checkpoint (default: 60)"
    )
    options = parser.parse_args(arguments)
    from paceline.launch import lifecycle
    from paceline.launch.job import load

    print(lifecycle.stop(load(options.job), options.grace))
    return 0


def fetch(arguments: list[str]) -> int:
    """Copy the run folder of a job to this machine."""
    description = "Copy the run folder of a job, or that of each seed, to this machine, also while it is running."
    options = _job_parser("fetch", description).parse_args(arguments)
    from paceline.launch.backends import backend_of
    from paceline.launch.job import load
    from paceline.launch.lifecycle import state_of
    from paceline.launch.states import ACTIVE

    job = load(options.job)
    try:
        for folder in backend_of(job.spec).fetch(job):
            print(folder)
    except NoRunFolder as error:
        if (state := state_of(job)) in ACTIVE:
            message = f"{job.id} is {state}, but has no run folder yet. Fetch again later."
            raise NoRunFolder("no-run-folder", message, job=job.id) from None
        raise error
    return 0
