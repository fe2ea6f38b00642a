"""Prepare data, and verify, show or export what was prepared."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.arguments import invalid
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.data.duplicates import Duplicates
    from paceline.data.prepare.cifar import Cifar
    from paceline.data.prepare.convert import Variant
    from paceline.data.prepare.raw import RawDataset
    from paceline.data.shards import Dataset

Sides = int | Sequence[int]


def prepare(
    source: str | Path | Mapping[str, str | Path],
    out: str | Path,
    *,
    reader: str = "",
    options: Mapping[str, Any] | None = None,
    class_names: str | Path = "",
    max_side: Sides = (),
    short_side: Sides = (),
    original: bool = False,
    quality: int = 90,
    val_fraction: float = 0.0,
    test_fraction: float = 0.0,
    group_by: str = "",
    limit_per_class: int = 0,
    allow_empty_classes: bool = False,
    workers: int = 0,
) -> Path:
    """Convert images to shards; return the folder written.

    `source` is a folder with one folder per class (also s3://), a list (CSV, TSV, JSONL, Parquet), a tar, WebDataset
    shards, or a Hugging Face dataset (hf:NAME or a saved one); or one source per split: {"train": ..., "val": ...}.
    `reader` names a registered reader, or the kind of source if it is not detected; `options` are its arguments.
    `class_names` is a file with the names of numbered classes. Each size makes a variant; without a size, images keep
    theirs. `workers` processes decode; 0: one per core.
    """
    from paceline.data.prepare.sources import open_source
    from paceline.data.splits import Division

    places = {split: str(place) for split, place in source.items()} if isinstance(source, Mapping) else str(source)
    for place in places.values() if isinstance(places, dict) else [places]:
        _check_place(Path(place), Path(out))
    if isinstance(places, dict) and (not places or not places.keys() <= {"train", "val", "test"}):
        raise invalid("source", source, "a path, or a mapping from train, val and test to paths")
    variants = _variants(max_side, short_side, original, quality)
    division = Division(val_fraction, test_fraction, group_by)
    names = Path(class_names) if class_names else None
    found = open_source(places, reader, options or {}, division, limit_per_class, names)
    return _write(found, out, variants, workers, allow_empty_classes)


def prepare_imagenet(
    out: str | Path,
    *,
    train: str = "",
    val: str = "",
    devkit: str = "",
    source: str | Path = "",
    max_side: Sides = (),
    short_side: Sides = (),
    original: bool = False,
    quality: int = 90,
    val_fraction: float = 0.0,
    test_fraction: float = 0.0,
    group_by: str = "",
    limit_per_class: int = 0,
    allow_empty_classes: bool = False,
    workers: int = 0,
) -> Path:
    """Convert ImageNet to shards, from its archives (train, val, devkit) or an unpacked tree (source)."""
    from paceline.data.prepare import imagenet
    from paceline.data.splits import Division

    division = Division(val_fraction, test_fraction, group_by)
    variants = _variants(max_side, short_side, original, quality)
    if source:
        _check_place(Path(source), Path(out))
        found = imagenet.from_tree(Path(source), devkit, limit_per_class, division)
    else:
        if division != Division():
            message = "--val-fraction, --test-fraction and --group-by do not apply to ImageNet archives. Omit them."
            raise UserError("option-not-applicable", message, option="--val-fraction")
        given = {"train": train, "val": val, "devkit": devkit}
        if missing := [f"--{name}" for name, place in given.items() if not place]:
            raise UserError("missing-source", f"`prepare imagenet` needs {' and '.join(missing)}, or --from TREE.")
        found = imagenet.from_archives(train, val, devkit, limit_per_class)
    return _write(found, out, variants, workers, allow_empty_classes)


def prepare_cifar10(out: str | Path = "", *, source: str | Path | None = None) -> Path:
    """Download CIFAR-10, or read an archive of it (source); return the folder written, by default data/cifar10."""
    from paceline.data.prepare.cifar import CIFAR10

    return _write_cifar(CIFAR10, out, source)


def prepare_cifar100(out: str | Path = "", *, source: str | Path | None = None) -> Path:
    """Download CIFAR-100, or read an archive of it (source); return the folder written, by default data/cifar100."""
    from paceline.data.prepare.cifar import CIFAR100

    return _write_cifar(CIFAR100, out, source)


def _write_cifar(kind: "Cifar", out: str | Path, source: str | Path | None) -> Path:
    from paceline.data.prepare import cifar
    from paceline.data.shards import default_folder

    folder = Path(out) if out else default_folder(kind.name)
    cifar.prepare(kind, folder, Path(source) if source else None)
    return folder


def _check_place(source: Path, out: Path) -> None:
    if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        message = f"--out {out} is inside {source}, where it would be read as a class. Choose another folder."
        raise UserError("output-inside-source", message, path=out)


def _variants(max_side: Sides, short_side: Sides, original: bool, quality: int) -> "list[Variant]":
    from paceline.data.prepare.convert import Variant

    if not 1 <= quality <= 100:
        message = f"--quality {quality} is out of range. Use a number from 1 to 100."
        raise UserError("invalid-quality", message, quality=quality)
    variants = [Variant(max_side=side, quality=quality) for side in _listed(max_side)]
    variants += [Variant(short_side=side, quality=quality) for side in _listed(short_side)]
    if original or not variants:
        variants.insert(0, Variant())
    return list(dict.fromkeys(variants))


def _listed(sides: Sides) -> Sequence[int]:
    return [sides] if isinstance(sides, int) else sides


def _write(
    source: "RawDataset", out: str | Path, variants: "list[Variant]", workers: int, allow_empty_classes: bool
) -> Path:
    from paceline.data.describe import print_summary
    from paceline.data.prepare.pack import prepare
    from paceline.data.shards import Dataset
    from paceline.system.logs import console

    prepare(source, Path(out), variants, workers or os.cpu_count() or 1, allow_empty_classes)
    print_summary(Dataset.open(Path(out)), console)
    return Path(out)


def _with_suffix(out: str | Path, suffix: str, what: str) -> Path:
    if Path(out).suffix != suffix:
        message = f"{out}: {what} written as {suffix}. Choose a name with that suffix."
        raise UserError("wrong-suffix", message, path=out)
    return Path(out)


def _new(path: Path) -> Path:
    if path.exists():  # it may be the list that the data was prepared from
        raise UserError("output-exists", f"{path} exists. Choose another name, or remove it.", path=path)
    return path


class PreparedData:
    """Prepared data in a folder, or at an https:// or s3:// URL, which is downloaded first as in training."""

    def __init__(self, place: str | Path, variant: str = ""):
        from paceline.config.data import ARRAYS
        from paceline.data import cache
        from paceline.data.description import DESCRIPTION
        from paceline.data.kinds import kind_of
        from paceline.data.shards import Dataset

        self.path = cache.local(str(place), variant)
        self._downloaded, self._variant = str(self.path) != str(Path(place)), variant
        kind = kind_of(str(self.path)) if (self.path / DESCRIPTION).is_file() else ""
        self._arrays = kind if kind in ARRAYS else ""
        self._shards = None if self._arrays else Dataset.open(self.path)
        if variant:
            self._dataset("variant").choose(variant)

    def _dataset(self, option: str) -> "Dataset":
        if self._shards is None:
            message = f"--{option} needs shards, but {self.path} has the arrays of {self._arrays}. Omit it."
            raise UserError("option-not-applicable", message, option=f"--{option}")
        return self._shards

    def print_summary(self) -> None:
        """Print splits, variants, classes and what preparation left out."""
        from paceline.data import arrays, describe
        from paceline.system.tables import output

        if self._shards:
            describe.print_summary(self._shards, output())
            return
        description, splits = arrays.read(self.path, self._arrays)  # verifies checksums
        images = " and ".join(f"{len(labels):,} {split} images" for split, (_, labels) in splits.items())
        facts = f"{len(description['classes'])} classes, {images}, fingerprint {description['fingerprint']}"
        print(f"{self.path}: {self._arrays}, {facts}")

    def verify(self) -> None:
        """Verify every checksum, index and record; UserError if one is wrong."""
        from paceline.data import arrays, describe
        from paceline.data.description import PREPARE_AGAIN
        from paceline.system.logs import console

        if self._shards:
            again = "Remove these files; the same command then downloads them again."
            describe.check(self._shards, self._variant, again if self._downloaded else PREPARE_AGAIN)
        else:
            arrays.read(self.path, self._arrays)
            console.print(f"{self.path}: every checksum matches")

    def write_contact_sheet(self, out: str | Path = "samples.png", split: str = "train", seed: int = 1) -> Path:
        """Write random images with their labels as .png; return its path."""
        from paceline.data import describe

        path = _with_suffix(out, ".png", "contact sheets are")
        describe.write_contact_sheet(self._dataset("show"), path, self._variant, split, seed)
        return path

    def duplicates(
        self,
        out: str | Path = "",
        *,
        max_distance: int = 7,
        sheet: str | Path = "",
        keep_list: str | Path = "",
    ) -> "Duplicates":
        """Find near-duplicates within and between the splits, print and return them.

        Two images are near-duplicates if their 64-bit hashes differ in at most `max_distance` (0 to 7) bits and their
        thumbnails correlate. `out`: all pairs as .csv; `sheet`: pairs side by side as .png; `keep_list`: a list (.csv)
        to prepare again, without images of train that have a copy in val or test, and of val in test.
        """
        from paceline.data import duplicate_report as report
        from paceline.data.duplicates import find_duplicates
        from paceline.system.tables import output

        dataset, variant = self._dataset("duplicates"), self._variant
        pairs = _with_suffix(out, ".csv", "pairs of near-duplicates are") if out else None
        kept = _new(_with_suffix(keep_list, ".csv", "lists are")) if keep_list else None
        drawn = _with_suffix(sheet, ".png", "contact sheets are") if sheet else None
        found = find_duplicates(dataset, variant, max_distance)
        report.print_duplicates(found, list(dataset.description["splits"]), output())
        if pairs:
            report.write_pairs(found, pairs)
        if kept:
            report.write_kept(found, dataset, variant, kept)
        if drawn:
            report.write_pair_sheet(found, dataset, variant, drawn)
        return found

    def export_images(self, out: str | Path, splits: Sequence[str] = ()) -> Path:
        """Write JPEG files with identical coefficients, one folder per split and class; by default all splits."""
        from paceline.data import describe

        dataset = self._dataset("export")
        describe.export(dataset, Path(out), self._variant, list(splits or dataset.description["splits"]))
        return Path(out)
