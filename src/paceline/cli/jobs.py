"""The verbs that look after jobs: jobs, status, logs, attach, resume, stop, fetch."""

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

Machines of jobs whose end is not known here are asked, all at once; one that does not answer within 10 seconds is
unreachable. The state is pending, running, finished, failed, stopped, lost (its processes are gone), unreachable, gone
(its machines are), not started, or unknown."""
_ANSWER_SECONDS = 10.0


def backend_of(job: "Job") -> "Backend":
    """What plans, starts and looks after this job."""
    from paceline.launch import ec2, slurm, ssh

    back: dict[str, Backend] = {"slurm": slurm, "ec2": ec2}
    return back.get(job.backend, ssh)


def follow_to_the_end(job: "Job") -> int:
    """Show what it does, bring its run folder here, and clean up behind it; the exit status."""
    from paceline.launch import control, states

    back = backend_of(job)
    try:
        status = back.follow(job)
    except KeyboardInterrupt:
        print(
            f"{job.id} continues; `paceline attach {job.id}` follows it again, `paceline stop {job.id}` ends it",
            file=sys.stderr,
        )
        return 130
    ended = states.FINISHED if status == 0 else _state(job)
    ended = ended if ended in states.FINAL else states.FAILED
    try:
        print(f"run folder: {back.fetch(job)}", file=sys.stderr)
    except NoRunFolder as error:
        print(f"paceline: {error}", file=sys.stderr)
        status = status or 1
    except UserError:
        if job.backend != "ec2":  # there the run folder would be gone with the machines
            control.conclude(job, ended)
            back.tidy(job)
        raise
    control.conclude(job, ended)
    back.tidy(job)
    if ended != states.FINISHED:
        print(f"paceline: {_sentence(job, ended)}", file=sys.stderr)
    return status


def _state(job: "Job") -> str:
    """Of the whole job; a backend that does not answer knows nothing."""
    from paceline.launch import states

    try:
        return states.overall(job, backend_of(job).status(job))
    except UserError:
        return states.known_here(job)


def _sentence(job: "Job", state: str, already: bool = False) -> str:
    """What became of a job, and what can be done with it now."""
    from paceline.launch import control, ec2, states

    how = "starts it" if state == states.NOT_STARTED else "starts it again, from its last checkpoint if there is one"
    resume = f"`paceline resume {job.id}` {how}"
    if state == states.FAILED:
        resume = f"`paceline logs {job.id}` shows why, {resume}"
    over = state == states.FAILED and control.concluded(job) and not job.extra.get("ec2", {}).get("keep")
    if job.backend == "ec2" and (over or state in (states.STOPPED, states.GONE)):
        resume = ec2.elsewhere(job)  # its machines are released
    verb = "has" if state == states.FAILED else "is"
    return f"{job.id} {verb} {'already ' if already else ''}{state}; {states.advice(job, state, resume)}"


def _job_parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = make_parser(verb, "[JOB]", description)
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="its id or the beginning of it; default: the newest"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def jobs(arguments: list[str]) -> int:
    """All that were launched from here."""
    parser = make_parser("jobs", "[--quick]", _JOBS)
    parser.add_argument("--quick", action="store_true", help="ask no other machine; show what is known here")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.cli.columns import lines_of, terminal_width
    from paceline.launch.job import all_ids, home, load
    from paceline.launch.states import states_of

    found: dict[str, Job | str] = {}
    for job_id in all_ids():
        try:
            found[job_id] = load(job_id)
        except UserError as error:
            found[job_id] = str(error)
    if not found:
        print(f"no jobs in {home() / 'jobs'}; `paceline launch --help` shows how to launch one")
        return 0
    known = [job for job in found.values() if not isinstance(job, str)]
    states = states_of(known, lambda job: backend_of(job).status(job), _ANSWER_SECONDS, options.quick)
    rows = [
        [job_id, "unreadable", "?", "?", "?"]
        if isinstance(job, str)
        else [job_id, states[job_id], job.backend, _when(job.created), ", ".join(job.hosts)]
        for job_id, job in found.items()
    ]
    for line in lines_of(("job", "state", "backend", "created", "hosts"), rows, ("hosts", "created"), terminal_width()):
        print(line)
    for job in found.values():
        if isinstance(job, str):
            print(f"paceline: {job}", file=sys.stderr)
    return 0


def _when(created: str) -> str:
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created


def status(arguments: list[str]) -> int:
    """What a job's machines do."""
    description = "Say what the machines of a job are doing, and how far its run is."
    options = _job_parser("status", description).parse_args(arguments)
    from paceline.cli.watch import figures
    from paceline.launch.job import load
    from paceline.launch.states import HAS_RUN, RUNNING, described, kind_of, overall, runs_of

    job = load(options.job)
    parts = backend_of(job).status(job)
    print(job.id)
    for name, state in parts:
        say(f"  {name}: {described(state)}")
    for now in runs_of(job, [name for name, state in parts if kind_of(state) in HAS_RUN]):
        told = ", ".join(f"{label} {value}" for label, value in figures(now)[1:])
        say(f"  run {now.name}: {told or 'no step yet'}")
    if (state := overall(job, parts)) != RUNNING:
        print(_sentence(job, state))
    return 0


