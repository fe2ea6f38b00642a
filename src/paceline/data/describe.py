"""What is in prepared data: in words, checked, as a picture, and as ordinary files again."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from paceline.base import chart
from paceline.base.files import sha256, size_text
from paceline.base.logs import console
from paceline.data import codec
from paceline.data.prepare.assemble import LEFT_OUT
from paceline.data.shards import ANEW, Dataset, Split, shard_name
from paceline.errors import UserError

_MOST_REASONS = 12


def summary(dataset: Dataset) -> Iterator[str]:
    description = dataset.description
    yield f"{dataset.folder}: {dataset.name}, {len(dataset.classes)} classes, fingerprint {dataset.fingerprint}"
    for split, entry in description["splits"].items():
        least, most = min(entry["per_class"]), max(entry["per_class"])
        left_out = f", {entry['left_out']} left out" if entry["left_out"] else ""
        yield f"  {split}: {entry['samples']:,} images, {least} to {most} a class{left_out}"
    for name, variant in description["variants"].items():
        samples = sum(entry["samples"] for entry in description["splits"].values())
        total = sum(split["bytes"] for split in variant["splits"].values())
        shards = sum(len(split["shards"]) for split in variant["splits"].values())
        yield f"  {name}: {size_text(total)} in {shards} shards, {total / samples / 1e3:,.1f} kB an image"
    yield from _remarks(dataset)


def _remarks(dataset: Dataset) -> Iterator[str]:
    """Files that were not what they should be: left out or re-encoded, counted by reason, with an example of each."""
    remarks = dataset.description["remarks"]
    groups: dict[str, list[dict[str, str]]] = {}
    for remark in remarks:
        groups.setdefault(_reason(remark["what"]), []).append(remark)
    if not groups:
        return
    yield f"  {len(remarks):,} files were skipped or re-encoded (all listed in {dataset.folder / 'dataset.json'}):"
    ordered = sorted(groups.items(), key=lambda group: (not group[0].startswith(LEFT_OUT), -len(group[1])))
    for reason, group in ordered[:_MOST_REASONS]:
        first = group[0]
        yield f"    {len(group):,} {reason}, e.g. {first['split']} {first['file']}"
    if rest := sum(len(group) for _, group in ordered[_MOST_REASONS:]):
        yield f"    {rest:,} for other reasons"


def _reason(what: str) -> str:
    """Without the figures of a single file, so that like reasons are counted together."""
    return re.sub(r"\d+", "N", what)


def check(dataset: Dataset, cure: str = ANEW) -> None:
    """Verify every file and, where a shard does not match, find the samples that are damaged."""
    damaged: list[str] = []
    for variant, entry in dataset.description["variants"].items():
        for name, content in entry["splits"].items():
            folder = dataset.folder / variant / name
            lists = [_mismatch(folder, file) for file in content["lists"] if not _matches(folder, file)]
            damaged += lists
            split = None if lists else dataset.split(name, variant)
            shards = track(content["shards"], f"checking {variant}/{name}", console=console, transient=True)
            for number, file in enumerate(shards):
                if not _matches(folder, file):
                    found = list(_damaged_records(split, number)) if split else []
                    damaged += found or [_mismatch(folder, file)]
    if damaged:
        shown = "\n  ".join(damaged[:20])
        raise UserError(f"{dataset.folder}: {len(damaged)} damaged:\n  {shown}\n{cure}")
    console.print(f"{dataset.folder}: every checksum matches")


def _matches(folder: Path, file: dict[str, Any]) -> bool:
    path = folder / file["file"]
    return path.is_file() and path.stat().st_size == file["bytes"] and sha256(path) == file["sha256"]


def _mismatch(folder: Path, file: dict[str, Any]) -> str:
    return f"{folder / file['file']} is missing or does not match its checksum"


def _damaged_records(split: Split, shard: int) -> Iterator[str]:
    if not (split.folder / shard_name(shard)).is_file():
        return
    for number in np.flatnonzero(split.index["shard"] == shard):
        try:
            codec.describe(split.record(int(number)))
        except codec.CodecError as error:
            yield f"{split.where(int(number))}: {error}"


def contact_sheet(dataset: Dataset, out: Path, variant: str, split_name: str, seed: int) -> None:
    """Random samples with their labels, as a PNG."""
    columns, rows, side = 8, 6, 128
    split = dataset.split(split_name, variant or dataset.variants[0])
    chosen = np.random.default_rng(seed).permutation(len(split))[: columns * rows]
    pixels = np.zeros((len(chosen), 3, side, side), np.uint8)
    index = split.index[chosen]
    width, height = index["width"].astype(np.int32), index["height"].astype(np.int32)
    shorter = np.minimum(width, height)
    boxes = np.stack([(width - shorter) // 2, (height - shorter) // 2, shorter, shorter, 0 * shorter], axis=1)
    statuses = codec.Decoder(split.shards).crop(split.places(chosen), np.ascontiguousarray(boxes), pixels)
    labels = [
        codec.reason(int(status)) if status else dataset.classes[int(row["label"])].name
        for row, status in zip(index, statuses, strict=True)
    ]
    chart.write_png(chart.contact_sheet(list(pixels.transpose(0, 2, 3, 1)), labels, columns, side), out)
    console.print(f"{out}: {len(chosen)} random images of {split_name}")


def export(dataset: Dataset, out: Path, variant: str, splits: list[str]) -> None:
    """Ordinary JPEG files with the same coefficients, in a folder for each split and class."""
    ids = [entry["id"] for entry in dataset.description["classes"]]
    written, failed = 0, list[str]()
    for name in splits:
        split = dataset.split(name, variant)
        for number in track(range(len(split)), f"exporting {name}", console=console, transient=True):
            folder = out / name / ids[int(split.index[number]["label"])]
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"{number:08d}-{Path(split.names[number]).stem[:100]}.jpg"
            try:
                target.write_bytes(codec.unpack(split.record(number)))
                written += 1
            except codec.CodecError as error:
                failed.append(f"{split.where(number)}: {error}")
            except OSError as error:
                target.unlink(missing_ok=True)  # half an image
                raise OSError(error.errno, error.strerror, str(target)) from None
    console.print(f"{out}: {written:,} JPEG files")
    if failed:
        shown = "\n  ".join(failed[:20])
        raise UserError(f"{len(failed)} images could not be exported:\n  {shown}\n{ANEW}")
