"""Groups of runs that differ only in the seed, and what their spread says about the differences between groups."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from paceline.analysis.fairness import DECIDING, SEED, fairness
from paceline.analysis.run import LoggedRun
from paceline.analysis.statistics import LEVEL, Spread, WelchTest, holm, measurements_needed, spread, welch

_IMPLAUSIBLE = 1e30
_ANY_IN_A_GROUP = (SEED, "commit", "seconds")
"""Facts that may differ within a group: the commit of the working directory is not that of the training code."""


@dataclass(frozen=True)
class GroupMetric:
    """A metric in which groups of runs are compared."""

    name: str
    title: str
    of: Callable[[LoggedRun], float | None]

    def text(self, value: float) -> str:
        """Return a value as text."""
        if self.name == "top1":
            return f"{value:.2%}"
        return f"{value:.4f}" if self.name == "loss" else f"{value:,.{_decimals(value)}f} s"

    def text_of_difference(self, value: float, sign: str = "+") -> str:
        """Return the difference of two values, or with sign="" a standard deviation, as text."""
        if self.name == "top1":
            return f"{_without_zero_sign(f'{100 * value:{sign}.2f}')} points"
        if self.name == "loss":
            return _without_zero_sign(f"{value:{sign}.4f}")
        return f"{_without_zero_sign(f'{value:{sign},.{_decimals(value)}f}')} s"


def _decimals(seconds: float) -> int:
    return 1 if abs(seconds) >= 100 else 2


def _without_zero_sign(number: str) -> str:
    return number if number.strip("+-0.,") else number.lstrip("+-")


METRICS = (
    GroupMetric("top1", "top-1", lambda run: run.final.get("top1")),
    GroupMetric("loss", "validation loss", lambda run: run.final.get("loss")),
    GroupMetric("train_seconds", "training time", lambda run: run.train_seconds if run.complete else None),
)


@dataclass(frozen=True)
class SeedGroup:
    """Runs of one experiment with different seeds."""

    name: str
    runs: tuple[LoggedRun, ...]
    """Runs that are part of the statistics, one per seed."""
    left_out: tuple[str, ...]
    """Why other runs of the group are left out, one text each."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(seed for run in self.runs if (seed := _seed(run)) is not None)

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """The plausible values of each metric, by its name; metrics that no run has are missing."""
        found = {
            each.name: [value for run in self.runs if (value := each.of(run)) is not None and abs(value) < _IMPLAUSIBLE]
            for each in METRICS
        }
        return {name: values for name, values in found.items() if values}

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """Mean, standard deviation and 95% confidence interval of each metric, by its name."""
        return {name: spread(values) for name, values in self.values.items()}


@dataclass(frozen=True)
class GroupDifference:
    """How the mean of a group differs from that of the first group."""

    group: str
    first: str
    metric: GroupMetric
    test: WelchTest
    corrected: float | None
    """The p-value after Holm's correction for the number of groups; None if nothing can be tested."""
    seeds_needed: int | None
    """Seeds per group that detect a true difference of this size with a power of 80%; None: unknown."""

    @property
    def is_significant(self) -> bool | None:
        """Whether the difference is significant; None if nothing can be tested."""
        return None if self.corrected is None else self.corrected < LEVEL


@dataclass(frozen=True)
class GroupedRuns:
    """The groups of compared runs; none if no two runs differ only in the seed."""

    groups: tuple[SeedGroup, ...] = ()
    differences: tuple[GroupDifference, ...] = ()
    only_one_seed: bool = False
    """Whether there are no groups because every one of several experiments has a single run."""

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain JSON values."""
        return {
            "groups": [
                {
                    "name": group.name,
                    "seeds": group.seeds,
                    "runs": [run.name for run in group.runs],
                    "left_out": group.left_out,
                    "figures": {
                        name: vars(spread) | {"values": group.values[name]} for name, spread in group.spreads.items()
                    },
                }
                for group in self.groups
            ],
            "differences": [
                {"group": each.group, "first": each.first, "figure": each.metric.name}
                | vars(each.test)
                | {"p_holm": each.corrected, "is_significant": each.is_significant, "seeds_needed": each.seeds_needed}
                for each in self.differences
            ],
        }


def grouped_runs(runs: Sequence[LoggedRun]) -> GroupedRuns:
    """Return the groups in the order of their first runs, and their differences to the first group."""
    found: dict[object, list[LoggedRun]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    if all(len(set(map(_seed, members))) < 2 for members in found.values()):
        several = len(runs) > 1 and not fairness(runs, across_seeds=True).same
        return GroupedRuns(only_one_seed=several and all(_seed(run) is not None for run in runs))
    named = zip(_names(list(found.values())), found.values(), strict=True)
    groups = tuple(_group(name, members) for name, members in named)
    differences = [each for metric in METRICS for each in _differences(groups, metric)]
    return GroupedRuns(groups, tuple(differences))


def _key(run: LoggedRun) -> object:
    """Return what the runs of a group have in common: everything but the seed."""
    facts = run.facts | {"global_batch": run.global_batch}
    if _seed(run) is None or any(facts.get(name) is None for name in DECIDING):
        return id(run)  # whether it is the same experiment as another run is unknown
    common = {name: repr(value) for name, value in facts.items() if name not in _ANY_IN_A_GROUP}
    return frozenset(common.items()), run.ranks, len(run.hosts)


def _seed(run: LoggedRun) -> int | None:
    seed = run.facts.get(SEED)
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _group(name: str, members: Sequence[LoggedRun]) -> SeedGroup:
    counted: dict[Any, LoggedRun] = {}
    left_out = []
    for run in sorted(members, key=lambda run: _seed(run) or 0):
        seed = _seed(run)
        if run.status not in ("finished", "imported") or run.final.get("top1") is None:
            status = run.status if run.status not in ("finished", "imported") else "without an evaluation"
            left_out.append(f"{run.name} (seed {seed}) is {status}")
        elif seed in counted:
            left_out.append(f"{run.name} repeats seed {seed} of {counted[seed].name}")
        else:
            counted[seed] = run
    return SeedGroup(name, tuple(counted.values()), tuple(left_out))


def _names(groups: Sequence[Sequence[LoggedRun]]) -> list[str]:
    """Return a name per group: the common part of the names of its runs."""
    names: list[str] = []
    for members in groups:
        stems = [re.sub(r"-seed-?\d+$", "", run.name) for run in members]
        common = "".join(
            letters[0] for letters in takewhile(lambda each: len(set(each)) == 1, zip(*stems, strict=False))
        )
        if len(members) > 1:
            common = common.rstrip("-_. ") or members[0].name
        numbered = (common, *(f"{common} ({number})" for number in range(2, len(groups) + 2)))
        names.append(next(name for name in numbered if name not in names))
    return names


def _differences(groups: Sequence[SeedGroup], metric: GroupMetric) -> list[GroupDifference]:
    first, *others = groups
    tested = [
        (group, test)
        for group in others
        if metric.name in first.values
        and metric.name in group.values
        and (test := welch(first.values[metric.name], group.values[metric.name]))
    ]
    p_values = [test.p for _, test in tested if test.p is not None]
    corrected = iter(holm(np.array(p_values)).tolist())
    return [
        GroupDifference(
            group.name,
            first.name,
            metric,
            test,
            None if test.p is None else next(corrected),
            _seeds_needed(first.spreads[metric.name], group.spreads[metric.name], test),
        )
        for group, test in tested
    ]


def _seeds_needed(first: Spread, second: Spread, test: WelchTest) -> int | None:
    assert first.std is not None
    assert second.std is not None
    return measurements_needed(test.difference, (first.std, second.std))
