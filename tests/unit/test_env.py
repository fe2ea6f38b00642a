"""The rank from the environment, and the plan of the launcher, without starting anything."""

import socket

import pytest
import torch
from conftest import TOKEN, raises

from paceline.distributed import plan as plans
from paceline.distributed import world as worlds
from paceline.distributed.env import first_host, last_host, under_launcher
from paceline.distributed.plan import JoinSpec, plan
from paceline.distributed.world import World

SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04,7]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def clean(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *SLURM):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_single_process_is_a_world_of_size_one(clean) -> None:
    world = World.from_env("cpu")
    assert (world.rank, world.size, world.is_rank_zero) == (0, 1, True)
    with world.connected():
        assert world.sum_(torch.ones(2)).tolist() == [1, 1]
        assert world.on_rank_zero(lambda: 5) == 5
        world.barrier()


def test_torchrun_variables(clean) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        clean.setenv(name, value)
    with raises("incomplete-rank-env") as caught:
        World.from_env("cpu")
    assert "MASTER_ADDR=None" in str(caught.value)
    clean.setenv("MASTER_ADDR", "127.0.0.1")
    clean.setenv("MASTER_PORT", "29400")
    world = World.from_env("cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    clean.setenv("RANK", "x")
    with raises("incomplete-rank-env") as caught:
        World.from_env("cpu")
    assert "RANK='x'" in str(caught.value)


def test_srun_variables(clean) -> None:
    for name, value in SLURM.items():
        clean.setenv(name, value)
    world = World.from_env("cpu")
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 5, 1, 2)
    assert worlds.os.environ["MASTER_ADDR"] == "gpu03"
    assert 1024 < int(worlds.os.environ["MASTER_PORT"]) < 65536


def test_a_batch_script_and_a_single_task_are_not_ranks() -> None:
    assert not under_launcher({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert not under_launcher(SLURM | {"SLURM_STEP_NUM_TASKS": "1"})
    assert under_launcher(SLURM)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-4]", "n1"), ("gpu-[003,007]", "gpu-003"), ("a[2-3],b", "a2")],
)
def test_first_host_of_a_slurm_nodelist(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n2"),
        ("n[1-4]", "n4"),
        ("gpu-[003,007]", "gpu-007"),
        ("a[2-3],b", "b"),
        ("a,b[2]", "b2"),
    ],
)
def test_last_host_of_a_slurm_nodelist(nodelist: str, host: str) -> None:
    assert last_host(nodelist) == host


def test_a_nodelist_without_a_host_is_refused() -> None:
    with raises("invalid-slurm-nodelist") as caught:
        first_host("[1-2]")
    assert "'[1-2]'" in str(caught.value)


@pytest.mark.parametrize(("token", "code"), [("", "token-missing"), ("short", "token-too-short")])
def test_several_nodes_need_a_token(monkeypatch, token: str, code: str) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", token)
    with raises(code):
        plan(["train", "digits"], 1, JoinSpec(2, "127.0.0.1:29400", 1))


def test_a_rendezvous_name_that_resolves_to_loopback_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    monkeypatch.setattr(plans, "own_address_towards", lambda host, port: "127.0.0.1")
    with raises("rendezvous-loopback") as caught:
        plan(["train", "digits"], 1, JoinSpec(2, "vm:29400"))
    assert caught.value.fields == {"host": "vm"}


def test_processes_divide_the_cores(clean) -> None:
    clean.delenv("PACELINE_THREADS", raising=False)
    clean.setattr(worlds.os, "sched_getaffinity", lambda _: set(range(8)))
    assert [worlds.threads_per_process(processes) for processes in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("threads", ["0", "x", "-1"])
def test_an_invalid_number_of_threads_is_refused(monkeypatch, threads: str) -> None:
    monkeypatch.setenv("PACELINE_THREADS", threads)
    with raises("invalid-threads") as caught:
        worlds.threads_per_process(1)
    assert repr(threads) in str(caught.value)


def test_a_missing_gpu_is_reported(clean) -> None:
    clean.setattr(torch.cuda, "is_available", lambda: False)
    with raises("no-gpu"):
        World.from_env("cuda")


def test_one_node_uses_the_loopback_interface(monkeypatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    planned = plan(["train", "digits"], 2, JoinSpec())
    assert planned.environment["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert planned.command == ["train", "digits"]
    assert planned.listen == ""


def test_several_nodes_rendezvous_at_node_0(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        rendezvous = f"127.0.0.1:{taken.getsockname()[1]}"
        planned = plan(["train", "digits"], 1, JoinSpec(2, rendezvous, 1))
        assert "GLOO_SOCKET_IFNAME" not in planned.environment  # the user's choice is kept
        assert plan(["train", "digits"], 1, JoinSpec(2, rendezvous)).listen == "127.0.0.1"


@pytest.mark.parametrize("rendezvous", ["host", "host:", ":29400", "host:port", "host:99999"])
def test_an_invalid_rendezvous_is_refused(rendezvous: str, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    with raises("invalid-rendezvous") as caught:
        plan(["train", "digits"], 1, JoinSpec(2, rendezvous, 1))
    assert repr(rendezvous) in str(caught.value)
