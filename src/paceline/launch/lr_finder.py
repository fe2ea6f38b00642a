"""The learning-rate range test: trains while the learning rate grows, and suggests one from the losses."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from paceline.analysis.charts import Chart, Line, svg
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.launch.checks import reachable
from paceline.launch.groups import Nodes
from paceline.launch.trials import prepared_trials
from paceline.optim.lr_range import MIN_STEPS, LrRange, suggest
from paceline.system.files import write_json, write_text
from paceline.track.checks import FiniteFloat, NonNegativeInt, PositiveInt

JSON, SVG = "find-lr.json", "find-lr.svg"


class _Loss(TypedDict):
    """What rank 0 prints after every step; the loss is None if it is not finite."""

    step: NonNegativeInt
    loss: FiniteFloat | None


class _TestFacts(TypedDict):
    """What rank 0 prints at the end."""

    ranks: PositiveInt
    precision: Annotated[str, Field(max_length=20)]
    peak_factor: Annotated[FiniteFloat, Field(gt=0)]


_LOSS, _FACTS = TypeAdapter(_Loss), TypeAdapter(_TestFacts)


@dataclass(frozen=True)
class LrPoint:
    """One step of the test: the loss before the weights are updated with this learning rate."""

    lr: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class LrSearch:
    """The result of a learning-rate range test; `folder` has it as JSON and as a chart."""

    folder: Path
    recipe: str
    points: list[LrPoint]
    suggested: float | None
    """The learning rate at which the smoothed loss falls fastest; None if it does not fall by more than its noise."""
    minimum: float
    """The learning rate with the lowest smoothed loss."""
    noise: float
    """Standard deviation of the loss of a single step."""
    optim_lr: float | None
    """`optim.lr` with which the highest learning rate of the schedule is the suggested one; None if phases set theirs.
    """
    diverged: bool
    """Whether the loss diverged before the highest learning rate."""

    @property
    def chart(self) -> str:
        """The losses by learning rate, as SVG."""
        lines = [
            Line("loss", [(point.lr, point.loss) for point in self._in_view], thin=True),
            Line("smoothed", [(point.lr, point.smoothed) for point in self._in_view]),
        ]
        if self.suggested:
            at = next(point for point in self.points if point.lr == self.suggested)
            lines.append(Line(f"suggested: {at.lr:.3g}", [(at.lr, at.smoothed)], run=1))
        return svg(Chart(f"{self.recipe}: loss by learning rate", lines, "learning rate", log_x=True))

    @property
    def _in_view(self) -> list[LrPoint]:
        """The points up to where the loss has grown far above the first one, so that the curve stays readable."""
        low = min(point.smoothed for point in self.points)
        most = self.points[0].smoothed + 0.5 * (self.points[0].smoothed - low) + 3 * self.noise
        last = next((number for number, point in enumerate(self.points) if point.smoothed > most), len(self.points))
        return [point for point in self.points[: last + 1] if point.loss <= most] or self.points

    def __repr__(self) -> str:
        return f"LrSearch(suggested={self.suggested}, minimum={self.minimum}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return f'<p>{escape(repr(self))}</p><div style="width:640px">{self.chart}</div>'


def find(
    recipe: Recipe, folder: Path, nodes: Nodes, lrs: LrRange, on_step: Callable[[int, float, float], None]
) -> LrSearch:
    """Run the test, and write the results to a folder. UserError if the losses allow no suggestion."""
    _check(lrs)
    if nodes.hosts:
        reachable(recipe.data, "ssh")
    losses: list[float | None] = []
    facts: list[dict[str, Any]] = []

    def add(record: dict[str, Any]) -> None:
        try:
            if "step" not in record:
                facts.append(dict(_FACTS.validate_python(record)))
                return
            loss = _LOSS.validate_python(record)["loss"]
        except ValidationError:
            return
        losses.append(loss)
        on_step(len(losses), lrs.lr_at(len(losses) - 1), math.nan if loss is None else loss)

    words = ["--min-lr", lrs.low, "--max-lr", lrs.high, "--steps", lrs.steps, *(["--linear"] if lrs.linear else [])]
    with prepared_trials(recipe, folder, nodes, (JSON, SVG)) as started:
        ended = started.run("try-lr", words, add)
    if ended.error and ended.error.code != "rank-failed":  # rank-failed only refers to the lines above it
        raise ended.error
    finite = [loss for loss in losses if loss is not None]
    if losses[:1] == [None]:
        message = (
            f"{recipe.name}: the loss of the first step is not finite, before any learning rate has an effect. "
            "Check the images, the weights and the loss, or use --precision fp32."
        )
        raise UserError("first-loss-not-finite", message, recipe=recipe.name)
    if ended.status or not facts or not finite:
        message = f"{recipe.name}: the training of the range test failed: {ended.reason}"
        raise UserError("lr-test-failed", message, reason=ended.reason)
    return _result(recipe, folder, nodes, lrs, finite, facts[-1], len(finite) < lrs.steps or len(losses) > len(finite))


def _check(lrs: LrRange) -> None:
    if lrs.low >= lrs.high:
        message = f"--min-lr {lrs.low:g} is not below --max-lr {lrs.high:g}. Swap them, or widen the range."
        raise UserError("range-reversed", message, low=lrs.low, high=lrs.high)
    if lrs.steps < MIN_STEPS:
        message = f"--steps {lrs.steps} is too small to tell a trend from noise. Use at least {MIN_STEPS}."
        raise UserError("too-few-steps", message, steps=lrs.steps)


def _result(
    recipe: Recipe,
    folder: Path,
    nodes: Nodes,
    lrs: LrRange,
    losses: list[float],
    facts: dict[str, Any],
    diverged: bool,
) -> LrSearch:
    found = suggest(losses)
    rates = [lrs.lr_at(step) for step in range(len(losses))]
    suggested = None if found.steepest is None else rates[found.steepest]
    result = LrSearch(
        folder,
        recipe.name,
        [LrPoint(*point) for point in zip(rates, losses, found.smoothed, strict=True)],
        suggested,
        rates[found.lowest],
        found.noise,
        None if suggested is None or any(phase.lr for phase in recipe.phases) else suggested / facts["peak_factor"],
        diverged,
    )
    values = {
        "recipe": recipe.name,
        "searched": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": facts["ranks"],
        "hosts": [host.name for host in nodes.hosts],
        "precision": facts["precision"],
        "range": asdict(lrs),
        "suggested": suggested,
        "optim_lr": result.optim_lr,
        "minimum": result.minimum,
        "noise": result.noise,
        "diverged": diverged,
        "points": [asdict(point) for point in result.points],
    }
    write_json(folder / JSON, values)
    write_text(folder / SVG, result.chart)
    if suggested is None:
        message = (
            f"{recipe.name}: no learning rate from {lrs.low:g} to {rates[-1]:g} lowers the loss by more than its noise "
            f"of {found.noise:.2g}. See {folder / SVG}. Use more --steps, another --min-lr or --max-lr, or a larger "
            "--train.global_batch, which lowers the noise."
        )
        raise UserError("no-suggested-lr", message, folder=folder, noise=found.noise)
    return result
