"""Tries an optimizer on a few small tensors before training.

timm's and registered optimizers may keep state that checkpoints do not hold, or fail on sharded tensors. That must be
an error at the start, not a failed checkpoint or other results after a resume.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn, optim

from paceline import extensions
from paceline.config.optim import Optim
from paceline.errors import UserError
from paceline.optim.factory import construct
from paceline.optim.state import state_dict, try_load
from paceline.optim.template import parameters_by_number
from paceline.system.trees import flatten, unflatten

_SHAPES = ((21, 18, 3, 3), (25, 20), (9,))  # a filter, a matrix and a bias, which do not divide evenly by two
_STEPS, _STOP = 13, 7  # the stop is not a multiple of usual intervals, e.g. of every second or fifth step
_SHARDED_STEPS = 4
_LR = 0.01
_TOLERANCE = 0.05  # relative to the change of a weight; Muon computes in bf16

Placement = Callable[[torch.Tensor], torch.Tensor]


def check_resumable(config: Optim) -> None:
    """Refuse an optimizer that computes something else after its state was stored and loaded."""
    config = replace(config, lr=_LR)
    try:
        with torch.random.fork_rng(devices=[]), _one_thread():
            whole = _trained(_new(config, _initial()), range(_STEPS))
            stopped = _trained(_new(config, _initial()), range(_STOP))
            resumed = _new(config, _weights(stopped))
            if more := sorted(stopped.state_dict().keys() - {"state", "param_groups"}):
                raise _refusal(config, f"its state_dict() also holds {', '.join(more)}")
            if problem := try_load(resumed, config, _stored(state_dict(stopped)), _STOP):
                raise _refusal(config, problem)
            _trained(resumed, range(_STOP, _STEPS))
    except UserError:
        raise
    except Exception as error:
        raise _refusal(config, _reason(error)) from error
    bits = ([weight.view(torch.int32) for weight in _weights(optimizer)] for optimizer in (whole, resumed))
    if not all(map(torch.equal, *bits)):
        raise _refusal(config, "it keeps state that is not in its state_dict(), or draws random numbers")
    kept = _attributes(resumed)
    if lost := sorted(name for name, value in _attributes(whole).items() if kept.get(name) != value):
        raise _refusal(config, f"it keeps {', '.join(lost)} outside of its state_dict()")


def check_shardable(config: Optim, parameter: torch.Tensor) -> None:
    """Refuse an optimizer that does not compute the same on tensors that are sharded like a parameter. A collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # imported late because it takes a second

    assert isinstance(parameter, DTensor)
    mesh, placements, config = parameter.device_mesh, parameter.placements, replace(config, lr=_LR)
    initial = [weight.to(mesh.device_type) for weight in _initial()]
    whole = _trained(_new(config, initial), range(_SHARDED_STEPS))
    try:
        shard = partial(distribute_tensor, device_mesh=mesh, placements=placements)
        sharded = _trained(_new(config, map(shard, initial)), range(_SHARDED_STEPS), shard)
    except Exception as error:
        reason = f"on sharded tensors {_reason(error)}"
    else:
        after = [weight.full_tensor() for weight in _weights(sharded) if isinstance(weight, DTensor)]
        if all(map(_is_close, initial, _weights(whole), after)):
            return
        reason = "it computes something else on sharded tensors"
    message = f"optim.name={config.name!r} does not support strategy fsdp: {reason}. Use strategy ddp."
    raise UserError("optimizer-needs-ddp", message, name=config.name)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, because several of them would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _initial() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in _SHAPES]


def _new(config: Optim, weights: Iterable[torch.Tensor]) -> optim.Optimizer:
    *matrices, bias = (nn.Parameter(weight.clone()) for weight in weights)
    decayed = {"params": matrices, "weight_decay": config.weight_decay, "scale": 1.0}
    return construct([decayed, {"params": [bias], "weight_decay": 0.0, "scale": 1.0}], config)


def _trained(
    optimizer: optim.Optimizer, steps: Iterable[int], place: Placement = lambda tensor: tensor
) -> optim.Optimizer:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters_by_number(optimizer).values():
            parameter.grad = place(torch.randn(parameter.shape, generator=generator).to(parameter.device))
        optimizer.step()
    return optimizer


def _weights(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in parameters_by_number(optimizer).values()]


class _Pickler(pickle.Pickler):
    """Writes equal values as equal bytes: tensors by value, functions by name, inner optimizers by their attributes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            flat = value.detach().reshape(-1).cpu()
            return bytes, (flat.view(torch.uint8).numpy().tobytes(),)
        if isinstance(value, optim.Optimizer):
            return dict, (sorted(_attributes(value).items()),)
        return (str, (value.__qualname__,)) if isinstance(value, FunctionType) else NotImplemented


def _attributes(optimizer: optim.Optimizer) -> dict[str, bytes]:
    """Return an optimizer's own attributes as bytes, without those of every optimizer and those without a value."""
    values = {}
    for name in vars(optimizer).keys() - vars(optim.Optimizer(_weights(optimizer), {})).keys():
        pickler = _Pickler(file := io.BytesIO())
        pickler.fast = True  # otherwise the bytes depend on which values are the same object
        with suppress(Exception):  # locks, files and the like
            pickler.dump(getattr(optimizer, name))
            values[name] = file.getvalue()
    return values


def _stored(state: dict[str, Any]) -> Any:
    """Return the state as a checkpoint holds it: JSON and contiguous copies of the tensors."""
    skeleton, tensors = flatten(state)
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return unflatten(json.loads(json.dumps(skeleton)), copies)


def _is_close(before: torch.Tensor, expected: torch.Tensor, found: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= _TOLERANCE * (expected - before).norm())


def _reason(error: Exception) -> str:
    return f"it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": .")


def _refusal(config: Optim, problem: str) -> UserError:
    extension = extensions.find("optimizer", config.name)
    where = f" ({extension.where})" if extension else ""
    message = (
        f"optim.name={config.name!r}{where} cannot be resumed exactly, as a trial on small tensors shows: {problem}."
    )
    return UserError("optimizer-not-resumable", message, name=config.name)
