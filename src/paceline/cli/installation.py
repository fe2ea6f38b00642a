"""The internal command `installation`: import everything that training needs, and print the results as JSON."""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from paceline.launch.installation import CODEC, DEVICES, PACKAGES


def installation(arguments: list[str]) -> int:
    """Print one line of JSON per part immediately, so that a missing line shows which part crashed the process."""
    for name in PACKAGES:
        _report(name, partial(_imported, name))
    _report(DEVICES, _devices)
    _report(CODEC, _codec)
    return 0


def _report(part: str, check: Callable[[], dict[str, Any]]) -> None:
    try:
        result = check()
    except Exception as error:  # an import may raise anything
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps({"part": part} | result), flush=True)


def _imported(name: str) -> dict[str, Any]:
    """Import a package as training does; return its version."""
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
