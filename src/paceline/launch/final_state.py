"""How a job ended, as files in its folder: its hosts need not be asked again, and no part of it may be restarted."""

from contextlib import suppress

from paceline.errors import UserError
from paceline.launch.job import Job, folder_of
from paceline.launch.states import FINAL, NodeState
from paceline.system.files import write_text

STOPPED = "stopped"
"""File in the folder of a job that its user stopped."""
_FINAL_STATE = "final_state"  # file in the folder of a job that has ended


def mark_stopped(job: Job) -> None:
    """Remember that the user stopped the job, so that nobody who follows it restarts nodes."""
    (folder_of(job.id) / STOPPED).touch(0o600)


def is_stopped(job: Job) -> bool:
    """Return whether no part of the job may be started any more."""
    return (folder_of(job.id) / STOPPED).exists() or final_state(job) is not None


def record_final_state(job: Job, state: NodeState) -> None:
    with suppress(FileNotFoundError):  # stopped before it started, and forgotten
        write_text(folder_of(job.id) / _FINAL_STATE, state, 0o600)


def final_state(job: Job) -> NodeState | None:
    """Return how the job ended, or None if that is not known here."""
    path = folder_of(job.id) / _FINAL_STATE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if text in FINAL:
        return NodeState(text)
    message = f"{path} is corrupt: {text[:100]!r} is not how a job ends. Remove the file."
    raise UserError("job-corrupt", message, path=path)


def clear_final_state(job: Job) -> None:
    """Forget that the job was stopped or ended, because it starts again."""
    for name in (STOPPED, _FINAL_STATE):
        (folder_of(job.id) / name).unlink(missing_ok=True)
