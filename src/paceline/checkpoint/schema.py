"""What a checkpoint must hold to be used. Checksums show that files are whole, not that paceline has written them."""

from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from paceline.system.untrusted import HUGE, is_plain

_MOST_BYTES = 1 << 36  # of a file
_Count = Annotated[int, Field(ge=0, le=10**12)]
_Positive = Annotated[int, Field(ge=1, le=10**9)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Finite = Annotated[float, Field(ge=-HUGE, le=HUGE)]
_AboveZero = Annotated[float, Field(gt=0, le=HUGE)]
_EXACTLY, _AT_LEAST = with_config(ConfigDict(extra="forbid")), with_config(ConfigDict(extra="ignore"))


@_EXACTLY
class _Entry(TypedDict):
    bytes: Annotated[int, Field(ge=0, le=_MOST_BYTES)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@_EXACTLY
class _Metrics(TypedDict, total=False):
    top1: _Share
    top5: _Share
    loss: _Finite


@_EXACTLY
class _Skeletons(TypedDict):
    model: dict[str, Any]
    ema: dict[str, Any]
    optimizer: dict[str, Any]
    progress: dict[str, Any]


@_EXACTLY
class _State(TypedDict):
    format: int
    step: _Count
    metrics: _Metrics
    parts: _Skeletons


@_EXACTLY
class _Scaler(TypedDict, total=False):
    scale: Annotated[float, Field(gt=0, le=2.0**127)]
    growth_factor: Annotated[float, Field(gt=1, le=1e6)]
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]
    growth_interval: _Positive
    _growth_tracker: _Count


def _whole_or_empty(scaler: dict[str, Any]) -> dict[str, Any]:
    if scaler and len(scaler) < 5:
        raise ValueError("it lacks some of its five values")
    return scaler


@_AT_LEAST
class _Recipe(TypedDict):
    """Its fields are checked where it is used."""

    data: dict[str, Any]
    checkpoint: dict[str, Any]


@_AT_LEAST
class _Preprocessing(TypedDict):
    mean: Annotated[list[_Finite], Field(min_length=1, max_length=1000)]
    std: Annotated[list[_AboveZero], Field(min_length=1, max_length=1000)]


@_EXACTLY
class _Model(TypedDict):
    name: str
    num_classes: _Positive
    in_chans: _Positive
    options: dict[str, Any]


@_EXACTLY
class _Progress(TypedDict):
    step: _Count
    scaler: Annotated[_Scaler, AfterValidator(_whole_or_empty)]
    recipe: _Recipe
    data: str
    classes: list[Annotated[list[str], Field(min_length=2, max_length=2)]]
    preprocessing: _Preprocessing
    model: _Model


def _agreeing(progress: _Progress) -> _Progress:
    channels = {len(progress["preprocessing"]["mean"]), len(progress["preprocessing"]["std"])}
    if channels != {progress["model"]["in_chans"]}:
        raise ValueError("mean, std and model.in_chans are of different numbers of channels")
    if len(progress["classes"]) != progress["model"]["num_classes"]:
        raise ValueError("classes and model.num_classes are of different numbers of classes")
    return progress


_MANIFEST: TypeAdapter[Any] = TypeAdapter(
    dict[Annotated[str, Field(pattern=r"^(state\.json|(model|ema|optimizer)\.safetensors)$")], _Entry]
)
_STATE, _PROGRESS = TypeAdapter(_State), TypeAdapter(Annotated[_Progress, AfterValidator(_agreeing)])


def check_manifest(value: Any) -> None:
    _check(_MANIFEST, value, "")


def check_state(value: Any) -> None:
    """Of state.json, before its parts are put together; ValueError names the key, its value and what is wrong."""
    _check(_STATE, value, "")


def check_progress(progress: Any, step: int) -> None:
    if not is_plain(progress):
        raise ValueError("progress holds tensors, or numbers that are not finite or far too large")
    _check(_PROGRESS, progress, "progress.")
    if progress["step"] != step:
        raise ValueError(f"progress.step={progress['step']} is not the step of the checkpoint, which is {step}")


def check_tensors(parts: dict[str, Any]) -> None:
    """That weights are tensors by name, and the optimizer's state is one; see `optim.groups` for what fits a model."""
    for part in ("model", "ema"):
        for name, value in parts[part].items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise ValueError(f"{part}.{name} is not a tensor by name")
    match parts["optimizer"]:
        case {"state": dict(states), "param_groups": list(groups), **more} if not more:
            sound = all(isinstance(key, int) and isinstance(own, dict) for key, own in states.items())
            if sound and all(isinstance(group, dict) for group in groups):
                return
    raise ValueError("optimizer is not the state of an optimizer")


def _check(adapter: TypeAdapter[Any], value: Any, prefix: str) -> None:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = prefix + ".".join(map(str, first["loc"]))
        raise ValueError(f"{key}={_short(first['input'])}: {first['msg']}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
