"""The commands prepare and data."""

import argparse
from pathlib import Path

from paceline.cli.options import count, make_parser
from paceline.errors import UserError

_PREPARE = """Convert a dataset to the format that training reads fastest.

  paceline prepare cifar10                      download CIFAR-10, or read it from an archive (--from)
  paceline prepare imagenet --train ILSVRC2012_img_train.tar --val ILSVRC2012_img_val.tar
                            --devkit ILSVRC2012_devkit_t12.tar.gz --out DIR      reads the archives without unpacking
  paceline prepare imagenet --from TREE --out DIR               TREE/train/n01440764/*.JPEG, TREE/val/n01440764/*.JPEG
  paceline prepare folder TREE --out DIR [--val-fraction 0.1] [--test-fraction 0.1]    one folder per class
  paceline prepare folder LIST.csv --out DIR                    a list: path,label and optionally split

Archives may also be https:// or s3:// URLs. The same command resumes an interrupted preparation."""

_DATA = """Describe prepared data; verify it, show samples, or export its images.

Data at an https:// or s3:// URL is downloaded to $PACELINE_CACHE or ~/.cache/paceline first, as in training."""


_SHARD_OPTIONS = (
    "max_side",
    "short_side",
    "original",
    "quality",
    "val_fraction",
    "test_fraction",
    "group_by",
    "limit_per_class",
    "allow_empty_classes",
    "workers",
)


def prepare(arguments: list[str]) -> int:
    """Run `paceline prepare`; returns the exit status."""
    options = _prepare_parser().parse_args(arguments)
    from paceline.api.data import prepare_cifar10, prepare_folder, prepare_imagenet
    from paceline.data.shards import default_folder

    if options.out == Path():
        raise UserError("empty-option", "--out is empty. Give a folder.", option="--out")
    out = options.out or default_folder("shards" if options.dataset == "folder" else options.dataset)
    if options.dataset == "cifar10":
        prepare_cifar10(out, source=options.source)
        return 0
    given = {name: getattr(options, name) for name in _SHARD_OPTIONS}
    if options.dataset == "folder":
        _check_folder_options(options)
        prepare_folder(options.tree, out, **given)
        return 0
    if options.tree:
        message = f"`prepare imagenet` takes no argument {str(options.tree)!r}. Give a tree with --from."
        raise UserError("option-not-applicable", message, option=str(options.tree))
    archives = {name: getattr(options, name) for name in ("train", "val", "devkit")}
    prepare_imagenet(out, source=options.source or "", **archives, **given)
    return 0


def _check_folder_options(options: argparse.Namespace) -> None:
    if not options.tree:
        message = "no folder is given. Use `paceline prepare folder TREE --out DIR`."
        raise UserError("missing-source", message)
    if given := [name for name in ("source", "train", "val", "devkit") if getattr(options, name)]:
        name = f"--{given[0].replace('source', 'from')}"
        message = f"{name} does not apply to `prepare folder`, which reads {options.tree}. Leave it out."
        raise UserError("option-not-applicable", message, option=name)


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
    archives.add_argument("--train", default="", metavar="TAR", help="ILSVRC2012_img_train.tar")
    archives.add_argument("--val", default="", metavar="TAR", help="ILSVRC2012_img_val.tar")
    archives.add_argument(
        "--devkit",
        default="",
        metavar="TAR",
        help="ILSVRC2012_devkit_t12.tar.gz; with --from: only for readable class names",
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
    _add_splits(parser)
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
        "--workers", type=count, default=0, metavar="N", help="processes that decode images (default: one per core)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _add_splits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("splits of images that have none")
    group.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of each class to use for validation",
    )
    group.add_argument(
        "--test-fraction",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of each class that is only used to test the finished model",
    )
    group.add_argument(
        "--group-by",
        default="",
        metavar="REGEX",
        help="images stay in one split if REGEX finds the same text in their paths",
    )


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
    parser.add_argument("--split", default="", choices=["train", "val", "test"], help="which split to show or export")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="seed of the samples to show")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.api.data import PreparedData

    if bool(options.out) != bool(options.export):
        missing, given = ("--export jpeg", "--out") if options.out else ("--out DIR", "--export jpeg")
        raise UserError("missing-option", f"{given} needs {missing}. Give both or neither.", option=missing)
    if options.split and not (options.show or options.export):
        raise UserError("missing-option", "--split needs --show or --export. Give one of them.", option="--show")
    prepared = PreparedData(options.folder, options.variant)
    prepared.print_summary()
    if options.check:
        prepared.verify()
    if options.show:
        prepared.write_contact_sheet(options.show, options.split or "train", options.seed)
    if options.export:
        prepared.export_images(options.out, [options.split] if options.split else [])
    return 0