def logs(arguments: list[str]) -> int:
    """What a job's machines have printed."""
    parser = _job_parser("logs", "Show the logs of all machines of a job.")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    options = parser.parse_args(arguments)
    from paceline.launch.job import load

    job = load(options.job)
    if options.follow:
        return backend_of(job).follow(job, bring_back=False)
    _show_logs(job)
    return 0


def _show_logs(job: "Job") -> None:
    """As they are now."""
    once = iter([False])
    backend_of(job).follow(job, until=lambda: next(once, True), bring_back=False)


def attach(arguments: list[str]) -> int:
    """Go on with a job as if one had launched it just now."""
    options = _job_parser("attach", "Follow a job: logs, lost machines started again, run folder.").parse_args(
        arguments
    )
    from paceline.launch import control, states
    from paceline.launch.job import load

    job = load(options.job)
    ended = control.concluded(job)
    if not ended:
        return follow_to_the_end(job)
    _show_logs(job)
    print(f"paceline: {_sentence(job, ended)}", file=sys.stderr)
    return 0 if ended == states.FINISHED else 1


def resume(arguments: list[str]) -> int:
    """Start a job again that ended before its time."""
    parser = _job_parser("resume", "Resume a failed or stopped job from its last checkpoint, and follow it.")
    options = parser.parse_args(arguments)
    from paceline.launch import states
    from paceline.launch.job import load

    job = load(options.job)
    back = backend_of(job)
    lock = _lock(job)
    parts = back.status(job)
    state = states.overall(job, parts)
    busy = [name for name, own in parts if states.kind_of(own) in (states.RUNNING, states.PENDING)]
    silent = [f"{name} ({own})" for name, own in parts if states.kind_of(own) == states.UNREACHABLE]
    if busy:
        raise UserError(f"{job.id} still runs on {', '.join(busy)}; `paceline attach {job.id}` follows it")
    if state == states.FINISHED:
        raise UserError(_sentence(job, state))
    if silent:
        raise UserError(
            f"{job.id} cannot be resumed: {', '.join(silent)}, where it may still be training; "
            "resume it when all of its machines can be reached"
        )
    job = back.resume(job)
    lock.release()
    return follow_to_the_end(job)


def _lock(job: "Job") -> "FolderLock":
    """Two at once would start it twice."""
    from paceline.launch.job import folder_of
    from paceline.system.files import FolderLock

    try:
        return FolderLock(folder_of(job.id))
    except UserError:
        raise UserError(
            f"another terminal is starting {job.id} or looks after it; `paceline status {job.id}` shows what it does"
        ) from None


def stop(arguments: list[str]) -> int:
    """End a job everywhere."""
    parser = _job_parser("stop", "End a job on all machines: its ranks save, then nothing of it is left running.")
    parser.add_argument("--grace", type=positive, default=60, metavar="S", help="time to save (default 60)")
    options = parser.parse_args(arguments)
    from paceline.launch import control, states
    from paceline.launch.job import folder_of, load
    from paceline.system.files import is_locked

    job = load(options.job)
    before = _state(job)
    # one that failed may be brought back by whoever follows it
    if before in (states.FINISHED, states.FAILED) and not (before == states.FAILED and is_locked(folder_of(job.id))):
        return _clean_up(job, before)
    if control.concluded(job) == states.STOPPED:
        print(_sentence(job, states.STOPPED, already=True))
        return 0
    left = backend_of(job).stop(job, options.grace)
    if left:
        for line in left:
            print(f"paceline: {line}", file=sys.stderr)
        print(f"{job.id}: not all of it could be stopped; `paceline stop {job.id}` tries again")
        return 1
    after = _state(job)
    if after == states.FINISHED:  # meanwhile
        control.reopen(job)
    control.conclude(job, after if after == states.FINISHED else states.STOPPED)
    print(_sentence(job, after if after == states.FINISHED else states.STOPPED))
    return 0


def _clean_up(job: "Job", state: str) -> int:
    """A job that is over needs no stop; what was kept for it is given back, on EC2 after its run folder is here."""
    from paceline.launch import control

    back = backend_of(job)
    if job.backend == "ec2":
        try:
            print(f"run folder: {back.fetch(job)}")
        except NoRunFolder as error:
            print(f"paceline: {error}", file=sys.stderr)
    control.conclude(job, state)
    back.tidy(job)
    print(_sentence(job, state, already=True))
    return 0


def fetch(arguments: list[str]) -> int:
    """Bring a job's run folder here."""
    options = _job_parser("fetch", "Bring the run folder of a job here, also while it goes on.").parse_args(arguments)
    from paceline.launch import states
    from paceline.launch.job import load

    job = load(options.job)
    try:
        print(backend_of(job).fetch(job))
    except NoRunFolder as error:
        if (state := _state(job)) in (states.RUNNING, states.PENDING):
            raise NoRunFolder(f"{job.id} is {state}, but has no run folder yet; fetch again in a while") from None
        raise error
    return 0
