"""Finds the uploaded file in the body of an HTML form."""

import re

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_MAX_PARTS = 16


def first_file(content_type: str, body: bytes) -> bytes | None:
    """Return the first file of a multipart form, None if it has none; any other body as it is."""
    if not content_type.lower().startswith("multipart/form-data"):
        return body
    if not (found := _BOUNDARY.search(content_type)):
        return None
    delimiter = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    parts = (b"\r\n" + body).split(b"\r\n" + delimiter, _MAX_PARTS)
    for part in parts[1:]:
        head, blank, content = part.partition(b"\r\n\r\n")
        if blank and b"filename" in head.lower():
            return content
    return None
