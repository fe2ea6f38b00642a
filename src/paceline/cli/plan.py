"""The command plan: phases, steps, time and cost of a recipe, without training."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import add_scaling, count, count_or_auto, fraction, make_parser, positive, with_recipe
from paceline.errors import UserError
from paceline.system.files import say, write_text
from paceline.system.tables import new_table, print_list, show

if TYPE_CHECKING:
    from paceline.api.planning import TrainingPlan
    from paceline.config.recipe import Recipe

_PLAN = """Show the phases, steps, images and learning rate of a recipe without training.

With --images-per-second, or a finished run (--learn-from), also estimate time and cost on 1 to 16 nodes."""

_DROPPED_FIRST = ("images", "data", "eval data", "eval size", "steps")


def plan(arguments: list[str]) -> int:
    """Run `paceline plan`; returns the exit status."""
    from paceline.analysis.charts import Chart, Line, sparkline, svg
    from paceline.api.planning import plan as planned
    from paceline.config.timeline import phase_table

    options, recipe = with_recipe(_parser(), arguments)
    if options.chart and options.chart.suffix != ".svg":
        message = f"--chart {options.chart}: charts are written as .svg. Choose a name with that suffix."
        raise UserError("wrong-suffix", message, path=options.chart)
    shape = {"nodes": options.nodes, "gpus_per_node": options.gpus_per_node}
    plan = planned(recipe, **shape, train_images=options.train_images or 0, scale_batch=options.scale_batch or "")
    recipe, timeline, ranks = plan.recipe, plan.timeline, plan.ranks
    what = f"{recipe.model.name} on {recipe.data.name or recipe.data.path} ({plan.samples:,} images)"
    say(f"{recipe.name}: {what}, {ranks} rank{'s' * (ranks > 1)} ({_shape(plan)})\n")
    accumulation = recipe.train.grad_accumulation
    heads, *rows = phase_table(timeline, ranks, accumulation, plan.lr_at, plan.highest_lr, plan.evaluation_variant)
    print_list(heads, rows, _DROPPED_FIRST)
    repeats = plan.images / plan.samples
    copies = f", in {recipe.data.aug_repeats} copies each" if recipe.data.aug_repeats > 1 else ""
    print(f"\n{timeline.total:,} steps, {plan.images:,} images, {repeats:.2f} times the training set{copies}")
    curve = plan.lr_curve()
    rates = [rate for _, rate in curve]
    decays = " (without the decays of plateau, which depend on the evaluations)" if plan.decays_on_plateau else ""
    print(f"learning rate{decays}, maximum {plan.highest_lr():.4g}:\n{sparkline(rates)}")
    if patience := recipe.early_stop.patience:
        print(f"The run may end earlier: early_stop.patience={patience}.")
    if options.chart:
        chart = Chart(f"{recipe.name}: learning rate", [Line("learning rate", curve)], from_zero=True)
        write_text(options.chart, svg(chart))
        print(options.chart)
    if options.images_per_second or options.learn_from:
        _print_times(options, plan)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("plan", "RECIPE [--nodes N] [--gpus-per-node G] [--dotted.field VALUE ...]", _PLAN)
    parser.add_argument("--nodes", type=count, default=1, metavar="N", help="number of nodes (default 1)")
    parser.add_argument(
        "--gpus-per-node",
        type=count_or_auto,
        default="auto",
        metavar="G|auto",
        help="ranks per node (default auto: the visible GPUs of this machine, 1 on CPUs)",
    )
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
        type=fraction,
        default=0.5,
        metavar="FRACTION",
        help="fraction of communication that overlaps with computation (default 0.5)",
    )
    time.add_argument("--price", type=positive, default=0.0, metavar="X", help="price per node and hour")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _shape(plan: "TrainingPlan") -> str:
    nodes, each = plan.nodes, plan.gpus_per_node
    return f"{nodes} node{'s' * (nodes > 1)} x {each} process{'es' * (each > 1)}"


def _print_times(options: argparse.Namespace, plan: "TrainingPlan") -> None:
    from paceline.api.planning import measured_speed

    speed, origin = options.images_per_second, "--images-per-second"
    if options.learn_from:
        speed, origin = measured_speed(options.learn_from), str(options.learn_from)
        _warn_of_differences(options.learn_from, plan.recipe)
    given = {"bandwidth": options.bandwidth, "overlap": options.overlap, "price": options.price}
    estimates = plan.estimates(speed, **given)
    dtype = plan.recipe.grad_sync.dtype
    if plan.recipe.grad_sync.powersgd_rank:
        print("\nThese estimates assume uncompressed gradients; PowerSGD sends less.")
    rows = [
        [
            str(estimate.nodes),
            str(estimate.ranks),
            f"{estimate.seconds / plan.timeline.total:.3f} s",
            f"{estimate.communication:.0%}",
            _duration(estimate.seconds),
            f"{estimate.cost:,.2f}" if options.price else "-",
        ]
        for estimate in estimates
    ]
    print()
    show(new_table(("nodes", "ranks", "step", "communication", "time", "cost"), rows))
    print(
        f"assumptions: {speed:,.0f} images/s per rank at every image size ({origin}); {plan.parameters / 1e6:.1f} M "
        f"parameters, all-reduced as {dtype} at {options.bandwidth:g} Gbit/s, {options.overlap:.0%} "
        "overlapped with computation; evaluation, checkpoints and start-up are not included"
    )


def _warn_of_differences(run: Path, recipe: "Recipe") -> None:
    """Warn if the throughput of a run is that of another model, image size or precision."""
    from paceline.config.io import load_recipe

    try:
        learned, own = _workload(load_recipe(str(run / "recipe.yaml"))), _workload(recipe)
    except UserError:
        return  # the speed of a run can be used without its recipe
    differing = [f"{name} {learned[name]}, not {own[name]}" for name in own if learned[name] != own[name]]
    if differing:
        say(f"paceline: warning: {run} has {'; '.join(differing)}. Its throughput may not apply.", error=True)


def _workload(recipe: "Recipe") -> dict[str, str]:
    """Return what determines the throughput on the same hardware."""
    sizes = {phase.size or recipe.data.size for phase in recipe.all_phases()}
    unscaled = f"that of {recipe.data.name or recipe.data.path}"
    names = [f"{size} px" if size else unscaled for size in sorted(sizes)]
    return {"model": recipe.model.name, "image size": ", ".join(names), "precision": recipe.precision}


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
