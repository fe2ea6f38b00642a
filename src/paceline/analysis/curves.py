"""The curves in reports, logbooks and notebooks, and the names of their lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.analysis.charts import Chart, Line
from paceline.analysis.run import LoggedRun
from paceline.analysis.settings import image_modifiers, loss_modifiers


@dataclass(frozen=True)
class CurveSpec:
    title: str
    metric: str
    """Key of the value in a record."""
    file: str
    kinds: tuple[str, ...] = ("train",)
    """Kinds of records that hold the metric."""
    percent: bool = False
    from_zero: bool = False


CURVES = (
    CurveSpec("top-1", "top1", "accuracy", ("train", "eval"), percent=True),
    CurveSpec("loss", "loss", "loss", ("train", "eval")),
    CurveSpec("learning rate", "lr", "learning-rate"),
    CurveSpec("images/s", "images_per_second", "speed", from_zero=True),
)


def line_name(run: LoggedRun, curve: CurveSpec, kind: str) -> str:
    """Return the name of a run's line, e.g. "training loss (label smoothing 0.1)"."""
    if len(curve.kinds) == 1:
        return curve.title
    plain = ["cross entropy"] if curve.metric == "loss" and run.recipe else []
    if kind == "eval":
        return f"validation {curve.title}{_in_brackets(plain)}"
    return f"training {curve.title}{_in_brackets(_conditions(run, curve) or plain)}"


def _in_brackets(words: Sequence[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def _conditions(run: LoggedRun, curve: CurveSpec) -> list[str]:
    """Return why a training curve and the validation curve beside it are not comparable."""
    return image_modifiers(run) if curve.metric == "top1" else loss_modifiers(run)


def common_name(runs: Sequence[LoggedRun], curve: CurveSpec, kind: str) -> str:
    """Return the name of a line for all runs together; it says so if the runs measure different things."""
    names = list(dict.fromkeys(line_name(run, curve, kind) for run in runs))
    return names[0] if len(names) == 1 else f"{names[0].partition(' (')[0]} (not the same measure in all runs)"


def note(runs: Sequence[LoggedRun], curve: CurveSpec) -> str:
    """Return the note of a chart with training and validation curves, else an empty string."""
    having = {kind: [run for run in runs if _has(run, curve, kind)] for kind in curve.kinds}
    if not having.get("eval") or not having["train"]:
        return ""
    bold, thin = (common_name(having[kind], curve, kind) for kind in ("eval", "train"))
    warning = " The two are not comparable." if any(_conditions(run, curve) for run in having["train"]) else ""
    return f"Bold: {bold}. Thin: {thin}, a running mean over augmented batches.{warning}"


def _has(run: LoggedRun, curve: CurveSpec, kind: str) -> bool:
    return any(record["kind"] == kind and record.get(curve.metric) is not None for record in run.records)


def charts_of(runs: Sequence[LoggedRun]) -> Iterator[tuple[str, Chart]]:
    """Yield file names and charts of one run or of several."""
    several = len(runs) > 1
    for curve in CURVES:
        lines = [
            Line(
                f"{run.name}, {line_name(run, curve, kind)}" if several else line_name(run, curve, kind),
                run.points(curve.metric, kind),
                number,
                thin=kind == "train" and len(curve.kinds) > 1,
            )
            for number, run in enumerate(runs)
            for kind in curve.kinds
        ]
        names = [run.name for run in runs] if several else []
        chart = Chart(curve.title, lines, "epoch", curve.percent, curve.from_zero, note(runs, curve), names)
        yield f"{curve.file}.svg", chart
