"""Types of recipe fields. Pydantic checks their ranges when a recipe is read."""

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):  # YAML's yes and no would otherwise become 1 and 0
        raise ValueError("should be a number")
    return value


NUMBER = BeforeValidator(_no_bool)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER]
Fraction = Annotated[float, Field(ge=0, lt=1), NUMBER]
PositiveFraction = Annotated[float, Field(gt=0, le=1), NUMBER]
FractionOrOne = Annotated[float, Field(ge=0, le=1), NUMBER]
Count = Annotated[int, Field(ge=1), NUMBER]
Side = Annotated[int, Field(ge=0, le=4096), NUMBER]
"""Side of an image in pixels; 0: not set."""
CountOrZero = Annotated[int, Field(ge=0), NUMBER]
Patterns = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""A list of patterns; one may also be written without a list."""


def _class_weights(value: object) -> object:
    if value in ("none", "balanced"):
        return value
    if not isinstance(value, dict):
        raise ValueError("should be none, balanced or a mapping, e.g. {cat: 2.0}")
    for name, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"the weight of {name!r} should be a positive number")
    return {str(name): float(weight) for name, weight in value.items()} or "none"


ClassWeights = Annotated[Any, PlainValidator(_class_weights), WithJsonSchema({"type": "none|balanced|object"})]
"""A name, or weights by class. For a union, pydantic would report an error once per member."""
