"""The errors that ranks report to their agent, and which of several failures is the cause."""

import signal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.distributed.world import LOST_RANK
from paceline.errors import UserError

KILLED = (-signal.SIGKILL, 255)
"""Exit codes of killed ranks; multiprocessing returns 255 for ranks that ended with their fork server."""


def reported_error(failure: ProcessFailure) -> UserError | None:
    """Return the error that a rank reported before it ended, if any."""
    found = failure.error_file_data
    return UserError.from_json(found) if "code" in found else None  # torch fills in a message if there is no file


def is_own_error(failure: ProcessFailure) -> bool:
    """Whether a rank reported an error other than the loss of another rank."""
    error = reported_error(failure)
    return error is not None and error.code != LOST_RANK


def first_failure(failures: dict[int, ProcessFailure]) -> UserError:
    """Return the error for the failure that caused the others."""

    # a killed rank is the cause; ranks that lost it, or that the agent stopped, are not
    def cause_first(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        error = reported_error(failure)
        lost = error is not None and error.code == LOST_RANK
        return failure.exitcode not in KILLED, lost, failure.exitcode < 0, failure.timestamp

    rank = min(failures, key=cause_first)
    failure = failures[rank]
    if failure.exitcode in KILLED:
        return UserError(
            "rank-killed",
            f"rank {rank} was killed, perhaps because the node ran out of memory. Run the same command again to resume "
            "from the last checkpoint.",
            rank=rank,
        )
    if failure.exitcode < 0:
        return UserError("rank-crashed", f"rank {rank} crashed with {failure.signal_name()}", rank=rank)
    error = reported_error(failure)
    return error or UserError("rank-failed", f"rank {rank} failed; see the lines above", rank=rank)
