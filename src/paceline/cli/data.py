"""The commands prepare and data."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import count, make_parser
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.data.prepare.sources import RawDataset

_PREPARE = """Convert a dataset to the format that training reads fastest.

  paceline prepare cifar10                      download CIFAR-10, or read it from an archive (--from)
  paceline prepare imagenet --train ILSVRC2012_img_train.tar --val ILSVRC2012_img_val.tar
                            --devkit ILSVRC2012_devkit_t12.tar.gz --out DIR      reads the archives without unpacking
  paceline prepare imagenet --from TREE --out DIR               TREE/train/n01440764/*.JPEG, TREE/val/n01440764/*.JPEG
  paceline prepare folder TREE --out DIR [--val-fraction 0.1]   any tree with one folder per class
  paceline prepare folder LIST.csv --out DIR                    a list: path,label and optionally split (train, val)

Archives may also be https:// or s3:// URLs. The same command resumes an interrupted preparation."""

_DATA = """Describe prepared data; verify it, show samples, or export its images.

Data at an https:// or s3:// URL is downloaded to $PACELINE_CACHE or ~/.cache/paceline first, as in training."""


def prepare(arguments: list[str]) -> int:
    """Run `paceline prepare`; returns the exit status."""
    options = _prepare_parser().parse_args(arguments)
    from paceline.data.shards import default_folder

    if options.out == Path():
        raise UserError("empty-option", "--out is empty. Give a folder.", option="--out")
    out = options.out or default_folder("shards" if options.dataset == "folder" else options.dataset)
    for tree in (options.tree, options.source):
        if tree and tree.is_dir() and out.resolve().is_relative_to(tree.resolve()):
            raise UserError(
                "output-inside-source",
                f"--out {out} is inside {tree}, where it would be read as a class. Choose another folder.",
                path=out,
            )
    if options.dataset == "cifar10":
        from paceline.data.prepare import cifar10

        cifar10.prepare(out, options.source)
        return 0
    from paceline.data.describe import print_summary
    from paceline.data.prepare.convert import Variant
    from paceline.data.prepare.pack import prepare as write
    from paceline.data.shards import Dataset
    from paceline.system.logs import console

    if options.quality > 100:
        raise UserError(
            "invalid-quality",
            f"--quality {options.quality} is out of range. Use a number from 1 to 100.",
            quality=options.quality,
        )
    variants = [Variant(max_side=side, quality=options.quality) for side in options.max_side]
    variants += [Variant(short_side=side, quality=options.quality) for side in options.short_side]
    if options.original or not variants:
        variants.insert(0, Variant())
    source = _source(options)
    workers = options.workers or os.cpu_count() or 1
    write(source, out, list(dict.fromkeys(variants)), workers, options.allow_empty_classes)
    print_summary(Dataset.open(out), console)
    return 0


def _prepare_parser() -> argparse.ArgumentParser:
    parser = make_parser("prepare", "cifar10|imagenet|folder [TREE] --out DIR [options]", _PREPARE)
    parser.add_argument("dataset", choices=["cifar10", "imagenet", "folder"], help="which dataset")
    parser.add_argument(
        "tree", nargs="?", type=Path, metavar="TREE", help="the image folder, or the CSV list, of `prepare folder`"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: cifar10, imagenet or shards in $PACELINE_DATA, or in data)",
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="PATH", help="a local archive or tree")
    archives = parser.add_argument_group("ImageNet archives")
    archives.add_argument("--train", metavar="TAR", help="ILSVRC2012_img_train.tar")
    archives.add_argument("--val", metavar="TAR", help="ILSVRC2012_img_val.tar")
    archives.add_argument(
        "--devkit", metavar="TAR", help="ILSVRC2012_devkit_t12.tar.gz; with --from: only for readable class names"
    )
    sizes = parser.add_argument_group("image sizes; each one makes a variant, all in one pass")
    sizes.add_argument("--original", action="store_true", help="original images (default if no other size is given)")
    sizes.add_argument(
        "--max-side", type=count, nargs="+", default=[], metavar="N", help="longest side at most N pixels"
    )
    sizes.add_argument(
        "--short-side", type=count, nargs="+", default=[], metavar="N", help="shortest side at most N pixels"
    )
    sizes.add_argument(
        "--quality", type=count, default=90, metavar="Q", help="JPEG quality of resized images (default 90)"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of each class to use for validation",
    )
    parser.add_argument(
        "--limit-per-class",
        type=count,
        default=0,
        metavar="N",
        help="only the first N images per class, for tests",
    )
    parser.add_argument(
        "--allow-empty-classes", action="store_true", help="continue even if no image of a class can be read"
    )
    parser.add_argument(
        "--workers", type=count, metavar="N", help="processes that decode images (default: one per core)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _source(options: argparse.Namespace) -> "RawDataset":
    from paceline.data.prepare import imagenet
    from paceline.data.prepare.sources import tree

    if options.dataset == "folder":
        if not options.tree:
            message = "no folder is given. Use `paceline prepare folder TREE --out DIR`."
            raise UserError("missing-source", message)
        if given := [name for name in ("source", "train", "val", "devkit") if getattr(options, name)]:
            name = f"--{given[0].replace('source', 'from')}"
            message = f"{name} does not apply to `prepare folder`, which reads {options.tree}. Leave it out."
            raise UserError("option-not-applicable", message, option=name)
        return tree(options.tree, "folder", options.val_fraction, options.limit_per_class)
    if options.tree:
        message = f"`prepare imagenet` takes no argument {str(options.tree)!r}. Give a tree with --from."
        raise UserError("option-not-applicable", message, option=str(options.tree))
    if options.source:
        return imagenet.from_tree(options.source, options.devkit or "", options.limit_per_class, options.val_fraction)
    if options.val_fraction:
        message = "--val-fraction does not apply to ImageNet archives, which have a validation split. Leave it out."
        raise UserError("option-not-applicable", message, option="--val-fraction")
    if missing := [name for name in ("train", "val", "devkit") if not getattr(options, name)]:
        options_missing = " and ".join(f"--{name}" for name in missing)
        raise UserError("missing-source", f"`prepare imagenet` needs {options_missing}, or --from TREE.")
    return imagenet.from_archives(options.train, options.val, options.devkit, options.limit_per_class)


def data(arguments: list[str]) -> int:
    """Run `paceline data`; returns the exit status."""
    parser = make_parser("data", "DIR [--check] [--show FILE.png] [--export jpeg --out DIR]", _DATA)
    parser.add_argument("folder", metavar="DIR", help="prepared data, or its https:// or s3:// URL")
    parser.add_argument("--check", action="store_true", help="verify every checksum, index and record")
    parser.add_argument(
        "--show", type=Path, nargs="?", const=Path("samples.png"), metavar="FILE.png", help="write a contact sheet"
    )
    parser.add_argument(
        "--export", choices=["jpeg"], help="write the images as JPEG files, with identical coefficients"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder of --export")
    parser.add_argument("--variant", default="", metavar="NAME", help="which variant to check, show or export")
    parser.add_argument("--split", default="", choices=["train", "val"], help="which split to show or export")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="seed of the samples to show")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.data import cache, describe
    from paceline.data.description import DESCRIPTION
    from paceline.data.kinds import kind_of
    from paceline.data.shards import Dataset
    from paceline.system.tables import output

    if options.show and options.show.suffix != ".png":
        raise UserError(
            "wrong-suffix",
            f"--show {options.show}: contact sheets are written as .png. Choose a name with that suffix.",
            path=options.show,
        )
    if bool(options.out) != bool(options.export):
        missing, given = ("--export jpeg", "--out") if options.out else ("--out DIR", "--export jpeg")
        raise UserError("missing-option", f"{given} needs {missing}. Give both or neither.", option=missing)
    folder = cache.local(options.folder, options.variant)
    if (folder / DESCRIPTION).is_file() and kind_of(str(folder)) == "cifar10":
        return _cifar10(folder, options)
    dataset = Dataset.open(folder)
    if options.variant:
        dataset.choose(options.variant)
    describe.print_summary(dataset, output())
    if options.check:
        downloaded = str(folder) != str(Path(options.folder))
        fix = "Remove these files; the same command then downloads them again."
        describe.check(dataset, options.variant, *([fix] if downloaded else []))
    if options.show:
        describe.write_contact_sheet(dataset, options.show, options.variant, options.split or "train", options.seed)
    if options.export:
        describe.export(dataset, options.out, options.variant, [options.split] if options.split else ["train", "val"])
    return 0


def _cifar10(folder: Path, options: argparse.Namespace) -> int:
    from paceline.data import arrays
    from paceline.system.logs import console

    if given := [name for name in ("show", "export", "variant", "split") if getattr(options, name)]:
        message = f"--{given[0]} needs shards, but {folder} has the arrays of CIFAR-10. Leave it out."
        raise UserError("option-not-applicable", message, option=f"--{given[0]}")
    description, splits = arrays.read(folder, "cifar10")  # verifies checksums
    images = " and ".join(f"{len(labels):,} {split} images" for split, (_, labels) in splits.items())
    print(
        f"{folder}: cifar10, {len(description['classes'])} classes, {images}, fingerprint {description['fingerprint']}"
    )
    if options.check:
        console.print(f"{folder}: every checksum matches")
    return 0
