"""Check values before they go into scripts and command lines, here and on other hosts; quote them for a shell."""

import re
import shlex
import unicodedata
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.system.files import printable

if TYPE_CHECKING:
    from pydantic import ValidationError

_MAX_LENGTH = 4096  # PATH_MAX on Linux
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@-]{0,99}")
_HOST = re.compile(rf"({_USER.pattern}@)?[A-Za-z0-9_:][A-Za-z0-9._:-]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_PLAIN = {"Cc": "a control character", "Cs": "a byte that is not UTF-8", "Zl": "a line break", "Zp": "a line break"}


def plain(option: str, text: str) -> str:
    """Return the text if it is a single printable line, so that shell quotes, comments and directives can hold it."""
    for letter in text:
        if problem := _NOT_PLAIN.get(unicodedata.category(letter)):
            message = f"{option} {text[:100]!r} contains {problem} ({letter!a}). Remove it."
            raise UserError("invalid-character", message, option=option)
    if len(text) > _MAX_LENGTH:
        message = f"{option} {text[:40]!r}... has {len(text)} characters. Use at most {_MAX_LENGTH}."
        raise UserError("value-too-long", message, option=option)
    return text


def operand(option: str, text: str) -> str:
    """Return the text if it is a single line that no program takes for an option."""
    if text.startswith("-"):
        shown = text[:100]
        message = f"{option} {shown!r} starts with a dash, like an option. Write ./{shown} for a file."
        raise UserError("value-starts-with-dash", message, option=option)
    return plain(option, text)


def run_name(option: str, text: str) -> str:
    """Return the name of a run or job if it can be a folder name and part of a script."""
    if not _NAME.fullmatch(text):
        rule = "Use at most 200 letters, digits, dots, dashes and underscores, starting with a letter or digit."
        raise UserError("invalid-name", f"{option} {text[:100]!r} is not a valid name. {rule}", option=option)
    return text


def host_name(option: str, text: str) -> str:
    """Return the host name if ssh takes it as one and it can be a folder name; ssh could run other text as options."""
    if not _HOST.fullmatch(text) or len(text) > 255:
        rule = "Write NAME or USER@NAME; set the port and other options in ~/.ssh/config."
        raise UserError("invalid-host-name", f"{option} {text[:100]!r} is not a host name. {rule}", host=text[:100])
    return text


def user_name(option: str, text: str) -> str:
    """Return the name of the user to log in as, if it is valid for ssh."""
    if not _USER.fullmatch(text):
        rule = "Use letters, digits, dots and dashes."
        raise UserError("invalid-user-name", f"{option} {text[:100]!r} is not a user name. {rule}", option=option)
    return text


def variable(option: str, text: str) -> str:
    """Return the name of an environment variable, if valid: a shell cannot quote it."""
    if not _VARIABLE.fullmatch(text):
        message = f"{option} {text[:100]!r} is not the name of an environment variable. Use letters, digits and _."
        raise UserError("invalid-variable-name", message, option=option)
    return text


def quoted(path: str) -> str:
    """Return the path quoted for a shell; a leading $HOME stays a variable of the host that runs it."""
    return '"$HOME"' + shlex.quote(path.removeprefix("$HOME")) if path.startswith("$HOME") else shlex.quote(path)


def in_ssh_option(path: object) -> str:
    """Return the path escaped for double quotes in an ssh option, where a percent sign starts a token."""
    return re.sub(r'(["\\])', r"\\\1", str(path)).replace("%", "%%")


def first_problem(error: "ValidationError") -> str:
    """Return the first of the problems that pydantic found in untrusted values, as one short printable line."""
    first = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(map(str, first["loc"]))
    return printable(f"{key}: {first['msg']}" if key else first["msg"])[:200]
