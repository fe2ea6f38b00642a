"""Write the reference pages from the code when MkDocs builds the site; they are not in the repository."""

import argparse
import json
import re
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from command_parsers import parser_of, public_commands, subparsers
from error_codes import error_codes
from pydantic import TypeAdapter

from paceline.config.io import fields, leaves, to_tree
from paceline.config.recipe import Recipe
from paceline.track import checks

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path in docs/."""
    return {
        "reference/cli.md": _commands(),
        "reference/recipe.md": _recipe_fields(),
        "reference/records.md": _records(),
        "reference/errors.md": _errors(),
    }


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the generated pages; MkDocs calls this."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def _commands() -> str:
    parts = [
        "# Command line",
        "Every command prints this with `--help`. Exit statuses are in [Train](../guides/train.md).",
    ]
    for name, summary in public_commands().items():
        parser = parser_of(name)
        parts += [f"## paceline {name}", f"{summary[0].upper()}{summary[1:]}.", _help(parser)]
        for backend, below in subparsers(parser):
            parts += [f"### paceline {name} {backend}", _help(below)]
    return _joined(parts)


def _help(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().rstrip()}\n```"


def _recipe_fields() -> str:
    defaults = dict(leaves(to_tree(Recipe(name="NAME"))))
    groups: dict[str, list[list[str]]] = {}
    for row in fields():
        group, _, below = row.path.partition(".")
        default = defaults.get(row.path)
        shown = "" if row.path == "name" or default is None else _code(json.dumps(default))
        kinds = " or ".join(map(_code, row.kind.split("|")))
        groups.setdefault(group if below else "", []).append(
            [_code(row.path), kinds, shown, " ".join(row.help.split())]
        )
    parts = [
        "# Fields of a recipe",
        "`paceline train RECIPE --help` prints the same with the values of a recipe. [Write a recipe]"
        "(../guides/recipes.md) explains how fields are set.",
    ]
    for group, rows in groups.items():
        parts += [f"## {group or 'Fields without a group'}", _table(("field", "type", "default", "meaning"), rows)]
    return _joined(parts)


_FILES = {
    "environment.json": ("One entry of `starts` per start of the run.", checks.Start),
    "summary.json": ("Rewritten during the run; at the end it also has the totals.", checks.Summary),
    "telemetry/HOST.jsonl": ("Records of kind `sample`, one per second.", checks.TelemetrySample),
}


def _records() -> str:
    parts = [
        "# Records of a run",
        "These are the fields that are validated when a run is read. A record may have more. [The run folder]"
        "(run-folder.md) says what they mean.",
        "## metrics.jsonl",
    ]
    for kind, schema in checks._RECORDS.items():
        parts += [f"### Records of kind {kind}", _schema_table(schema)]
    for name, (text, schema) in _FILES.items():
        parts += [f"## {name}", text, _schema_table(schema)]
    return _joined(parts)


def _schema_table(kind: type) -> str:
    schema = TypeAdapter(kind).json_schema()
    definitions, required = schema.get("$defs", {}), schema.get("required", [])
    rows = [
        [_code(name), _kind(entry, definitions), "yes" if name in required else ""]
        for name, entry in schema["properties"].items()
    ]
    return _table(("field", "type", "required"), rows)


def _kind(entry: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe a type of a JSON schema in a few words."""
    if "$ref" in entry:
        names = definitions[entry["$ref"].rpartition("/")[2]]["properties"]
        return f"object with {', '.join(map(_code, names))}"
    if "anyOf" in entry:
        return " or ".join(_kind(each, definitions) for each in entry["anyOf"])
    if entry.get("type") == "array":
        return f"list of {_kind(entry['items'], definitions)}"
    if entry.get("type") == "object":
        values: Any = entry.get("additionalProperties") or next(iter(entry.get("patternProperties", {}).values()), {})
        return f"object of {_kind(values, definitions)}" if isinstance(values, dict) and values else "object"
    return str(entry.get("type", "any"))


def _errors() -> str:
    rows = [
        [f'<span id="{code}"></span>{_code(code)}', "<br>".join(map(_shown, templates))]
        for code, templates in error_codes().items()
    ]
    return _joined(
        [
            "# Error codes",
            "A message that you can act on ends with its code in brackets. Codes are stable: scripts can rely on them. "
            "`UserError.code` has the code in Python. Values are shown by name, or as three dots.",
            _table(("code", "message"), rows),
        ]
    )


def _shown(template: str) -> str:
    """Return a message as Markdown that shows every character as it is."""
    text = escape(" ".join(template.split()), quote=False)
    return re.sub(r"[*_`\[\]{}]", lambda match: f"&#{ord(match[0])};", text)


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"
