"""Which number format a device trains in."""

from contextlib import AbstractContextManager

import torch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve(wanted: str, device: torch.device) -> str:
    """`auto` as bf16 where the device computes it natively, fp16 on other GPUs, else fp32."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    native = any(present for name, present in torch.cpu.get_capabilities().items() if "bf16" in name)
    return "bf16" if native else "fp32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=_DTYPES[precision], enabled=precision != "fp32")


def grad_scaler(precision: str, device: torch.device, scale: float) -> torch.amp.GradScaler:
    """Dynamic loss scaling, on any device; does nothing but for fp16."""
    return torch.amp.GradScaler(device.type, init_scale=scale, enabled=precision == "fp16")
