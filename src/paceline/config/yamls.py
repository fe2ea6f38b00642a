"""YAML without its traps, read within limits: a stranger's file may not hang or crash its reader.

A key given twice is refused (plain YAML takes the last one), 010 is ten and 1:30 a text (plain YAML: eight and ninety).
"""

import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from paceline.system.untrusted import read_regular

MOST_BYTES = 1 << 18
_MOST_CHARACTERS = 1 << 20
"""With every alias written out: nested ones make gigabytes of a kilobyte."""
_DEEPEST = 50
_INT = "tag:yaml.org,2002:int"


class _Loader(yaml.SafeLoader):
    """Errors show the line."""


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Many times faster, and in every wheel; errors do not show the line."""


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)  # merge keys
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            continue  # construct_mapping complains
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    made: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return made


for _kind in (_Loader, _FastLoader):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
    _kind.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str, fast: bool = False) -> Any:
    """The value that a text describes; yaml.YAMLError for one that is not YAML, or beyond the limits."""
    loader = _FastLoader if fast else _Loader
    try:
        _check_limits(yaml.parse(text, loader))
        return yaml.load(text, loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # what constructors of the yaml package stumble over: `!!int ""`, `2024-99-99`
        raise yaml.YAMLError(str(error) or type(error).__name__) from None


def read(path: Path, inside: Path | None = None, fast: bool = False) -> Any:
    """The value in a file; OSError or yaml.YAMLError."""
    content = read_regular(path, MOST_BYTES, inside)
    try:
        return parse(content.decode("utf-8-sig"), fast)
    except UnicodeDecodeError as error:
        raise yaml.YAMLError(str(error)) from None


def _check_limits(events: Iterable[Any]) -> None:
    """Depth, and size with every alias written out, before anything is built."""
    sizes: dict[str | None, int] = {}
    levels: list[tuple[str | None, int]] = [(None, 0)]
    """Anchor and size so far of the collections that are open."""
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            if len(levels) > _DEEPEST:
                raise _beyond(f"nested more than {_DEEPEST} levels deep", event)
            levels.append((event.anchor, 1))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = levels.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = sizes[event.anchor] = 1 + len(event.value)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise _beyond(f"*{event.anchor} refers to nothing before it", event)
            size = sizes[event.anchor]
        else:
            continue
        levels[-1] = (levels[-1][0], levels[-1][1] + size)
        if levels[-1][1] > _MOST_CHARACTERS:
            raise _beyond(f"more than {_MOST_CHARACTERS:,} characters with its aliases written out", event)


def _beyond(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, problem, event.start_mark)
