"""Calls on rank 0 between two real ranks, and which ranks share a machine."""

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import HANG
from torch.distributed import FileStore, destroy_process_group

from paceline.distributed import process_group
from paceline.distributed.plan import JoinSpec, plan
from paceline.distributed.world import World
from paceline.errors import UserError


def _fail() -> None:
    raise UserError("run-folder-unsafe", "runs/a: log.txt is a link", path=Path("runs/a"), links=["log.txt"], count=1)


def _rank(rank: int, folder: str, results: "multiprocessing.Queue[Any]") -> None:
    process_group.connect_ranks("gloo", FileStore(f"{folder}/store", 2), rank, 2, timedelta(seconds=HANG))
    world = World(rank, 2)
    value = world.on_rank_zero(lambda: {"rank": rank})
    try:
        world.on_rank_zero(_fail)
    except UserError as error:
        results.put((value, error.code, str(error), error.fields))
    destroy_process_group()


def test_an_error_on_rank_zero_has_its_code_and_fields_on_all_ranks(tmp_path: Path, monkeypatch) -> None:
    for name, setting in plan(["train"], 2, JoinSpec()).environment.items():
        monkeypatch.setenv(name, setting)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    fields = {"path": "runs/a", "links": ["log.txt"], "count": 1}
    expected = ({"rank": 0}, "run-folder-unsafe", "runs/a: log.txt is a link", fields)
    assert [results.get(timeout=HANG) for _ in ranks] == [expected, expected]
    for rank in ranks:
        rank.join(HANG)


def test_the_rank_timeout_begins_when_all_ranks_have_completed_the_first_step(monkeypatch) -> None:
    """A GPU may still run it, with collectives that wait for slower ranks."""
    calls: list[str] = []
    monkeypatch.setattr("paceline.distributed.world.wait", lambda device: calls.append(f"wait for {device}"))
    monkeypatch.setattr(World, "barrier", lambda self: calls.append("barrier"))
    monkeypatch.setattr(process_group, "set_timeout", lambda timeout: calls.append("timeout"))
    World(0, 2, device=torch.device("cuda", 1)).shorten_timeout()
    assert calls == ["wait for cuda:1", "barrier", "timeout"]


def test_ranks_of_simulated_nodes_are_processes_of_this_machine(monkeypatch) -> None:
    gathered: list[object] = []
    monkeypatch.setattr(World, "all_gather_object", lambda self, value: gathered.append(value) or gathered)
    for node in ("node-0", "node-1"):
        monkeypatch.setenv("PACELINE_HOST", node)
        processes = World(0, 2).processes_here()
    assert processes == [os.getpid()] * 2
