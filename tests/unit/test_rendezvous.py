"""The rendezvous: authentication, rounds of nodes, and torch's process group over its store."""

import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import HANG, TOKEN, raises
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from paceline.distributed import membership
from paceline.distributed.channel import Channel, ChannelError, Session, WrongPeerError
from paceline.distributed.objects import all_gather_object, broadcast_object
from paceline.distributed.rendezvous import JoinTerms, MultiNode
from paceline.distributed.server import Server
from paceline.distributed.store import RendezvousStore, network_store

KEY = TOKEN.encode()


@pytest.fixture
def server() -> Server:
    server = Server("127.0.0.1", 0, KEY)
    server.start()
    return server


def node(server: Server, **terms: object) -> MultiNode:
    terms = {"ranks": 1, "minimum": 1, "maximum": 2, "timeout": float(HANG)} | terms
    return MultiNode(f"127.0.0.1:{server.port}", KEY, JoinTerms(**terms), "job")


def test_the_store_behaves_like_torchs_own(server) -> None:
    store = network_store(f"127.0.0.1:{server.port}", "1/test", KEY)
    store.set("name", b"\x00\xff")
    assert store.get("name") == b"\x00\xff"
    assert [store.add("count", amount) for amount in (2, 3, 0)] == [2, 5, 5]
    assert store.check(["name", "count"])
    assert not store.check(["name", "nothing"])
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "other", "second") == b"first"
    assert store.compare_set("new", "first", "second") == b"second"
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert store.delete_key("name")
    assert not store.check(["name"])
    with pytest.raises(DistStoreError, match="1/test/nothing"):
        store.wait(["nothing"], timedelta(milliseconds=50))


def test_waiting_ends_when_the_key_is_set(server) -> None:
    one, other = (RendezvousStore("127.0.0.1", server.port, KEY) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.get, "1/late")
        other.set("1/late", "here")
        assert waiting.result(HANG) == b"here"


@pytest.mark.parametrize("token", [b"", b"another token, which is as long as it has to be"])
def test_a_wrong_token_is_refused(server, token: bytes) -> None:
    with pytest.raises(WrongPeerError, match=f"127.0.0.1:{server.port}") as caught:
        Channel("127.0.0.1", server.port, token)
    assert caught.value.code == "token-mismatch"


def test_another_program_at_the_port_is_recognized() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(lambda: listener.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        with pytest.raises(WrongPeerError) as caught:
            Channel("127.0.0.1", listener.getsockname()[1], KEY)
        answering.result()
    assert caught.value.code == "not-a-rendezvous"


def test_messages_cannot_be_modified_replayed_or_reflected() -> None:
    server, client = (Session(KEY, b"s" * 32, b"c" * 32, is_server) for is_server in (True, False))
    first, second = client.pack({"do": "add"})[4:], client.pack({"do": "get"})[4:]
    with pytest.raises(ChannelError):
        server.unpack(second)  # out of order
    with pytest.raises(ChannelError):
        server.unpack(first.replace(b"add", b"bad"))
    assert server.unpack(first) == {"do": "add"}
    with pytest.raises(ChannelError):
        server.unpack(first)
    with pytest.raises(ChannelError):
        client.unpack(first)
    with pytest.raises(ChannelError, match=str(0xFFFFFFFF)):
        Session.length(b"\xff\xff\xff\xff")


def test_the_first_round_waits_for_all_nodes_and_keeps_their_order(server) -> None:
    nodes = [node(server, minimum=2, order=order, ranks=order + 1) for order in (1, 0)]
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(MultiNode.next_rendezvous, nodes))
    assert [(info.rank, info.world_size) for info in infos] == [(1, 2), (0, 2)]
    assert nodes[0].rank_store == nodes[1].rank_store
    assert [each.num_nodes_waiting() for each in nodes] == [0, 0]


