"""What dataset.json may hold. It can come from elsewhere, and names in it become paths here: it is not trusted."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

# a name that stays inside the folder it is joined to
_Name = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$", max_length=255)]
_Count = Annotated[int, Field(ge=0, lt=1 << 48)]


class _File(BaseModel):
    file: _Name
    bytes: _Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Shard(_File):
    samples: _Count


class _Files(BaseModel):
    bytes: _Count
    shards: Annotated[list[_Shard], Field(min_length=1)]
    lists: list[_File]


class _Variant(BaseModel):
    splits: dict[_Name, _Files]


class _Class(BaseModel):
    id: _Name
    name: str


class _Split(BaseModel):
    samples: Annotated[int, Field(ge=1)]
    left_out: _Count
    per_class: Annotated[list[_Count], Field(min_length=2)]


class _Remark(BaseModel):
    split: str
    file: str
    what: str


class _Description(BaseModel):
    kind: Literal["shards"]
    name: _Name
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    classes: Annotated[list[_Class], Field(min_length=2)]
    splits: Annotated[dict[_Name, _Split], Field(min_length=1)]
    variants: Annotated[dict[_Name, _Variant], Field(min_length=1)]
    remarks: list[_Remark]


def problem(description: Any) -> str:
    """What is wrong with a description, in a line; empty where nothing is."""
    try:
        _Description.model_validate(description)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    return ""
