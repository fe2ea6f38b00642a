"""Perceptual hashes of thumbnails, and the search for similar ones.

A hash has the signs of the 64 lowest frequencies of an image. They survive resizing, re-encoding and crops of about a
pixel, and differ between images: those of unrelated images agree in half of the bits.
"""

from collections.abc import Iterator

import numpy as np

from paceline.data.codec import THUMBNAIL

HASH_BITS = 64
MAX_DISTANCE = 7
"""Hashes that differ in up to 7 bits have one of four quarters that differs in at most one bit."""
_QUARTERS, _QUARTER_BITS = 4, 16
_PAIRS_AT_ONCE = 1 << 21  # bounds the memory of a search
_ONES = np.array([number.bit_count() for number in range(1 << _QUARTER_BITS)], np.uint8)

_MIN_CONTRAST = 2.0  # standard deviation, in gray levels, below which an image shows nothing but noise
_MIN_SIGN = 0.002  # of the contrast: smaller coefficients are noise, and count as not positive


def _cosines() -> np.ndarray:
    """Return the matrix of the orthonormal DCT-II."""
    rows, columns = np.mgrid[:THUMBNAIL, :THUMBNAIL]
    matrix = np.cos(np.pi * rows * (2 * columns + 1) / (2 * THUMBNAIL)) * np.sqrt(2 / THUMBNAIL)
    matrix[0] /= np.sqrt(2)
    return matrix.astype(np.float32)


_DCT = _cosines()
_LOWEST = np.array(
    sorted(((u, v) for u in range(12) for v in range(12)), key=lambda at: (at[0] + at[1], abs(at[0] - at[1]), at))
)[1 : HASH_BITS + 1]  # without the mean


def hashes(thumbnails: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of thumbnails (n, 32, 32), uint64 (n,), and whether they have contrast, without which a hash
    means nothing."""
    contrast = thumbnails.std(axis=(1, 2), dtype=np.float64)
    waves = (_DCT @ thumbnails @ _DCT.T)[:, _LOWEST[:, 0], _LOWEST[:, 1]]
    signs = waves > _MIN_SIGN * THUMBNAIL * contrast[:, None]
    packed = np.ascontiguousarray(np.packbits(signs, axis=1))
    return packed.view(np.uint64).ravel(), contrast >= _MIN_CONTRAST


def correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the correlation coefficients of pairs of thumbnails (n, 32, 32)."""
    first, second = (part.reshape(len(part), -1).astype(np.float64) for part in (first, second))
    first, second = (part - part.mean(axis=1, keepdims=True) for part in (first, second))
    products = (first * second).sum(axis=1)
    scale = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    return products / np.maximum(scale, 1e-12)


def distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return in how many bits pairs of hashes differ."""
    different = np.ascontiguousarray(first ^ second)
    return _ONES[different.view(np.uint16)].reshape(-1, _QUARTERS).sum(axis=1, dtype=np.int64)


def neighbors(hashes: np.ndarray, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all pairs of hashes that differ in at most `limit` bits, each pair once: positions (n,), (n,).

    Only hashes of which a quarter is equal, or differs in one bit, are compared (multi-index hashing). No pair up to
    MAX_DISTANCE is missed, by the pigeonhole principle.
    """
    assert 0 <= limit <= MAX_DISTANCE
    quarters = np.ascontiguousarray(hashes).view(np.uint16).reshape(-1, _QUARTERS)
    flips = [0] + [1 << bit for bit in range(_QUARTER_BITS)] * (limit >= _QUARTERS)
    for number in range(_QUARTERS):
        order = np.argsort(quarters[:, number], kind="stable")
        keys = quarters[order, number].astype(np.int64)
        starts = np.searchsorted(keys, np.arange((1 << _QUARTER_BITS) + 1))
        for flip in flips:
            owners = np.flatnonzero(keys & flip == 0)  # of the two buckets that differ in this bit, one compares
            begins = owners + 1 if not flip else starts[keys[owners] ^ flip]
            ends = starts[(keys[owners] ^ flip) + 1]
            for first, second in _expanded(owners, begins, ends):
                left, right = order[first], order[second]
                close = distance(hashes[left], hashes[right]) <= limit
                left, right = left[close], right[close]
                # a pair that an earlier quarter has found is not yielded again
                earlier = _ONES[quarters[left, :number] ^ quarters[right, :number]] <= (len(flips) > 1)
                new = ~earlier.any(axis=1)
                yield left[new], right[new]


def _expanded(owners: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every owner with every number of its range, about _PAIRS_AT_ONCE at a time."""
    before = np.concatenate([[0], np.cumsum(ends - begins)])
    at = 0
    while at < len(owners):
        to = max(at + 1, int(np.searchsorted(before, before[at] + _PAIRS_AT_ONCE, "right")) - 1)
        lengths = (ends - begins)[at:to]
        offsets = np.arange(lengths.sum()) - np.repeat(before[at:to] - before[at], lengths)
        yield np.repeat(owners[at:to], lengths), np.repeat(begins[at:to], lengths) + offsets
        at = to
