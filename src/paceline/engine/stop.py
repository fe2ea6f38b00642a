"""Signals, and the agreement of all ranks on what happens after a step."""

import os
import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from paceline.distributed.env import AGENT
from paceline.distributed.world import World
from paceline.system.logs import announce_stop
from paceline.system.signals import STOPS


class Signals:
    """Records SIGINT or SIGTERM, so that the loop can end after a step. A second signal exits at once."""

    def __init__(self, world: World) -> None:
        self.received = 0
        self._since = 0.0
        self._announce = world.is_rank_zero and AGENT not in os.environ  # the agent announces it for its ranks
        # systemd and SLURM signal the launcher and the ranks, and the launcher forwards its signal to the ranks
        self._duplicate_seconds = 2.0 if world.size > 1 else 0.0

    def __enter__(self) -> "Signals":
        # an ignored signal stays ignored, except in ranks, which ignore SIGINT only until they can checkpoint
        handled = [signum for signum in STOPS if AGENT in os.environ or signal.getsignal(signum) != signal.SIG_IGN]
        self._previous = {signum: signal.signal(signum, self._handle) for signum in handled}
        return self

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self.received:
            if time.monotonic() - self._since >= self._duplicate_seconds:
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
    """An all-reduce of votes. Unless `wait`, its result is used one step later so that no rank waits for it."""

    def __init__(self, world: World, num_votes: int, wait: bool = False):
        self._single, self._wait = world.size == 1, wait
        self._zeros = torch.zeros(num_votes, dtype=torch.int64)
        self._votes, self._pending = self._zeros, None

    def agree(self, votes: list[int]) -> list[int]:
        """Submit this step's votes (0: none) and return the largest votes of all ranks in this or the previous step."""
        if self._single:
            return votes
        self.close()
        previous, self._votes = self._votes, torch.tensor(votes)
        self._pending = dist.all_reduce(self._votes, dist.ReduceOp.MAX, async_op=True)
        if self._wait:
            self.close()
        return (self._votes if self._wait else previous).tolist()

    def close(self) -> None:
        """Wait for the last votes."""
        if self._pending is not None:
            self._pending.wait()
