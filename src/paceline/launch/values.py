"""Values that go into scripts and onto command lines, here and on other machines: quoted, or refused by name."""

import re
import shlex
import unicodedata

from paceline.errors import UserError

_LONGEST = 4096  # as paths of Linux
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@-]{0,99}")
_HOST = re.compile(rf"({_USER.pattern}@)?[A-Za-z0-9_:][A-Za-z0-9._:-]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_PLAIN = {"Cc": "a control character", "Cs": "a byte that is not UTF-8", "Zl": "a line break", "Zp": "a line break"}


def plain(what: str, text: str) -> str:
    """The text, if it is one line: quotes of a shell keep it together, and no comment or directive ends in it."""
    for letter in text:
        if found := _NOT_PLAIN.get(unicodedata.category(letter)):
            raise UserError(f"{what} {text[:100]!r} contains {found} ({letter!a}); remove it")
    if len(text) > _LONGEST:
        raise UserError(f"{what} {text[:40]!r}... has {len(text)} characters; use at most {_LONGEST}")
    return text


def operand(what: str, text: str) -> str:
    """One line that no program takes for an option."""
    if text.startswith("-"):
        raise UserError(f"{what} {text[:100]!r} begins with a dash, as options do; write ./{text[:100]} for a file")
    return plain(what, text)


def run_name(what: str, text: str) -> str:
    """Of a run or job: it becomes a folder, and part of scripts."""
    if not _NAME.fullmatch(text):
        rule = "use letters, digits, dots and dashes, at most 200, beginning with a letter or digit"
        raise UserError(f"{what} {text[:100]!r}: {rule}")
    return text


def host_name(what: str, text: str) -> str:
    """As ssh takes it, and as a folder can be called; ssh would take others for options, or hand them to a shell."""
    if not _HOST.fullmatch(text) or len(text) > 255:
        rule = "write NAME or USER@NAME; ports and the like belong into ~/.ssh/config"
        raise UserError(f"{what} {text[:100]!r} is not a host name; {rule}")
    return text


def user_name(what: str, text: str) -> str:
    """That ssh logs in as."""
    if not _USER.fullmatch(text):
        raise UserError(f"{what} {text[:100]!r} is not the name of a user; use letters, digits, dots and dashes")
    return text


def variable(what: str, text: str) -> str:
    """The name of an environment variable, which no shell can quote."""
    if not _VARIABLE.fullmatch(text):
        raise UserError(f"{what} {text[:100]!r} is not the name of a variable; use letters, digits and underscores")
    return text


def quoted(path: str) -> str:
    """For a shell; $HOME is that of the machine."""
    return '"$HOME"' + shlex.quote(path.removeprefix("$HOME")) if path.startswith("$HOME") else shlex.quote(path)


def in_ssh_option(path: object) -> str:
    """For the double quotes of an option of ssh, which would split words and fill in what follows a percent sign."""
    return re.sub(r'(["\\])', r"\\\1", str(path)).replace("%", "%%")
