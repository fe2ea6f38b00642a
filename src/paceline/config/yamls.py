"""A strict YAML reader with limits: an untrusted file must not hang or crash it.

A duplicate key is an error (plain YAML takes the last one), 010 is ten and 1:30 is text (plain YAML: eight and ninety),
and 1e-5 is a number, as in YAML 1.2 (PyYAML: text).
"""

import math
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from paceline.system.untrusted import read_regular

MAX_BYTES = 1 << 18
_MAX_CHARACTERS = 1 << 20
"""With every alias expanded: nested aliases turn a kilobyte into gigabytes."""
_MAX_DEPTH = 50
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_REAL = re.compile(
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class RefusedYaml(yaml.MarkedYAMLError):
    """YAML that is valid but not accepted; `code` is the code of the problem."""

    def __init__(self, code: str, problem: str, mark: Any):
        super().__init__(None, None, problem, mark)
        self.code = code


class _YamlLoader(yaml.SafeLoader):
    """Its errors quote the line."""


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Many times faster and part of every wheel, but its errors do not quote the line."""


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            continue  # construct_mapping reports it
        if key in seen:
            raise RefusedYaml("yaml-duplicate-key", f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)  # merge keys, whose values those of the mapping itself replace
    made: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return made


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loaders would read as a number."""


for _kind in (_YamlLoader, _FastLoader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver(_INT, _INTEGER, list("-+0123456789"))
    _kind.add_implicit_resolver(_FLOAT, _REAL, list("-+.0123456789"))
for _kind in (_YamlLoader, _FastLoader):
    _kind.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str, fast: bool = False) -> Any:
    """The value of a YAML text; yaml.YAMLError if it is not YAML or exceeds the limits."""
    loader = _FastLoader if fast else _YamlLoader
    try:
        _check_limits(yaml.parse(text, loader))
        return yaml.load(text, loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # constructors of PyYAML fail with various errors: `!!int ""`, `2024-99-99`
        raise yaml.YAMLError(str(error) or type(error).__name__) from None


def dump(value: Any) -> str:
    """YAML that parses to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def dump_line(value: Any, quoted: bool = False) -> str:
    """A word of a command line that parses to an equal value."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_style='"' if quoted else None,
        default_flow_style=True,
        sort_keys=False,
        width=math.inf,
    )
    return text.removesuffix("\n").removesuffix("\n...")


def read(path: Path, inside: Path | None = None, fast: bool = False) -> Any:
    """The value of a YAML file; OSError or yaml.YAMLError if it cannot be read."""
    content = read_regular(path, MAX_BYTES, inside)
    try:
        return parse(content.decode("utf-8-sig"), fast)
    except UnicodeDecodeError as error:
        raise yaml.YAMLError(str(error)) from None


def _check_limits(events: Iterable[Any]) -> None:
    """Check depth, and size with every alias expanded, before anything is built."""
    sizes: dict[str | None, int] = {}
    levels: list[tuple[str | None, int]] = [(None, 0)]
    """Anchor and size so far of the open collections."""
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            if len(levels) > _MAX_DEPTH:
                raise RefusedYaml("yaml-too-deep", f"nested more than {_MAX_DEPTH} levels deep", event.start_mark)
            levels.append((event.anchor, 1))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = levels.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = sizes[event.anchor] = 1 + len(event.value)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise RefusedYaml("yaml-undefined-alias", f"*{event.anchor} is not defined before it", event.start_mark)
            size = sizes[event.anchor]
        else:
            continue
        levels[-1] = (levels[-1][0], levels[-1][1] + size)
        if levels[-1][1] > _MAX_CHARACTERS:
            problem = f"more than {_MAX_CHARACTERS:,} characters with its aliases expanded"
            raise RefusedYaml("yaml-too-large", problem, event.start_mark)
