"""Schemas for the files of a run folder, which may be untrusted. Each record is validated once, when it is read."""

from collections.abc import Iterable
from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from paceline.system.untrusted import HUGE, is_plain

_MAX_SECONDS = 1e15
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-HUGE, le=HUGE)]
Percent = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1000)]
Fraction = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=10**18)]
Positive = Annotated[int, Field(ge=1, le=10**12)]
NotNegative = Annotated[float, Field(allow_inf_nan=False, ge=0, le=_MAX_SECONDS)]
Part = Annotated[str, Field(pattern=r"^\w{1,32}$")]
"""A part of a step: data, compute, sync, optimizer."""


def _same_number_of_ranks(split: dict[str, list[float]]) -> dict[str, list[float]]:
    if "data" not in split or len({len(times) for times in split.values()}) > 1:
        raise ValueError("the parts have different numbers of ranks")
    return split


class _Place(TypedDict, total=False):
    step: Required[Count]
    epoch: NotNegative
    phase: Count


class _Train(_Place, total=False):
    steps: Required[Positive]
    images: Required[Count]
    seconds: Required[dict[Part, NotNegative]]
    seconds_per_rank: Annotated[dict[Part, list[NotNegative]], AfterValidator(_same_number_of_ranks)]
    memory_per_rank: Annotated[list[Count], Field(min_length=1)]
    images_per_second: NotNegative
    top1: Fraction
    lr: Finite
    loss: Finite | None


class _Eval(_Place, total=False):
    top1: Required[Fraction | None]
    top5: Required[Fraction | None]
    loss: Required[Finite | None]
    samples: Count
    chance: Fraction
    predicted: Count
    seconds: Required[NotNegative]


class _Checkpoint(_Place, total=False):
    seconds: Required[NotNegative]


class _Callback(_Place):
    values: dict[str, Finite | str]


class _Hardware(TypedDict, total=False):
    cpu: str
    gpu: str
    device: str
    cores: Positive
    threads_per_process: Positive
    gpus: Count


class _LargestBatch(TypedDict):
    largest: Required[Any]
    largest_global: Required[Any]
    fastest: Required[Any]
    searched: Required[Any]


class Start(TypedDict, total=False):
    started: str
    recipe_sha256: str
    ranks: Positive
    first_step: Count
    hosts: dict[str, Any]
    host_of_rank: list[str]
    hardware: _Hardware
    packages: dict[str, str]
    code: dict[str, Any]
    imports: dict[str, dict[str, str]]
    largest_batch: _LargestBatch | None
    command: list[str]
    price: NotNegative


class Summary(TypedDict, total=False):
    status: str
    message: str
    global_batch: Count
    parameters: Count
    total_steps: Count


class _Data(TypedDict, total=False):
    name: str
    decode_threads: Count


class _Training(TypedDict, total=False):
    global_batch: Count


class Recipe(TypedDict, total=False):
    name: str
    about: dict[str, Any]
    data: _Data
    model: dict[str, Any]
    train: _Training
    evaluate: dict[str, Any]
    checkpoint: dict[str, Any]
    grad_sync: dict[str, Any]


class _GpuSample(TypedDict, total=False):
    use_percent: Percent | None
    memory_bytes: Count | None
    watts: NotNegative | None
    celsius: Finite | None


class TelemetrySample(TypedDict, total=False):
    time: Required[NotNegative]
    cpu_percent: Required[Percent]
    memory_bytes: Required[Count]
    other_cpu_percent: Percent
    other_gpu_processes: Count
    gpus: list[_GpuSample]


class Imported(TypedDict, total=False):
    """A record of another program's log."""

    kind: Required[str]
    step: Required[Count]
    epoch: NotNegative | None
    steps: Positive
    images: Count
    seconds: dict[Part, NotNegative]
    images_per_second: NotNegative
    top1: Fraction | None
    top5: Fraction | None
    loss: Finite | None
    lr: Finite


_RECORDS: dict[str, type] = {
    "train": _Train,
    "eval": _Eval,
    "checkpoint": _Checkpoint,
    "callback": _Callback,
    "resume": _Place,
}
_CHECKS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (*_RECORDS.values(), Start, Summary, Recipe, TelemetrySample, Imported)
}

_READ_COMPLETELY = (Start, Summary, Recipe)
"""Of other kinds only the fields above are read, so unknown fields need no check."""


def is_valid(value: object, kind: type) -> bool:
    """Return whether a value is valid for a schema."""
    try:
        _CHECKS[kind].validate_python(value, strict=True)
    except (ValidationError, RecursionError):
        return False
    return kind not in _READ_COMPLETELY or is_plain(value)


def is_valid_record(record: dict[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl is valid for its kind."""
    kind = record.get("kind")
    return isinstance(kind, str) and kind in _RECORDS and is_valid(record, _RECORDS[kind])


def valid(values: Iterable[Any], kind: type) -> list[Any]:
    """Return the values that are valid for a schema."""
    return [value for value in values if is_valid(value, kind)]
