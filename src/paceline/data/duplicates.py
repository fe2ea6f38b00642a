"""Near-duplicates within and between the splits of prepared data.

Images are hashed from the DC coefficients in the shards, without decoding them. Pairs with similar hashes are compared
again by the correlation of their thumbnails, and connected pairs are joined into clusters.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from rich.progress import track

from paceline.data import codec
from paceline.data.hashing import MAX_DISTANCE, correlation, distance, hashes, neighbors
from paceline.data.shards import Dataset, Split
from paceline.errors import UserError
from paceline.system.logs import console

MIN_CORRELATION = 0.9
_MIN_BLOCKS_SIDE = 256  # pixels; smaller images have too few blocks for a thumbnail, and are quickly decoded
_BATCH = 256
_MAX_PAIRS = 5_000_000


@dataclass(frozen=True)
class DuplicateImage:
    """An image of a pair."""

    split: str
    number: int
    name: str
    label: str


@dataclass(frozen=True)
class DuplicatePair:
    """Two near-duplicates. Pairs with the same cluster are connected through other pairs."""

    cluster: int
    first: DuplicateImage
    second: DuplicateImage
    distance: int
    correlation: float

    @property
    def labels_differ(self) -> bool:
        return self.first.label != self.second.label


@dataclass(frozen=True)
class Duplicates:
    """The near-duplicates of prepared data."""

    num_images: int
    pairs: list[DuplicatePair]
    """Enough pairs to connect every cluster; copies with equal hashes are paired with the first of them only."""
    copies: dict[tuple[str, str], int]
    """How many images of a split have a near-duplicate in another split, or another one in the same split."""
    flat: int = 0
    """Images without contrast, which are not compared."""
    unreadable: list[str] = field(default_factory=list)
    leaked: frozenset[tuple[str, int]] = frozenset()
    """Split and number of images of train with a near-duplicate in val or test, and of val with one in test."""


def find_duplicates(dataset: Dataset, variant: str = "", max_distance: int = MAX_DISTANCE) -> Duplicates:
    """Return the near-duplicates among all images of a variant."""
    if not 0 <= max_distance <= MAX_DISTANCE:
        message = f"--max-distance {max_distance} is out of range. Use a number from 0 to {MAX_DISTANCE}."
        raise UserError("invalid-distance", message, max_distance=max_distance)
    images = _Thumbnails(dataset, variant or dataset.variants[0])
    found, has_contrast = images.hashes()
    readable = ~np.isin(np.arange(len(found)), list(images.failures))
    compared = np.flatnonzero(has_contrast & readable)
    first, second, alike = _pairs(images, found, compared, max_distance)
    clusters = _clusters(len(found), first, second)
    distances = distance(found[first], found[second])
    order = np.lexsort((second, first, clusters[first]))
    numbered = {root: number for number, root in enumerate(dict.fromkeys(clusters[first[order]].tolist()), start=1)}
    pairs = [
        DuplicatePair(
            numbered[int(clusters[first[at]])],
            images.describe(int(first[at])),
            images.describe(int(second[at])),
            int(distances[at]),
            round(float(alike[at]), 4),
        )
        for at in order
    ]
    members = np.unique(np.concatenate([first, second]))
    copies, leaked = _overlap(images, members, clusters[members])
    flat = int((readable & ~has_contrast).sum())
    return Duplicates(len(found), pairs, copies, flat, list(images.failures.values()), leaked)


class _Thumbnails:
    """The images of all splits, numbered through."""

    def __init__(self, dataset: Dataset, variant: str):
        self.names = list(dataset.description["splits"])
        self._splits: list[Split] = [dataset.split(name, variant) for name in self.names]
        for split in self._splits:
            _ = split.shards  # mapped before threads use them
        self.starts = np.cumsum([0, *map(len, self._splits)])
        self._labels = [entry.name for entry in dataset.classes]
        self.failures: dict[int, str] = {}

    def split_of(self, numbers: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, numbers, "right") - 1

    def describe(self, number: int) -> DuplicateImage:
        at = int(self.split_of(np.array([number]))[0])
        split, within = self._splits[at], number - int(self.starts[at])
        label = self._labels[int(split.index[within]["label"])]
        return DuplicateImage(self.names[at], within, split.names[within], label)

    def thumbnails(self, numbers: np.ndarray) -> np.ndarray:
        """Return thumbnails, float32 (n, 32, 32). Images that cannot be read are recorded as failures."""
        out = np.zeros((len(numbers), codec.THUMBNAIL, codec.THUMBNAIL), np.float32)
        of = self.split_of(numbers)
        for at, split in enumerate(self._splits):
            here = np.flatnonzero(of == at)
            if not len(here):
                continue
            ids = numbers[here] - self.starts[at]
            small = split.sizes(ids).min(axis=1) < _MIN_BLOCKS_SIDE
            for chosen, make in ((here[~small], _from_blocks), (here[small], _from_pixels)):
                ids = numbers[chosen] - self.starts[at]
                out[chosen], statuses = make(split, ids)
                for bad in np.flatnonzero(statuses):
                    where = split.where(int(ids[bad]))
                    self.failures[int(numbers[chosen[bad]])] = f"{where}: {codec.reason(int(statuses[bad]))}"
        return out

    def hashes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the hashes of all images, and whether they have contrast."""
        total = int(self.starts[-1])
        batches = [np.arange(begin, min(begin + _BATCH, total)) for begin in range(0, total, _BATCH)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda numbers: hashes(self.thumbnails(numbers)), batches)
            results = list(track(made, "hashing", len(batches), console=console, transient=True))
        found, contrast = zip(*results, strict=True)
        return np.concatenate(found), np.concatenate(contrast)


