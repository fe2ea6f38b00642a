"""Resolves the training precision for the devices of all ranks."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.host import cpu_name, host_name
from paceline.system.logs import log

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(wanted: str, world: World) -> str:
    """Return the precision, which is the same on all ranks; UserError if a rank does not support it.

    `auto` is bf16 if the devices support it natively, else fp16 on CUDA and ROCm GPUs and fp32 on other devices.
    """
    device = world.device
    found = world.all_gather_object([host_name(), _name(device), _supports_bf16(device)])
    without = [rank for rank, (*_, native) in enumerate(found) if not native]
    if wanted == "auto":
        if 0 < len(without) < world.size:
            raise _mixture(found, without, device)
        fallback = "fp16" if device.type == "cuda" else "fp32"
        return fallback if without else "bf16"
    if device.type == "mps" and wanted != "fp32":
        message = f"precision={wanted}: device=mps trains in fp32. Use --precision fp32 or auto."
        raise UserError("precision-unsupported", message, precision=wanted, device="mps")
    if wanted == "bf16" and without:
        if device.type == "cuda":
            host, name, _ = found[without[0]]
            raise UserError(
                "precision-unsupported",
                f"precision=bf16: {name} (rank {without[0]}, {host}) does not support bf16. Use --precision "
                "fp16 or fp32.",
                precision=wanted,
                device=name,
                ranks=without,
            )
        log.warning("precision=bf16: this CPU only emulates bf16, which is many times slower than fp32")
    return wanted


def _mixture(found: list[list[Any]], without: list[int], device: torch.device) -> UserError:
    """Return the error of `auto` on devices with and without bf16: ranks would train in different precisions."""
    ranks = (next(rank for rank in range(len(found)) if rank not in without), without[0])
    (host, name, _), (other_host, other_name, _) = (found[rank] for rank in ranks)
    common = "fp16 or fp32" if device.type == "cuda" else "fp32"
    return UserError(
        "precision-mismatch",
        f"precision=auto: {name} (rank {ranks[0]}, {host}) supports bf16, but {other_name} (rank {ranks[1]}, "
        f"{other_host}) does not. Choose a precision for all ranks: --precision {common}.",
        ranks=without,
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _supports_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and any(
        present for name, present in torch.cpu.get_capabilities().items() if "bf16" in name
    )


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "fp32")


def grad_scaler(precision: str, device: torch.device, scale: float) -> torch.amp.GradScaler:
    """Return dynamic loss scaling for any device, which is enabled only for fp16."""
    return torch.amp.GradScaler(device.type, init_scale=scale, enabled=precision == "fp16")
