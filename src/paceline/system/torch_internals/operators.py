"""The private names of torch with which operators are observed: torch documents TorchDispatchMode as the way to do so,
but neither it nor the operators have public names."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
)


class HostReads(TorchDispatchMode):
    """Calls a function before every operator whose result the host needs, e.g. `.item()`: it would wait for a GPU."""

    def __init__(self, on_read: Callable[[str], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_read = on_read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITING:
            self._on_read("item" if func is _WAITING[0] else func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


class OnlyCasts(TorchDispatchMode):
    """Observes whether all that operators do with a tensor, or a view of it, is to cast it to a data type."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype):
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._dtype = tensor.untyped_storage().data_ptr(), dtype
        self.holds = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        casts = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self._dtype
        if not casts and not func.is_view and any(map(self._is_observed, tree_leaves((args, kwargs)))):
            self.holds = False
        return func(*args, **kwargs)

    def _is_observed(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == self._memory
