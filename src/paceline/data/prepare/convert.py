"""One file to one record for each variant: coefficients as they are where that is possible, else through Pillow."""

import io
import re
import warnings
from dataclasses import dataclass

from PIL import Image

from paceline.data import codec
from paceline.data.prepare.isolated import Unreadable
from paceline.system.files import size_text

_KEPT_QUALITY = 95  # for what has to be re-encoded although its size is kept
_END_OF_JPEG = b"\xff\xd9"
MAX_BYTES = 250_000_000
"""Of an image file."""
_MAX_PIXELS = 200_000_000  # as many as the largest sensors have
Image.MAX_IMAGE_PIXELS = _MAX_PIXELS // 2  # Pillow refuses twice as many, before it decodes
_MAX_SCANS = 100  # of a JPEG; programs write about ten, and each one takes as long as a whole image
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")  # those that a length follows, and the end
_START_OF_SCAN = b"\xff\xda"
Image.init()
_KNOWN = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "AVIF")
FORMATS = tuple(name for name in _KNOWN if name in Image.OPEN)
"""What Pillow may take a file for, whatever its name says; for others it would start programs (Ghostscript)."""


@dataclass(frozen=True)
class Variant:
    """One size of all images: as they are, or with a longest or shortest side of at most so many pixels."""

    max_side: int = 0
    short_side: int = 0
    quality: int = 90

    @property
    def name(self) -> str:
        if self.max_side:
            return f"max-{self.max_side}-q{self.quality}"
        return f"short-{self.short_side}-q{self.quality}" if self.short_side else "original"

    def size(self, width: int, height: int) -> tuple[int, int]:
        side, limit = (max(width, height), self.max_side) if self.max_side else (min(width, height), self.short_side)
        if not limit or side <= limit:
            return width, height
        return max(1, round(width * limit / side)), max(1, round(height * limit / side))


def convert_as(content: bytes, variants: list[dict[str, int]]) -> tuple[list[bytes], str]:
    """Like convert, for variants from JSON."""
    return convert(content, [Variant(**fields) for fields in variants])


def convert(content: bytes, variants: list[Variant]) -> tuple[list[bytes], str]:
    """A record for each variant, and a remark where the file was not what it should be."""
    if not content:
        raise Unreadable("the file is empty")
    records: list[bytes] = []
    image: Image.Image | None = None
    remark = ""
    for variant in variants:
        if variant.name == "original":
            try:
                records.append(codec.pack(content))
                continue
            except codec.CodecError as error:
                remark = f"{error}; re-encoded as a baseline JPEG of quality {_KEPT_QUALITY}"
        if image is None:
            image, damage = open_image(content)
            remark = damage or remark
        quality = _KEPT_QUALITY if variant.name == "original" else variant.quality
        try:
            records.append(codec.pack(encode(image, variant.size(*image.size), quality)))
        except codec.CodecError as error:
            raise Unreadable(f"{image.width} x {image.height} pixels: {error}") from None
    return records, remark


def check_size(num_bytes: int) -> None:
    """Call it before reading a file."""
    if num_bytes > MAX_BYTES:
        raise Unreadable(f"{size_text(num_bytes)}, more than {size_text(MAX_BYTES)}")


def open_image(content: bytes) -> tuple[Image.Image, str]:
    """The image, gray or RGB, and what was wrong with the file."""
    if _has_too_many_scans(content):
        raise Unreadable(f"a JPEG of more than {_MAX_SCANS} scans")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd EXIF and palette data, which nobody looks at here
        try:
            image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
            remarks = [] if image.format == "JPEG" else [f"a {image.format} file"]
            try:
                image.load()
            except OSError as error:
                if "truncated" not in str(error) or image.format != "JPEG":
                    raise
                image = Image.open(io.BytesIO(content + _END_OF_JPEG), formats=FORMATS)
                image.load()
                remarks.append("truncated; what is missing is gray")
            if image.mode not in ("L", "RGB"):
                remarks.append(f"mode {image.mode} converted")
            return _plain(image), "; ".join(remarks)
        except Image.DecompressionBombError:
            raise Unreadable(f"more than {_MAX_PIXELS:,} pixels") from None
        except MemoryError:
            raise Unreadable("needs too much memory to decode") from None
        except Exception as error:
            # Pillow's decoders raise nearly anything on corrupt files
            reason = re.sub(r" ?<_io.BytesIO[^>]*>", "", " ".join(str(error).split()))  # an address is no reason
            raise Unreadable(f"not an image ({reason[:120] or type(error).__name__})") from None


def _has_too_many_scans(content: bytes) -> bool:
    """Whether a JPEG is made to decode for minutes."""
    if not content.startswith(b"\xff\xd8") or content.count(_START_OF_SCAN) <= _MAX_SCANS:
        return False
    # there may be more in a thumbnail, or in a video after the end: from marker to marker, as libjpeg reads
    scans, at = 0, 2
    while scans <= _MAX_SCANS and (found := _MARKER.search(content, at)) and found[1] != b"\xd9":
        scans += found[0] == _START_OF_SCAN
        at = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
    return scans > _MAX_SCANS


def _plain(image: Image.Image) -> Image.Image:
    if image.mode in ("L", "RGB"):
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        # 16 bits: Pillow's own conversion would cut values off at 255
        _, high = image.getextrema()
        scale = 255.0 / (65535.0 if high > 255 else 255.0 if high > 1 else 1.0)  # type: ignore[operator]
        return image.convert("F").point(lambda value: value * scale).convert("L")
    if image.mode in ("1", "LA"):
        return image.convert("L")
    return image.convert("RGB")


def encode(image: Image.Image, size: tuple[int, int], quality: int) -> bytes:
    """A baseline JPEG of that size."""
    if size != image.size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    if max(size) > 65500:
        raise Unreadable(f"{size[0]} x {size[1]} pixels are too many")
    out = io.BytesIO()
    image.save(out, "jpeg", quality=quality, comment=b"")  # Pillow would copy the file's, which may be too long
    return out.getvalue()
