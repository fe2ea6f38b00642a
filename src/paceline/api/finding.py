"""Find the largest batch that fits, and a learning rate, with short trainings here or on several hosts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.api.arguments import Procs, check_count, check_procs, invalid
from paceline.api.planning import with_preprocessing
from paceline.api.training import loaded
from paceline.config.batch import check_strategy, layouts, procs_per_node
from paceline.config.overrides import Overrides
from paceline.config.recipe import Recipe

if TYPE_CHECKING:
    from paceline.launch.batch_finder import BatchSearch, Trial
    from paceline.launch.groups import Nodes
    from paceline.launch.lr_finder import LrSearch


def find_batch(
    recipe: str | Path | Recipe,
    overrides: Overrides | None = None,
    *,
    procs: Procs = "auto",
    hosts: str | Sequence[str] = (),
    memory_limits: Sequence[int] = (),
    max_batch: int = 65536,
    steps: int = 3,
    out: str | Path = "",
    ssh_config: str | Path = "",
    python: str = "python3",
    on_trial: "Callable[[Trial], None]" = lambda trial: None,
) -> "BatchSearch":
    """Find the largest per-rank batch that fits in memory, and the fastest one, with real training steps.

    With `hosts`, every trial runs on all of them over ssh, in `procs` processes each, so the result fits on all.
    `memory_limits` are bytes per rank on CPUs, one for all ranks or one for each; the default is the free memory.
    """
    from paceline.launch.batch_finder import find

    searched = with_preprocessing(loaded(recipe, overrides))
    nodes = _nodes(searched, procs, hosts, ssh_config, python)
    folder = Path(out or Path("runs") / f"find-batch-{searched.name}")
    max_batch, steps = check_count("max_batch", max_batch), check_count("steps", steps)
    return find(searched, folder, nodes, memory_limits, max_batch, steps, on_trial)


def find_lr(
    recipe: str | Path | Recipe,
    overrides: Overrides | None = None,
    *,
    procs: Procs = "auto",
    hosts: str | Sequence[str] = (),
    min_lr: float = 1e-6,
    max_lr: float = 10.0,
    steps: int = 100,
    linear: bool = False,
    out: str | Path = "",
    ssh_config: str | Path = "",
    python: str = "python3",
    on_step: Callable[[int, float, float], None] = lambda step, lr, loss: None,
) -> "LrSearch":
    """Train while the learning rate grows (learning-rate range test), and suggest a learning rate from the losses.

    Notebooks show the chart. `on_step` gets the number of steps, the learning rate and the loss. With `hosts`, the
    test runs on all of them over ssh, in `procs` processes each.
    """
    from paceline.launch.lr_finder import find
    from paceline.optim.lr_range import LrRange

    for name, value in (("min_lr", min_lr), ("max_lr", max_lr)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise invalid(name, value, "a positive number")
    tested = loaded(recipe, overrides)
    nodes = _nodes(tested, procs, hosts, ssh_config, python)
    layouts(tested, nodes.ranks)
    folder = Path(out or Path("runs") / f"find-lr-{tested.name}")
    return find(tested, folder, nodes, LrRange(min_lr, max_lr, check_count("steps", steps), linear), on_step)


def _nodes(recipe: Recipe, procs: Procs, hosts: str | Sequence[str], ssh_config: str | Path, python: str) -> "Nodes":
    """Return where the ranks run."""
    from paceline.launch.api import listed
    from paceline.launch.groups import nodes_of
    from paceline.launch.procs import per_host
    from paceline.launch.values import host_name, operand

    names = [host_name("--hosts", name) for name in listed(hosts)] if hosts else []
    nodes = nodes_of(names, Path(ssh_config) if ssh_config else None, operand("--python", python))
    if nodes.hosts and check_procs("procs", procs) == "auto":
        procs = per_host(nodes.hosts, recipe)
    nodes = replace(nodes, procs=procs_per_node(recipe, check_procs("procs", procs)))
    check_strategy(recipe, nodes.ranks)
    return nodes
