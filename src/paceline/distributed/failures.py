"""The errors that ranks report to their agent, and which of several failures is the cause."""

import signal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.distributed.reports import LOST_RANK
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


def _is_consequence(failure: ProcessFailure) -> bool:
    """Whether a rank failed because it lost another one. NCCL's watchdog then aborts the process."""
    error = reported_error(failure)
    return error.code == LOST_RANK if error else failure.exitcode == -signal.SIGABRT


def first_failure(failures: dict[int, ProcessFailure]) -> UserError:
    """Return the error for the failure that caused the others."""

    # a killed rank is the cause; ranks that lost it, or that the agent stopped, are not
    def cause_first(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        return failure.exitcode not in KILLED, _is_consequence(failure), failure.exitcode < 0, failure.timestamp

    rank = min(failures, key=cause_first)
    failure = failures[rank]
    if failure.exitcode in KILLED:
        return UserError(
            "rank-killed",
            f"rank {rank} was killed, perhaps because the node ran out of memory. Run the same command again to resume "
            "from the last checkpoint.",
            rank=rank,
        )
    if error := reported_error(failure):
        return error
    if failure.exitcode == -signal.SIGABRT:
        return UserError(
            "rank-crashed",
            f"rank {rank} was aborted (SIGABRT). NCCL aborts a rank that has lost another one; otherwise the lines "
            "above say why. Look for the first failure in the logs of the other nodes.",
            rank=rank,
        )
    if failure.exitcode < 0:
        return UserError("rank-crashed", f"rank {rank} crashed with {failure.signal_name()}", rank=rank)
    return UserError("rank-failed", f"rank {rank} failed; see the lines above", rank=rank)
