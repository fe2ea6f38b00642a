"""The schema of details.json, which may be untrusted."""

from functools import cache
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from paceline.track.checks import FiniteFloat, NonNegativeInt, UnitFraction

_IntervalField = Annotated[list[UnitFraction], Field(min_length=2, max_length=2)]
_FractionOrNone = UnitFraction | None


class _DataFields(TypedDict):
    name: str
    place: str
    split: str
    variant: NotRequired[str]
    """Of prepared images."""
    fingerprint: str
    num_corrupt: NonNegativeInt
    own: bool
    """Whether it is the data of the run."""
    trained_on: bool


class _ClassFields(TypedDict):
    id: str
    name: str


class _AccuracyFields(TypedDict):
    samples: NonNegativeInt
    correct: NonNegativeInt
    top1: UnitFraction
    interval: _IntervalField
    top5: UnitFraction
    loss: FiniteFloat


_ClassFigures = TypedDict(
    "_ClassFigures",
    {
        "class": NonNegativeInt,
        "support": NonNegativeInt,
        "predicted": NonNegativeInt,
        "recall": _FractionOrNone,
        "interval": _IntervalField | None,
        "precision": _FractionOrNone,
        "f1": _FractionOrNone,
    },
)


class _PairFields(TypedDict):
    label: NonNegativeInt
    predicted: NonNegativeInt
    count: NonNegativeInt
    fraction: UnitFraction
    images: list[NonNegativeInt]


class _BinFields(TypedDict):
    count: NonNegativeInt
    confidence: _FractionOrNone
    accuracy: _FractionOrNone


class _CalibrationFields(TypedDict):
    bins: list[_BinFields]
    ece: UnitFraction
    temperature: FiniteFloat | None
    bins_after: NotRequired[list[_BinFields]]
    ece_after: NotRequired[UnitFraction]
    loss_after: NotRequired[FiniteFloat]


class _ImageFields(TypedDict):
    index: NonNegativeInt
    path: str
    label: NonNegativeInt
    predicted: NonNegativeInt
    confidence: UnitFraction
    p_label: UnitFraction
    loss: FiniteFloat
    entropy: FiniteFloat


class _OverallFields(_AccuracyFields):
    balanced_accuracy: _FractionOrNone
    f1: _FractionOrNone


class _SliceFields(_AccuracyFields):
    slice: str | None


class _SlicesFields(TypedDict):
    by: str
    unmatched: NonNegativeInt
    rows: list[_SliceFields]


class DetailsFile(TypedDict):
    """The content of details.json."""

    version: NonNegativeInt
    checkpoint: str
    step: NonNegativeInt
    weights: Literal["ema", "model"]
    tta: str
    precision: str
    data: _DataFields
    classes: Annotated[list[_ClassFields], Field(min_length=1)]
    overall: _OverallFields
    per_class: list[_ClassFigures]
    class_order: list[NonNegativeInt]
    confused_pairs: list[_PairFields]
    calibration: _CalibrationFields
    num_label_errors: NonNegativeInt
    examples: dict[str, list[NonNegativeInt]]
    images: list[_ImageFields]
    slices: NotRequired[_SlicesFields]


@cache
def _adapter() -> TypeAdapter[DetailsFile]:
    return TypeAdapter(DetailsFile)


def is_details(record: Any) -> bool:
    """Return whether a value is the content of a details.json."""
    try:
        _adapter().validate_python(record, strict=True)
    except (ValidationError, RecursionError):
        return False
    return _is_consistent(record)


def _is_consistent(record: dict[str, Any]) -> bool:
    """Return whether all class numbers exist."""
    classes = list(range(len(record["classes"])))
    used = [entry[side] for entry in (*record["images"], *record["confused_pairs"]) for side in ("label", "predicted")]
    return (
        sorted(record["class_order"]) == classes
        and [row["class"] for row in record["per_class"]] == classes
        and max(used, default=0) < len(classes)
    )
