"""The internal verb installation: import everything that training needs, and tell what came of it."""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from paceline.launch.installation import CODEC, DEVICES, PACKAGES


def installation(arguments: list[str]) -> int:
    """One line of JSON per part, at once: of parts that crash the process, the missing line tells."""
    for name in PACKAGES:
        _tell(name, partial(_imported, name))
    _tell(DEVICES, _devices)
    _tell(CODEC, _codec)
    return 0


def _tell(part: str, question: Callable[[], dict[str, Any]]) -> None:
    try:
        answer = question()
    except Exception as error:  # whatever an import may raise
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps({"part": part} | answer), flush=True)


def _imported(name: str) -> dict[str, Any]:
    """As training does it."""
    if name != "torch":
        from paceline.system.torchvision_compat import allow_torchvision

        allow_torchvision()
    return {"version": str(import_module(name).__version__)}


def _devices() -> dict[str, Any]:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cuda": torch.version.cuda or torch.version.hip,
        "gpus": gpus,
        "bf16": any(present for name, present in torch.cpu.get_capabilities().items() if "bf16" in name),
        "gpu_bf16": [torch.cuda.is_bf16_supported(including_emulation=False)] * gpus,
    }


def _codec() -> dict[str, Any]:
    from paceline.data import codec

    return {"paths": codec.paths()}
