"""Which device a rank uses, and which devices of ranks fit together. GPUs are stubs."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HANG, environment, raises

from paceline.distributed import devices
from paceline.distributed.devices import RankDevice, check_devices, choose_device, describe, sharing_cores
from paceline.distributed.world import World
from paceline.engine import precision
from paceline.system.gpus import Gpu

A10G, T4 = ("A10G", True), ("Tesla T4", False)


@pytest.fixture
def cuda(monkeypatch) -> Any:
    """A function that makes torch see a number of GPUs."""

    def make(count: int, uuid: str = "0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: type("Properties", (), {"uuid": f"{uuid}.{device.index}"}),
        )

    return make


@pytest.fixture
def installed(monkeypatch) -> Any:
    """A function that makes the driver list a number of GPUs."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name)

    def make(count: int, vendor: str = "nvidia") -> None:
        gpus = [Gpu(vendor, "Some GPU", f"GPU-{number}") for number in range(count)]
        monkeypatch.setattr(devices, "installed_gpus", lambda: gpus)
        monkeypatch.setattr("paceline.system.gpus.installed_gpus", lambda: gpus)

    return make


# ---- one GPU per task ----


def test_each_rank_takes_its_own_gpu(cuda) -> None:
    cuda(4)
    assert [choose_device("auto", rank).index for rank in range(4)] == [0, 1, 2, 3]
    with raises("too-few-gpus") as caught:
        choose_device("auto", 4)
    assert caught.value.fields == {"gpus": 4}


def test_a_task_that_sees_one_gpu_takes_it(cuda) -> None:
    found = []
    for rank in range(2):  # srun --gpus-per-task=1
        cuda(1, uuid=f"gpu-{rank}")
        device = choose_device("auto", local_rank=rank, size=2)
        assert device == torch.device("cuda", 0)
        found.append(describe(device))
    check_devices(found)


def test_two_ranks_on_one_gpu_are_refused(cuda) -> None:
    cuda(1)
    found = [describe(choose_device("auto", rank, 2)) for rank in range(2)]
    with raises("too-few-gpus") as caught:
        check_devices(found)
    assert caught.value.fields == {"gpus": 1, "ranks": [0, 1]}


# ---- the same kind of device on all ranks ----


def _ranks(*kinds: str) -> list[RankDevice]:
    return [
        RankDevice(f"node-{rank}", "machine", kind, f"gpu-{rank}" if kind in ("cuda", "rocm") else "", "ff")
        for rank, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("kinds", [("cuda", "cuda", "cpu"), ("cuda", "rocm"), ("cpu", "cuda")])
def test_different_kinds_of_devices_are_refused(kinds: tuple[str, ...]) -> None:
    with raises("rank-device-mismatch") as caught:
        check_devices(_ranks(*kinds))
    assert caught.value.fields["ranks"] == [0, len(kinds) - 1]
    assert "node-0" in str(caught.value)
    assert f"node-{len(kinds) - 1}" in str(caught.value)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm"])
def test_equal_kinds_of_devices_train_together(kind: str) -> None:
    check_devices(_ranks(kind, kind, kind))


def test_gpus_without_a_uuid_are_told_apart_by_address_and_machine() -> None:
    same = RankDevice("a", "a", "rocm", "0000 0000:03:00.0", "")
    check_devices([same, same._replace(gpu="0000 0000:04:00.0")])
    check_devices([same, same._replace(host="b", machine="b")])
    with raises("too-few-gpus"):
        check_devices([same, same])


def test_rocm_is_not_cuda(cuda, monkeypatch) -> None:
    cuda(1)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert describe(torch.device("cuda", 0)).kind == "rocm"


class _Ranks(World):
    """A world whose other ranks are on given GPUs."""

    @staticmethod
    def on(monkeypatch: pytest.MonkeyPatch, device: str, *gpus: tuple[str, bool]) -> World:
        gathered = [[f"node-{rank}", *gpu] for rank, gpu in enumerate(gpus)]
        monkeypatch.setattr(World, "all_gather_object", lambda self, value: gathered)
        name, native = gpus[0]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: native)
        return World(0, len(gpus), device=torch.device(device))


@pytest.mark.parametrize("gpus", [(A10G, T4), (T4, A10G), (A10G, A10G, T4)])
@pytest.mark.parametrize(("device", "fix"), [("cuda", "fp16"), ("cpu", "fp32")])
def test_auto_precision_refuses_a_mixture(monkeypatch, gpus, device: str, fix: str) -> None:
    with raises("precision-mismatch") as caught:
        precision.resolve("auto", _Ranks.on(monkeypatch, device, *gpus))
    assert caught.value.fields["ranks"] == [rank for rank, gpu in enumerate(gpus) if gpu == T4]
    assert f"--precision {fix}" in str(caught.value)
    assert all(f"node-{rank}" in str(caught.value) for rank in (gpus.index(A10G), gpus.index(T4)))


