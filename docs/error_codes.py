"""Find every error code in src/paceline with its message templates, from the syntax tree."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

from paceline.extensions import SIGNATURES

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
_RAISED = {
    "UserError", "Problem", "HostError", "CorruptCheckpoint", "NotARun", "NoRunFolder", "RefusedYaml", "WrongPeerError",
}  # fmt: skip
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
CHOOSING = {
    "config/duration.py",
    "config/io.py",
    "config/phases.py",
    "distributed/channel.py",
    "distributed/world.py",
    "engine/run.py",
    "errors.py",
    "launch/aws_errors.py",
    "launch/doctor.py",
    "launch/fetching.py",
    "launch/hosts.py",
    "launch/ssh_errors.py",
    "analysis/importers.py",
    "analysis/read.py",
    "system/files.py",
}
"""Modules that choose a code in one place and raise it in another."""
_NOT_CODES = {"ls-files", "utf-8"}
_PRINTED = re.compile(r"\[([a-z]+(?:-[a-z]+)*)\]$")  # by the command line itself, at the end of a message


def error_codes() -> dict[str, list[str]]:
    """Return the message templates of every error code, sorted by code. The list is empty if it is not known."""
    found: dict[str, set[str]] = {}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    public = {
        name: text for tree in trees.values() for name, text in _constants(tree).items() if not name.startswith("_")
    }
    for path, tree in trees.items():
        module = path.relative_to(SOURCE).as_posix()
        texts = public | _constants(tree)
        raised = [*_raised(tree, texts), *_printed(tree, module)]
        complete = {code for code, template in raised if template}
        chosen = _chosen(tree, texts) if module in CHOOSING else ()
        for code, template in (*raised, *(each for each in chosen if each[0] not in complete)):
            found.setdefault(code, set()).update({template} - {""})
    return {code: sorted(found[code]) for code in sorted(found)}


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return the text constants of a module by name."""
    return {
        _name(target): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
    }


def _raised(tree: ast.Module, constants: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield codes and templates of errors whose code is in the function that creates them."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        texts = dict(constants)
        for node in sorted(ast.walk(function), key=_position):
            if isinstance(node, ast.Assign):
                text = _template(node.value, texts)
                texts |= {_name(target): text if _is_sentence(text) else "" for target in _targets(node)}
            elif isinstance(node, ast.Call) and len(node.args) > 1 and _name(node.func) in {*_RAISED, "error"}:
                template = _template(node.args[1], texts)
                yield from ((code, template) for code in _codes(node.args[0], function, constants))


def _codes(node: ast.expr, function: ast.FunctionDef, constants: dict[str, str]) -> list[str]:
    """Return the codes that an expression in a function can be."""
    match node:
        case ast.Constant(value=str(code)):
            return [code] if _is_code(code) else []
        case ast.IfExp(body=one, orelse=other):
            return [*_codes(one, function, constants), *_codes(other, function, constants)]
        case ast.JoinedStr(values=[ast.Constant(value=str(prefix)), ast.FormattedValue(value=ast.Name(id="kind"))]):
            return [prefix + kind for kind in SIGNATURES]
        case ast.Name(id="code"):
            return [value for value in _assigned_to_code(function) if _is_code(value)]
        case ast.Name(id=name) if name in constants:
            return [constants[name]]
        case _:
            return []


def _assigned_to_code(function: ast.FunctionDef) -> Iterator[object]:
    """Yield the literals in assignments to the variable `code`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(_name(each) == "code" for each in _targets(node)):
            yield from (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))


def _targets(node: ast.Assign) -> list[ast.expr]:
    first = node.targets[0]
    return first.elts if isinstance(first, ast.Tuple) else [first]


def _chosen(tree: ast.Module, constants: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield every literal that has the form of a code, with the text beside it in a call or tuple."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and _is_code(node.value):
            yield node.value, ""
        values: list[ast.expr] = []
        if isinstance(node, ast.Tuple):
            values = node.elts
        elif isinstance(node, ast.Call) and _name(node.func) not in _RAISED:
            values = node.args
        for code, message in pairwise(values):
            if isinstance(code, ast.Constant) and _is_code(code.value):
                text = _template(message, constants)
                yield code.value, text if _is_sentence(text) else ""


def _printed(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree) if module.startswith("cli/") else ():
        if isinstance(node, ast.JoinedStr) and (match := _PRINTED.search(text := _template(node, {}))):
            yield match[1], text.removesuffix(match[0]).removeprefix("error: ").strip()


def _position(node: ast.AST) -> tuple[int, bool]:
    """Sort nodes by line, and assignments before the calls that use them."""
    return getattr(node, "lineno", 0), isinstance(node, ast.Call)


def _is_code(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(_CODE.fullmatch(value)) and value not in _NOT_CODES


def _is_sentence(text: str) -> bool:
    return " " in text.strip(" .")


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _template(node: ast.expr, texts: dict[str, str]) -> str:
    """Return a message with names in place of its values; values that have no name are shown as three dots."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part, texts) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return texts.get(name) or f"{{{name}}}"
        case ast.FormattedValue(value=ast.Attribute(attr=name)):
            return f"{{{name}}}"
        case ast.FormattedValue(value=ast.IfExp(_, ast.Constant(str(one)), ast.Constant(str(other)))):
            return "/".join(filter(None, (one, other)))
        case ast.FormattedValue():
            return "..."
        case ast.Name(id=name):
            return texts.get(name) or ""
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left, texts) + _template(right, texts)
        case ast.Call(args=[first, *_]):
            return _template(first, texts)
        case _:
            return ""
