"""The commands predict and serve: use a trained model."""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.cli.options import Parser, add_checkpoint_option, count, fraction, make_parser, number, parser_settings
from paceline.cli.ranks import add_process_options, choose_procs, enter_rank, needs_agent, start_with_options
from paceline.distributed.env import under_launcher
from paceline.errors import UserError
from paceline.system.files import say
from paceline.system.gpus import default_procs
from paceline.system.outcome import report_outcome
from paceline.system.signals import interrupts_end
from paceline.system.wording import counted

_PREDICT = """Predict the classes of images with a trained model, with the pixels and the computation of an evaluation.

MODEL is a run folder, a checkpoint, or an export (.safetensors, .onnx, .pt2 or a timm-hub folder). INPUT is an image,
a folder (with its subfolders), a quoted pattern ("images/**/*.jpg"), prepared data, or - (file names from standard
input, one per line). Without --out, one line per image is printed. The result is the same, and in the order of the
inputs, for any number of processes. Images that cannot be read are listed, counted and skipped; the command fails if
none can be read."""

_SERVE = """Serve a page that classifies images, and POST /predict, on this machine.

MODEL is a run folder, a checkpoint, or an export (.safetensors, .onnx, .pt2 or a timm-hub folder).

    curl --data-binary @cat.jpg http://127.0.0.1:8000/predict"""

_JOB_OPTIONS = ("inputs_from", "files_from", "out", "top", "batch", "device", "split", "variant")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run folder, a checkpoint or an export")
    parser.add_argument("--top", type=count, default=5, metavar="K", help="classes per image (default 5)")
    add_checkpoint_option(parser)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="device (default: auto)"
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="",
        help="precision (default: that of the run; fp32 for exports)",
    )
    parser.add_argument(
        "--evaluate.tta",
        dest="tta",
        choices=("none", "flip", "flip-translate"),
        default="",
        help="test-time augmentation (default: that of the run)",
    )
    parser.add_argument(
        "--evaluate.crop_pct",
        dest="crop_pct",
        type=fraction,
        default=0.0,
        metavar="FRACTION",
        help="fraction of the shorter side that the center crop keeps (default: that of the model)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=1.0,
        metavar="T",
        help="divide logits by T before softmax, e.g. by the temperature of `paceline evaluate --details` (default 1)",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module that registers the model; also found in the current folder",
    )
    parser.add_argument("--trust", action="store_true", help="open a .pt2 file, which can run code of its author")


def _usage(options: argparse.Namespace) -> dict[str, Any]:
    from paceline.config.imports import trust

    trust(options.imports)
    names = ("checkpoint", "precision", "tta", "crop_pct", "trust", "temperature")
    return {name: getattr(options, name) for name in names} | {"imports": tuple(options.imports)}


def predict(arguments: list[str]) -> int:
    """Run `paceline predict`; returns the exit status."""
    options = _predict_parser().parse_mixed_args(arguments)
    choose_procs(options, lambda: default_procs(options.device))
    if "-" not in options.inputs:
        return _predict(arguments, options)
    if under_launcher(os.environ) or options.files_from:
        message = (
            "- (names from standard input) cannot be combined with --files-from or a launcher. Write all names to one "
            "file, and give only --files-from FILE."
        )
        raise UserError("conflicting-options", message, option="-")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # ranks have no standard input
        options.files_from = Path(folder) / "names"
        options.files_from.write_bytes(sys.stdin.buffer.read())
        options.inputs = [word for word in options.inputs if word != "-"]
        words = [word for word in arguments if word != "-"]
        return _predict([*words, "--files-from", str(options.files_from)], options)


def _predict(arguments: list[str], options: argparse.Namespace) -> int:
    if not (options.inputs or options.files_from or options.inputs_from):
        message = "no image is given. Give images, folders, patterns, prepared data or -, or use --files-from FILE."
        raise UserError("missing-input", message)
    if not under_launcher(os.environ) and needs_agent(options):
        return start_with_options(["predict", *arguments], options)
    enter_rank(options)
    with interrupts_end():
        from paceline.inference.open_model import Usage
        from paceline.inference.predictions import PredictionJob, predict_images

    counts = predict_images(
        PredictionJob(
            model=options.model,
            inputs=tuple(options.inputs),
            usage=Usage(**_usage(options)),
            **{name: getattr(options, name) for name in _JOB_OPTIONS},
        )
    )
    if counts.is_rank_zero and not report_outcome(images=counts.images, skipped=counts.skipped) and options.out:
        say(
            f"{options.out}: {counted(counts.images, 'image')}"
            + (f", {counts.skipped} skipped" if counts.skipped else "")
        )
    return 0


def _predict_parser() -> Parser:
    usage = "MODEL INPUT [INPUT ...] [--top 5] [--out predictions.csv|.jsonl|.parquet] [--procs N]"
    parser = Parser(**parser_settings("predict", usage, _PREDICT))
    _add_model_options(parser)
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="images, folders, patterns, prepared data or -")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write .csv, .jsonl or .parquet instead of standard output"
    )
    parser.add_argument("--files-from", type=Path, metavar="FILE", help="a file with the names of images, one per line")
    parser.add_argument("--inputs-from", type=Path, help=argparse.SUPPRESS)  # a file with INPUTs, from the Python API
    parser.add_argument(
        "--batch", type=count, default=0, metavar="N", help="batch per process (default: that of the run's evaluation)"
    )
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="", help="split of prepared data (default: all)"
    )
    parser.add_argument("--variant", default="", metavar="NAME", help="variant of prepared data that has several")
    add_process_options(parser, help_action="help")
    return parser


def serve(arguments: list[str]) -> int:
    """Run `paceline serve`; returns the exit status."""
    usage = "MODEL [--host 127.0.0.1] [--port 8000] [--top 5] [--max-upload-mb 20]"
    parser = make_parser("serve", usage, _SERVE)
    _add_model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on (default 8000; 0: any free port)")
    parser.add_argument(
        "--max-upload-mb", type=count, default=20, metavar="MB", help="largest upload in megabytes (default 20)"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    with interrupts_end():
        from paceline.api.serving import serve_model
        from paceline.inference.open_model import Usage

    place = (options.host, options.port)
    serve_model(options.model, Usage(**_usage(options)), place, options.top, options.max_upload_mb, options.device)
    return 0


def _temperature(text: str) -> float:
    from paceline.api.arguments import is_temperature

    if not is_temperature(value := number(text)):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number from 0.001 to 1000")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a port (0 to 65535)")
    return int(text)
