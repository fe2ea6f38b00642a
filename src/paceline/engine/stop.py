"""Stopping together: signals, and the agreement of all ranks on what happens after a step."""

import os
import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from paceline.distributed.env import AGENT
from paceline.distributed.world import World
from paceline.system.logs import announce_stop


class Signals:
    """Remembers SIGINT or SIGTERM, so that the loop can end after a step; a second one ends the process at once."""

    def __init__(self, world: World) -> None:
        self.received = 0
        self._since = 0.0
        self._announce = world.is_rank_zero and AGENT not in os.environ  # the agent speaks for its ranks
        # who stops a whole service or job sends one signal to launcher and ranks, and the launcher passes on its own
        self._same_within = 2.0 if world.size > 1 else 0.0

    def __enter__(self) -> "Signals":
        self._previous = {signum: signal.signal(signum, self._note) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self.received:
            if time.monotonic() - self._since >= self._same_within:
                os._exit(128 + signum)
            return
        self.received = signum
        self._since = time.monotonic()
        if self._announce:
            announce_stop(signum)

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)


class Agreement:
    """What any rank asks for, known to all of them one step later, so that no rank waits for another's vote."""

    def __init__(self, world: World, num_votes: int):
        self._alone = world.size == 1
        self._zeros = torch.zeros(num_votes, dtype=torch.int64)
        self._votes, self._pending = self._zeros, None

    def agree(self, votes: list[int]) -> list[int]:
        """Hand in this step's votes (0: none); the largest of all ranks' votes of the step before."""
        if self._alone:
            return votes
        if self._pending is not None:
            self._pending.wait()
        agreed = self._votes.tolist()
        self._votes = torch.tensor(votes)
        self._pending = dist.all_reduce(self._votes, dist.ReduceOp.MAX, async_op=True)
        return agreed

    def close(self) -> None:
        if self._pending is not None:
            self._pending.wait()
