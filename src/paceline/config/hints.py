"""Messages about the fields of a recipe: name, value and fix, in the form in which the user wrote them."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.config.duration import CODES as DURATION_CODES
from paceline.config.phases import Phase
from paceline.config.synonyms import field_of, replacement_hint
from paceline.errors import Problem

Given = Mapping[str, tuple[str, str]]
"""Command line overrides by the path of their field: option and value as typed."""
_SEE = "see `paceline train RECIPE --help`"


@dataclasses.dataclass(frozen=True)
class FieldRow:
    """One row of `--help`."""

    path: str
    kind: str
    help: str


def describe(item: Any, rows: Sequence[FieldRow], given: Given) -> Iterator[Problem]:
    """The problems behind one of pydantic's errors."""
    path, value = ".".join(map(str, item["loc"])), item["input"]
    match item["type"]:
        case "unexpected_keyword_argument":
            yield from unknown(path, value, rows, given)
        case "missing":
            yield Problem("missing-field", _sentences(f"{path} is missing", _help(path, rows)))
        case "value_error":
            yield Problem("invalid-value", f"{path}={value!r}: {item['ctx']['error']}")
        case code if code in DURATION_CODES:
            yield Problem(code, f"{path}={value!r}: {item['msg']}")
        case "dataclass_type" | "dataclass_exact_type":
            names = ", ".join(_level(path.split("."), rows))
            hint = replacement_hint(path, value, path in given) or f"set its fields: {names}"
            yield Problem("field-is-group", _sentences(f"{_typed(path, value, given)}: {path} is a group", hint))
        case "dict_type":
            yield Problem(
                "invalid-value", _sentences(f"{path}={value!r}: not a mapping ({{key: value}})", _help(path, rows))
            )
        case "bool_parsing" | "bool_type":
            yield Problem("invalid-value", _sentences(f"{path}={value!r}: should be true or false", _help(path, rows)))
        case _:
            message = item["msg"].replace("Input should be", "should be").split(", unable to parse")[0]
            yield Problem("invalid-value", _sentences(f"{path}={value!r}: {message}", _help(path, rows)))


def unknown(path: str, value: Any, rows: Sequence[FieldRow], given: Given) -> Iterator[Problem]:
    """A field that does not exist; for an unknown group, each of its given fields."""
    if path.startswith("phases."):
        *group, last = path.split(".")
        same = _level(group, rows).get(field_of(last).rpartition(".")[2])
        yield _unknown(f"{path}={value!r}", f"did you mean {same}?" if same else _close(path, rows))
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from unknown(f"{path}.{key}", inner, rows, given)
    elif hint := (
        _in_misspelled_group(path, rows, given)
        or replacement_hint(path, value, path in given)
        or _same_name(path, rows, given)
    ):
        yield _unknown(_typed(path, value, given), hint)
    else:
        shown = f"{path}={value!r}" if value is not None else _typed(path, value, given)
        yield _unknown(shown, _close(path, rows))


def _unknown(shown: str, hint: str) -> Problem:
    return Problem("unknown-field", _sentences(f"{shown}: unknown field", hint))


def _sentences(problem: str, fix: str) -> str:
    end = "" if fix.endswith((".", "?")) else "."
    is_value = fix.partition(" ")[0].endswith((":", ","))  # the help of many fields begins with one of their values
    return f"{problem}. {fix if is_value else fix[:1].upper() + fix[1:]}{end}"


def _in_misspelled_group(path: str, rows: Sequence[FieldRow], given: Given) -> str:
    """A hint at the field of this name in the group with the closest name, if the group does not exist."""
    *parents, last = path.split(".")
    if not parents or _level(parents, rows):
        return ""
    close = difflib.get_close_matches(parents[-1], _level(parents[:-1], rows), n=1)
    found = _level([*parents[:-1], *close], rows).get(last) if close else None
    return _use(found, path, given) if found else ""


def value_missing(path: str, option: str, rows: Sequence[FieldRow]) -> Problem:
    """An override without a value; perhaps it is a switch of another program."""
    kind = next((row.kind for row in rows if row.path == path), None)
    if kind is None and not _level(path.split("."), rows):
        return next(unknown(path, None, rows, {path: (option, "")}))
    fix = f"use `{option} {'true' if kind == 'boolean' else 'VALUE'}`"
    return Problem("missing-value", _sentences(f"{option}: the value is missing", fix))


def _typed(path: str, value: Any, given: Given) -> str:
    return " ".join(given[path]).strip() if path in given else f"{path}={value!r}"


def _same_name(path: str, rows: Sequence[FieldRow], given: Given) -> str:
    """A hint at the fields of the same name in other groups."""
    found = [row.path for row in rows if row.path.rpartition(".")[2] == path.rpartition(".")[2]]
    if len(found) != 1:
        return f"did you mean {', '.join(found[:-1])} or {found[-1]}?" if found else ""
    return _use(found[0], path, given)


def _use(found: str, path: str, given: Given) -> str:
    if path not in given:
        return f"did you mean {found}?"
    option = f"--{found} {given[path][1]}".strip()
    return f"use `{option}`"


def _level(parents: Sequence[str], rows: Sequence[FieldRow]) -> dict[str, str]:
    """Names directly below a group, with their paths."""
    if parents and parents[0] == "phases":
        return {field.name: ".".join([*parents, field.name]) for field in dataclasses.fields(Phase)}
    depth, paths = len(parents), [row.path.split(".") for row in rows]
    return {
        path[depth]: ".".join(path[: depth + 1])
        for path in paths
        if path[:depth] == list(parents) and len(path) > depth
    }


def _close(path: str, rows: Sequence[FieldRow]) -> str:
    """A hint at a similar name on the same level, otherwise anywhere."""
    *parents, last = path.split(".")
    level = _level(parents, rows)
    everywhere = {} if "phases" in parents else {row.path.rpartition(".")[2]: row.path for row in rows}
    for names, cutoff in ((level, 0.6), (everywhere, 0.8)):
        if close := difflib.get_close_matches(last, names, n=1, cutoff=cutoff):
            return f"did you mean {names[close[0]]}?"
    return f"valid fields: {', '.join(level)}" if level else _SEE


def _help(path: str, rows: Sequence[FieldRow]) -> str:
    named = ".".join(part for part in path.split(".") if not part.isdigit())
    return next((" ".join(row.help.split()) for row in rows if row.path == named), _SEE)
