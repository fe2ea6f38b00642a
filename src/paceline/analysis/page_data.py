"""The data of the report's script: runs, their ranks, and the points of every curve."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import methodcaller
from typing import Any

from paceline.analysis.charts import COLORS, dashes, thinned
from paceline.analysis.curves import CURVES, line_name, note
from paceline.analysis.run import LoggedRun

_AXES = ("epoch", "step", "images", "seconds")


def page_data(runs: Sequence[LoggedRun]) -> dict[str, Any]:
    """Return runs and charts as plain JSON values."""
    axes = [_Axes(run) for run in runs]
    return {
        "runs": [
            {
                "name": run.name,
                "color": f"var(--run-{number % len(COLORS)})",
                "dashes": dashes(number),
                "phases": list(_phases(run, run_axes)),
                "ranks": list(_ranks(run)),
            }
            for number, (run, run_axes) in enumerate(zip(runs, axes, strict=True))
        ],
        "charts": [chart for chart in _charts(runs, axes) if chart["lines"]],
    }


class _Axes:
    """The x values of every record of a run: epoch, step, images and minutes."""

    def __init__(self, run: LoggedRun):
        self._columns = [run.positions(axis) for axis in _AXES]

    def at(self, index: int) -> list[float | None]:
        epoch, step, images, seconds = (column[index] for column in self._columns)
        return [epoch, step, images, None if seconds is None else round(seconds / 60, 4)]


def _phases(run: LoggedRun, axes: _Axes) -> Iterator[dict[str, Any]]:
    numbered = [(record["phase"], index) for index, record in enumerate(run.records) if "phase" in record]
    begin = [0.0] * len(_AXES)
    for _, group in groupby(numbered, key=lambda pair: pair[0]):
        end = [value or 0.0 for value in axes.at([*group][-1][1])]
        yield {"from": begin, "to": end}
        begin = end


def _ranks(run: LoggedRun) -> Iterator[dict[str, Any]]:
    split = run.seconds_per_rank or {
        part: [seconds] for part, seconds in run.seconds.items() if part not in ("evaluate", "checkpoint")
    }
    if not split:
        return
    memory = _peaks(run)
    for rank in range(len(next(iter(split.values())))):
        host = f" on {run.host_of_rank[rank]}" if len(run.hosts) > 1 and rank < len(run.host_of_rank) else ""
        yield {
            "name": f"rank {rank}{host}",
            "seconds": {part: round(times[rank], 3) for part, times in split.items()},
            "gigabytes": round(memory[rank] / 1e9, 3) if rank < len(memory) else None,
        }


def _peaks(run: LoggedRun) -> list[int]:
    """Return the peak memory of each rank in bytes; empty if the number of ranks changed."""
    memory = [record["memory_per_rank"] for record in run.trained if record.get("memory_per_rank")]
    return [max(column) for column in zip(*memory, strict=True)] if len(set(map(len, memory))) == 1 else []


def _charts(runs: Sequence[LoggedRun], axes: Sequence[_Axes]) -> Iterator[dict[str, Any]]:
    for curve in CURVES:
        both = len(curve.kinds) > 1
        lines = [
            {"run": number, "name": line_name(run, curve, kind) if both else "", "points": points}
            | {"thin": both and kind == "train"}
            for kind in curve.kinds
            for number, run in enumerate(runs)
            if (points := _points(run, axes[number], kind, methodcaller("get", curve.metric)))
        ]
        axis = {"percent": curve.percent, "fromZero": curve.from_zero}
        yield {"title": curve.title, "note": note(runs, curve), "lines": lines} | axis
    lines = [
        {"run": number, "name": "", "points": points}
        for number, run in enumerate(runs)
        if (points := _points(run, axes[number], "train", _highest))
    ]
    several = any((run.ranks or 1) > 1 for run in runs)
    highest = "The rank with the highest peak; all ranks are listed under time and memory." if several else ""
    yield {"title": "peak memory per rank, GB", "note": highest, "fromZero": True, "lines": lines}
    for title, percent, figure in _HOST_FIGURES:
        lines = [
            {"run": number, "name": name, "points": points}
            for number, run in enumerate(runs)
            for name, points in _telemetry(run, figure)
        ]
        yield {"title": title, "percent": percent, "fromZero": True, "minutes": True, "lines": lines}


def _points(
    run: LoggedRun, axes: _Axes, kind: str, value_of: Callable[[dict[str, Any]], Any]
) -> list[list[float | None]]:
    values = [
        (index, value)
        for index, record in enumerate(run.records)
        if record["kind"] == kind and (value := value_of(record)) is not None
    ]
    return [[*axes.at(index), value] for index, value in thinned(values)]


def _highest(record: dict[str, Any]) -> float | None:
    return round(max(record["memory_per_rank"]) / 1e9, 4) if record.get("memory_per_rank") else None


def _fraction(name: str) -> Any:
    return lambda source: source[name] / 100 if source.get(name) is not None else None


# title, whether in percent, and the figures of a GPU or, without GPUs, of the host
_HOST_FIGURES: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    ("device utilization", True, {"gpu": _fraction("use_percent"), "host": _fraction("cpu_percent")}),
    ("GPU power, W", False, {"gpu": lambda source: source.get("watts")}),
)


def _telemetry(run: LoggedRun, figures: dict[str, Any]) -> Iterator[tuple[str, list[list[Any]]]]:
    begin = min((samples[0]["time"] for samples in run.telemetry.values() if samples), default=0.0)
    for host, samples in run.telemetry.items():
        gpus = max((len(sample.get("gpus", [])) for sample in samples), default=0)
        sources = [(f"{host} GPU {number}", "gpu", number) for number in range(gpus)] or [(host, "host", 0)]
        for name, kind, number in sources:
            if kind not in figures:
                continue
            points = []
            for sample in samples:
                source = sample if kind == "host" else (sample.get("gpus", []) + [{}] * gpus)[number]
                if (value := figures[kind](source)) is not None:
                    points.append([None, None, None, round((sample["time"] - begin) / 60, 4), round(value, 4)])
            if points:
                yield name, thinned(points)