def _from_blocks(split: Split, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return codec.thumbnails(split.shards, split.places(ids))


def _from_pixels(split: Split, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.zeros((len(ids), 3, codec.THUMBNAIL, codec.THUMBNAIL), np.uint8)
    boxes = np.zeros((len(ids), 5), np.int32)
    boxes[:, 2:4] = split.sizes(ids)
    statuses = codec.Decoder(split.shards).crop(split.places(ids), boxes, pixels, luma_only=True)
    return pixels[:, 0].astype(np.float32), statuses


Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""First and second image, and their correlation."""


def _pairs(images: _Thumbnails, found: np.ndarray, compared: np.ndarray, max_distance: int) -> Pairs:
    """Return pairs of near-duplicates that connect all of them, the smaller number first."""
    pairs: list[Pairs] = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]

    def keep(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        alike = _correlations(images.thumbnails, first, second)
        same = alike >= MIN_CORRELATION
        if same.any():
            pairs.append((np.minimum(first, second)[same], np.maximum(first, second)[same], alike[same]))
        if sum(len(part) for part, _, _ in pairs) > _MAX_PAIRS:
            message = f"there are more than {_MAX_PAIRS:,} pairs of near-duplicates. Use a smaller --max-distance."
            raise UserError("too-many-duplicates", message, pairs=_MAX_PAIRS)
        return same

    # copies are compared with the first image that has the same hash, since k copies would make k * k pairs
    unique, rest = [], compared[np.argsort(found[compared], kind="stable")]
    while len(rest):
        changes = np.r_[True, found[rest[1:]] != found[rest[:-1]]]
        representatives = rest[np.maximum.accumulate(np.where(changes, np.arange(len(rest)), 0))]
        unique.append(rest[changes])
        same = keep(representatives[~changes], rest[~changes])
        rest = rest[~changes][~same]
    remaining = np.sort(np.concatenate(unique)) if unique else compared
    for first, second in track(
        neighbors(found[remaining], max_distance), "comparing", total=None, console=console, transient=True
    ):
        keep(remaining[first], remaining[second])
    first, second, alike = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return first, second, alike


def _correlations(thumbnails: Callable[[np.ndarray], np.ndarray], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the correlations of pairs; thumbnails are made again, since those of all images would fill the memory."""
    bounds = [*range(0, len(first), 4096), len(first)]
    parts = [
        correlation(thumbnails(first[begin:end]), thumbnails(second[begin:end])) for begin, end in pairwise(bounds)
    ]
    return np.concatenate(parts) if parts else np.empty(0)


def _clusters(num: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the smallest number that each image is connected to."""
    roots = np.arange(num)
    while True:
        joined = roots.copy()
        np.minimum.at(joined, first, roots[second])
        np.minimum.at(joined, second, roots[first])
        joined = joined[joined]
        if np.array_equal(joined, roots):
            return roots
        roots = joined


def _overlap(
    images: _Thumbnails, members: np.ndarray, clusters: np.ndarray
) -> tuple[dict[tuple[str, str], int], frozenset[tuple[str, int]]]:
    """Return how many images have near-duplicates in which split, and those that leak into val or test."""
    splits, names = images.split_of(members), images.names
    _, position = np.unique(clusters, return_inverse=True)
    counts = np.zeros((position.max(initial=-1) + 1, len(names)), np.int64)
    np.add.at(counts, (position, splits), 1)
    copies = {
        (name, other): int((counts[position[splits == at], against] > (at == against)).sum())
        for at, name in enumerate(names)
        for against, other in enumerate(names)
    }
    return copies, frozenset(_leaked(names, members, splits, images.starts, counts[position]))


def _leaked(
    names: Sequence[str], members: np.ndarray, splits: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> Iterator[tuple[str, int]]:
    later = {"train": ("val", "test"), "val": ("test",)}
    for number, at, row in zip(members, splits, counts, strict=True):
        if any(row[names.index(other)] for other in later.get(names[at], ()) if other in names):
            yield names[at], int(number - starts[at])
