"""Validates the content of a checkpoint. Matching checksums do not prove that paceline wrote it."""

from itertools import pairwise
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from paceline.config.data import Interpolation
from paceline.system.untrusted import HUGE, is_plain

_MAX_FILE_BYTES, _MAX_DIMENSIONS = 1 << 36, 64
_Count = Annotated[int, Field(ge=0, le=10**12)]
_Positive = Annotated[int, Field(ge=1, le=10**9)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Finite = Annotated[float, Field(ge=-HUGE, le=HUGE)]
_AboveZero = Annotated[float, Field(gt=0, le=HUGE)]
_EXACTLY, _AT_LEAST = with_config(ConfigDict(extra="forbid")), with_config(ConfigDict(extra="ignore"))


@_EXACTLY
class _ManifestEntry(TypedDict):
    bytes: Annotated[int, Field(ge=0, le=_MAX_FILE_BYTES)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@_EXACTLY
class _Metrics(TypedDict, total=False):
    top1: _Fraction
    top5: _Fraction
    loss: _Finite
    samples: _Count


@_EXACTLY
class _Skeletons(TypedDict):
    model: dict[str, Any]
    ema: dict[str, Any]
    optimizer: dict[str, Any]
    progress: dict[str, Any]


@_EXACTLY
class _StateFile(TypedDict):
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


def _complete_or_empty(scaler: dict[str, Any]) -> dict[str, Any]:
    if scaler and len(scaler) < 5:
        raise ValueError("some of its five values are missing")
    return scaler


@_AT_LEAST
class _SavedRecipe(TypedDict):
    """Its fields are validated where it is used."""

    data: dict[str, Any]
    checkpoint: dict[str, Any]


@_AT_LEAST
class _Preprocessing(TypedDict):
    mean: Annotated[list[_Finite], Field(min_length=1, max_length=1000)]
    std: Annotated[list[_AboveZero], Field(min_length=1, max_length=1000)]
    interpolation: Interpolation


@_EXACTLY
class _ModelArguments(TypedDict):
    name: str
    num_classes: _Positive
    in_chans: _Positive
    options: dict[str, Any]


@_EXACTLY
class _Evaluations(TypedDict):
    """A column for each; the learning rate and the end of training may depend on them."""

    step: list[_Count]
    top1: list[_Fraction]
    top5: list[_Fraction]
    loss: list[_Finite]


@_EXACTLY
class _DataFacts(TypedDict):
    name: str
    fingerprint: str
    splits: dict[str, _Count]
    """Number of images of each split."""


class _Inference(TypedDict):
    """What is needed to use the weights, and how they came about; in checkpoints and in exports."""

    step: _Count
    epoch: Annotated[float, Field(ge=0, le=HUGE)]
    recipe: _SavedRecipe
    data: _DataFacts
    precision: str
    """Of training and evaluation: fp32, bf16 or fp16. The weights are fp32."""
    versions: dict[str, str]
    """Packages that trained the model."""
    classes: list[Annotated[list[str], Field(min_length=2, max_length=2)]]
    preprocessing: _Preprocessing
    model: _ModelArguments


@_EXACTLY
class _Progress(_Inference):
    scaler: Annotated[_Scaler, AfterValidator(_complete_or_empty)]
    evaluations: _Evaluations


@_EXACTLY
class _ExportMetadata(_Inference):
    format: Literal[1]
    paceline: str
    """The version that wrote the export."""
    weights: Literal["ema", "model"]
    metrics: dict[Literal["val", "test"], _Metrics]
    comparison: NotRequired[dict[str, Any]]
    """How the outputs of an exported graph differ from those of the model."""


def _consistent(progress: Any) -> Any:
    channels = {len(progress["preprocessing"]["mean"]), len(progress["preprocessing"]["std"])}
    if channels != {progress["model"]["in_chans"]}:
        raise ValueError("mean, std and model.in_chans differ in their number of channels")
    if len(progress["classes"]) != progress["model"]["num_classes"]:
        raise ValueError("the number of classes differs from model.num_classes")
    return progress


def _in_order(progress: Any) -> Any:
    evaluations, steps = progress["evaluations"], progress["evaluations"]["step"]
    if {len(steps)} != set(map(len, evaluations.values())):
        raise ValueError("the columns of evaluations differ in length")
    if any(begin >= end for begin, end in pairwise([*steps, progress["step"] + 1])):
        raise ValueError("the steps of evaluations are not in ascending order up to the step of the checkpoint")
    return progress


@_EXACTLY
class _ChunkPlace(TypedDict):
    """Where a chunk is in its tensor."""

    shape: Annotated[list[_Count], Field(max_length=_MAX_DIMENSIONS)]
    offsets: Annotated[list[_Count], Field(max_length=_MAX_DIMENSIONS)]


_FILE_NAME = r"^(state\.json|(model|ema|optimizer)(-\d{5}-of-\d{5})?\.safetensors)$"
_MANIFEST: TypeAdapter[Any] = TypeAdapter(dict[Annotated[str, Field(pattern=_FILE_NAME)], _ManifestEntry])
_CHUNKS: TypeAdapter[Any] = TypeAdapter(dict[str, _ChunkPlace])
_CheckedProgress = Annotated[_Progress, AfterValidator(_consistent), AfterValidator(_in_order)]
_STATE, _PROGRESS = TypeAdapter(_StateFile), TypeAdapter(_CheckedProgress)
_METADATA: TypeAdapter[Any] = TypeAdapter(Annotated[_ExportMetadata, AfterValidator(_consistent)])


def check_manifest(value: Any) -> None:
    """Raise ValueError with the key, its value and the problem."""
    _check(_MANIFEST, value, "")


def check_chunks(value: Any) -> None:
    """Validate the types of what a header says about chunks; whether they fit is checked with their sizes."""
    _check(_CHUNKS, value, "chunks.")


def check_state(value: Any) -> None:
    """Validate state.json before its parts are assembled. ValueError names the key, its value and the problem."""
    _check(_STATE, value, "")


def check_progress(progress: Any, step: int) -> None:
    """Validate the position in the training, the recipe and the inference metadata."""
    if not is_plain(progress):
        raise ValueError("progress contains tensors, or numbers that are not finite or too large")
    _check(_PROGRESS, progress, "progress.")
    if progress["step"] != step:
        raise ValueError(f"progress.step={progress['step']} differs from the step of the checkpoint, {step}")


def check_metadata(value: Any) -> None:
    """Validate the metadata of an export. ValueError names the key, its value and the problem."""
    if not is_plain(value):
        raise ValueError("it contains numbers that are not finite or too large")
    _check(_METADATA, value, "")


def check_optimizer(state: Any) -> None:
    """Check the structure of an optimizer state; `optim.state` checks that it matches the model."""
    match state:
        case {"state": dict(states), "param_groups": list(groups), **more} if not more:
            valid = all(isinstance(key, int) and isinstance(state, dict) for key, state in states.items())
            if valid and all(isinstance(group, dict) for group in groups):
                return
    raise ValueError("optimizer is not an optimizer state")


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
