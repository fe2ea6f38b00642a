"""Removes what identifies a user or a machine from text that is attached to a bug report."""

import getpass
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.system.host import host_name

_ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-f:]*:[0-9a-f:]+)(?![\w.])", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.])~?(?:/[\w.@+~-]+){2,}/?")
_AT = re.compile(r"[\w.+-]+@(?=[\w.-])")


class Scrubber:
    """Replaces host names by "node 0", "node 1" ..., and shortens addresses, user names and paths."""

    def __init__(self, hosts: Sequence[str]):
        names = {name: f"node {number}" for number, name in enumerate(hosts)}
        names |= {name.rpartition("@")[2]: node for name, node in names.items()}
        names.setdefault(host_name(), "this host")
        self._names = {name: node for name, node in names.items() if name}
        self._user = _user()

    def __call__(self, value: Any) -> Any:
        """Return a JSON value with scrubbed texts."""
        if isinstance(value, dict):
            return {self._without_hosts(key): self(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self(each) for each in value]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        text = self._without_hosts(_PATH.sub(lambda match: f".../{Path(match[0]).name}", text))
        text = _ADDRESS.sub(_hidden, _AT.sub("", text))
        return re.sub(rf"(?<![\w-]){re.escape(self._user)}(?![\w-])", "USER", text) if self._user else text

    def _without_hosts(self, text: str) -> str:
        for name, node in sorted(self._names.items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", node, text)
        return text


def _hidden(found: re.Match[str]) -> str:
    """Return what stands for an IP address; a time of day is none."""
    try:
        ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    return "ADDRESS"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without an entry in /etc/passwd
        return ""
