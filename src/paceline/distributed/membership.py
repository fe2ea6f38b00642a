"""Which nodes train together: nodes join, a round of them begins, and a later one when nodes fail, leave or come.

first round     begins when all nodes have joined, or, once the join timeout is over, with the minimum of them
later rounds    begin when all nodes that are alive have joined; one that is alive but does not stop its ranks is
                waited for only so long
"""

import asyncio
from dataclasses import dataclass, field

_GRACE = 60.0  # seconds that the others wait for a node that is alive and does not join


CLOSED, LOST = "closed", "lost"


class Refused(Exception):
    """The answer to a node that cannot take part; its text says why."""


@dataclass
class _Join:
    node: str
    ranks: int
    order: int
    """Place among the nodes that the user gave them; of others the order of arrival."""
    minimum: int
    maximum: int
    began: "asyncio.Future[dict[str, int]]" = field(default_factory=asyncio.Future)


class Membership:
    """Used from one event loop only."""

    def __init__(self) -> None:
        self.round = 0
        self._is_closed = False
        self._alive: set[str] = set()
        self._joining: dict[str, _Join] = {}
        self._members: list[str] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._is_late = False
        """Whether the minimum of nodes is enough to begin."""

    async def join(
        self, node: str, ranks: int, order: int, minimum: int, maximum: int, timeout: float
    ) -> dict[str, int]:
        """Wait for the next round; this node's place in it."""
        if self._is_closed:
            raise Refused(CLOSED)
        joining = self._joining[node] = _Join(node, ranks, order, minimum, maximum)
        if not self._deadline:
            wait = _GRACE if self.round else timeout
            self._deadline = asyncio.get_running_loop().call_later(wait, self._be_late)
        self._begin_if_ready()
        try:
            # the minimum of nodes begins when the time is over: give that round the time to reach everybody
            async with asyncio.timeout(timeout + 1.0):
                return await joining.began
        except TimeoutError:
            count = len(self._joining)
            raise Refused(f"{count} of {minimum} nodes joined within {timeout:g} s") from None
        finally:
            if self._joining.get(node) is joining:
                del self._joining[node]

    def arrive(self, node: str) -> None:
        self._alive.add(node)

    def leave(self, node: str) -> None:
        """It does not answer any more."""
        self._alive.discard(node)
        joining = self._joining.pop(node, None)
        if joining and not joining.began.done():
            joining.began.set_exception(Refused(LOST))
        self._begin_if_ready()

    def waiting(self) -> int:
        """Nodes for whose sake the members of this round have to stop and join again."""
        is_broken = any(node in self._joining for node in self._members)
        has_room = any(len(self._members) < joining.maximum for joining in self._joining.values())
        return len(self._joining) if is_broken or has_room else 0

    def close(self) -> None:
        """The job has ended."""
        self._is_closed = True
        for joining in self._joining.values():
            if not joining.began.done():
                joining.began.set_exception(Refused(CLOSED))

    def _begin_if_ready(self) -> None:
        if not self._joining:
            return
        count, limits = len(self._joining), next(iter(self._joining.values()))
        all_alive = self.round > 0 and not self._alive - self._joining.keys()
        if count >= limits.maximum or (count >= limits.minimum and (all_alive or self._is_late)):
            self._begin()

    def _be_late(self) -> None:
        self._is_late = True
        self._begin_if_ready()

    def _begin(self) -> None:
        if self._deadline:
            self._deadline.cancel()
        self._deadline, self._is_late = None, False
        known = {node: place for place, node in enumerate(self._members)}
        # of nodes without a place of their own those stay in front that were there before: rank 0 stays where it is
        chosen = sorted(self._joining.values(), key=lambda join: (join.order, known.get(join.node, len(known))))
        chosen = chosen[: chosen[0].maximum]
        self.round += 1
        self._members = [join.node for join in chosen]
        first_rank, world_size = 0, sum(join.ranks for join in chosen)
        for number, join in enumerate(chosen):
            place = {"round": self.round, "node": number, "nodes": len(chosen)}
            join.began.set_result(place | {"first_rank": first_rank, "world_size": world_size})
            first_rank += join.ranks
            del self._joining[join.node]
