"""Makes torchvision importable next to a torch that its compiled operators do not fit.

torchvision's wheel on PyPI is built for CUDA. Next to a torch without CUDA its operators do not load, and
`import torchvision` (hence `import timm`) fails with "operator torchvision::nms does not exist", because it registers
fake kernels for operators that are not declared. They are declared here after torchvision has tried to load them:
declaring operators that were loaded would abort the process. Functions that need the real operators (nms,
torchvision.io) still raise when called; Paceline calls none of them.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NEEDS_OPERATORS = "torchvision._meta_registrations"
"""The first module that needs the operators. torchvision imports it right after it has tried to load them."""
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold, float scale, int zero_point) -> Tensor",
}
_libraries: list[Any] = []  # kept alive, because operators are removed with their library


class _Declaring(MetaPathFinder):
    """Finds no module, but declares the missing operators at the moment when torchvision needs them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NEEDS_OPERATORS:
            sys.meta_path.remove(self)
            _declare_missing()
        return None


def allow_torchvision() -> None:
    """Make `import torchvision` work. torch calls this function on import, through an entry point."""
    if _NEEDS_OPERATORS not in sys.modules and not any(isinstance(finder, _Declaring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Declaring())


def _declare_missing() -> None:
    import torch  # not at the top: torch imports this module while it is being imported

    missing = [schema for name, schema in _SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if missing:
        _libraries.append(library := torch.library.Library("torchvision", "FRAGMENT"))
        for schema in missing:
            library.define(schema)
