"""Whether runs are the same experiment, and how they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.run import CODE_OF, LoggedRun

CONDITIONS = {
    "hardware": "hardware",
    "torch": "torch",
    "commit": "git commit of the working directory",
    "threads per rank": "threads per rank",
    "strategy": "strategy",
    "data.decode_threads": "decode threads",
    "train.grad_accumulation": "gradient accumulation",
    "evaluate.every": "evaluate.every",
    "evaluate.per_rank_batch": "evaluate.per_rank_batch",
    "grad_sync.transport": "grad_sync.transport",
    "grad_sync.bucket_mb": "grad_sync.bucket_mb",
    "fsdp.reshard_after_forward": "fsdp.reshard_after_forward",
    "fsdp.cpu_offload": "fsdp.cpu_offload",
    "model.activation_checkpointing": "activation checkpointing",
    "compile": "compile",
}
"""Facts that affect only the speed, not the result."""
NOT_COMPARED = (
    "train.global_batch",
    "seconds",
    "ranks",
    "nodes",
    "scaled.by",
    "scaled.rule",
    "scaled.from_batch",
    "scaled.from_lr",
)
"""Facts that are results, or that another fact already covers."""


@dataclass(frozen=True)
class Difference:
    fact: str
    values: tuple[Any, ...]
    """One value per run; None: unknown."""
    matters: bool
    """Whether the difference makes it another experiment; conditions and unknown values do not."""

    def __str__(self) -> str:
        return f"{self.fact}: " + " / ".join("unknown" if value is None else _short(value) for value in self.values)


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_MAX_NAMED = 5
"""Number of differences that a summary names; it only counts more of them, because they are listed below it."""


@dataclass(frozen=True)
class Fairness:
    """Whether runs are the same experiment, and how they differ."""

    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]
    """Deciding facts that are unknown for at least one run."""
    num_seeds: int = 0
    """Number of seeds if runs are compared as groups, so that the seed does not matter; otherwise 0."""

    @property
    def same(self) -> bool:
        return not any(difference.matters for difference in self.differences)

    @property
    def summary(self) -> str:
        """Whether the runs are the same experiment, and why not."""
        if not self.same:
            changed = [difference.fact for difference in self.differences if difference.matters]
            named = ", ".join(changed) if len(changed) <= _MAX_NAMED else f"{len(changed)} settings"
            verb = "differs" if len(changed) == 1 else "differ"
            return f"not the same experiment: {named} {verb}, so the ratio of their times is not a speed-up"
        if self.unknown:
            facts = ", ".join(self.unknown[:8]) + (" ..." if self.unknown[8:] else "")
            return f"cannot confirm that this is the same experiment: unknown for at least one run: {facts}"
        conditions = self.conditions
        same = f"the same experiment with {self.num_seeds} seeds" if self.num_seeds else "the same experiment"
        if len(conditions) > _MAX_NAMED:
            return f"{same} under {len(conditions)} different conditions"
        return same + (f" under different conditions: {', '.join(conditions)}" if conditions else "")

    @property
    def conditions(self) -> list[str]:
        """The facts that differ, without the seeds of groups."""
        return [each.fact for each in self.differences if not self._is_of_groups(each)]

    def effect(self, difference: Difference) -> str:
        """Return what a difference that does not matter affects; empty if it matters."""
        if self._is_of_groups(difference):
            return "compared as groups of seeds"
        return "" if difference.matters else "affects speed only"

    def _is_of_groups(self, difference: Difference) -> bool:
        return bool(self.num_seeds) and difference.fact == SEED


SEED = "seed"
DECIDING = {
    "global_batch": "global batch",
    "data": "data",
    "precision": "precision",
    "code": "code",
    SEED: SEED,
    "model.name": "model",
    "optim.lr": "learning rate",
    "train.duration": "duration",
}


def fairness(runs: Sequence[LoggedRun], across_seeds: bool = False) -> Fairness:
    """Return what differs between the runs, and which deciding facts are unknown.

    `across_seeds`: the runs are groups of seeds, so that a different seed does not make another experiment.
    """
    minor = {*CONDITIONS, SEED} if across_seeds else {*CONDITIONS}
    facts = [run.facts | {"global_batch": run.global_batch} for run in runs]
    differences, unknown = [], []
    for name in dict.fromkeys(name for each in facts for name in each if name not in NOT_COMPARED):
        values = tuple(each.get(name) for each in facts)
        known = [value for value in values if value is not None]
        if any(value != known[0] for value in known):
            label = DECIDING.get(name) or CONDITIONS.get(name) or name
            differences.append(Difference(label, values, matters=name not in minor))
        elif known and len(known) < len(values) and name not in minor:
            without = [run for run, value in zip(runs, values, strict=True) if value is None]
            if name.startswith(CODE_OF):
                continue  # not every run imports it, so that the imports in their recipes differ
            if all(run.recipe for run in without) and name not in DECIDING:
                differences.append(Difference(name, values, matters=True))  # a recipe holds every field that it uses
            elif name in DECIDING or any(run.kind != "paceline" for run in runs if run not in without):
                unknown.append(DECIDING.get(name) or name)
    unknown_everywhere = [label for name, label in DECIDING.items() if all(each.get(name) is None for each in facts)]
    ordered = sorted(differences, key=lambda difference: not difference.matters)
    num_seeds = len({repr(each.get(SEED)) for each in facts}) if across_seeds else 0
    return Fairness(tuple(ordered), tuple(unknown + unknown_everywhere), num_seeds)
