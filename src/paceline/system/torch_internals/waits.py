"""The private names of torch with which operators are observed. A module of its own, because training needs none."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
)


class HostReads(TorchDispatchMode):
    """Calls a function before every operator whose result the host needs, such as `.item()`: it would wait for a GPU.

    torch documents TorchDispatchMode as the way to observe operators, but neither it nor the operator of `.item()` has
    a public name.
    """

    def __init__(self, on_read: Callable[[str], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_read = on_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITING:
            self._on_read("item" if func is _WAITING[0] else func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))
