"""Recipes from YAML and command line, and back. One path for both, so that every mistake is reported at once."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from paceline.config import yamls
from paceline.config.hints import FieldRow, Given, describe, value_missing
from paceline.config.problems import problems
from paceline.config.recipe import Recipe
from paceline.errors import ConfigError, UserError

_ADAPTER = TypeAdapter(Recipe)
_MOST_BASES = 20
_MOST_PROBLEMS = 50  # a close field is looked for each


def shipped() -> dict[str, Path]:
    """The recipes inside the package, by name."""
    folder = Path(str(resources.files("paceline") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a shipped recipe or a file, with `--dotted.field value` overrides laid over it."""
    return recipe_from_tree(_read(_find(source), []), source, overrides)


def _read(path: Path, above: list[Path]) -> dict[str, Any]:
    """The tree in a file, laid over that of the recipe it names as its `base`."""
    if path.resolve() in (other.resolve() for other in above):
        raise ConfigError(str(path), [f"base: {' -> '.join(map(str, [*above, path]))} goes round in a circle"])
    if len(above) > _MOST_BASES:
        raise ConfigError(str(path), [f"base: more than {_MOST_BASES} recipes build on one another; merge some"])
    try:
        tree = yamls.read(path)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(str(path), [f"not readable as YAML: {_yaml_problem(error)}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [f"not readable as YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError(str(path), ["not a recipe; it should hold `key: value` lines, beginning with `name: ...`"])
    if "base" not in tree:
        return tree
    base = tree.pop("base")
    beside = path.parent / str(base)
    found = beside if beside.is_file() else _find(str(base))
    return _over(_read(found, [*above, path]), tree)


def _over(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Groups are merged field by field; lists and values are replaced."""
    merged = dict(base)
    for key, value in tree.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """What is wrong, where, and the line itself."""
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    excerpt = mark.get_snippet(indent=6) if mark else None
    return f"{where}{error.problem or error.context}" + (f"\n{excerpt}" if excerpt else "")


def recipe_from_tree(tree: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from plain dictionaries; every mistake in them and in the overrides at once."""
    given: dict[str, tuple[str, str]] = {}
    mistakes = list(_apply(tree, overrides, given))
    recipe = _validated(tree, mistakes, given)
    if mistakes or recipe is None:
        raise ConfigError(origin, mistakes)
    return recipe


def _find(source: str) -> Path:
    known = shipped()
    if source in known:
        return known[source]
    path = Path(source)
    if path.is_file():
        return path
    if path.exists():
        raise UserError(f"{source} is not a regular file; give a YAML file, or a name that `paceline recipes` lists")
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        raise UserError(f"{source}: no such file; `paceline recipes` lists the shipped recipes")
    close = difflib.get_close_matches(source, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"shipped are {', '.join(known)}"
    raise UserError(f"{source!r} is neither a shipped recipe nor a file; {hint}")


_OPTION = re.compile(r"--?([A-Za-z].*)")  # one dash: short options of other programs, for which there is a hint


def split_overrides(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """`--a.b 1 2 --c=3` as (a.b, [1, 2]), (c, [3])."""
    key: str | None = None
    values: list[str] = []
    for argument in arguments:
        if match := _OPTION.fullmatch(argument):
            if key is not None:
                yield key, values
            key, equals, value = match[1].partition("=")
            values = [value] if equals else []
        else:
            values.append(argument)
            key = key if key is not None else ""
    if key is not None:
        yield key, values


def _apply(tree: dict[str, Any], arguments: Sequence[str], given: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Lay overrides over the tree in place, and note them; yields what is wrong with them."""
    for written, words in split_overrides(arguments):
        dotted, option = written.replace("-", "_"), f"{'-' if len(written) == 1 else '--'}{written}"
        if not dotted:
            field, _, given_value = words[0].partition("=")
            how = f"--{field} {given_value}" if field and given_value else "--dotted.field VALUE"
            yield f"{' '.join(words)}: a value without a field; write {how}"
            continue
        if not words:
            yield value_missing(dotted, option, fields())
            continue
        try:
            values = [yamls.parse(word) if word else "" for word in words]
        except yaml.YAMLError:
            yield f"--{dotted} {' '.join(words)}: not readable as a YAML value"
            continue
        node = _parent(tree, dotted)
        last = dotted.rpartition(".")[2]
        value = values[0] if len(values) == 1 else values
        if _has_place(node, last):
            node[int(last)] = value
        elif isinstance(node, dict):
            node[last] = value
            given[dotted] = option, " ".join(words)
        elif not _below_plain_group(dotted, given):
            short = f"; it has {len(node)} values" if isinstance(node, list) else ""
            yield f"--{dotted}: there is no such field{short}"


def _below_plain_group(dotted: str, given: Given) -> bool:
    """Whether a group above it was given a plain value, which is complained about already."""
    groups = {row.path.rpartition(".")[0] for row in fields()}
    return any(dotted.startswith(f"{above}.") and above in groups for above in given)


def _parent(tree: dict[str, Any], dotted: str) -> Any:
    """The group or list that a path leads into; groups that are not there yet are made."""
    node: Any = tree
    for parent in dotted.split(".")[:-1]:
        if _has_place(node, parent):
            node = node[int(parent)]
        elif isinstance(node, dict) and not parent.isdigit():
            node = node.setdefault(parent, {})
        else:
            return None
    return node


def _has_place(node: Any, number: str) -> bool:
    return isinstance(node, list) and number.isdigit() and int(number) < len(node)


def _validated(tree: dict[str, Any], mistakes: list[str], given: Given) -> Recipe | None:
    try:
        recipe = _ADAPTER.validate_python(tree)
    except ValidationError as error:
        rows = fields()
        found = (text for item in error.errors() for text in describe(item, rows, given))
        mistakes += islice(found, _MOST_PROBLEMS)
        if next(found, None):
            mistakes.append("and more; is this a recipe?")
        return None
    mistakes += problems(recipe)
    return recipe


def fields() -> list[FieldRow]:
    """Every field of a recipe with its type and help text, groups resolved."""
    schema = _ADAPTER.json_schema()
    return list(_rows(schema, schema["$defs"], ""))


def _rows(node: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[FieldRow]:
    for name, entry in node["properties"].items():
        if "$ref" in entry:
            yield from _rows(definitions[entry["$ref"].rpartition("/")[2]], definitions, f"{prefix}{name}.")
        else:
            kind = "|".join(entry["enum"]) if "enum" in entry else entry["type"]
            yield FieldRow(prefix + name, kind, entry["description"])


def to_tree(recipe: Recipe) -> dict[str, Any]:
    tree: dict[str, Any] = _ADAPTER.dump_python(recipe, mode="json")
    return tree


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of a tree."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def dump_recipe(recipe: Recipe) -> str:
    """YAML that loads to an equal recipe."""
    return yaml.safe_dump(to_tree(recipe), sort_keys=False, allow_unicode=True, width=120)


def fingerprint(recipe: Recipe) -> str:
    """Identifies the experiment: what the recipe says of its origin and its results does not count."""
    tree = to_tree(recipe)
    del tree["about"]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
