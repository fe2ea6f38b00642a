"""The command evaluate."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import (
    add_checkpoint_option,
    complete_source,
    help_with_fields,
    make_parser,
    refuse_misspelled,
    split_source,
)
from paceline.cli.ranks import add_process_options, choose_procs, enter_rank, needs_agent, start_with_options
from paceline.distributed.env import under_launcher
from paceline.errors import UserError
from paceline.system.files import say
from paceline.system.gpus import default_procs
from paceline.system.outcome import report_outcome
from paceline.system.signals import interrupts_end

if TYPE_CHECKING:
    from paceline.analysis.details.slices import DetailsSpec

_EVALUATE = """Evaluate the best checkpoint of a run, or a given checkpoint, exactly, in any number of processes.

--details also writes what the model gets wrong: per-class figures, the confusion matrix, calibration, likely label
errors and the prediction of every image, to RUN/evaluations/DATA-SPLIT (DATA, if the images have no splits);
`paceline report RUN` then shows them.
Fields of data, evaluate, precision and device can be overridden: `--evaluate.tta flip --data.path DIR`."""

_EVALUATION_FIELDS = ("data", "evaluate", "precision", "device", "channels_last", "tf32", "import")


def _parser() -> argparse.ArgumentParser:
    usage = "RUN|CHECKPOINT [--split test] [--data DIR|LIST] [--details] [--procs N] [--dotted.field VALUE ...]"
    parser = make_parser("evaluate", usage, _EVALUATE)
    add_checkpoint_option(parser)
    parser.add_argument(
        "--split", choices=("train", "val", "test"), default="", help="split (default: val, else test, else train)"
    )
    parser.add_argument(
        "--data", metavar="DIR|LIST", help="other data: prepared data, an image folder or a list (as --data.path)"
    )
    parser.add_argument("--details", action="store_true", help="also write what the model gets wrong")
    parser.add_argument(
        "--slice-by",
        default="",
        metavar="COLUMN|REGEX",
        help="with --details: figures per value of a column of the list, or per text that is found in paths",
    )
    parser.add_argument(
        "--slice-file", type=Path, metavar="FILE", help="a list with a column path, and the column of --slice-by"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the details (default: RUN/evaluations/DATA-SPLIT)"
    )
    add_process_options(parser)
    complete_source(parser, "RUN|CHECKPOINT")
    return parser


def evaluate(arguments: list[str]) -> int:
    """Run `paceline evaluate`; returns the exit status."""
    from paceline.config.imports import allow_given
    from paceline.config.io import split_overrides

    parser = _parser()
    source, rest = split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    refuse_misspelled(parser, overrides)
    if options.help:
        return help_with_fields(parser, "digits", overrides, _EVALUATION_FIELDS)
    if not source:
        raise UserError("missing-run", "no run is given. Give a run folder or a checkpoint folder.")
    for key, _ in split_overrides(overrides):
        if key.partition(".")[0].replace("-", "_") not in _EVALUATION_FIELDS:
            raise UserError(
                "option-not-applicable",
                f"--{key} does not apply to an evaluation. Only fields of {', '.join(_EVALUATION_FIELDS)} do.",
                option=f"--{key}",
            )
    overrides += _other_data(options, [key for key, _ in split_overrides(overrides)])
    allow_given(overrides)
    details = _details(options)
    device = "".join(dict(split_overrides(overrides)).get("device", [])) or "auto"
    choose_procs(options, lambda: default_procs(device))
    if not under_launcher(os.environ) and needs_agent(options):
        return start_with_options(["evaluate", *arguments], options)
    enter_rank(options)
    with interrupts_end():
        from paceline.engine.evaluation.saved import evaluate_path

    label, metrics = evaluate_path(Path(source), options.checkpoint, overrides, options.split, details)
    if metrics:
        report_outcome(metrics=metrics)
        _show(label, metrics)
    return 0


def _other_data(options: argparse.Namespace, given: list[str]) -> list[str]:
    """Return the override that --data stands for."""
    if options.data is None:
        return []
    if clash := {"data.path", "data.name"} & {key.replace("-", "_") for key in given}:
        option = f"--{min(clash)}"
        raise UserError(
            "conflicting-options", f"--data {options.data} and {option} are both given. Leave one out.", option=option
        )
    return ["--data.path", options.data]


def _details(options: argparse.Namespace) -> "DetailsSpec | None":
    from paceline.analysis.details.slices import DetailsSpec

    wanted = {"--slice-by": options.slice_by, "--slice-file": options.slice_file, "--out": options.out}
    if not options.details:
        for option, value in wanted.items():
            if value:
                raise UserError("missing-option", f"{option} needs --details. Add it.", option="--details")
        return None
    spec = DetailsSpec(options.slice_by, options.slice_file, options.out)
    spec.check()
    return spec


def _show(label: str, metrics: dict[str, Any]) -> None:
    from paceline.analysis.run import shows_top5

    counts = f"{metrics['correct']} of {metrics['samples']}"
    top5 = f", top-5 {metrics['top5']:.2%}" if shows_top5(metrics["num_classes"]) else ""
    say(f"{label}: top-1 {metrics['top1']:.2%} ({counts}){top5}, loss {metrics['loss']:.4f}")
    if folder := metrics.get("details"):
        from paceline.analysis.details.read import read_details
        from paceline.analysis.details.text import show_details

        show_details(read_details(Path(folder)))