def test_a_stated_precision_applies_to_a_mixture(monkeypatch) -> None:
    world = _Ranks.on(monkeypatch, "cuda", A10G, T4)
    assert precision.resolve("fp16", world) == "fp16"
    assert precision.resolve("fp32", world) == "fp32"
    with raises("precision-unsupported") as caught:  # on all ranks, also on those that support it
        precision.resolve("bf16", world)
    assert caught.value.fields == {"precision": "bf16", "device": "Tesla T4", "ranks": [1]}


@pytest.mark.parametrize(
    ("device", "gpu", "expected"),
    [("cuda", A10G, "bf16"), ("cuda", T4, "fp16"), ("cpu", A10G, "bf16"), ("cpu", T4, "fp32"), ("mps", T4, "fp32")],
)
def test_auto_precision_of_equal_devices(monkeypatch, device: str, gpu: tuple[str, bool], expected: str) -> None:
    assert precision.resolve("auto", _Ranks.on(monkeypatch, device, gpu, gpu)) == expected


# ---- GPUs that torch cannot use ----


@pytest.mark.parametrize("requested", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("vendor", "cuda_build", "hip_build", "reason"),
    [
        ("nvidia", None, None, "built without CUDA"),
        ("amd", None, None, "built without ROCm"),
        ("amd", "13.0", None, "built without ROCm"),
        ("nvidia", "13.0", None, "The NVIDIA driver on your system is too old"),
    ],
)
def test_gpus_that_torch_does_not_see_are_an_error(
    monkeypatch, cuda, installed, requested: str, vendor: str, cuda_build: str, hip_build: str, reason: str
) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    cuda(0)
    installed(2, vendor)
    monkeypatch.setattr(torch.version, "cuda", cuda_build)
    monkeypatch.setattr(torch.version, "hip", hip_build)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with raises("gpu-not-usable") as caught:
        choose_device(requested, 0)
    assert caught.value.fields == {"gpus": ["Some GPU"] * 2}
    assert reason in str(caught.value)
    assert "--device cpu" in str(caught.value)
    assert choose_device("cpu", 0).type == "cpu"


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_a_choice_of_the_cpu(monkeypatch, cuda, installed, value: str) -> None:
    cuda(0)
    installed(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert choose_device("auto", 0).type == "cpu"
    with raises("no-gpu"):
        choose_device("cuda", 0)


def test_a_mistake_in_the_visible_devices_is_an_error(monkeypatch, cuda, installed) -> None:
    cuda(0)
    installed(2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with raises("gpu-not-usable") as caught:
        choose_device("auto", 0)
    assert "CUDA_VISIBLE_DEVICES='7'" in str(caught.value)


def test_the_wrong_one_of_several_variables_is_named(monkeypatch, cuda, installed) -> None:
    cuda(0)
    installed(2, "amd")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "9")
    with raises("gpu-not-usable") as caught:
        choose_device("auto", 0)
    assert "ROCR_VISIBLE_DEVICES='9'" in str(caught.value)


def test_a_cpu_build_of_torch_on_a_machine_with_gpus(paceline, nvml: Path) -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("needs a CPU build of torch")
    visible = {name: value for name, value in environment().items() if "VISIBLE_DEVICES" not in name}
    variables = visible | {"LD_LIBRARY_PATH": str(nvml)}
    answer = paceline("train", "digits", "--procs", 1, "--train.duration", "1ba", env=variables, timeout=HANG)
    assert "[gpu-not-usable]" in answer.stderr
    assert "Stand-in 0" in answer.stderr
    options = ("--device", "cpu", "--precision", "fp32", "--train.duration", "1ba")
    assert paceline("train", "digits", *options, env=variables, timeout=HANG).returncode == 0


# ---- MPS ----


def test_mps_trains_in_one_process(monkeypatch) -> None:
    with raises("no-gpu"):
        choose_device("mps", 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps", 0).type == "mps"
    with raises("mps-needs-one-process"):
        choose_device("mps", 0, size=2)
    with raises("precision-unsupported"):
        precision.resolve("bf16", World(device=torch.device("mps")))


# ---- cores ----


def _on_cores(machine: str, cores: str) -> RankDevice:
    return RankDevice("host", machine, "cpu", "", cores)


def test_ranks_with_cores_of_their_own_use_all_of_them() -> None:
    srun = [_on_cores("a", "f"), _on_cores("a", "f0")]  # the mask is already per task
    assert [sharing_cores(srun, rank) for rank in range(2)] == [1, 1]
    together = [_on_cores("a", "ff")] * 4 + [_on_cores("b", "ff")]
    assert [sharing_cores(together, rank) for rank in range(5)] == [4, 4, 4, 4, 1]


def test_the_mask_is_that_of_the_process(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    assert describe(torch.device("cpu")).cores == "23"
