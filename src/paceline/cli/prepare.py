"""The command prepare."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.options import count, make_parser, option_name
from paceline.errors import UserError

_PREPARE = """Convert a dataset to the format that training reads fastest.

  paceline prepare IMAGES --out DIR --val-fraction 0.1       IMAGES/CLASS/* or IMAGES/train/CLASS/*; also s3://...
  paceline prepare LIST.csv --out DIR                        path,label and optionally split; .tsv, .jsonl, .parquet
  paceline prepare IMAGES.tar --out DIR                      a tar of class folders; also https:// and s3:// URLs
  paceline prepare webdataset 'train-{000..009}.tar' --out DIR      .jpg, .png or .webp with .cls, .json or .txt
  paceline prepare hf:NAME[:CONFIG] --out DIR                a Hugging Face dataset, or a folder of save_to_disk
  paceline prepare READER SOURCE --import MODULE             your own reader
  paceline prepare cifar10                                   download it, or read an archive (--from); also cifar100
  paceline prepare imagenet --train ILSVRC2012_img_train.tar --val ILSVRC2012_img_val.tar
                            --devkit ILSVRC2012_devkit_t12.tar.gz --out DIR      reads the archives without unpacking
  paceline prepare imagenet --from TREE --out DIR               TREE/train/n01440764/*.JPEG, TREE/val/n01440764/*.JPEG

The kind of a source is detected. Put its reader before it if that is wrong: folder, list, tar, webdataset or hf.
The same command resumes an interrupted preparation."""

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


_READER_OPTIONS = ("test", "image_column", "label_column", "class_names", "options", "import_")
DATASETS = ("cifar10", "cifar100", "imagenet")


def prepare(arguments: list[str]) -> int:
    """Run `paceline prepare`; returns the exit status."""
    parser = _prepare_parser()
    options = parser.parse_args(arguments)
    from paceline.api.data import prepare, prepare_cifar10, prepare_cifar100, prepare_imagenet
    from paceline.config.imports import load_modules, trust
    from paceline.data.shards import default_folder

    if options.out == Path():
        raise UserError("empty-option", "--out is empty. Give a folder.", option="--out")
    trust(options.import_)
    load_modules(options.import_)
    built_in = options.dataset in DATASETS
    out = options.out or default_folder(options.dataset if built_in else "shards")
    given = {name: getattr(options, name) for name in _SHARD_OPTIONS}
    if not built_in:
        reader, source = _source(options)
        prepare(source, out, reader=reader, options=_reader_options(options), class_names=options.class_names, **given)
        return 0
    if options.source:
        message = f"`prepare {options.dataset}` takes no argument {options.source!r}. Give a local copy with --from."
        raise UserError("option-not-applicable", message, option=options.source)
    _refuse(parser, options, _READER_OPTIONS)
    if options.dataset == "imagenet":
        archives = {name: getattr(options, name) for name in ("train", "val", "devkit")}
        prepare_imagenet(out, source=options.local or "", **archives, **given)
        return 0
    _refuse(parser, options, (*_SHARD_OPTIONS, "train", "val", "devkit"))
    (prepare_cifar10 if options.dataset == "cifar10" else prepare_cifar100)(out, source=options.local)
    return 0


def _source(options: argparse.Namespace) -> tuple[str, str | dict[str, str]]:
    """Return the reader (empty: to be detected), and the source, or the source of each split."""
    from paceline import extensions

    for name, option in (("local", "--from"), ("devkit", "--devkit")):
        if getattr(options, name):
            message = f"{option} applies only to cifar10, cifar100 and imagenet. Omit it."
            raise UserError("option-not-applicable", message, option=option)
    known = (*extensions.BUILT_IN["reader"], *extensions.names("reader"))
    reader, source = options.dataset or "", options.source or ""
    if not source and reader not in known:
        reader, source = "", reader
    parts = {name: getattr(options, name) for name in ("train", "val", "test") if getattr(options, name)}
    if source and parts:
        message = f"--{next(iter(parts))} replaces the source {source}. Give one source, or one per split."
        raise UserError("option-not-applicable", message, option=f"--{next(iter(parts))}")
    if not source and not parts:
        message = (
            f"no source is given. Use `paceline prepare {reader or 'FOLDER'}{' SOURCE' * bool(reader)} --out DIR`."
        )
        raise UserError("missing-source", message)
    return reader, source or parts


def _reader_options(options: argparse.Namespace) -> dict[str, Any]:
    from yaml import YAMLError, safe_load

    columns = {name: getattr(options, name) for name in ("image_column", "label_column") if getattr(options, name)}
    try:
        given = safe_load(options.options or "{}")
    except YAMLError:
        given = None
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        message = f"--options {options.options!r} is not a mapping. Write e.g. '{{depth: 2}}'."
        raise UserError("invalid-option", message, option="--options")
    return {**columns, **given}


def _refuse(parser: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse options that do not apply to a built-in dataset."""
    for name in names:
        if getattr(options, name) != parser.get_default(name):
            option = option_name(name)
            message = f"{option} does not apply to `prepare {options.dataset}`. Omit it."
            raise UserError("option-not-applicable", message, option=option)


def _prepare_parser() -> argparse.ArgumentParser:
    parser = make_parser("prepare", "[READER] SOURCE | cifar10 | cifar100 | imagenet [--out DIR] [options]", _PREPARE)
    parser.add_argument("dataset", nargs="?", metavar="DATASET", help="source, reader, cifar10, cifar100 or imagenet")
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help="folder, list, tar, shards, hf:NAME or s3:// prefix"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder (default: cifar10, cifar100, imagenet or shards in $PACELINE_DATA, or in data)",
    )
    parser.add_argument("--from", dest="local", type=Path, metavar="PATH", help="a local archive or tree of a dataset")
    _add_reading(parser)
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


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_argument_group("one source per split, or ImageNet's archives")
    parts.add_argument("--train", default="", metavar="SOURCE", help="training images; ILSVRC2012_img_train.tar")
    parts.add_argument("--val", default="", metavar="SOURCE", help="validation images; ILSVRC2012_img_val.tar")
    parts.add_argument("--test", default="", metavar="SOURCE", help="test images")
    parts.add_argument(
        "--devkit",
        default="",
        metavar="TAR",
        help="ILSVRC2012_devkit_t12.tar.gz; with --from: only for readable class names",
    )
    group = parser.add_argument_group("reading")
    group.add_argument("--image-column", default="", metavar="NAME", help="column of images or paths (hf, lists)")
    group.add_argument(
        "--label-column", default="", metavar="NAME", help="column of labels (hf, lists), or key in .json (webdataset)"
    )
    group.add_argument("--class-names", default="", metavar="FILE", help="names of numbered classes, one per line")
    group.add_argument("--options", default="", metavar="YAML", help="options of a registered reader: '{key: value}'")
    group.add_argument(
        "--import", dest="import_", action="append", default=[], metavar="MODULE", help="module that registers a reader"
    )


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
