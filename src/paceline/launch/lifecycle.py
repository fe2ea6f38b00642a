"""The life of a job after its launch: follow it to its end, stop it, resume it, and say what can be done next."""

import sys

from paceline.errors import NoRunFolder, UserError
from paceline.launch.backends import backend_of
from paceline.launch.backends.ec2 import resume_hint
from paceline.launch.final_state import clear_final_state, final_state, record_final_state
from paceline.launch.job import Job, folder_of
from paceline.launch.job_states import advice, known_here, overall
from paceline.launch.specs import Ec2Spec
from paceline.launch.states import ACTIVE, FINAL, NodeState
from paceline.system.files import FolderLock, is_locked


def follow_to_end(job: Job) -> int:
    """Follow a job until it ends, fetch its run folder, and clean up; return its exit status."""
    backend = backend_of(job.spec)
    try:
        status = backend.follow(job)
    except KeyboardInterrupt:
        hint = f"`paceline attach {job.id}` follows it again, `paceline stop {job.id}` stops it"
        print(f"{job.id} continues; {hint}", file=sys.stderr)
        return 130
    state = NodeState.FINISHED if status == 0 else state_of(job)
    state = state if state in FINAL else NodeState.FAILED
    try:
        for folder in backend.fetch(job):
            print(f"run folder: {folder}", file=sys.stderr)
    except NoRunFolder as error:
        print(f"paceline: error: {error.report}", file=sys.stderr)
        status = status or 1
    except UserError:
        if not isinstance(job.spec, Ec2Spec):  # terminating the instances would delete the run folder
            _end(job, state)
        raise
    _end(job, state)
    if state is not NodeState.FINISHED:
        print(f"paceline: {summary(job, state)}", file=sys.stderr)
    return status


def _end(job: Job, state: NodeState) -> None:
    record_final_state(job, state)
    backend_of(job.spec).clean_up(job)


def show_logs(job: Job) -> None:
    """Print the current logs, once."""
    once = iter([False])
    backend_of(job.spec).follow(job, until=lambda: next(once, True), restart_lost=False)


def state_of(job: Job) -> NodeState:
    """Return the state of the whole job; if the backend does not answer, what is known here."""
    try:
        return overall(job, backend_of(job.spec).status(job))
    except UserError:
        return known_here(job)


def summary(job: Job, state: NodeState, already: bool = False) -> str:
    """Return the state of a job, and what the user can do with it."""
    has_failed, spec = state is NodeState.FAILED, job.spec
    how = "starts it" if state is NodeState.NOT_STARTED else "starts it again, from its last checkpoint if there is one"
    resume = f"`paceline resume {job.id}` {how}"
    if has_failed:
        resume = f"`paceline logs {job.id}` shows why, {resume}"
    if isinstance(spec, Ec2Spec):
        is_over = has_failed and final_state(job) and not spec.keep
        if is_over or state in (NodeState.STOPPED, NodeState.GONE):
            resume = resume_hint(job)  # its instances are terminated
    verb = "has" if has_failed else "is"
    return f"{job.id} {verb} {'already ' if already else ''}{state}; {advice(job, state, resume)}"


def resume(job: Job) -> Job:
    """Start a failed or stopped job again from its last checkpoint; return it."""
    backend = backend_of(job.spec)
    lock = _lock(job)
    nodes = backend.status(job)
    state = overall(job, nodes)
    active = [node.name for node in nodes if node.state in ACTIVE]
    unreachable = [f"{node.name} ({node})" for node in nodes if node.state is NodeState.UNREACHABLE]
    if active:
        message = f"{job.id} still runs on {', '.join(active)}. `paceline attach {job.id}` follows it."
        raise UserError("job-running", message, job=job.id, nodes=active)
    if state is NodeState.FINISHED:
        message = f"only a stopped or failed job can be resumed: {summary(job, state)}"
        raise UserError("job-finished", message, job=job.id)
    if unreachable:
        reason = f"it may still be training on {', '.join(unreachable)}"
        message = f"{job.id} cannot be resumed: {reason}. Resume it when all nodes are reachable."
        raise UserError("nodes-unreachable", message, job=job.id)
    job = backend.resume(job)
    lock.release()
    return job


def _lock(job: Job) -> FolderLock:
    """Lock a job: two terminals would start it twice."""
    try:
        return FolderLock(folder_of(job.id))
    except UserError:
        message = f"another terminal is starting or following {job.id}. `paceline status {job.id}` shows its state."
        raise UserError("job-in-use", message, job=job.id) from None


def stop(job: Job, grace: float) -> str:
    """Stop a job after a checkpoint; return its state, and what the user can do with it."""
    before = state_of(job)
    # a terminal that follows a failed job may restart it
    if before is NodeState.FINISHED or (before is NodeState.FAILED and not is_locked(folder_of(job.id))):
        return _clean_up(job, before)
    if final_state(job) is NodeState.STOPPED:
        return summary(job, NodeState.STOPPED, already=True)
    if remaining := backend_of(job.spec).stop(job, grace):
        for line in remaining:
            print(f"paceline: {line}", file=sys.stderr)
        message = f"not all of {job.id} was stopped. `paceline stop {job.id}` tries again."
        raise UserError("job-not-stopped", message, job=job.id)
    after = NodeState.FINISHED if state_of(job) is NodeState.FINISHED else NodeState.STOPPED
    if after is NodeState.FINISHED:  # before the stop took effect
        clear_final_state(job)
    record_final_state(job, after)
    return summary(job, after)


def _clean_up(job: Job, state: NodeState) -> str:
    """Release what a job that has ended still holds; on EC2, fetch its run folder first."""
    if isinstance(job.spec, Ec2Spec):
        try:
            for folder in backend_of(job.spec).fetch(job):
                print(f"run folder: {folder}")
        except NoRunFolder as error:
            print(f"paceline: {error.report}", file=sys.stderr)
    _end(job, state)
    return summary(job, state, already=True)
