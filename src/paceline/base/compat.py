"""The one place that knows about torchvision's quirk.

torchvision's wheel is built for CUDA. Beside a CPU build of torch its compiled operators do not load, and
`import torchvision` (so `import timm`) fails with "operator torchvision::nms does not exist", because it registers fake
kernels for operators that nobody declared. Declaring them first cures it; what needs the real operators
(nms, torchvision.io) still raises when it is called, and nothing here calls it.
"""

import torch

_library: torch.library.Library | None = None  # kept alive: its operators vanish with it


def allow_torchvision() -> None:
    """Make `import torchvision` work beside any build of torch; call before importing timm."""
    global _library
    if torch.version.cuda is not None or _library is not None:
        return
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold, float scale, int zero_point) -> Tensor",
    )
