"""The command plan: phases, steps, time and cost of a recipe, without training."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import add_scaling, count, make_parser, positive, with_recipe
from paceline.errors import UserError
from paceline.system.files import say, write_text
from paceline.system.tables import new_table, print_list, show

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe
    from paceline.config.timeline import Timeline

_PLAN = """Show the phases, steps, images and learning rate of a recipe without training.

With --images-per-second, or a finished run (--learn-from), also estimate time and cost on 1 to 16 nodes."""

_DROPPED_FIRST = ("images", "data", "eval size", "steps")
_SAMPLES = {"imagenet": 1_281_167, "cifar10": 50_000, "digits": 1437}


def plan(arguments: list[str]) -> int:
    """Run `paceline plan`; returns the exit status."""
    from paceline.analysis.charts import Chart, Line, sparkline, svg
    from paceline.config.batch import check_samples, layouts
    from paceline.config.scaling import scaled
    from paceline.config.timeline import Timeline, phase_table
    from paceline.data.kinds import resolve
    from paceline.optim.schedules import LrPlan, lr_at

    options, recipe = with_recipe(_parser(), arguments)
    if options.chart and options.chart.suffix != ".svg":
        raise UserError(
            "wrong-suffix",
            f"--chart {options.chart}: charts are written as .svg. Choose a name with that suffix.",
            path=options.chart,
        )
    if not 0 <= options.overlap <= 1:
        raise UserError(
            "invalid-overlap",
            f"--overlap {options.overlap:g} is out of range. Use a number from 0 to 1.",
            overlap=options.overlap,
        )
    ranks = options.nodes * options.gpus_per_node
    if options.scale_batch:
        recipe = scaled(recipe, ranks, options.scale_batch)
    layouts(recipe, ranks)
    if recipe.data.path and Path(recipe.data.path).exists():
        recipe = resolve(recipe)
    samples = options.train_images or _known_samples(recipe)
    timeline = Timeline.of(recipe, samples)
    check_samples(timeline, samples, recipe.data.path or recipe.data.name)
    lr_plan = LrPlan.of(recipe.optim, timeline)
    stride = max(1, timeline.total // 2000)
    edges = [edge for phase in timeline.phases for edge in (phase.begin, phase.end - 1)]
    shown = sorted({*range(0, timeline.total, stride), *edges})
    rates = [lr_at(step, lr_plan) for step in shown]
    what = f"{recipe.model.name} on {recipe.data.name or recipe.data.path} ({samples:,} images)"
    say(f"{recipe.name}: {what}, {ranks} rank{'s' * (ranks > 1)}\n")
    heads, *rows = phase_table(timeline, ranks, recipe.train.grad_accumulation, lambda step: lr_at(step, lr_plan))
    print_list(heads, rows, _DROPPED_FIRST)
    images = sum(phase.images for phase in timeline.phases)
    print(f"\n{timeline.total:,} steps, {images:,} images, {images / samples:.2f} times the training set")
    print(f"learning rate, maximum {max(rates):.4g}:\n{sparkline(rates)}")
    if options.chart:
        points = [(timeline.epoch_at(step), rate) for step, rate in zip(shown, rates, strict=True)]
        chart = Chart(f"{recipe.name}: learning rate", [Line("learning rate", points)], from_zero=True)
        write_text(options.chart, svg(chart))
        print(options.chart)
    if options.images_per_second or options.learn_from:
        _print_times(options, recipe, timeline)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("plan", "RECIPE [--nodes N] [--gpus-per-node G] [--dotted.field VALUE ...]", _PLAN)
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="number of nodes (default 1)")
    parser.add_argument("--gpus-per-node", type=count, default=1, metavar="G", help="ranks per node (default 1)")
    parser.add_argument("--train-images", type=count, metavar="N", help="size of the training set, if unknown")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the learning rate")
    add_scaling(parser)
    time = parser.add_argument_group("time and cost")
    time.add_argument("--images-per-second", type=positive, metavar="X", help="throughput of a single rank")
    time.add_argument("--learn-from", type=Path, metavar="RUN", help="take the throughput per rank from a finished run")
    time.add_argument(
        "--bandwidth", type=positive, default=10.0, metavar="GBIT", help="Gbit/s between nodes (default 10)"
    )
    time.add_argument(
        "--overlap",
        type=float,
        default=0.5,
        metavar="FRACTION",
        help="fraction of communication that overlaps with computation (default 0.5)",
    )
    time.add_argument("--price", type=positive, default=0.0, metavar="X", help="price per node and hour")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _known_samples(recipe: "Recipe") -> int:
    from paceline.config.data import FROM_FILES, IN_MEMORY
    from paceline.config.imports import load_imports
    from paceline.data.listing import list_images
    from paceline.data.registered import open_registered
    from paceline.data.shards import Dataset, default_folder

    data = recipe.data
    if data.name == "synthetic":
        return data.synthetic.train_samples
    if data.name and data.name not in (*IN_MEMORY, *FROM_FILES):
        load_imports(recipe)
        return len(open_registered(data)[0]["train"])
    place = Path(data.path or default_folder(data.name))
    if data.name in ("folder", "list") and place.exists():
        return len(list_images(place).train)
    if data.name not in IN_MEMORY and place.exists():
        return int(Dataset.open(place).description["splits"]["train"]["samples"])
    if data.name not in _SAMPLES:
        raise UserError(
            "unknown-dataset-size",
            f"the number of training images of {data.path or data.name} is unknown. Give it with --train-images N.",
        )
    return _SAMPLES[data.name]


def _print_times(options: argparse.Namespace, recipe: "Recipe", timeline: "Timeline") -> None:
    """Each rank computes its part of a batch; a ring all-reduce then sends 2 (n - 1) / n of the gradients."""
    speed, origin = options.images_per_second, "--images-per-second"
    if options.learn_from:
        speed, origin = _measured_speed(options.learn_from)
    parameters = _parameters(recipe)
    if recipe.grad_sync.powersgd_rank:
        print("\nThese estimates assume uncompressed gradients; PowerSGD sends less.")
    width = 4 if recipe.grad_sync.dtype == "fp32" else 2
    rows = []
    for nodes in sorted({1, 2, 4, 8, 16, options.nodes}):
        ranks = nodes * options.gpus_per_node
        if any(phase.global_batch % (ranks * recipe.train.grad_accumulation) for phase in timeline.phases):
            continue
        wire = 2 * (nodes - 1) / nodes * parameters * width * 8 / (options.bandwidth * 1e9)
        total = communication = 0.0
        for phase in timeline.phases:
            computing = phase.global_batch / ranks / speed
            visible = wire - min(options.overlap * wire, computing)
            communication += (phase.end - phase.begin) * visible
            total += (phase.end - phase.begin) * (computing + visible)
        hours = total / 3600
        cost = f"{hours * nodes * options.price:,.2f}" if options.price else "-"
        step = total / timeline.total
        rows.append([str(nodes), str(ranks), f"{step:.3f} s", f"{communication / total:.0%}", _duration(total), cost])
    print()
    show(new_table(("nodes", "ranks", "step", "communication", "time", "cost"), rows))
    print(
        f"assumptions: {speed:,.0f} images/s per rank at every image size ({origin}); {parameters / 1e6:.1f} M "
        f"parameters, all-reduced as {recipe.grad_sync.dtype} at {options.bandwidth:g} Gbit/s, {options.overlap:.0%} "
        "overlapped with computation; evaluation, checkpoints and start-up are not included"
    )


def _measured_speed(run: Path) -> tuple[float, str]:
    """Images per second of one rank of a finished run without communication, and where that comes from."""
    from paceline.track.records import RunFolder

    try:
        summary = RunFolder(run).read_summary()
        seconds = summary["seconds"]
        if summary["status"] != "finished":
            raise UserError(
                "run-not-finished",
                f"--learn-from {run}: the run is not finished (status {summary['status']}). Give a finished run.",
                path=run,
            )
        if "sync" not in seconds:
            raise UserError(
                "run-without-sync-time",
                f"--learn-from {run}: the run has no measured synchronization time (FSDP). Give a run with DDP.",
                path=run,
            )
        total = summary["train_seconds"]
        busy = (total - seconds.get("sync", 0.0)) / total
        speed = float(summary["images_per_second"] / summary["ranks"] / busy)
        if speed > 0:
            return speed, str(run)
    except (KeyError, TypeError, ZeroDivisionError):
        pass
    raise UserError(
        "run-without-speed",
        f"--learn-from {run}: summary.json has no throughput. Give the folder of a finished run.",
        path=run,
    )


def _parameters(recipe: "Recipe") -> int:
    import torch

    from paceline.engine.trial import shape_of
    from paceline.models import factory

    channels, _, classes = shape_of(recipe)
    with torch.device("meta"):
        model = factory.create(factory.untrained(recipe.model), classes, channels)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
