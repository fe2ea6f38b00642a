"""Types of recipe fields. Pydantic checks their ranges when a recipe is read."""

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

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
Count = Annotated[int, Field(ge=1), NUMBER]
Side = Annotated[int, Field(ge=0, le=4096), NUMBER]
"""Side of an image in pixels; 0: not set."""
CountOrZero = Annotated[int, Field(ge=0), NUMBER]
