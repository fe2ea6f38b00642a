"""Malicious files, and the valid ones that they are made from."""

import io
import random
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from conftest import HANG
from sample_images import sample_image

ADDRESS = 0x4141414141414141
"""An unmapped address: dereferencing it crashes."""


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in another process, so that a crash fails only one test."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(timeout=HANG)


# ---- pickles ----


def python2_batch(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch, byte for byte as Python 2 wrote those of CIFAR."""
    names = b"".join(b"U\x10image_%06d.png" % number for number in range(len(labels)))
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(",
            b"".join(b"K" + bytes([label]) for label in labels),
            b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09",
            b"(K\x01M"
            + struct.pack("<H", len(images))
            + b"M\x00\x0c\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", images.size),
            images.tobytes() + b"tbU\x09filenamesq\x0c]q\x0d(" + names + b"eu.",
        )
    )


def exploits(canary: Path) -> dict[str, bytes]:
    """Pickles that touch the canary, or make their reader dereference an arbitrary address."""
    touch = _text(f"touch {canary}")
    system = b"cposix\nsystem\n"
    evaluate = _text(f"__import__('os').system('touch {canary}')")
    made = {
        "reduce": system + touch + b"\x85R",
        "reduce by name on the stack": b"\x8c\x05posix\x8c\x06system\x93" + touch + b"\x85R",
        "inst": b"(" + touch + b"iposix\nsystem\n",
        "obj": b"(" + system + touch + b"o",
        "newobj": b"csubprocess\nPopen\n" + touch + b"\x85\x81",
        "newobj with keywords": b"csubprocess\nPopen\n" + touch + b"\x85}\x92",
        "eval": b"cbuiltins\neval\n" + evaluate + b"\x85R",
        "build by setstate": b"cbuiltins\nobject\n)\x81}" + _text("__setstate__") + system + b"sb" + touch + b"b",
        "a numpy module that executes code": b"cnumpy.testing\nrundocs\n" + touch + b"\x85R",
        "numpy.load": b"cnumpy\nload\n" + touch + b"\x85R",
        "an extension": b"\x82\x01",
        "a persistent id": b"Pposix\n",
        "a persistent id on the stack": touch + b"Q",
        "an out-of-band buffer": b"\x97",
        "another codec": b"c_codecs\nencode\n" + touch + _text("hex") + b"\x86R",
    }
    dtype = b"cnumpy\ndtype\n(X\x02\x00\x00\x00%bK\x00K\x01tR"
    fields = b"(X\x01\x00\x00\x00ft}X\x01\x00\x00\x00f(" + dtype % b"O8" + b"K\x00ts"
    pointing = dtype % b"V8" + b"(K\x03X\x01\x00\x00\x00|N" + fields + b"K\x08K\x01K\x00tb"
    for what, kind in {"an object": dtype % b"O8", "a field that is an object": pointing}.items():
        made[f"an array of {what} at an address"] = _array(kind, struct.pack("<Q", ADDRESS))
    made["an array that is longer than its bytes"] = _array(dtype % b"u1", b"x", shape=b"J\xff\xff\xff\x7f")
    made["an array with a negative shape"] = _array(dtype % b"u1", b"x", shape=b"J\xff\xff\xff\xff")
    made["a list that contains itself"] = b"]q\x00h\x00a"
    made["nested lists"] = b"]" * 50_000 + b"a" * 49_999
    made["a key of nested tuples"] = b"}" + b")" + b"\x85" * 100_000 + b"Ns"
    begin = b"\x80\x04}(C\x06labels]K\x01aC\x04data"
    return {what: begin + body + b"u." for what, body in made.items()}


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _array(dtype: bytes, raw: bytes, shape: bytes = b"K\x01") -> bytes:
    state = b"(K\x01(" + shape + b"t" + dtype + b"\x89C" + bytes([len(raw)]) + raw + b"t"
    return b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR" + state + b"b"


# ---- images ----


def pictures() -> dict[str, bytes]:
    """A valid image of every supported format."""
    image = sample_image(40, 30)
    options: dict[str, tuple[str, dict[str, object]]] = {
        "jpeg": ("jpeg", {}),
        "progressive jpeg": ("jpeg", {"progressive": True}),
        "png": ("png", {}),
        "lossy webp": ("webp", {}),
        "lossless webp": ("webp", {"lossless": True}),
        "gif": ("gif", {}),
        "bmp": ("bmp", {}),
        "ppm": ("ppm", {}),
        "tiff": ("tiff", {}),
        "lzw tiff": ("tiff", {"compression": "tiff_lzw"}),
        "jpeg tiff": ("tiff", {"compression": "jpeg"}),
        "avif": ("avif", {}),
    }
    made = {}
    for name, (kind, more) in options.items():
        out = io.BytesIO()
        try:
            image.save(out, kind, **more)
        except (KeyError, OSError):  # this Pillow was built without it
            continue
        made[name] = out.getvalue()
    return made


def disguised(canary: Path) -> dict[str, bytes]:
    """Files of other formats, some of which can start programs or read other files."""
    box = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n"
    return {
        "PostScript": box + b"%%EndComments\n(" + bytes(canary) + b") (w) file closefile showpage\n%%EOF\n",
        "DOS EPS": b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 32, len(box)) + bytes(20) + box,
        "PDF": b"%PDF-1.4\n1 0 obj << /OpenAction << /S /Launch /F (touch) >> >> endobj\n%%EOF\n",
        "SVG": b"<?xml version='1.0'?><svg><image href='file://" + bytes(canary) + b"'/></svg>",
        "WMF": b"\xd7\xcd\xc6\x9a\x00\x00" + struct.pack("<hhhhH", 0, 0, 40, 30, 72) + b"\x01\x00\x09\x00" + bytes(40),
        "FITS": b"SIMPLE  =                    T".ljust(80) + b"BITPIX  = 8".ljust(80) + b"END".ljust(2720),
        "ImageMagick": b'push graphic-context\nfill \'url(https://x/"|touch "'
        + bytes(canary)
        + b')"\npop graphic-context',
        "XPM": b'/* XPM */\nstatic char *x[] = {"1 1 1 1", "a c #000", "a"};',
        "HTML": b"<html>404 not found</html>",
        "a pickle": exploits(canary)["reduce"],
    }


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    """A gray PNG whose header claims a size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def jpeg_of_scans(width: int, height: int, scans: int) -> bytes:
    """A progressive JPEG with tiny scans, each of which is decoded over the whole image."""

    def segment(marker: int, body: bytes) -> bytes:
        return bytes([255, marker]) + struct.pack(">H", len(body) + 2) + body

    table = bytes([1] + [0] * 15)
    head = segment(0xDB, b"\0" + b"\1" * 64) + segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")
    tables = segment(0xC4, b"\x00" + table + b"\x00") + segment(0xC4, b"\x10" + table + b"\xe0")
    first = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + bytes(4)
    return (
        b"\xff\xd8"
        + head
        + tables
        + first
        + (segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + bytes(2)) * scans
        + b"\xff\xd9"
    )


def slow_bmp(rows: int) -> bytes:
    """A BMP with 4-bit run lengths, which Pillow decodes in Python pixel by pixel, 13,005 per row."""
    runs = (b"\xff\x12" * 51 + b"\0\0") * rows
    head = struct.pack("<IiiHHIIiiII", 40, 13_005, rows, 1, 4, 2, len(runs), 0, 0, 16, 16)
    return b"BM" + struct.pack("<IHHI", 54 + 64 + len(runs), 0, 0, 54 + 64) + head + bytes(64) + runs


def bombs() -> dict[str, bytes]:
    """Small files that claim to be huge, or decompress to huge data."""
    zeros = zlib.compress(bytes(1 << 27), 9)
    head, body = png_of(40, 30, bytes(41 * 30))[:33], png_of(40, 30, bytes(41 * 30))[33:]
    tags = b"".join(struct.pack("<HHII", 1000 + number, 7, 1 << 20, 8) for number in range(5000))
    return {
        "png.png": png_of(50_000, 50_000),
        "flat.png": png_of(2_000_000_000, 1),
        "baseline.jpg": pictures()["jpeg"].replace(struct.pack(">HH", 30, 40), struct.pack(">HH", 65_000, 65_000)),
        "progressive.jpg": jpeg_of_scans(65_000, 65_000, 3),
        "scans.jpg": jpeg_of_scans(4000, 4000, 5000),
        "screen.gif": b"GIF89a" + struct.pack("<HH", 65_000, 65_000) + pictures()["gif"][10:],
        "large.ppm": b"P6 99999 99999 255\n" + bytes(100),
        "plain.ppm": b"P3 99999 99999 255\n" + b"1 " * 100,
        "large.bmp": pictures()["bmp"][:18] + struct.pack("<ii", 99_999, 99_999) + pictures()["bmp"][26:],
        "large.tiff": struct.pack("<2sHIH", b"II", 42, 8, 2) + _tag(256, 99_999) + _tag(257, 99_999) + bytes(4),
        "tags.tiff": struct.pack("<2sHIH", b"II", 42, 8, 5000) + tags + bytes(1 << 20),
        "text.png": head + _chunk(b"zTXt", b"a\0\0" + zeros) * 8 + body,
        "profile.png": head + _chunk(b"iCCP", b"a\0\0" + zeros) + body,
    }


def _tag(number: int, value: int) -> bytes:
    return struct.pack("<HHII", number, 4, 1, value)


# ---- tars ----


def member(name: bytes, size: int, kind: bytes = b"0", body: bytes = b"", link: bytes = b"") -> bytes:
    """A header that claims any size, followed by `body`."""
    stated = b"\x80" + size.to_bytes(11, "big") if size >= 0 else b"\xff" + (256**11 + size).to_bytes(11, "big")
    fields = (
        name.ljust(100, b"\0") + b"0000644\0" * 3 + stated + b"%011o\0" % 0 + b" " * 8 + kind + link.ljust(100, b"\0")
    )
    return _summed((fields + b"ustar  \0").ljust(512, b"\0")) + body + bytes(-len(body) % 512)


def _summed(head: bytes) -> bytes:
    blank = head[:148] + b" " * 8 + head[156:]
    return head[:148] + b"%06o\0 " % sum(blank) + head[156:]


def attributes(**fields: str) -> bytes:
    """A pax header for the member that follows; GNU_sparse_size stands for GNU.sparse.size."""
    body = b""
    for key, value in fields.items():
        rest = f" {key.replace('_', '.')}={value}\n".encode()
        length = next(number for number in range(len(rest), len(rest) + 9) if number == len(str(number)) + len(rest))
        body += b"%d" % length + rest
    return member(b"pax", len(body), b"x", body)


def sparse(name: bytes, size: int) -> bytes:
    """A GNU sparse member without data that claims a size."""
    head = member(name, 0, b"S")
    return _summed(head[:386] + b"%011o\0" % 0 * 2 + head[410:483] + b"\x80" + size.to_bytes(11, "big") + head[495:])


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def deep_mat(depth: int) -> bytes:
    """A MATLAB file of nested cells, which SciPy reads recursively."""

    def element(kind: int, body: bytes) -> bytes:
        return struct.pack("<II", kind, len(body)) + body + bytes(-len(body) % 8)

    def head(array: int, name: bytes = b"") -> bytes:
        return element(6, struct.pack("<II", array, 0)) + element(5, struct.pack("<ii", 1, 1)) + element(1, name)

    parts = [element(14, head(6) + element(9, struct.pack("<d", 1)))]
    size = len(parts[0])
    for level in range(depth):
        outer = head(1, b"synsets" if level == depth - 1 else b"")
        parts.append(struct.pack("<II", 14, len(outer) + size) + outer)
        size += 8 + len(outer)
    return b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + b"".join(reversed(parts))


# ---- mutations ----


def mutated(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield copies with flipped bits, changed, repeated and deleted bytes, and truncations; deterministic per seed."""
    rng = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(changed))
            match rng.randrange(5):
                case 0:
                    changed[at] ^= 1 << rng.randrange(8)
                case 1:
                    changed[at] = rng.choice((0, 1, 127, 128, 255))
                case 2:
                    changed[at : at + 4] = rng.randbytes(4)
                case 3:
                    changed[at:at] = changed[at : at + rng.randrange(1, 64)]
                case 4:
                    del changed[at : at + rng.choice((1, 2, 16))]
        yield bytes(changed) if rng.random() < 0.85 else bytes(changed[: rng.randrange(len(changed))])
