"""Ranks connect in spite of those who take their places, and through the right interface."""

import multiprocessing
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import HANG, TOKEN
from torch.distributed import FileStore

from paceline.distributed import process_group
from paceline.distributed.channel import Channel, ChannelError, connect
from paceline.distributed.plan import JoinSpec, endpoint, plan
from paceline.distributed.server import _MAX_UNAUTHENTICATED, Server
from paceline.errors import UserError


def _rank(rank: int, folder: str, failures: dict[int, int], results: "multiprocessing.Queue[object]") -> None:
    """Of two; the first attempts of some fail, as if somebody else had connected in their place."""
    attempt, times = dist.init_process_group, failures.get(rank, 0)

    def fail_at_first(*words: object, **options: object) -> None:
        nonlocal times
        times -= 1
        if times >= 0:
            raise RuntimeError("Connect timeout")
        attempt(*words, **options)

    process_group.dist.init_process_group = fail_at_first
    process_group._CONNECT_TIMEOUT = timedelta(seconds=1 if failures else HANG)
    store, timeout = FileStore(f"{folder}/store", 2), timedelta(seconds=HANG)
    try:
        process_group.gather_through(store, "started", rank, 2, "", timeout)
        process_group.connect_ranks("gloo", store, rank, 2, timeout)
        dist.all_reduce(total := torch.ones(1))
        results.put((rank, total.item()))
    except UserError as error:
        results.put((rank, error.code))


@pytest.mark.parametrize("failures", [{}, {1: 1}, {0: 1, 1: 2}])
def test_ranks_that_were_not_connected_try_again_together(tmp_path: Path, failures: dict[int, int]) -> None:
    assert _join(tmp_path, failures) == [2.0, 2.0]


def test_ranks_that_never_connect_end_with_a_message(tmp_path: Path) -> None:
    assert _join(tmp_path, {1: 3}) == ["ranks-not-connected"] * 2


def _join(folder: Path, failures: dict[int, int]) -> list[object]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(folder), failures, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    answers = dict(results.get(timeout=HANG) for _ in ranks)
    for rank in ranks:
        rank.join(HANG)
    return [answers[0], answers[1]]


def test_one_machine_stays_on_loopback_whatever_is_set_for_several(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert plan(["train"], 2, JoinSpec()).environment["GLOO_SOCKET_IFNAME"] != "eth9"


def test_nccl_uses_exactly_the_interface_of_the_rendezvous(monkeypatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    found = plan(["train"], 2, JoinSpec()).environment
    assert found["NCCL_SOCKET_IFNAME"] == f"={found['GLOO_SOCKET_IFNAME']}"


def test_an_address_of_ipv6_may_have_brackets() -> None:
    assert endpoint("[fd00::2]:29400") == endpoint("fd00::2:29400") == ("fd00::2", 29400)


def test_a_node_joins_while_others_flood_the_rendezvous() -> None:
    server = Server("127.0.0.1", 0, TOKEN.encode())
    server.start()
    flood = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3 * _MAX_UNAUTHENTICATED)]
    try:
        with ThreadPoolExecutor(8) as pool:
            for channel in pool.map(lambda _: connect("127.0.0.1", server.port, TOKEN.encode(), HANG), range(8)):
                channel.close()
        assert len(server._unauthenticated) <= _MAX_UNAUTHENTICATED
    finally:
        for stranger in flood:
            stranger.close()


def test_a_server_that_closes_early_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        closing = pool.submit(lambda: listener.accept()[0].close())
        with pytest.raises(ChannelError):
            Channel("127.0.0.1", port, TOKEN.encode())
        closing.result()
    with pytest.raises(ChannelError, match="does not respond"):
        connect("127.0.0.1", port, TOKEN.encode(), timeout=0.3)
