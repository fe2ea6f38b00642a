"""`paceline data`: summarizes, checks, shows and exports prepared data."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from paceline.data import codec, sheets
from paceline.data.description import LEFT_OUT, PREPARE_AGAIN
from paceline.data.files import mismatch
from paceline.data.shards import Dataset, Split
from paceline.errors import UserError
from paceline.system.files import printable, size_text
from paceline.system.logs import console
from paceline.system.tables import new_table, show
from paceline.system.wording import counted

_MAX_REASONS = 12


def print_summary(dataset: Dataset, screen: Console) -> None:
    """Print classes, splits, variants, and files that were left out."""
    classes = f"{len(dataset.classes)} classes, fingerprint {dataset.fingerprint}"
    screen.print(f"{dataset.folder}: {dataset.name}, {classes}", soft_wrap=True)
    show(new_table(("split", "images", "per class", "left out"), list(_splits(dataset))), screen)
    show(new_table(("variant", "size", "shards", "per image"), list(_variants(dataset))), screen)
    for line in _remarks(dataset):
        screen.print(line, soft_wrap=True)


def _splits(dataset: Dataset) -> Iterator[tuple[str, ...]]:
    for split, entry in dataset.description["splits"].items():
        least, most = min(entry["per_class"]), max(entry["per_class"])
        yield split, f"{entry['samples']:,}", f"{least} to {most}", f"{entry['left_out']:,}"


def _variants(dataset: Dataset) -> Iterator[tuple[str, ...]]:
    samples = sum(entry["samples"] for entry in dataset.description["splits"].values())
    for name, variant in dataset.description["variants"].items():
        total = sum(split["bytes"] for split in variant["splits"].values())
        shards = sum(len(split["shards"]) for split in variant["splits"].values())
        yield name, size_text(total), str(shards), f"{total / samples / 1e3:,.1f} kB"


def _remarks(dataset: Dataset) -> Iterator[str]:
    """Yield how many files were left out or re-encoded, by reason, with an example of each."""
    remarks = dataset.description["remarks"]
    groups: dict[str, list[dict[str, str]]] = {}
    for remark in remarks:
        groups.setdefault(_reason(remark["what"]), []).append(remark)
    if not groups:
        return
    total = sum(split["remarks"] for split in dataset.description["splits"].values())
    listed = "all" if total == len(remarks) else f"{len(remarks):,} of them"
    files = counted(total, "file")
    yield f"{files} skipped or re-encoded ({listed} listed in {dataset.folder / 'dataset.json'}):"
    ordered = sorted(groups.items(), key=lambda group: (not group[0].startswith(LEFT_OUT), -len(group[1])))
    for _, group in ordered[:_MAX_REASONS]:
        first = group[0]
        yield f"  {len(group):,} {first['what']}, e.g. {first['split']} {first['file']}"
    if rest := sum(len(group) for _, group in ordered[_MAX_REASONS:]):
        yield f"  {rest:,} for other reasons"


def _reason(what: str) -> str:
    """Return the remark without its numbers, so that reasons that differ only in them are counted together."""
    return re.sub(r"\d+", "N", what)


def check(dataset: Dataset, variant: str = "", fix: str = PREPARE_AGAIN) -> None:
    """Verify every file and every record of one variant, or of all variants. Raises a UserError that lists problems."""
    problems = [
        problem
        for name in ([variant] if variant else dataset.variants)
        for split in dataset.description["splits"]
        for problem in _problems(dataset, name, split)
    ]
    if problems:
        shown = "\n  ".join(problems[:20])
        message = f"{dataset.folder}: {counted(len(problems), 'problem')} found:\n  {shown}\n{fix}"
        raise UserError("dataset-corrupt", message, path=dataset.folder, problems=problems)
    console.print(f"{dataset.folder}: every checksum matches")


def _problems(dataset: Dataset, variant: str, name: str) -> Iterator[str]:
    folder = dataset.folder / variant / name
    files = dataset.description["variants"][variant]["splits"][name]
    try:
        split = dataset.split(name, variant)
    except UserError as error:  # without a valid index, records cannot be located
        found = [mismatch(folder / entry["file"], entry) for entry in (*files["lists"], *files["shards"])]
        yield from filter(None, found) if any(found) else [error.report]
        return
    try:
        len(split.names)
    except UserError as error:
        yield error.report
    shards = track(files["shards"], f"checking {variant}/{name}", console=console, transient=True)
    for number, entry in enumerate(shards):
        records = list(_corrupt_records(split, number))
        yield from records
        if not records and (problem := mismatch(folder / entry["file"], entry)):
            yield problem


def _corrupt_records(split: Split, shard: int) -> Iterator[str]:
    for number, record in split.records(shard):
        width, height = split.index[number][["width", "height"]]
        try:
            found = codec.describe(record)[:2]
        except codec.CodecError as error:
            yield f"{split.where(number)}: {error}"
        else:
            if found != (width, height):
                yield f"{split.where(number)}: {found[0]} x {found[1]} pixels, but {width} x {height} in the index"


def write_contact_sheet(dataset: Dataset, out: Path, variant: str, split_name: str, seed: int) -> None:
    """Write a PNG of random samples with their labels."""
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
    sheets.write_png(sheets.contact_sheet(list(pixels.transpose(0, 2, 3, 1)), labels, columns, side), out)
    console.print(f"{out}: {counted(len(chosen), 'random image')} of {split_name}")


def export(dataset: Dataset, out: Path, variant: str, splits: list[str]) -> None:
    """Write JPEG files with the same coefficients, one folder per split and class. The folder must be new or empty."""
    if other := next(out.iterdir(), None) if out.is_dir() else None:
        message = f"--out {out} already contains {printable(other.name)}. Choose a new folder."
        raise UserError("output-has-other-data", message, path=out)
    ids = [entry["id"] for entry in dataset.description["classes"]]
    written, failed = 0, list[str]()
    for name in splits:
        split = dataset.split(name, variant)
        for number in track(range(len(split)), f"exporting {name}", console=console, transient=True):
            folder = out / name / ids[int(split.index[number]["label"])]
            folder.mkdir(parents=True, exist_ok=True)
            stem = printable(Path(split.names[number]).stem)[:50]  # at most 200 bytes
            target = folder / f"{number:08d}-{stem}.jpg"
            try:
                target.write_bytes(codec.unpack(split.record(number)))
                written += 1
            except codec.CodecError as error:
                failed.append(f"{split.where(number)}: {error}")
            except OSError as error:
                target.unlink(missing_ok=True)  # incomplete
                raise OSError(error.errno, error.strerror, str(target)) from None
    console.print(f"{out}: {counted(written, 'JPEG file')}")
    if failed:
        shown = "\n  ".join(failed[:20])
        message = f"{counted(len(failed), 'image')} could not be exported:\n  {shown}\n{PREPARE_AGAIN}"
        raise UserError("dataset-corrupt", message, path=dataset.folder, problems=failed)
