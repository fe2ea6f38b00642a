"""Finds the ranks that did not arrive at a collective, and writes torch's flight recorder to the run folder.

torch's own dump on a timeout is a pickle, which runs code when it is loaded, and its threads poll the store every
second. Here a thread of each rank watches the progress of collectives, and uses the store only if one takes too long.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store

from paceline.distributed.reports import LOST_RANK, report_error
from paceline.errors import UserError
from paceline.system.files import make_folder, write_json
from paceline.system.torch_internals import flight_records

CollectiveCounts = Mapping[tuple[str, str], tuple[int, int]]
"""Numbers of the last enqueued and the last completed collective by library and group."""
_MARGIN = 1.0  # seconds before torch's watchdog aborts a rank, enough to report why
_MAX_LISTED = 8  # ranks in a message

_timeout = timedelta(minutes=10)
_folder: Path | None = None
_others: dict[tuple[str, str], Callable[[], tuple[int, int]]] = {}


def set_timeout(timeout: timedelta) -> None:
    """Note how long collectives wait for other ranks."""
    global _timeout
    _timeout = timeout


def timeout() -> timedelta:
    """Return how long collectives wait for other ranks."""
    return _timeout


def watch_also(library: str, group: str, counts: Callable[[], tuple[int, int]]) -> None:
    """Watch collectives that are not torch's; `counts` returns the numbers of entered and of completed ones."""
    _others[library, group] = counts


def set_folder(folder: Path) -> None:
    """Choose where the flight recorder is written."""
    global _folder
    _folder = folder


class CollectiveWatch:
    """Watches the collectives of this rank in a thread, from `start` to `stop`."""

    def __init__(self, store: Store, rank: int, hosts: list[str]):
        self._store, self._rank, self._hosts = store, rank, hosts
        self._since: dict[tuple[str, str], tuple[int, float]] = {}
        self._published, self._enqueued = "", 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)

    def counts(self) -> CollectiveCounts:
        """Return the progress of the collectives of this rank."""
        return {key: counts() for key, counts in _others.items()} | {
            (library, group): (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
            for library, records in flight_records(collectives=False).items()
            for group, status in records.get("pg_status", {}).items()
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        with suppress(RuntimeError):  # without the store, errors name no rank
            pause = 0.0
            while not self._ended.wait(pause):
                waited, library = self.observe(time.monotonic())
                timeout = _timeout.total_seconds()
                # the main thread of a rank with GPUs waits inside CUDA and cannot report anything
                if library == "nccl" and waited >= timeout - _MARGIN:
                    end_rank(self.explain() or lost_rank(self._rank, "a collective timed out"))
                pause = _MARGIN / 4 if waited >= timeout / 2 else min(1.0, timeout / 20)

    def observe(self, now: float) -> tuple[float, str]:
        """Return how many seconds the longest pending collective has taken, and its library.

        After half of the timeout, the other ranks are told that this one waits.
        """
        progress = self.counts()
        pending = {key: done for key, (enqueued, done) in progress.items() if enqueued > done}
        self._since = {
            key: since if (since := self._since.get(key)) and since[0] == done else (done, now)
            for key, done in pending.items()
        }
        enqueued = sum(number for number, _ in progress.values())
        key = min(self._since, key=lambda each: self._since[each][1], default=None)
        done, begin = self._since[key] if key else (0, now)
        if key and now - begin >= _timeout.total_seconds() / 2:
            self._publish(json.dumps([*key, done + 1]), enqueued)
        elif enqueued != self._enqueued:  # a collective that failed counts as completed, but none follows it
            self._publish("", enqueued)
        return now - begin, key[0] if key else ""

    def _publish(self, state: str, enqueued: int) -> None:
        if state != self._published:
            self._store.set(f"waiting/{self._rank}", state)
        self._published, self._enqueued = state, enqueued

    def explain(self) -> UserError | None:
        """Return the error of a collective that timed out, with the ranks that did not arrive; None for other errors.

        Also writes the flight recorder of this rank.
        """
        if not self._published:
            return None
        library, group, number = json.loads(self._published)
        with suppress(OSError):
            _dump(self._rank)
        keys = [f"waiting/{rank}" for rank in range(len(self._hosts))]
        states = [self._store.get(key).decode() if self._store.check([key]) else "" for key in keys]
        absent = [rank for rank, state in enumerate(states) if not state]
        same = {rank: json.loads(state) for rank, state in enumerate(states) if state}
        behind = [rank for rank, state in same.items() if state[:2] == [library, group] and state[2] < number]
        missing = absent or behind
        what = f"{_name(library, group, number)} within {_timeout.total_seconds():g} s"
        if missing:
            who = ", ".join(f"rank {rank} ({self._hosts[rank]})" for rank in missing[:_MAX_LISTED])
            text = f"{who}{' ...' * (len(missing) > _MAX_LISTED)} did not arrive at {what}"
        else:
            text = f"all ranks arrived at {what} of each other, but did not complete it. Check the network"
        return lost_rank(self._rank, text, missing)


def lost_rank(rank: int, what: str, missing: list[int] | None = None) -> UserError:
    """Return the error of a rank that cannot communicate with others."""
    where = f" Recent collectives of this rank: {_path(rank)}." if missing is not None and _folder else ""
    message = (
        f"rank {rank} cannot continue: {what}. Look for the first failure in the log of that rank, then run the same "
        f"command again to resume from the last checkpoint.{where}"
    )
    return UserError(LOST_RANK, message, rank=rank, **({"missing": missing} if missing else {}))


def end_rank(error: UserError) -> None:
    """Report an error and end this process, whose main thread cannot do it."""
    if not report_error(error):
        print(f"paceline: error: {error.report}", file=sys.stderr, flush=True)
    os._exit(1)


def _name(library: str, group: str, number: int) -> str:
    """Return e.g. "collective 17 (gloo:all_reduce)"."""
    entries: list[dict[str, Any]] = flight_records(collectives=True).get(library, {}).get("entries", [])
    names = (
        entry["profiling_name"]
        for entry in reversed(entries)
        if str(entry["pg_id"]) == group and entry["collective_seq_id"] == number and not entry["is_p2p"]
    )
    name = next(names, "")
    return f"collective {number}" + (f" ({name})" if name else "")


def _path(rank: int) -> Path:
    assert _folder
    return _folder / f"rank-{rank}.json"


def _dump(rank: int) -> None:
    if _folder:
        make_folder(_folder)
        write_json(_path(rank), flight_records(collectives=True))
