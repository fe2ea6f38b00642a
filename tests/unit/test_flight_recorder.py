"""Which rank did not arrive at a collective, on simulated clocks: watches see counts instead of the flight recorder."""

from datetime import timedelta

import pytest
from conftest import HANG
from torch.distributed import HashStore

from paceline.distributed import flight_recorder
from paceline.distributed.flight_recorder import CollectiveWatch
from paceline.distributed.reports import LOST_RANK
from paceline.errors import UserError


def _watches(store: HashStore, counts: list[dict[str, tuple[int, int]]]) -> list[CollectiveWatch]:
    hosts = [f"node-{rank}" for rank in range(len(counts))]
    watches = [CollectiveWatch(store, rank, hosts) for rank in range(len(counts))]
    for watch, count in zip(watches, counts, strict=True):
        watch.counts = lambda count=count: {("nccl", group): each for group, each in count.items()}
    return watches


@pytest.fixture
def minute(monkeypatch) -> None:
    """Collectives time out after 60 s."""
    monkeypatch.setattr(flight_recorder, "_timeout", timedelta(seconds=60))
    monkeypatch.setattr(flight_recorder, "_folder", None)


@pytest.mark.usefixtures("minute")
def test_a_rank_that_computes_while_all_others_wait_is_missing() -> None:
    counts = [{"0": (7, 6)}, {"0": (6, 6)}, {"0": (7, 6)}]
    watches = _watches(HashStore(), counts)
    for now in range(0, 60, 5):
        waits = [watch.observe(float(now)) for watch in watches]
    assert [seconds for seconds, _ in waits] == [55.0, 0.0, 55.0]
    for rank in (0, 2):
        error = watches[rank].explain()
        assert error is not None
        assert (error.code, error.fields) == (LOST_RANK, {"rank": rank, "missing": [1]})
        assert "node-1" in str(error)
    assert watches[1].explain() is None


@pytest.mark.usefixtures("minute")
def test_the_first_collective_of_a_group_is_watched() -> None:
    (watch,) = _watches(HashStore(), [{"0": (1, -1)}])  # torch's number of the last completed one before any is
    assert [watch.observe(now)[0] for now in (0.0, 20.0)] == [0.0, 20.0]


@pytest.mark.usefixtures("minute")
def test_collectives_that_are_not_torchs_are_watched(monkeypatch) -> None:
    monkeypatch.setattr(flight_recorder, "_others", {})
    flight_recorder.watch_also("local", "barrier", lambda: (3, 2))
    watch = CollectiveWatch(HashStore(), 0, ["node-0"])
    assert [watch.observe(now) for now in (0.0, 20.0)] == [(0.0, "local"), (20.0, "local")]


@pytest.mark.usefixtures("minute")
def test_slow_collectives_that_complete_are_forgotten() -> None:
    counts = [{"0": (7, 6)}, {"0": (7, 6)}]
    watches = _watches(HashStore(), counts)
    for now in (0.0, 40.0):
        for watch in watches:
            watch.observe(now)
    counts[0]["0"] = counts[1]["0"] = (8, 7)  # the next one
    for watch in watches:
        assert watch.observe(41.0)[0] == 0.0
        assert watch.explain() is None


@pytest.mark.usefixtures("minute")
def test_a_rank_at_an_earlier_collective_is_missing() -> None:
    watches = _watches(HashStore(), [{"0": (9, 8)}, {"0": (7, 6)}])
    for now in (0.0, 40.0):
        for watch in watches:
            watch.observe(now)
    error = watches[0].explain()
    assert error is not None
    assert error.fields == {"rank": 0, "missing": [1]}


@pytest.mark.usefixtures("minute")
def test_a_rank_behind_a_stuck_kernel_is_ended_by_its_watch(monkeypatch) -> None:
    ended: list[UserError] = []
    monkeypatch.setattr(flight_recorder, "_timeout", timedelta(seconds=1))
    watch = _watches(HashStore(), [{"0": (7, 6)}, {"0": (6, 6)}])[0]

    def end(error: UserError) -> None:
        ended.append(error)
        watch.stop()

    monkeypatch.setattr(flight_recorder, "end_rank", end)
    watch.start()
    watch._thread.join(HANG)
    assert [error.code for error in ended] == [LOST_RANK]
