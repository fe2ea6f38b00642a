"""GPU ranks and the cores of their NUMA nodes, on made-up machines."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.distributed import world
from paceline.system import host, numa
from paceline.system.device import pci_address

FIRST, SECOND = frozenset((*range(8), *range(16, 24))), frozenset((*range(8, 16), *range(24, 32)))
"""Two sockets of eight physical cores with two hardware threads each."""
ALL = FIRST | SECOND
SIBLINGS = {core: core % 16 for core in ALL}
UNKNOWN: frozenset[int] = frozenset()


def _shares(mask: frozenset[int], local: list[frozenset[int]]) -> list[numa.Share | None]:
    return [numa.divide(mask, local, rank, SIBLINGS) for rank in range(len(local))]


def test_eight_gpus_on_two_sockets() -> None:
    shares = _shares(ALL, [FIRST] * 4 + [SECOND] * 4)
    assert [share.near for share in shares if share] == [
        frozenset((core, core + 1, core + 16, core + 17)) for core in range(0, 16, 2)
    ]
    assert all(share and not share.spare for share in shares)


def test_gpus_that_alternate_between_sockets() -> None:
    shares = _shares(ALL, [FIRST, SECOND, FIRST, SECOND])
    assert [sorted(share.near) for share in shares if share] == [
        [0, 1, 2, 3, 16, 17, 18, 19],
        [8, 9, 10, 11, 24, 25, 26, 27],
        [4, 5, 6, 7, 20, 21, 22, 23],
        [12, 13, 14, 15, 28, 29, 30, 31],
    ]


def test_one_gpu_decodes_on_the_other_socket_too() -> None:
    assert _shares(ALL, [SECOND]) == [numa.Share(near=SECOND, spare=FIRST)]


def test_two_gpus_on_one_socket_share_the_other_one() -> None:
    first, second = _shares(ALL, [FIRST, FIRST])
    assert first
    assert second
    assert first.near | second.near == FIRST
    assert first.spare | second.spare == SECOND
    assert not (first.near | first.spare) & (second.near | second.spare)


def test_without_numa_nodes_a_rank_keeps_its_cores() -> None:
    assert _shares(ALL, [UNKNOWN, UNKNOWN]) == [None, None]


def test_a_mask_that_excludes_the_socket_is_kept() -> None:
    assert _shares(FIRST, [SECOND]) == [None]


def test_a_mask_restricts_the_cores() -> None:
    assert _shares(frozenset((0, 1, 9)), [FIRST]) == [numa.Share(near=frozenset((0, 1)), spare=frozenset((9,)))]


def test_more_ranks_than_cores_are_not_bound() -> None:
    assert _shares(frozenset((0, 8)), [FIRST, FIRST, SECOND]) == [
        None,
        None,
        numa.Share(near=frozenset((8,)), spare=UNKNOWN),
    ]


@given(
    st.sets(st.sampled_from(sorted(ALL))), st.lists(st.sampled_from([FIRST, SECOND, UNKNOWN]), min_size=1, max_size=9)
)
def test_shares_are_near_disjoint_and_within_the_mask(mask: set[int], local: list[frozenset[int]]) -> None:
    shares = [share for share in _shares(frozenset(mask), local) if share]
    cores = [core for share in shares for core in share.near | share.spare]
    assert len(cores) == len(set(cores))
    assert set(cores) <= mask
    for rank, share in enumerate(_shares(frozenset(mask), local)):
        assert share is None or (share.near and share.near <= local[rank])


@pytest.mark.parametrize(("text", "cores"), [("0-2,64\n", {0, 1, 2, 64}), ("5", {5}), ("\n", set())])
def test_core_lists_of_the_kernel(text: str, cores: set[int]) -> None:
    assert numa.parse(text) == cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> list[list[int]]:
    """A machine with two sockets and four GPUs. Returns the affinities that are set."""
    for number, cores in enumerate(("0-7,16-23", "0-7,16-23", "8-15,24-31", "8-15,24-31")):
        folder = tmp_path / f"0000:{number:02x}:00.0"
        folder.mkdir()
        (folder / "numa_node").write_text(f"{number // 2}\n")
        (folder / "local_cpulist").write_text(f"{cores}\n")
    virtual = tmp_path / "0000:09:00.0"
    virtual.mkdir()
    (virtual / "numa_node").write_text("-1\n")
    (virtual / "local_cpulist").write_text("0-31\n")
    affinities: list[list[int]] = []
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    monkeypatch.setattr(numa, "siblings_of", lambda _: SIBLINGS)
    monkeypatch.setattr(host, "_mask", frozenset())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: affinities.append(sorted(cores)), raising=False)
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return affinities


def test_sysfs_gives_the_cores_of_a_gpu(machine: list[list[int]]) -> None:
    assert numa.cores_of("0000:02:00.0") == SECOND
    assert numa.cores_of("0000:09:00.0") == UNKNOWN  # a virtual machine without NUMA nodes
    assert numa.cores_of("0000:77:00.0") == numa.cores_of("") == UNKNOWN


def _stub_gpus(monkeypatch, visible: int) -> None:
    class Properties:
        def __init__(self, bus: int):
            self.pci_domain_id, self.pci_bus_id, self.pci_device_id = 0, bus, 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties(device.index))


def test_a_rank_is_bound_to_the_cores_of_its_gpu_and_so_are_its_threads(machine: list[list[int]], monkeypatch) -> None:
    _stub_gpus(monkeypatch, visible=4)
    assert pci_address(torch.device("cuda", 3)) == "0000:03:00.0"
    world._bind_near_gpu(torch.device("cuda", 3), local_rank=3, local_size=4)
    quarter = [12, 13, 14, 15, 28, 29, 30, 31]
    assert machine == [quarter]
    assert host.cores() == len(quarter)
    thread = host.BackgroundThread(lambda: None, "any")
    thread.start()
    thread.join()
    assert machine == [quarter, quarter]


def test_cores_of_a_slurm_task_are_not_divided_again(machine: list[list[int]], monkeypatch) -> None:
    _stub_gpus(monkeypatch, visible=4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 18, 19}, raising=False)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    world._bind_near_gpu(torch.device("cuda", 1), local_rank=1, local_size=4)
    assert machine == [[2, 3, 18, 19]]


def test_a_slurm_task_that_sees_only_its_own_gpu(machine: list[list[int]], monkeypatch) -> None:
    _stub_gpus(monkeypatch, visible=1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 18, 19}, raising=False)
    world._bind_near_gpu(torch.device("cuda", 0), local_rank=3, local_size=4)
    assert machine == [[2, 3, 18, 19]]


def test_an_affinity_that_the_user_chose_is_kept(machine: list[list[int]], monkeypatch) -> None:
    _stub_gpus(monkeypatch, visible=4)
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    world._bind_near_gpu(torch.device("cuda", 0), local_rank=0, local_size=4)
    assert machine == []


@pytest.mark.parametrize("chosen", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_user_configured_the_allocator(monkeypatch, chosen: str) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(chosen, "max_split_size_mb:128")
    host.expand_gpu_segments()
    found = {name: os.environ[name] for name in names if name in os.environ}
    assert found == ({chosen: "max_split_size_mb:128"} if chosen else {names[0]: "expandable_segments:True"})
    monkeypatch.delenv(names[0], raising=False)
