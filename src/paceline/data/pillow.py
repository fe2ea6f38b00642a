"""Decodes untrusted image files with Pillow, within limits of bytes, pixels and scans."""

import io
import re
import stat
import warnings
from pathlib import Path

from PIL import Image, ImageOps

from paceline.data import codec
from paceline.system.files import size_text
from paceline.system.untrusted import Unreadable

_END_OF_JPEG = b"\xff\xd9"
MAX_BYTES = 250_000_000
"""The maximum size of an image file."""
MAX_PIXELS = 200_000_000
"""The maximum size of an image: as many pixels as the largest camera sensors have."""
_MAX_SCANS = 100  # of a JPEG; encoders write about ten, and each one costs a pass over the whole image
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")  # markers followed by a length, and the end marker
_ORIENTATION = 0x0112
_MAX_16_BITS = 65535
_EXIF_BYTES = 1 << 17  # at the start of a JPEG, where its EXIF segment is
_START_OF_SCAN = b"\xff\xda"
Image.init()
_KNOWN = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "AVIF")
FORMATS = tuple(name for name in _KNOWN if name in Image.OPEN)
"""The formats that Pillow may open, whatever the file name. For others it would start programs (Ghostscript)."""


def check_size(num_bytes: int) -> None:
    """Raise Unreadable if a file is too large; call it before reading the file."""
    if num_bytes > MAX_BYTES:
        raise Unreadable(f"{size_text(num_bytes)} is more than {size_text(MAX_BYTES)}")


def check_file(path: Path) -> None:
    """Raise Unreadable if a file is too large, or would block its reader, as a FIFO does."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable("not a regular file")
    check_size(status.st_size)


def open_image(content: bytes) -> tuple[Image.Image, str]:
    """Return the image, gray or RGB, and a remark on what was wrong with the file."""
    if not content:
        raise Unreadable("the file is empty")
    if _has_too_many_scans(content):
        raise Unreadable(f"a JPEG with more than {_MAX_SCANS} scans")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about EXIF and palette data
        try:
            image = _opened(content)
            is_jpeg = image.format in ("JPEG", "MPO")  # MPO: a JPEG with further images behind it
            remarks = [] if is_jpeg else [f"a {image.format} file"]
            try:
                image.load()
            except OSError as error:
                if "truncated" not in str(error) or not is_jpeg:
                    raise
                if not _lacks_only_end_marker(content):
                    raise Unreadable("truncated") from None
                image = _opened(content + _END_OF_JPEG)
                image.load()
                remarks.append("without an end marker")
            if not is_jpeg and _is_animated(content):
                remarks.append("the first of several frames")
            if orientation(image) != 1:
                remarks.append("rotated as its EXIF orientation says")
            if image.mode not in ("L", "RGB"):
                remarks.append(f"converted from mode {image.mode}")
            return plain(image), "; ".join(remarks)
        except Unreadable:
            raise
        except Image.DecompressionBombError:
            limit = min(MAX_PIXELS, 2 * (Image.MAX_IMAGE_PIXELS or MAX_PIXELS))
            raise Unreadable(f"more than {limit:,} pixels") from None
        except MemoryError:
            raise Unreadable("decoding needs too much memory") from None
        except Exception as error:
            # Pillow's decoders raise nearly anything on corrupt files; the address of the buffer means nothing to users
            reason = re.sub(r" ?<_io.BytesIO[^>]*>", "", " ".join(str(error).split()))
            raise Unreadable(f"not an image ({reason[:120] or type(error).__name__})") from None


def _opened(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    # Pillow has a limit for the whole process, which is not ours to change and may have been removed
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    return image


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image: 1 if its pixels are upright, from 5 on if width and height change."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # corrupt EXIF data
        return 1
    return found if found in range(1, 9) else 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an opened image as it is shown."""
    # Pillow itself rotates TIFFs
    return image.size[::-1] if orientation(image) >= 5 and image.format != "TIFF" else image.size


def is_rotated_jpeg(content: bytes) -> bool:
    """Whether the pixels of a JPEG are not upright."""
    if not content.startswith(b"\xff\xd8") or b"Exif" not in content[:_EXIF_BYTES]:
        return False
    try:
        return orientation(_opened(content)) != 1
    except Exception:  # not an image; whoever decodes it reports that
        return False


def _lacks_only_end_marker(content: bytes) -> bool:
    """Whether a JPEG has all its pixels. Known for baseline JPEGs only; the codec needs no end marker."""
    try:
        codec.pack(content)
    except codec.CodecError:
        return False
    return True


def _is_animated(content: bytes) -> bool:
    try:
        return bool(getattr(_opened(content), "is_animated", False))
    except Exception:  # of a later frame, which is not used
        return True


def _has_too_many_scans(content: bytes) -> bool:
    """Whether a JPEG has so many scans that decoding would take minutes."""
    if not content.startswith(b"\xff\xd8") or content.count(_START_OF_SCAN) <= _MAX_SCANS:
        return False
    # thumbnails and trailing videos have scans of their own, so walk the markers as libjpeg does
    scans, at = 0, 2
    while scans <= _MAX_SCANS and (found := _MARKER.search(content, at)) and found[1] != b"\xd9":
        scans += found[0] == _START_OF_SCAN
        at = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
    return scans > _MAX_SCANS


def plain(image: Image.Image) -> Image.Image:
    """Return an image as gray or RGB, upright. Values of 16 bits are scaled to 0-255, whatever their maximum is.

    Raises Unreadable if the range of values is unknown.
    """
    if orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("L", "RGB"):
        return image
    if image.mode == "F":
        raise Unreadable("floating-point pixels, whose range is unknown; convert them to 8 or 16 bits")
    if image.mode.startswith("I;16") or image.mode == "I":
        return _scaled_to_8_bits(image)
    if image.mode in ("1", "LA"):
        return image.convert("L")
    return image.convert("RGB")


def _scaled_to_8_bits(image: Image.Image) -> Image.Image:
    """Return an image of 16 bits as gray. Mode I, as which Pillow opens some of them, may hold 32 bits."""
    values = image.convert("I")
    low, high = values.getextrema()
    if low < 0 or high > _MAX_16_BITS:  # type: ignore[operator]
        raise Unreadable(f"pixels from {low} to {high}, more than 16 bits; convert them to 8 or 16 bits")
    # Pillow's own conversion would clip values at 255
    return values.convert("F").point(lambda value: value * (255 / _MAX_16_BITS)).convert("L")
