"""Bandwidth between ranks: on a simulated device whose calls return when they are enqueued, and on real gloo ranks."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import raises
from processes import run_ranks

from paceline.distributed import bandwidth
from paceline.distributed.bandwidth import (
    Bandwidth,
    all_reduce_bandwidth,
    pairs,
    seconds_per_call,
)
from paceline.distributed.world import World


@dataclass
class EnqueueingDevice:
    """Works through its queue on its own clock; the host gets ahead of it until it synchronizes."""

    host: float = 0.0
    done: float = 0.0
    calls: int = 0

    def enqueue(self, setup: float = 5.0, each: float = 0.01) -> None:
        self.host += 1e-6
        self.done = max(self.done, self.host) + each + (0.0 if self.calls else setup)
        self.calls += 1

    def synchronize(self) -> None:
        self.host = max(self.host, self.done)

    def clock(self) -> float:
        return self.host


def test_time_is_that_of_the_device_without_setup() -> None:
    device = EnqueueingDevice()
    taken = seconds_per_call(device.enqueue, device.synchronize, lambda own: own, 1.0, device.clock)
    assert taken == pytest.approx(0.01, rel=1e-3)
    assert 90 < device.calls < 110


def test_slowest_rank_counts_and_decides_on_the_repeats() -> None:
    device = EnqueueingDevice()
    taken = seconds_per_call(device.enqueue, device.synchronize, lambda own: 4 * own, 1.0, device.clock)
    assert taken == pytest.approx(0.04, rel=1e-3)
    assert 25 < device.calls < 32


def test_bandwidth_of_gpus_synchronizes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock, the collective and the wait of a world are those of the simulated device."""
    device = EnqueueingDevice()
    monkeypatch.setattr(seconds_per_call, "__defaults__", (device.clock,))
    monkeypatch.setattr(bandwidth, "wait", lambda _: device.synchronize())

    def all_reduce(tensor: torch.Tensor) -> None:
        tensor.mul_(2)
        device.enqueue()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(World, "all_gather_object", lambda _, value: [value, value])
    measured = all_reduce_bandwidth(World(size=2), 1.0, 1 << 10)
    assert measured.algorithm_bytes_per_second == pytest.approx((1 << 10) / 0.01, rel=1e-3)


def test_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(3))
    with raises("all-reduce-wrong"):
        all_reduce_bandwidth(World(size=2), 0.1, 1 << 10)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    for ranks, factor in ((2, 1.0), (4, 1.5), (8, 1.75)):
        measured = Bandwidth(tuple(range(ranks)), 1000, 0.5)
        assert measured.algorithm_bytes_per_second == 2000
        assert measured.bus_bytes_per_second == 2000 * factor


def test_every_gpu_is_in_a_pair() -> None:
    assert pairs(1, 1) == []
    assert pairs(4, 4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    many = pairs(32, 8)
    assert {rank for pair in many for rank in pair} == set(range(32))
    assert {(0, 1), (0, 8), (7, 8), (7, 15), (0, 31), (0, 24)} <= set(many)
    assert len(many) == 64
    assert all(low < high for low, high in pairs(9, 1))


def test_real_ranks_measure_themselves_and_every_pair(tmp_path: Path) -> None:
    answer = run_ranks(tmp_path, 3, "test-allreduce", "--seconds", "0.05", "--device", "cpu")
    (line,) = answer.stdout.splitlines()
    figures = json.loads(line)
    assert [name.split()[-1] for name in figures["ranks"]] == ["cpu"] * 3
    assert [pair[:2] for pair in figures["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert min(figures["bus_bytes_per_second"], *(pair[2] for pair in figures["pairs"])) > 0
