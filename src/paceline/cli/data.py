"""The verbs prepare and data."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import count, make_parser
from paceline.errors import UserError
from paceline.system.files import say

if TYPE_CHECKING:
    from paceline.data.prepare.sources import Source

_PREPARE = """Bring images into the form that training reads fastest.

  paceline prepare cifar10                      download CIFAR-10, or read it from an archive (--from)
  paceline prepare imagenet --train ILSVRC2012_img_train.tar --val ILSVRC2012_img_val.tar
                            --devkit ILSVRC2012_devkit_t12.tar.gz --out DIR      nothing is unpacked to disk
  paceline prepare imagenet --from TREE --out DIR               TREE/train/n01440764/*.JPEG, TREE/val/n01440764/*.JPEG
  paceline prepare folder TREE --out DIR [--val-fraction 0.1]   any tree with a folder for each class
  paceline prepare folder LIST.csv --out DIR                    a list: path,label and optionally split (train, val)

Archives may also be https:// or s3:// addresses. Interrupted and started again, preparation goes on where it was."""

_DATA = """Describe prepared data; check it, show it, or give the images back.

Data behind an https:// or s3:// address is fetched first, to $PACELINE_CACHE or ~/.cache/paceline, as training does."""


def prepare(arguments: list[str]) -> int:
    parser = make_parser("prepare", "cifar10|imagenet|folder [TREE] --out DIR [options]", _PREPARE)
    parser.add_argument("dataset", choices=["cifar10", "imagenet", "folder"], help="which data set")
    parser.add_argument(
        "tree", nargs="?", type=Path, metavar="TREE", help="the image folder, or the CSV list, of `prepare folder`"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to put it (default: cifar10, imagenet or shards in $PACELINE_DATA, or in data)",
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="PATH", help="an archive or tree you already have")
    archives = parser.add_argument_group("ImageNet's archives")
    archives.add_argument("--train", metavar="TAR", help="ILSVRC2012_img_train.tar")
    archives.add_argument("--val", metavar="TAR", help="ILSVRC2012_img_val.tar")
    archives.add_argument(
        "--devkit", metavar="TAR", help="ILSVRC2012_devkit_t12.tar.gz; with --from: only for readable names"
    )
    sizes = parser.add_argument_group("sizes; several make as many variants in one pass")
    sizes.add_argument(
        "--original", action="store_true", help="keep images as they are (the default without other sizes)"
    )
    sizes.add_argument(
        "--max-side", type=count, nargs="+", default=[], metavar="N", help="longest side of at most N pixels"
    )
    sizes.add_argument(
        "--short-side", type=count, nargs="+", default=[], metavar="N", help="shortest side of at most N"
    )
    sizes.add_argument(
        "--quality", type=count, default=90, metavar="Q", help="JPEG quality of resized images (default 90)"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share kept for validation, evenly from each class",
    )
    parser.add_argument(
        "--limit-per-class", type=count, default=0, metavar="N", help="only the first N of a class, for trials"
    )
    parser.add_argument(
        "--allow-empty-classes", action="store_true", help="continue even if no image of a class could be read"
    )
    parser.add_argument(
        "--workers", type=count, metavar="N", help="processes that decode images (default: one per core)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.data.shards import default_folder

    if options.out == Path():
        raise UserError("--out is empty; give a folder")
    out = options.out or default_folder("shards" if options.dataset == "folder" else options.dataset)
    for tree in (options.tree, options.source):
        if tree and tree.is_dir() and out.resolve().is_relative_to(tree.resolve()):
            raise UserError(f"--out {out} lies inside {tree}, and would be taken for a class; choose another folder")
    if options.dataset == "cifar10":
        from paceline.data.prepare import cifar10

        cifar10.prepare(out, options.source)
        return 0
    from paceline.data.describe import summary
    from paceline.data.prepare.convert import Variant
    from paceline.data.prepare.pack import prepare as write
    from paceline.data.shards import Dataset
    from paceline.system.logs import console

    if options.quality > 100:
        raise UserError(f"--quality {options.quality} is more than 100")
    variants = [Variant(max_side=side, quality=options.quality) for side in options.max_side]
    variants += [Variant(short_side=side, quality=options.quality) for side in options.short_side]
    if options.original or not variants:
        variants.insert(0, Variant())
    source = _source(options)
    workers = options.workers or os.cpu_count() or 1
    write(source, out, list(dict.fromkeys(variants)), workers, options.allow_empty_classes)
    console.print("\n".join(summary(Dataset.open(out))))
    return 0


def _source(options: argparse.Namespace) -> "Source":
    from paceline.data.prepare import imagenet
    from paceline.data.prepare.sources import tree

    if options.dataset == "folder":
        if not options.tree:
            raise UserError("prepare which folder? paceline prepare folder TREE --out DIR")
        if given := [name for name in ("source", "train", "val", "devkit") if getattr(options, name)]:
            name = given[0].replace("source", "from")
            raise UserError(f"--{name} has no bearing on `prepare folder`, whose images are in {options.tree}")
        return tree(options.tree, "folder", options.val_fraction, options.limit_per_class)
    if options.tree:
        raise UserError(f"prepare imagenet takes no {str(options.tree)!r}; a tree is given with --from")
    if options.source:
        return imagenet.from_tree(options.source, options.devkit or "", options.limit_per_class, options.val_fraction)
    if options.val_fraction:
        raise UserError("--val-fraction has no bearing on ImageNet's archives, which have a validation split")
    if missing := [name for name in ("train", "val", "devkit") if not getattr(options, name)]:
        raise UserError(f"prepare imagenet needs {' and '.join(f'--{name}' for name in missing)}, or --from TREE")
    return imagenet.from_archives(options.train, options.val, options.devkit, options.limit_per_class)


def data(arguments: list[str]) -> int:
    parser = make_parser("data", "DIR [--check] [--show FILE.png] [--export jpeg --out DIR]", _DATA)
    parser.add_argument("folder", metavar="DIR", help="prepared data, or its https:// or s3:// address")
    parser.add_argument("--check", action="store_true", help="verify every checksum, index and record")
    parser.add_argument(
        "--show", type=Path, nargs="?", const=Path("samples.png"), metavar="FILE.png", help="a contact sheet"
    )
    parser.add_argument(
        "--export", choices=["jpeg"], help="write the images as ordinary JPEG files, coefficient by coefficient"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to export to")
    parser.add_argument("--variant", default="", metavar="NAME", help="which size to fetch, check, show or export")
    parser.add_argument("--split", default="", choices=["train", "val"], help="which split to show or export")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="which samples to show")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.data import cache, describe
    from paceline.data.description import DESCRIPTION
    from paceline.data.kinds import kind_of
    from paceline.data.shards import Dataset

    if options.show and options.show.suffix != ".png":
        raise UserError(f"--show {options.show}: the contact sheet is a PNG; choose a name that ends in .png")
    if options.out and not options.export:
        raise UserError("--out is where --export jpeg writes to; give both or neither")
    folder = cache.local(options.folder, options.variant)
    if (folder / DESCRIPTION).is_file() and kind_of(str(folder)) == "cifar10":
        return _cifar10(folder, options)
    dataset = Dataset.open(folder)
    if options.variant:
        dataset.choose(options.variant)
    say("\n".join(describe.summary(dataset)))
    if options.check:
        fetched = str(folder) != str(Path(options.folder))
        cure = "remove those files; the same command then fetches them again"
        describe.check(dataset, options.variant, *([cure] if fetched else []))
    if options.show:
        describe.contact_sheet(dataset, options.show, options.variant, options.split or "train", options.seed)
    if options.export:
        if not options.out:
            raise UserError("--export jpeg needs --out DIR")
        describe.export(dataset, options.out, options.variant, [options.split] if options.split else ["train", "val"])
    return 0


def _cifar10(folder: Path, options: argparse.Namespace) -> int:
    from paceline.data import arrays
    from paceline.system.logs import console

    if given := [name for name in ("show", "export", "variant", "split") if getattr(options, name)]:
        raise UserError(f"--{given[0]} is for shards; {folder} holds the arrays of CIFAR-10 (see docs/format.md)")
    description, splits = arrays.read(folder, "cifar10")  # and verify it
    images = " and ".join(f"{len(labels):,} {split} images" for split, (_, labels) in splits.items())
    print(
        f"{folder}: cifar10, {len(description['classes'])} classes, {images}, fingerprint {description['fingerprint']}"
    )
    if options.check:
        console.print(f"{folder}: every checksum matches")
    return 0
