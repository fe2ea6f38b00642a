"""Resolves the training precision for a device."""

from contextlib import AbstractContextManager

import torch

from paceline.errors import UserError
from paceline.system.logs import log

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(wanted: str, device: torch.device) -> str:
    """Return the precision. `auto` is bf16 if the device supports it natively, else fp16 on GPUs and fp32 on CPUs."""
    native = _supports_bf16(device)
    if wanted == "auto":
        fallback = "fp16" if device.type == "cuda" else "fp32"
        return "bf16" if native else fallback
    if wanted == "bf16" and not native:
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            raise UserError(
                "precision-unsupported",
                f"precision=bf16: {name} does not support bf16. Use fp16 or auto.",
                precision=wanted,
                device=name,
            )
        log.warning("precision=bf16: this CPU only emulates bf16, which is many times slower than fp32")
    return wanted


def _supports_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(present for name, present in torch.cpu.get_capabilities().items() if "bf16" in name)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=_DTYPES[precision], enabled=precision != "fp32")


def grad_scaler(precision: str, device: torch.device, scale: float) -> torch.amp.GradScaler:
    """Return dynamic loss scaling for any device, which is enabled only for fp16."""
    return torch.amp.GradScaler(device.type, init_scale=scale, enabled=precision == "fp16")
