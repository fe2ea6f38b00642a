"""What `paceline data --duplicates` prints and writes."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from paceline.data import codec, sheets
from paceline.data.duplicates import DuplicateImage, Duplicates
from paceline.data.shards import Dataset, Split
from paceline.system.files import printable, write_text
from paceline.system.logs import console
from paceline.system.tables import new_table, show
from paceline.system.wording import counted

_EFFECTS = {
    ("val", "train"): "the validation accuracy may be too high",
    ("test", "train"): "the test accuracy may be too high",
    ("test", "val"): "the test accuracy may be too high, since val chooses the best checkpoint",
}
_FIX = (
    "Prepare the data again: with --group-by REGEX, which keeps images of one object in one split, or from a list "
    "without the copies, which --keep-list FILE.csv writes."
)
_SHOWN = 10
_COLUMNS = ("cluster", "split_1", "name_1", "label_1", "split_2", "name_2", "label_2")


def print_duplicates(found: Duplicates, splits: Sequence[str], screen: Console) -> None:
    """Print how many images have near-duplicates where, the first pairs, and a warning if they cross splits."""
    clusters = len({pair.cluster for pair in found.pairs})
    differ = sum(pair.labels_differ for pair in found.pairs)
    facts = f"{counted(len(found.pairs), 'pair')} of near-duplicates in {counted(clusters, 'cluster')}"
    labels = f"{counted(differ, 'pair')} with different labels"
    screen.print(f"{counted(found.num_images, 'image')}: {facts}, {labels}", soft_wrap=True)
    heads = ("images with a copy", *(f"in {name}" for name in splits))
    rows = [(f"of {name}", *(f"{found.copies[name, other]:,}" for other in splits)) for name in splits]
    show(new_table(heads, rows), screen)
    for pair in found.pairs[:_SHOWN]:
        labels = f"labels {pair.first.label} and {pair.second.label}" if pair.labels_differ else pair.first.label
        screen.print(printable(f"  {_text(pair.first)} = {_text(pair.second)} ({labels})"), soft_wrap=True)
    if len(found.pairs) > _SHOWN:
        screen.print(f"  and {len(found.pairs) - _SHOWN:,} more; --out FILE.csv lists all", soft_wrap=True)
    for line in _remarks(found):
        screen.print(line, soft_wrap=True)


def _text(image: DuplicateImage) -> str:
    return f"{image.split} {image.name}"


def _remarks(found: Duplicates) -> Iterator[str]:
    if found.flat:
        yield f"not compared: {counted(found.flat, 'image')} with almost no contrast"
    if found.unreadable:
        images = counted(len(found.unreadable), "image")
        yield f"warning: {images} cannot be read, e.g. {found.unreadable[0]}. Run with --check."
    for (split, other), effect in _EFFECTS.items():
        if count := found.copies.get((split, other), 0):
            images = f"{count:,} {split} image{'s have' if count > 1 else ' has'} a near-duplicate in {other}"
            yield f"warning: {images}; {effect}"
    if found.leaked:
        yield _FIX


def write_pairs(found: Duplicates, out: Path) -> None:
    """Write all pairs as CSV."""
    rows = (
        (
            *(pair.cluster, pair.first.split, pair.first.name, pair.first.label),
            *(pair.second.split, pair.second.name, pair.second.label),
            *("yes" if pair.labels_differ else "no", pair.distance, f"{pair.correlation:.4f}"),
        )
        for pair in found.pairs
    )
    _write_csv(out, (*_COLUMNS, "labels_differ", "distance", "correlation"), rows)
    console.print(f"{out}: {counted(len(found.pairs), 'pair')} of near-duplicates")


def write_kept(found: Duplicates, dataset: Dataset, variant: str, out: Path) -> None:
    """Write a list of all images, without those of train that have a copy in val or test, and of val in test."""
    ids, kept = [entry.id for entry in dataset.classes], list[tuple[str, str, str]]()
    for name in dataset.description["splits"]:
        split = dataset.split(name, variant or dataset.variants[0])
        for number, (path, label) in enumerate(zip(split.names, split.index["label"], strict=True)):
            if (name, number) not in found.leaked:
                kept.append((path, ids[int(label)], name))
    _write_csv(out, ("path", "label", "split"), kept)
    console.print(
        f"{out}: a list of {counted(len(kept), 'image')}, without {len(found.leaked):,}. Paths are those of the source"
        f': move it to the source folder SRC and run "paceline prepare SRC/{out.name} --out DIR".',
        soft_wrap=True,
    )


def _write_csv(out: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(out, content.getvalue())


def write_pair_sheet(found: Duplicates, dataset: Dataset, variant: str, out: Path) -> None:
    """Write a PNG of the first pairs, side by side; pairs across splits come first, then those with other labels."""
    if not found.pairs:
        console.print(f"{out} is not written: there are no pairs")
        return
    columns, rows, side = 8, 8, 128
    splits = {name: dataset.split(name, variant or dataset.variants[0]) for name in dataset.description["splits"]}
    ordered = sorted(
        found.pairs, key=lambda pair: (pair.first.split == pair.second.split, not pair.labels_differ, pair.cluster)
    )
    chosen = [image for pair in ordered[: columns * rows // 2] for image in (pair.first, pair.second)]
    images = [_pixels(splits[image.split], image.number, side) for image in chosen]
    labels = [f"{image.split}: {image.label}" for image in chosen]
    sheets.write_png(sheets.contact_sheet(images, labels, columns, side), out)
    console.print(f"{out}: {len(chosen) // 2} of {len(found.pairs):,} pairs")


def _pixels(split: Split, number: int, side: int) -> np.ndarray:
    """Return the whole image, black if it cannot be read: uint8 (side, side, 3)."""
    pixels, ids = np.zeros((1, 3, side, side), np.uint8), np.array([number])
    boxes = np.array([[0, 0, *split.sizes(ids)[0], 0]], np.int32)
    codec.Decoder(split.shards).crop(split.places(ids), boxes, pixels)
    return pixels[0].transpose(1, 2, 0)
