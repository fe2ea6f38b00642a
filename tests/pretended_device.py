"""A GPU that is pretended on the CPU, to find every place where the host waits for it.

Tensors on it are CPU tensors whose storage is tagged, so that all operators work, backward included. `reads` lists what
would make the host wait on a GPU: reading values, operators whose output size depends on values, and copies from or to
memory that is not pinned. An operator that mixes host and device tensors raises an error, as it would there.
It cannot show in which order streams run.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "repeat_interleave")
"""Operators that wait for the device, in ATen's names."""
_PROPERTIES = SimpleNamespace(name="pretended GPU", uuid="0", total_memory=1 << 34, major=9, minor=0)
_TO_HOST = ("tolist", "numpy", "__array__")
_UPLOADS = ("tensor", "as_tensor")
"""Functions that copy values of the host, which are not pinned."""


@dataclass(frozen=True)
class Wait:
    part: str
    """Of the run."""
    what: str
    where: str
    """The line of Paceline that caused it."""


@dataclass
class Tags:
    """Storages that are on the device, or pinned. Weak references keep addresses from being reused."""

    _known: dict[int, StorageWeakRef] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._known.setdefault(storage._cdata, StorageWeakRef(storage))
        return tensor

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._known


class PretendedDevice:
    """Context in which cuda:0 exists."""

    def __init__(self) -> None:
        self.on_device, self.pinned = Tags(), Tags()
        self.waits: list[Wait] = []
        self.part, self.setup = "start", None

    @contextlib.contextmanager
    def __call__(self, patch: pytest.MonkeyPatch) -> Iterator["PretendedDevice"]:
        _patch_cuda(self, patch)
        functions = _Functions(self)
        with functions, _Operators(self, functions):
            yield self

    def wait(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/paceline/" in frame.filename]
        where = f"{frames[-1].filename.rpartition('/paceline/')[2]}:{frames[-1].lineno}" if frames else ""
        self.waits.append(Wait(self.part, what, where))

    def upload(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Return a copy on the device."""
        if not (non_blocking and tensor in self.pinned):
            self.wait("copies to the device from memory that is not pinned, or without non_blocking")
        return self.on_device.add(tensor.clone(memory_format=torch.preserve_format))

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host."""
        self.wait("copies to the host")
        with torch.utils._python_dispatch._disable_current_modes():
            return tensor.detach().clone(memory_format=torch.preserve_format)


class _Functions(TorchFunctionMode):
    """Handles devices, which operators on the CPU know nothing of."""

    def __init__(self, device: PretendedDevice):
        super().__init__()
        self._device = device
        self.depth = 0
        """Of the calls from Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.depth += 1
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self.depth -= 1

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = self._device
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        is_on_device = first in device.on_device
        if func == torch.Tensor.device.__get__:
            return CUDA if is_on_device else func(*args)
        if func == torch.Tensor.is_cuda.__get__:
            return is_on_device
        if name in ("is_pinned", "pin_memory"):
            return first in device.pinned if name == "is_pinned" else device.pinned.add(first.clone())
        if func is torch.device or name == "_parse_to":  # the arguments of Module.to
            return func(*args, **kwargs)
        if name in _TO_HOST and is_on_device:
            device.wait(name)
        if func is torch.nn.functional.one_hot:  # on CPUs it checks the values
            first, classes = args
            shape = (*first.shape, classes)
            return first.new_zeros(shape).scatter_(-1, first[..., None], 1)
        if name == "cuda":
            return self._to(first, CUDA, func=torch.Tensor.to, args=args[:1], kwargs=kwargs)
        if name == "cpu":
            return self._to(first, _HOST, func=torch.Tensor.to, args=args[:1], kwargs=kwargs)
        target = next((leaf for leaf in (*args, *kwargs.values()) if _is_device(leaf)), None)
        target = torch.device(target) if target is not None else None
        if name == "to" and target is not None:
            return self._to(first, target, func, args, kwargs)
        if target is None or target.type != "cuda":
            pinned = kwargs.pop("pin_memory", False)
            result = func(*args, **kwargs)
            return device.pinned.add(result) if pinned else result
        if name in _UPLOADS and not (isinstance(first, torch.Tensor) and is_on_device):
            device.wait(f"torch.{name}(..., device=cuda)")
        result = func(*_on_host(args), **_on_host(kwargs))
        return device.on_device.add(result) if isinstance(result, torch.Tensor) else result

    def _to(self, tensor: torch.Tensor, target: torch.device, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        device = self._device
        # positions of Tensor.to(device, dtype, non_blocking)
        non_blocking = bool(kwargs.get("non_blocking", next((arg for arg in args if isinstance(arg, bool)), False)))
        if tensor in device.on_device and target.type == "cpu":
            tensor = device.download(tensor)
        elif tensor not in device.on_device and target.type == "cuda":
            tensor = device.upload(tensor, non_blocking)
        result: torch.Tensor = func(tensor, *_on_host(args[1:]), **_on_host(kwargs))
        return result


class _Operators(TorchDispatchMode):
    """Tags the results of operators, and finds those that wait."""

    def __init__(self, device: PretendedDevice, functions: _Functions):
        super().__init__()
        self._device, self._functions = device, functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self._device, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_on_device = any(tensor in device.on_device for tensor in tensors)
        if not is_on_device:
            result = func(*args, **kwargs)
            if not (tensors or self._functions.depth) and isinstance(result, torch.Tensor):
                # not called from Python: DDP creates its buckets, which are where the parameters are
                return device.on_device.add(result) if result.is_floating_point() else result
            return result
        name = func.overloadpacket.__name__
        if name in _READS or (name.startswith("index") and any(map(_is_mask, tree_leaves(args[1])))):
            device.wait(name)
        foreign = [each for each in tensors if each.ndim and each not in device.on_device and each.numel()]
        if name == "copy_" and args[1] not in device.on_device:
            device.upload(args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        elif name == "copy_" and args[0] not in device.on_device:
            device.wait("copies to the host")
        elif foreign and func.namespace == "aten":
            raise RuntimeError(f"{func}: tensors on the host and on the device")
        result = func(*args, **kwargs)
        if name != "_local_scalar_dense":
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    device.on_device.add(leaf)
        return result


def _is_mask(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8)


def _is_device(leaf: object) -> bool:
    return isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.partition(":")[0] in ("cuda", "cpu"))


def _on_host(tree: Any) -> Any:
    return tree_map(lambda leaf: _HOST if _is_device(leaf) else leaf, tree)


class _Event:
    """Stands in for torch.cuda.Event; all work is done at once, so that it never waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0

    def record(self, *_: Any) -> None:
        self.time = time.perf_counter()

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 1000 * (end.time - self.time)


class _Stream(_Event):
    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Generator(torch.Generator):
    def __new__(cls, *_: Any) -> "_Generator":
        return super().__new__(cls)


def _patch_cuda(device: PretendedDevice, patch: pytest.MonkeyPatch) -> None:
    """Replace what needs a GPU. Waiting for all of its work counts as a wait."""
    stream = _Stream()
    stubs: dict[str, Callable[..., Any]] = {
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_: device.wait("torch.cuda.synchronize"),
        "set_device": lambda *_: None,
        "current_device": lambda: 0,
        "max_memory_allocated": lambda *_: 0,
        "get_device_name": lambda *_: _PROPERTIES.name,
        "get_device_properties": lambda *_: _PROPERTIES,
        "is_bf16_supported": lambda **_: True,
    }
    for name, stub in stubs.items():
        patch.setattr(torch.cuda, name, stub)
        if hasattr(torch.accelerator, name):
            patch.setattr(torch.accelerator, name, stub)
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    patch.setattr(torch.Tensor, "backward", _backward)
    patch.setattr(torch, "Event", _Event)
    patch.setattr(torch, "Stream", _Stream)
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: list[list[torch.Tensor | None]], indices: bool = False) -> Any:
        found = group(lists, indices)
        is_on_device = any(tensor in device.on_device for tensor in lists[0])
        return {((CUDA if is_on_device else place), dtype): value for (place, dtype), value in found.items()}

    patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", grouped)
    patch.setattr(torch.amp.grad_scaler.torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    patch.setattr(torch, "Generator", _Generator)
    _patch_futures(patch)


def _backward(loss: torch.Tensor) -> None:
    """Tensor.backward as no torch function, within which Python code of hooks would see the real device."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), accumulate_grad=True)


def _patch_futures(patch: pytest.MonkeyPatch) -> None:
    """Futures of the host raise an error for a GPU tensor, futures of a GPU exist only in builds with CUDA."""
    future = torch.futures.Future
    init, set_result = future.__init__, future.set_result

    def init_on_host(self: Any, *, devices: list[torch.device] | None = None) -> None:
        init(self)
        self.has_device = bool(devices)

    def set_checked(self: Any, result: Any) -> None:
        assert self.has_device, "the future of a GPU tensor must name its device"
        set_result(self, result)

    patch.setattr(future, "__init__", init_on_host)
    patch.setattr(future, "set_result", set_checked)
