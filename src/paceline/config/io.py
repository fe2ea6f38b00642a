"""Read and write recipes. YAML and overrides are validated together, so that all problems are found at once."""

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
from paceline.config.overrides import overlay, type_at, without_nulls
from paceline.config.problems import problems
from paceline.config.recipe import Recipe
from paceline.config.synonyms import data_field
from paceline.errors import ConfigError, Problem, UserError

_ADAPTER = TypeAdapter(Recipe)
_MAX_BASES = 20
_MAX_PROBLEMS = 50  # the search for a similar field name takes time for each


def shipped() -> dict[str, Path]:
    """Paths of the shipped recipes by name."""
    folder = Path(str(resources.files("paceline") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a shipped name or a YAML file, with `--dotted.field value` overrides applied."""
    return recipe_from_tree(_read(recipe_file(source), []), source, overrides)


def _read(path: Path, above: list[Path]) -> dict[str, Any]:
    """The tree in a file, merged over the recipe that it names as its `base`."""
    if path.resolve() in (other.resolve() for other in above):
        cycle = " -> ".join(map(str, [*above, path]))
        raise ConfigError(str(path), [Problem("base-cycle", f"base: {cycle} is a cycle. Remove one `base` line.")])
    if len(above) > _MAX_BASES:
        message = f"base: a chain of more than {_MAX_BASES} recipes. Merge some of them."
        raise ConfigError(str(path), [Problem("base-too-deep", message)])
    try:
        tree = yamls.read(path)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [_yaml_problem(error)]) from None
    if not isinstance(tree, dict):
        message = "the file is not a recipe. It must contain `key: value` lines, starting with `name: ...`."
        raise ConfigError(str(path), [Problem("not-a-recipe", message)])
    if "base" not in tree:
        return tree
    base = tree.pop("base")
    beside = path.parent / str(base)
    found = beside if beside.is_file() else recipe_file(str(base))
    return _merge(_without_results(_read(found, [*above, path])), tree)


def _without_results(base: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a base without its results, which do not apply to other settings."""
    about = base.get("about")
    if not isinstance(about, dict):
        return base
    return base | {"about": {key: value for key, value in about.items() if key not in ("published", "measured")}}


def _merge(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Groups are merged field by field; lists and values are replaced."""
    merged = dict(base)
    for key, value in tree.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _yaml_problem(error: yaml.YAMLError) -> Problem:
    """What is wrong, in which line, and the line itself if known."""
    code = error.code if isinstance(error, yamls.RefusedYaml) else "invalid-yaml"
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem(code, f"cannot read the file as YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    excerpt = mark.get_snippet(indent=6) if mark else None
    message = f"cannot read the file as YAML: {where}{error.problem or error.context}"
    return Problem(code, message + (f"\n{excerpt}" if excerpt else ""))


def recipe_from_tree(tree: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of plain dictionaries and overrides; ConfigError with all of their problems."""
    given: dict[str, tuple[str, str]] = {}
    found = list(_apply(tree, overrides, given))
    recipe = _validated(tree, found, given)
    if found or recipe is None:
        raise ConfigError(origin, found)
    return recipe


def recipe_file(source: str) -> Path:
    """Return the file of a shipped recipe, by name, or of a path."""
    known = shipped()
    if source in known:
        return known[source]
    path = Path(source)
    if path.is_file():
        return path
    if path.exists():
        raise UserError(
            "recipe-not-a-file",
            f"{source} is not a regular file. Give a YAML file, or a name that `paceline recipes` lists.",
            source=source,
        )
    if path.suffix in (".yaml", ".yml") or path.parent != Path("."):
        message = f"recipe file {source} does not exist. `paceline recipes` lists the shipped recipes."
        raise UserError("recipe-not-found", message, source=source)
    close = difflib.get_close_matches(source, known, n=1, cutoff=0.4)
    hint = f"Did you mean {close[0]!r}?" if close else f"Shipped recipes: {', '.join(known)}."
    raise UserError("recipe-not-found", f"{source!r} is neither a shipped recipe nor a file. {hint}", source=source)


_OPTION = re.compile(r"--?([A-Za-z].*)")  # one dash: short options of other programs get a hint as well


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


def _apply(tree: dict[str, Any], arguments: Sequence[str], given: dict[str, tuple[str, str]]) -> Iterator[Problem]:
    """Apply overrides to the tree in place and record them in `given`; yields their problems."""
    for written, words in split_overrides(arguments):
        dotted, option = _field_of(written), f"{'-' if len(written) == 1 else '--'}{written}"
        if not dotted:
            field, _, given_value = words[0].partition("=")
            how = f"--{field} {given_value}" if field and given_value else "--dotted.field VALUE"
            yield Problem("value-without-field", f"{' '.join(words)}: a value without a field. Use `{how}`.")
            continue
        if not words:
            yield value_missing(dotted, option, fields())
            continue
        if dotted == "import" and isinstance(tree.setdefault("imports", []), list):
            tree["imports"] += [word for word in words if word not in tree["imports"]]
            continue
        try:
            values = [yamls.parse(word) if word else "" for word in words]
        except yaml.YAMLError:
            yield Problem(
                "invalid-value", f"--{dotted} {' '.join(words)}: cannot read the value as YAML. {_yaml_fix(words)}"
            )
            continue
        if dotted == "data" and isinstance(values[0], str) and data_field(words[0])[0] == "data.path":
            dotted = "data.path"  # --data PATH, as in other programs: other data than the recipe's
            tree["data"] = _merge(tree.get("data") or {}, {"name": ""})
        node = _parent(tree, dotted)
        last = dotted.rpartition(".")[2]
        value = values[0] if len(values) == 1 else values
        if _has_index(node, last):
            node[int(last)] = value
        elif isinstance(node, dict):
            node[last] = overlay(node.get(last), value, type_at(dotted))
            given[dotted] = option, " ".join(words)
        elif isinstance(node, list):
            yield Problem("index-out-of-range", f"--{dotted}: the index is out of range. There are {len(node)} values.")
        elif not _below_overwritten_group(dotted, given):
            yield Problem("unknown-field", f"--{dotted}: unknown field")


def _yaml_fix(words: list[str]) -> str:
    """Return how to write a pattern such as *, which YAML takes for a reference, or what else to check."""
    if all("'" not in word and word[:1] not in "[{" for word in words):
        return f"""Quote it twice: "[{", ".join(f"'{word}'" for word in words)}]"."""
    return "Check its quotes and brackets, and that no key occurs twice."


def _field_of(written: str) -> str:
    """The field that an option names: its dashes are underscores, except in names of registered extensions."""
    field = written.replace("-", "_")
    for group in ("callbacks.", "data.augment.custom.", "train.class_weights."):
        if field.startswith(group):
            name, dot, option = written[len(group) :].partition(".")
            return f"{group}{name}{dot}{option.replace('-', '_')}"
    return field


def _below_overwritten_group(dotted: str, given: Given) -> bool:
    """Whether another override replaced a group above it with a plain value, which is reported already."""
    groups = {row.path.rpartition(".")[0] for row in fields()}
    return any(dotted.startswith(f"{above}.") and above in groups for above in given)


def _parent(tree: dict[str, Any], dotted: str) -> Any:
    """The group or list that contains a path; missing groups are created."""
    node: Any = tree
    for parent in dotted.split(".")[:-1]:
        if _has_index(node, parent):
            node = node[int(parent)]
        elif isinstance(node, dict) and not parent.isdigit():
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        else:
            return None
    return node


def _has_index(node: Any, number: str) -> bool:
    return isinstance(node, list) and number.isdigit() and int(number) < len(node)


def _validated(tree: dict[str, Any], found: list[Problem], given: Given) -> Recipe | None:
    """The recipe, or None if it is invalid; problems are appended to `found`."""
    try:
        recipe = _ADAPTER.validate_python(without_nulls(tree))
    except ValidationError as error:
        rows = fields()
        described = (problem for item in error.errors() for problem in describe(item, rows, given))
        found += islice(described, _MAX_PROBLEMS)
        if next(described, None):
            message = f"and more, after the first {_MAX_PROBLEMS}. Check that the file is a recipe."
            found.append(Problem("too-many-problems", message))
        return None
    found += problems(recipe)
    return recipe


def fields() -> list[FieldRow]:
    """Every field of a recipe with its dotted path, type and help text."""
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
    """The recipe as plain dictionaries, lists and values."""
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
    return yamls.dump(to_tree(recipe))


def fingerprint(recipe: Recipe) -> str:
    """A hash of the experiment; `about` does not count."""
    tree = to_tree(recipe)
    del tree["about"]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
