"""The command data."""

import argparse
from pathlib import Path

from paceline.cli.options import count, make_parser
from paceline.errors import UserError

_DATA = """Describe prepared data; verify it, show samples, find near-duplicates, or export its images.

Data at an https:// or s3:// URL is downloaded to $PACELINE_CACHE or ~/.cache/paceline first, as in training."""

MAX_DISTANCE = 7  # of data/hashing.py, which imports numpy


def data(arguments: list[str]) -> int:
    """Run `paceline data`; returns the exit status."""
    options = _data_parser().parse_args(arguments)
    from paceline.api.data import PreparedData

    _check_data_options(options)
    prepared = PreparedData(options.folder, options.variant)
    prepared.print_summary()
    if options.check:
        prepared.verify()
    if options.duplicates:
        prepared.duplicates(
            options.out or "",
            max_distance=options.max_distance,
            sheet=options.show or "",
            keep_list=options.keep_list or "",
        )
    elif options.show:
        prepared.write_contact_sheet(options.show, options.split or "train", options.seed)
    if options.export:
        prepared.export_images(options.out, [options.split] if options.split else [])
    return 0


def _check_data_options(options: argparse.Namespace) -> None:
    if options.export and options.duplicates:
        message = "--export and --duplicates both write to --out. Use two commands."
        raise UserError("conflicting-options", message, option="--export")
    if options.export and not options.out:
        message = "--export jpeg needs --out DIR. Give both or neither."
        raise UserError("missing-option", message, option="--out DIR")
    if options.out and not (options.export or options.duplicates):
        message = "--out needs --export jpeg or --duplicates. Give one of them, or omit it."
        raise UserError("missing-option", message, option="--export jpeg")
    if options.split and options.duplicates:
        message = "--split does not apply to --duplicates, which compares all splits. Omit it."
        raise UserError("option-not-applicable", message, option="--split")
    if options.split and not (options.show or options.export):
        raise UserError("missing-option", "--split needs --show or --export. Give one of them.", option="--show")
    if (options.keep_list or options.max_distance != MAX_DISTANCE) and not options.duplicates:
        message = "--keep-list and --max-distance need --duplicates. Add it, or leave them out."
        raise UserError("missing-option", message, option="--duplicates")


def _data_parser() -> argparse.ArgumentParser:
    usage = "DIR [--check] [--show FILE.png] [--duplicates [--out FILE.csv]] [--export jpeg --out DIR]"
    parser = make_parser("data", usage, _DATA)
    parser.add_argument("folder", metavar="DIR", help="prepared data, or its https:// or s3:// URL")
    parser.add_argument("--check", action="store_true", help="verify every checksum, index and record")
    parser.add_argument(
        "--show",
        type=Path,
        nargs="?",
        const=Path("samples.png"),
        metavar="FILE.png",
        help="write a contact sheet; with --duplicates, of pairs",
    )
    parser.add_argument("--duplicates", action="store_true", help="find near-duplicates within and between the splits")
    parser.add_argument(
        "--max-distance",
        type=int,
        choices=range(MAX_DISTANCE + 1),
        default=MAX_DISTANCE,
        metavar="BITS",
        help="bits of 64 that the hashes of near-duplicates may differ in, 0 to 7 (default 7)",
    )
    parser.add_argument(
        "--keep-list",
        type=Path,
        metavar="FILE.csv",
        help="write a list to prepare again, without copies of val and test images in train",
    )
    parser.add_argument(
        "--export", choices=["jpeg"], help="write the images as JPEG files, with identical coefficients"
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="output folder of --export, or CSV file of --duplicates"
    )
    parser.add_argument("--variant", default="", metavar="NAME", help="which variant to check, show, compare or export")
    parser.add_argument("--split", default="", choices=["train", "val", "test"], help="which split to show or export")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="seed of the samples to show")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser
