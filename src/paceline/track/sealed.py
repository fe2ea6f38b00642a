"""JSON that ends with its own checksum, so that a flipped bit is detected.

{"kind": "train", "step": 10, "loss": 2.1, "crc": "5f3b1c02"}    CRC-32 of the text before the last comma
"""

import json
import re
import zlib
from pathlib import Path
from typing import Any

from paceline.system.files import replacing

_CRC = re.compile(rb', "crc": "([0-9a-f]{8})"\}\s*$')


def seal(value: dict[str, Any], indent: int | None = None) -> bytes:
    """Return the JSON text of a value with its checksum, without a newline at the end."""
    # file names need not be valid Unicode
    text = json.dumps(value, indent=indent, ensure_ascii=indent is None).encode(errors="backslashreplace")
    body = text.removesuffix(b"}").rstrip()
    return body + b', "crc": "%08x"}' % zlib.crc32(body)


def is_intact(text: bytes) -> bool:
    """Return whether a text matches its checksum. Text of older versions has none and is accepted."""
    found = _CRC.search(text, max(0, len(text) - 64))
    return found is None or zlib.crc32(text[: found.start()]) == int(found[1], 16)


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(seal(value, indent=1) + b"\n")
