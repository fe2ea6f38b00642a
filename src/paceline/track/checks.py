"""Schemas for the files of a run folder, which may be untrusted. Each record is validated once, when it is read."""

from collections.abc import Iterable
from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from paceline.system.untrusted import HUGE, is_plain

_MAX_SECONDS = 1e15
FiniteFloat = Annotated[float, Field(allow_inf_nan=False, ge=-HUGE, le=HUGE)]
Percent = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1000)]
UnitFraction = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**18)]
PositiveInt = Annotated[int, Field(ge=1, le=10**12)]
NonNegativeFloat = Annotated[float, Field(allow_inf_nan=False, ge=0, le=_MAX_SECONDS)]
Part = Annotated[str, Field(pattern=r"^\w{1,32}$")]
"""A part of a step: data, compute, sync, optimizer."""


def _same_number_of_ranks(split: dict[str, list[float]]) -> dict[str, list[float]]:
    if "data" not in split or len({len(times) for times in split.values()}) > 1:
        raise ValueError("the parts have different numbers of ranks")
    return split


class _RecordBase(TypedDict, total=False):
    step: Required[NonNegativeInt]
    epoch: NonNegativeFloat
    phase: NonNegativeInt


class _TrainRecord(_RecordBase, total=False):
    steps: Required[PositiveInt]
    images: Required[NonNegativeInt]
    seconds: Required[dict[Part, NonNegativeFloat]]
    seconds_per_rank: Annotated[dict[Part, list[NonNegativeFloat]], AfterValidator(_same_number_of_ranks)]
    memory_per_rank: Annotated[list[NonNegativeInt], Field(min_length=1)]
    images_per_second: NonNegativeFloat
    compile_seconds: NonNegativeFloat
    top1: UnitFraction
    lr: FiniteFloat
    loss: FiniteFloat | None


class _EvalRecord(_RecordBase, total=False):
    top1: Required[UnitFraction | None]
    top5: Required[UnitFraction | None]
    loss: Required[FiniteFloat | None]
    samples: NonNegativeInt
    chance: UnitFraction
    predicted: NonNegativeInt
    seconds: Required[NonNegativeFloat]


class _CheckpointRecord(_RecordBase, total=False):
    seconds: Required[NonNegativeFloat]


class _ProfiledOperator(TypedDict):
    name: Annotated[str, Field(max_length=200)]
    calls: NonNegativeInt
    seconds: NonNegativeFloat
    fraction: UnitFraction


class _ProfileRecord(_RecordBase, total=False):
    steps: Required[PositiveInt]
    operators: Required[Annotated[list[_ProfiledOperator], Field(max_length=100)]]


class _CallbackRecord(_RecordBase):
    values: dict[str, FiniteFloat | str]


class _Hardware(TypedDict, total=False):
    cpu: str
    gpu: str
    device: str
    cores: PositiveInt
    threads_per_process: PositiveInt
    gpus: NonNegativeInt


class _LargestBatch(TypedDict):
    largest: Required[Any]
    largest_global: Required[Any]
    fastest: Required[Any]
    searched: Required[Any]


class Start(TypedDict, total=False):
    started: str
    recipe_sha256: str
    ranks: PositiveInt
    first_step: NonNegativeInt
    hosts: dict[str, Any]
    host_of_rank: list[str]
    hardware: _Hardware
    packages: dict[str, str]
    code: dict[str, Any]
    imports: dict[str, dict[str, str]]
    import_files: dict[str, str]
    largest_batch: _LargestBatch | None
    memory_key: dict[str, Any]
    command: list[str]
    price: NonNegativeFloat


class Summary(TypedDict, total=False):
    status: str
    message: str
    stopped_by: str
    stop_reason: str
    global_batch: NonNegativeInt
    parameters: NonNegativeInt
    total_steps: NonNegativeInt


class _DataSection(TypedDict, total=False):
    name: str
    decode_threads: NonNegativeInt


class _TrainSection(TypedDict, total=False):
    global_batch: NonNegativeInt


class RecipeFile(TypedDict, total=False):
    name: str
    about: dict[str, Any]
    data: _DataSection
    model: dict[str, Any]
    train: _TrainSection
    evaluate: dict[str, Any]
    checkpoint: dict[str, Any]
    grad_sync: dict[str, Any]


class _GpuSample(TypedDict, total=False):
    use_percent: Percent | None
    memory_bytes: NonNegativeInt | None
    watts: NonNegativeFloat | None
    celsius: FiniteFloat | None


class TelemetrySample(TypedDict, total=False):
    time: Required[NonNegativeFloat]
    cpu_percent: Required[Percent]
    memory_bytes: Required[NonNegativeInt]
    other_cpu_percent: Percent
    other_gpu_processes: NonNegativeInt
    gpus: list[_GpuSample]


class ImportedRecord(TypedDict, total=False):
    """A record of another program's log."""

    kind: Required[str]
    step: Required[NonNegativeInt]
    epoch: NonNegativeFloat | None
    steps: PositiveInt
    images: NonNegativeInt
    seconds: dict[Part, NonNegativeFloat]
    images_per_second: NonNegativeFloat
    top1: UnitFraction | None
    top5: UnitFraction | None
    loss: FiniteFloat | None
    lr: FiniteFloat


_RECORDS: dict[str, type] = {
    "train": _TrainRecord,
    "eval": _EvalRecord,
    "test": _EvalRecord,
    "checkpoint": _CheckpointRecord,
    "callback": _CallbackRecord,
    "profile": _ProfileRecord,
    "resume": _RecordBase,
}
_CHECKS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind)
    for kind in (*_RECORDS.values(), Start, Summary, RecipeFile, TelemetrySample, ImportedRecord)
}

_READ_COMPLETELY = (Start, Summary, RecipeFile)
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
