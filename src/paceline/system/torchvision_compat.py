"""Makes torchvision importable next to a torch without CUDA.

torchvision's wheel on PyPI is built for CUDA. Next to a torch without CUDA its compiled operators do not load, and
`import torchvision` (hence `import timm`) fails with "operator torchvision::nms does not exist", because it registers
fake kernels for operators that are not declared. Declaring them first fixes the import. Functions that need the real
operators (nms, torchvision.io) still raise when called; Paceline calls none of them. Where torchvision's own operators
load, declaring them again would abort the process.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_library: Any = None  # kept alive, because its operators are removed with it


def allow_torchvision() -> None:
    """Make `import torchvision` work. torch calls this function on import, through an entry point."""
    global _library
    import torch  # not at the top: torch imports this module while it is being imported

    if _library is not None or torch.version.cuda is not None or not _is_built_for_cuda():
        return
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold, float scale, int zero_point) -> Tensor",
    )


def _is_built_for_cuda() -> bool:
    """Read torchvision's version ("0.28.0+cu130") without importing it."""
    try:
        spec = find_spec("torchvision")
        if spec is None or not spec.origin:
            return False
        version = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError, ImportError):  # be tolerant: this runs in every program that imports torch
        return False
    return re.search(r"__version__ = .*\+cu\d", version) is not None