def test_a_late_node_starts_a_new_round(server) -> None:
    first = node(server, timeout=0.2)
    assert first.next_rendezvous().world_size == 1  # alone, after the join timeout
    second = node(server)
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(second.next_rendezvous)
        deadline = time.monotonic() + HANG
        while not first.num_nodes_waiting():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        again = pool.submit(first.next_rendezvous)
        infos = again.result(HANG), joining.result(HANG)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]


def test_a_round_does_not_wait_for_a_lost_node(server) -> None:
    nodes = [node(server, minimum=1) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(MultiNode.next_rendezvous, nodes))
    nodes[0]._is_over.set()  # its connection ends, as if its process was killed
    assert nodes[1].next_rendezvous().world_size == 1


def test_too_few_nodes_time_out(server) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"1 of 2 nodes"):
        node(server, minimum=2, timeout=0.1).next_rendezvous()


def test_no_node_joins_after_the_job_has_ended(server) -> None:
    first, second = node(server, maximum=1), node(server)
    first.next_rendezvous()
    first.shutdown()
    with pytest.raises(RendezvousClosedError):
        second.next_rendezvous()


def test_a_node_without_heartbeats_joins_again(server, monkeypatch) -> None:
    silent = node(server, maximum=1)
    server._members.leave(silent._node)  # before it joins: as if its heartbeats had stopped
    assert silent.next_rendezvous().world_size == 1
    assert membership.LOST == "lost"


def _rank(port: int, rank: int, answers: "multiprocessing.Queue[object]") -> None:
    store = network_store(f"127.0.0.1:{port}", "1/ranks", KEY)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=HANG))
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    value = {"step": 3, 7: [None, 1.5, "text"], "weights": torch.arange(6.0).reshape(2, 3)} if rank == 1 else None
    received = broadcast_object(value, 1, rank)
    gathered = all_gather_object({"rank": rank, "name": "x" * (1 + 5 * rank)}, 2)
    answers.put((float(total), received["weights"].tolist(), received[7], gathered))
    dist.destroy_process_group()


def test_torchs_process_group_works_over_the_store(server, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(server.port, rank, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=HANG) for _ in ranks]
    for process in ranks:
        process.join(HANG)
        assert process.exitcode == 0
    assert found[0] == found[1]
    names = [{"rank": 0, "name": "x"}, {"rank": 1, "name": "xxxxxx"}]
    assert found[0] == (3.0, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [None, 1.5, "text"], names)


_NOT_JSON = (b"\x80\x04cos\nsystem\n", b"[" * 100_000, b"\xff\xfe")
_NOT_VALUES = (b"5", b"[1]", b"[1, 2]", b'[1, [["a"]]]', b'[1, [["a", [], [1]]]]')
_NOT_TREES = (b'[{"x": 1}, []]', b'[{"pairs": [[1]]}, []]', b'[{"pairs": [[1, 2], [1, 3]]}, []]')
_NO_TENSORS = (b'[{"__tensor__": "a"}, []]', b'[{"__tensor__": ["a"]}, []]')


@pytest.mark.parametrize("sent", [*_NOT_JSON, *_NOT_VALUES, *_NOT_TREES, *_NO_TENSORS])
def test_invalid_messages_of_a_rank_are_refused(monkeypatch, sent: bytes) -> None:
    """A process that impersonates a rank sends two broadcasts: the length of a message, and the message."""
    broadcasts = [torch.tensor([len(sent)]), torch.frombuffer(bytearray(sent), dtype=torch.uint8)]
    monkeypatch.setattr(dist, "broadcast", lambda tensor, _src: tensor.copy_(broadcasts.pop(0)))
    with raises("invalid-rank-message") as caught:
        broadcast_object(None, 1, 0)
    assert caught.value.fields == {"rank": 1}


@pytest.mark.parametrize("length", [0, -1, 1 << 62])
def test_invalid_lengths_are_refused(monkeypatch, length: int) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda tensor, _src: tensor.fill_(length))
    with raises("invalid-rank-message"):
        broadcast_object(None, 1, 0)
