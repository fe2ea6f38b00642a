"""The verbs that look after jobs: jobs, status, logs, attach, stop, fetch."""

import argparse
import sys
from typing import TYPE_CHECKING

from paceline.cli.options import make_parser, positive
from paceline.errors import NoRunFolder, UserError

if TYPE_CHECKING:
    from paceline.launch.job import Backend, Job


def backend_of(job: "Job") -> "Backend":
    """What plans, starts and looks after this job."""
    from paceline.launch import ec2, slurm, ssh

    back: dict[str, Backend] = {"slurm": slurm, "ec2": ec2}
    return back.get(job.backend, ssh)


def follow_to_the_end(job: "Job") -> int:
    """Show what it does, bring its run folder here, and clean up behind it; the exit status."""
    back = backend_of(job)
    try:
        status = back.follow(job)
        try:
            print(f"run folder: {back.fetch(job)}", file=sys.stderr)
        except NoRunFolder as error:
            print(f"paceline: {error}", file=sys.stderr)
            status = status or 1
    except KeyboardInterrupt:
        print(
            f"{job.id} goes on; `paceline attach {job.id}` comes back, `paceline stop {job.id}` ends it",
            file=sys.stderr,
        )
        return 130
    except UserError:
        if job.backend != "ec2":  # there the run folder would be gone with the machines
            back.tidy(job)
        raise
    back.tidy(job)
    return status


def _job_parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = make_parser(verb, "[JOB]", description)
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="its id or the beginning of it; default: the newest"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def jobs(arguments: list[str]) -> int:
    """All that were launched from here."""
    parser = make_parser("jobs", "[-h]", "List the jobs that were launched from this machine.")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    parser.parse_args(arguments)
    from paceline.launch.job import all_ids, load

    for job_id in all_ids():
        job = load(job_id)
        print(f"{job.id}  {job.backend}  {', '.join(job.hosts)}  {job.created}")
    return 0


def status(arguments: list[str]) -> int:
    """What a job's machines do."""
    options = _job_parser("status", "Say what the machines of a job are doing.").parse_args(arguments)
    from paceline.launch.job import load

    job = load(options.job)
    print(job.id)
    for name, state in backend_of(job).status(job):
        print(f"  {name}: {state}")
    return 0


def logs(arguments: list[str]) -> int:
    """What a job's machines have printed."""
    parser = _job_parser("logs", "Show the logs of all machines of a job.")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    options = parser.parse_args(arguments)
    from paceline.launch.job import load

    job, once = load(options.job), iter([False])
    until = (lambda: False) if options.follow else (lambda: next(once, True))
    status = backend_of(job).follow(job, until=until, bring_back=False)
    return status if options.follow else 0


def attach(arguments: list[str]) -> int:
    """Go on with a job as if one had launched it just now."""
    options = _job_parser("attach", "Follow a job: logs, lost machines started again, run folder.").parse_args(
        arguments
    )
    from paceline.launch.job import load

    return follow_to_the_end(load(options.job))


def resume(arguments: list[str]) -> int:
    """Start a job again that ended before its time."""
    parser = _job_parser("resume", "Start a job again that failed or was stopped, from its last save, and follow it.")
    options = parser.parse_args(arguments)
    from paceline.base.files import FolderLock
    from paceline.launch.job import folder_of, load

    job = load(options.job)
    back = backend_of(job)
    lock = FolderLock(folder_of(job.id))  # two at once would start it twice
    states = back.status(job)
    if busy := [name for name, state in states if state.startswith(("running", "RUNNING", "PENDING"))]:
        raise UserError(f"{job.id} still runs on {', '.join(busy)}; `paceline attach {job.id}` follows it")
    if any(state.startswith(("ended 0", "COMPLETED")) for _, state in states):
        raise UserError(f"{job.id} is finished; `paceline fetch {job.id}` brings its run folder here")
    job = back.resume(job)
    lock.release()
    return follow_to_the_end(job)


def stop(arguments: list[str]) -> int:
    """End a job everywhere."""
    parser = _job_parser("stop", "End a job on all machines: its ranks save, then nothing of it is left running.")
    parser.add_argument("--grace", type=positive, default=60, metavar="S", help="time to save (default 60)")
    options = parser.parse_args(arguments)
    from paceline.launch.job import load

    job = load(options.job)
    left = backend_of(job).stop(job, options.grace)
    for line in left:
        print(f"paceline: {line}", file=sys.stderr)
    more = f"`paceline resume {job.id}` goes on, `paceline fetch {job.id}` brings its run folder here"
    print(f"{job.id}: {f'stopped; {more}' if not left else 'not all of it could be stopped'}")
    return 1 if left else 0


def fetch(arguments: list[str]) -> int:
    """Bring a job's run folder here."""
    options = _job_parser("fetch", "Bring the run folder of a job here, also while it goes on.").parse_args(arguments)
    from paceline.launch.job import load

    job = load(options.job)
    print(backend_of(job).fetch(job))
    return 0
