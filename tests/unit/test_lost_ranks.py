"""Ranks whose peers died or do not respond: they report it and exit, and the error names the rank that is missing."""

import json
import multiprocessing
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HANG
from torch.distributed import HashStore

from paceline.distributed import flight_recorder, process_group, world
from paceline.distributed.env import STORE
from paceline.distributed.plan import interface_of
from paceline.distributed.process_group import is_lost_connection
from paceline.distributed.reports import LOST_RANK
from paceline.distributed.world import World
from paceline.errors import Stopped, UserError

LOST = [
    # gloo
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41234",
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:490] Read error [10.0.0.2]:9: "
    "Connection reset by peer",
    "[unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation to complete",
    "[unbound_buffer.cc:81] Application timeout caused pair closure",
    # NCCL, through torch's DistBackendError
    "NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=19, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=60000) ran for 60081 "
    "milliseconds before timing out.",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, remote process exited or there was a "
    "network error, NCCL version 2.26.2\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer "
    "ip-10-0-0-5.ec2.internal<49152>",
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, "
    "NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.",
    # the store
    "the connection to the rendezvous is lost: 10.0.0.1:29400 closed the connection",
]
OWN = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: device-side assert triggered",
    "NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.26.2",
]


@pytest.mark.parametrize("message", LOST)
def test_messages_of_gloo_and_nccl_about_a_lost_rank(message: str) -> None:
    assert is_lost_connection(RuntimeError(message))


@pytest.mark.parametrize("message", OWN)
def test_messages_about_the_own_rank(message: str) -> None:
    assert not is_lost_connection(RuntimeError(message))


def _block(*_: object, **__: object) -> None:
    threading.Event().wait()


def _rank(rank: int, size: int, folder: str, behavior: str, results: "multiprocessing.Queue[Any]") -> None:
    """Connect and communicate; `behavior` says what the last rank does then."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {STORE: f"{folder}/store", "PACELINE_THREADS": "1", "GLOO_SOCKET_IFNAME": interface_of("127.0.0.1")}
    # as NCCL does when a rank is dead: destroying waits, and so may aborting
    process_group.dist.destroy_process_group = _block
    process_group.abort_groups = _block
    process_group._ABORT_TIMEOUT = 0.1
    flight_recorder.set_folder(Path(folder) / "flight-recorder")
    try:
        with World.from_env("cpu").connected() as ranks:
            ranks.barrier()
            if rank == size - 1:
                _last(behavior)
            if behavior == "sleeps":
                process_group.set_timeout(timedelta(seconds=4))
            ranks.sum_(torch.ones(3))
    except UserError as error:
        results.put((rank, error.code, error.fields, str(error)))
    results.close()
    results.join_thread()
    os._exit(0)


def _last(behavior: str) -> None:
    if behavior == "dies":
        os._exit(1)
    time.sleep(HANG)


def _run(folder: Path, behavior: str, size: int) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, size, str(folder), behavior, results)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        found = sorted((results.get(timeout=HANG) for _ in ranks[:-1]), key=lambda each: each[0])
        for rank in ranks[:-1]:
            rank.join(HANG)
            assert rank.exitcode == 0
        return found
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_whose_peer_died_reports_it_although_destroying_the_group_would_block(tmp_path: Path) -> None:
    [(_, code, fields, _)] = _run(tmp_path, "dies", size=2)
    assert (code, fields) == (LOST_RANK, {"rank": 0})


def test_the_error_names_the_rank_that_did_not_arrive(tmp_path: Path) -> None:
    for rank, code, fields, text in _run(tmp_path, "sleeps", size=3):
        assert (code, fields) == (LOST_RANK, {"rank": rank, "missing": [2]})
        assert "rank 2" in text
        assert "all_reduce" in text
        dumped = json.loads((tmp_path / "flight-recorder" / f"rank-{rank}.json").read_text())
        assert dumped["gloo"]["entries"][-1]["profiling_name"] == "gloo:all_reduce"


class _Group:
    """A stand-in for torch's process group, which notes what is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[str] = []
        for name in ("destroy_group", "abandon_group"):
            monkeypatch.setattr(process_group, name, lambda name=name: self.called.append(name))
        monkeypatch.setattr(process_group, "connect_ranks", lambda *_: self.called.append("connect"))
        monkeypatch.setattr(process_group, "connect_gpus", lambda device: self.called.append(f"connect {device}"))
        monkeypatch.setattr(process_group, "gather_through", lambda store, key, rank, size, value, timeout: [value])
        monkeypatch.setattr(world, "refuse_new_connections", lambda: None)
        monkeypatch.setattr(world, "_store", lambda size: HashStore())
        monkeypatch.setattr(World, "barrier", lambda self: self_called.append("barrier"))
        self_called = self.called


@pytest.fixture
def group(monkeypatch) -> _Group:
    monkeypatch.setenv("PACELINE_THREADS", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return _Group(monkeypatch)


def test_the_group_is_destroyed_only_after_a_barrier(group: _Group) -> None:
    with World(0, 2).connected():
        pass
    assert group.called == ["connect", "barrier", "destroy_group"]


def test_ranks_that_stop_together_leave_together(group: _Group) -> None:
    with pytest.raises(Stopped), World(0, 2).connected():
        raise Stopped(15)
    assert group.called == ["connect", "barrier", "destroy_group"]


@pytest.mark.parametrize("error", [ValueError("a bug"), UserError("data-not-found", "no data"), KeyboardInterrupt()])
def test_after_a_failure_the_group_is_abandoned(group: _Group, error: BaseException) -> None:
    with pytest.raises(type(error)), World(0, 2).connected():
        raise error
    assert group.called == ["connect", "abandon_group"]


def test_nccl_connects_at_the_start(group: _Group, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"uuid": "a"}))
    with World(0, 2, device=torch.device("cuda", 0)).connected():
        group.called.append("train")
    assert group.called == ["connect", "connect cuda:0", "train", "barrier", "destroy_group"]
