"""Which number format a device trains in."""

from contextlib import AbstractContextManager

import torch

from paceline.errors import UserError
from paceline.system.logs import log

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(wanted: str, device: torch.device) -> str:
    """`auto` as bf16 where the device computes it natively, fp16 on other GPUs, else fp32."""
    native = _computes_bf16(device)
    if wanted == "auto":
        fallback = "fp16" if device.type == "cuda" else "fp32"
        return "bf16" if native else fallback
    if wanted == "bf16" and not native:
        if device.type == "cuda":
            raise UserError(
                f"precision=bf16: {torch.cuda.get_device_name(device)} does not compute in bf16; use fp16, or auto"
            )
        log.warning("precision=bf16: this processor only emulates bf16, many times slower than fp32")
    return wanted


def _computes_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(present for name, present in torch.cpu.get_capabilities().items() if "bf16" in name)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=_DTYPES[precision], enabled=precision != "fp32")


def grad_scaler(precision: str, device: torch.device, scale: float) -> torch.amp.GradScaler:
    """Dynamic loss scaling, on any device; does nothing but for fp16."""
    return torch.amp.GradScaler(device.type, init_scale=scale, enabled=precision == "fp16")
