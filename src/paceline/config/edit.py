"""Write measured results into the text of a recipe, and keep its comments and layout."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from paceline.config import yamls
from paceline.config.tracking import Measured
from paceline.errors import UserError
from paceline.system.files import write_text
from paceline.system.untrusted import read_regular

_ADAPTER = TypeAdapter(Measured)
_INDENT = "  "


def write_measured(path: Path, measured: Measured) -> None:
    """Replace about.measured in a recipe's file; UserError, and no change, if anything else would change."""
    path = path.resolve()  # a link stays one
    content = read_regular(path, yamls.MAX_BYTES).decode()
    text = content.removeprefix("\ufeff")
    fields: dict[str, Any] = _ADAPTER.dump_python(measured, mode="json", exclude_defaults=True)
    edited = _edited(text, fields)
    if edited is None or _tree(edited) != _expected(text, fields):
        message = (
            f"{path}: about.measured cannot be written without changing other parts of the file. Write `about:` and "
            "its fields on lines of their own, and remove `measured`."
        )
        raise UserError("recipe-not-editable", message, path=path)
    write_text(path, content[: len(content) - len(text)] + edited, path.stat().st_mode & 0o777)


def _tree(text: str) -> Any:
    try:
        return yamls.parse(text)
    except yaml.YAMLError:
        return None


def _expected(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = yamls.parse(text)
    return tree | {"about": (tree.get("about") or {}) | {"measured": fields}}


def _edited(text: str, fields: dict[str, Any]) -> str | None:
    """Return the text with these fields in about.measured; None if its layout is unknown."""
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        return None
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = ["measured:", *(f"{_INDENT}{name}: {yamls.dump_line(value)}" for name, value in fields.items())]
    about = _entry(root, "about")
    if about is None:
        above = (_entry(root, "name") or root.value[0])[1]
        return _inserted(text, _end(text, above), ["about:", *(_INDENT + line for line in lines)], newline)
    key, value = about
    if isinstance(value, yaml.ScalarNode) and not value.value:
        return _inserted(text, key.end_mark.index, [_INDENT + line for line in lines], newline)
    if not isinstance(value, yaml.MappingNode) or value.flow_style or value.start_mark.index < key.end_mark.index:
        return None  # the last: an alias
    margin = " " * value.value[0][0].start_mark.column
    if old := _entry(value, "measured"):
        return text[: old[0].start_mark.index] + f"{newline}{margin}".join(lines) + text[_end(text, old[1]) :]
    return _inserted(text, _end(text, value), [margin + line for line in lines], newline)


def _inserted(text: str, place: int, lines: list[str], newline: str) -> str:
    """Return the text with these lines below the line of a place."""
    found = text.find("\n", place)
    above, below = (text, "") if found < 0 else (text[: found + 1], text[found + 1 :])
    return above.rstrip("\r\n") + newline + newline.join(lines) + newline + below


def _entry(mapping: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next((pair for pair in mapping.value if pair[0].value == name), None)


def _end(text: str, node: yaml.Node) -> int:
    """Return where the text of a node ends; the mark of a block is where the next one begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return len(text[: node.end_mark.index].rstrip())
