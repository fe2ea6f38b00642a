"""Chooses the device of a rank, and checks that the devices of all ranks can train together."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.errors import UserError
from paceline.system.device import pci_address
from paceline.system.gpus import VARIABLES, Gpu, are_gpus_hidden, installed_gpus, no_gpu, visible_gpus
from paceline.system.host import host_name, machine_id

_KINDS = {"cuda": "a CUDA GPU", "rocm": "a ROCm GPU", "cpu": "the CPU", "mps": "the GPU of a Mac"}


class RankDevice(NamedTuple):
    """What ranks tell each other before they connect."""

    host: str
    machine: str
    kind: str
    gpu: str
    """UUID and PCI address of the GPU, or empty."""
    cores: str
    """Cores that the rank may use, as a hexadecimal mask."""


def choose_device(requested: str, local_rank: int, size: int = 1) -> torch.device:
    """Return the device of a rank. `auto` is a GPU if there is one."""
    if requested == "cpu":
        return torch.device("cpu")
    if requested == "mps":
        return _mps(size)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not available:
        _refuse_unused_gpus()
        if requested == "cuda":
            raise no_gpu()
        return torch.device("cpu")
    if available == 1:  # srun --gpus-per-task=1 shows each task its own GPU; check_devices finds shared ones
        return torch.device("cuda", 0)
    if local_rank >= available:
        raise UserError(
            "too-few-gpus",
            f"this node has {available} GPUs, but at least {local_rank + 1} ranks. Use --procs {available} or fewer.",
            gpus=available,
        )
    return torch.device("cuda", local_rank)


def _mps(size: int) -> torch.device:
    if not torch.backends.mps.is_available():
        message = "device=mps: PyTorch finds no Metal GPU. Use a Mac with Apple silicon, or another --device."
        raise UserError("no-gpu", message)
    if size > 1:
        message = f"device=mps trains in one process, not in {size}: PyTorch has no collectives for it. Use --procs 1."
        raise UserError("mps-needs-one-process", message, ranks=size)
    return torch.device("mps")


def _refuse_unused_gpus() -> None:
    """Raise UserError if the machine has GPUs that PyTorch cannot use, unless the user hides them."""
    if are_gpus_hidden(os.environ) or not (gpus := installed_gpus()):
        return
    raise UserError(
        "gpu-not-usable",
        f"this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)} ({gpus[0].name}), but PyTorch cannot use "
        f"{'them' if len(gpus) > 1 else 'it'}: {_reason(gpus)} To train on the CPU anyway, use --device cpu.",
        gpus=[gpu.name for gpu in gpus],
    )


def _reason(gpus: list[Gpu]) -> str:
    """Return why PyTorch cannot use the GPUs that the driver lists, and the fix."""
    platform, built = ("CUDA", torch.version.cuda) if gpus[0].vendor == "nvidia" else ("ROCm", torch.version.hip)
    if not built:
        return f"PyTorch {torch.__version__} is built without {platform}. Install a build with it (pytorch.org)."
    if not visible_gpus():
        given = [(name, os.environ[name]) for name in VARIABLES if name in os.environ]
        # ROCm has several variables, of which perhaps only one is wrong
        name, value = next((each for each in given if not visible_gpus(dict([each]))), given[-1])
        return f"{name}={value!r} selects none of them. Correct or unset it."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{' '.join(str(error).split())[:300]} Update the driver, or install a PyTorch build for it."
    return f"the driver does not support {platform} {built}. Update the driver."


def describe(device: torch.device) -> RankDevice:
    """Return what other ranks need to know about the device of this one."""
    kind, gpu = device.type, ""
    if kind == "cuda":
        kind = "rocm" if torch.version.hip else "cuda"
        # not every GPU has a UUID, and parts of one (MIG) share the PCI address
        gpu = f"{getattr(torch.cuda.get_device_properties(device), 'uuid', '')} {pci_address(device)}".strip()
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return RankDevice(host_name(), machine_id(), kind, gpu, f"{sum(1 << core for core in mask):x}")


def check_devices(found: Sequence[RankDevice]) -> None:
    """Raise UserError if ranks use different kinds of devices, or share a GPU."""
    first = {one.kind: rank for rank, one in reversed(list(enumerate(found)))}
    if len(first) > 1:
        used = ", ".join(f"rank {rank} ({found[rank].host}) uses {_KINDS[kind]}" for kind, rank in first.items())
        raise UserError(
            "rank-device-mismatch",
            f"ranks use different kinds of devices: {used}. Check driver and PyTorch on these hosts with `paceline "
            "doctor`, or use --device cpu on all nodes.",
            ranks=sorted(first.values()),
        )
    users: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(found):
        if one.gpu:
            users.setdefault((one.machine, one.gpu), []).append(rank)
    if shared := next((ranks for ranks in users.values() if len(ranks) > 1), None):
        host = found[shared[0]].host
        gpus = len({one.gpu for one in found if one.host == host})
        raise UserError(
            "too-few-gpus",
            f"ranks {' and '.join(map(str, shared[:2]))} on {host} use the same GPU ({found[shared[0]].gpu}). Use "
            f"--procs {gpus} or fewer, or give each rank its own GPU (SLURM: --gpus-per-task=1).",
            gpus=gpus,
            ranks=shared,
        )


def sharing_cores(found: Sequence[RankDevice], rank: int) -> int:
    """Return how many ranks may use the cores of this rank; srun gives every task its own."""
    own = found[rank]
    return sum((one.machine, one.cores) == (own.machine, own.cores) for one in found)
