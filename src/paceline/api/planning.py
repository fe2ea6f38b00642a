"""Before training: the steps, learning rate, time and cost of a recipe, the batch that fits, the state of a machine."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.api.arguments import Procs, check_choice, check_count, check_procs
from paceline.api.training import loaded
from paceline.config.batch import check_samples, layouts, procs_per_node
from paceline.config.data import FROM_FILES, IMAGENET_IMAGES, IN_MEMORY
from paceline.config.imports import load_imports
from paceline.config.overrides import Overrides
from paceline.config.recipe import Recipe
from paceline.config.scaling import scaled
from paceline.config.timeline import ResolvedPhase, Timeline
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.data.shards import Dataset
    from paceline.launch.installation import Finding
    from paceline.optim.schedules import LrPlan

_SAMPLES = {"imagenet": IMAGENET_IMAGES[0], "cifar10": 50_000, "cifar100": 50_000, "digits": 1437}
_MAX_POINTS = 2000


@dataclass(frozen=True)
class Estimate:
    """Time and cost on a number of nodes."""

    nodes: int
    ranks: int
    seconds: float
    communication: float
    """Fraction of the time that is spent waiting for communication."""
    cost: float


@dataclass(frozen=True)
class TrainingPlan:
    """The phases of a recipe in steps."""

    recipe: Recipe
    nodes: int
    gpus_per_node: int
    samples: int
    """Size of the training set."""
    timeline: Timeline
    prepared: "Dataset | None" = None
    """The prepared images, if they are on this machine."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def images(self) -> int:
        """Number of images that are trained on."""
        return sum(phase.images for phase in self.timeline.phases)

    @cached_property
    def _lr_plan(self) -> "LrPlan":
        from paceline.optim.schedules import LrPlan

        return LrPlan.of(self.recipe.optim, self.timeline)

    @property
    def decays_on_plateau(self) -> bool:
        """Whether the learning rate also depends on the evaluations; `lr_at` and `lr_curve` are without its decays."""
        return self._lr_plan.plateau is not None

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        from paceline.optim.schedules import lr_at

        return lr_at(step, self._lr_plan)

    def highest_lr(self, begin: int = 0, end: int = 0) -> float:
        """Return the highest learning rate of the steps from `begin` up to before `end`, by default of all steps."""
        return self._lr_plan.highest_between(begin, end) if end else self._lr_plan.highest

    def lr_curve(self) -> list[tuple[float, float]]:
        """Return epochs and learning rates, at the edges of phases and at most 2000 points between them."""
        total = self.timeline.total
        edges = [edge for phase in self.timeline.phases for edge in (phase.begin, phase.end - 1)]
        steps = sorted({*range(0, total, max(1, total // _MAX_POINTS)), *edges})
        return [(self.timeline.epoch_at(step), self.lr_at(step)) for step in steps]

    def evaluation_variant(self, phase: ResolvedPhase) -> str:
        """Return the variant of prepared images that a phase is validated on; empty for other data."""
        if self.prepared:
            return self.prepared.choose_for_evaluation(phase.evaluate_variant, phase.variant)
        if phase.evaluate_variant or phase.variant in ("", "original"):
            return phase.evaluate_variant or phase.variant
        return f"original, else {phase.variant}"

    @cached_property
    def parameters(self) -> int:
        """Number of trained parameters."""
        import torch

        from paceline.engine.trial import shape_of
        from paceline.models import factory
        from paceline.models.freezing import freeze

        channels, _, classes = shape_of(self.recipe)
        with torch.device("meta"):
            model = factory.create(factory.untrained(self.recipe.model), classes, channels)
            freeze(model, self.recipe.model)
        return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def estimates(
        self, images_per_second: float, *, bandwidth: float = 10.0, overlap: float = 0.5, price: float = 0.0
    ) -> list[Estimate]:
        """Estimate time and cost on 1 to 16 nodes from the speed of one rank.

        Each rank computes its part of a batch; a ring all-reduce then sends 2 (n - 1) / n of the gradients over links
        of `bandwidth` Gbit/s, of which the fraction `overlap` is hidden by computation.
        """
        if not 0 <= overlap <= 1:
            message = f"--overlap {overlap:g} is out of range. Use a number from 0 to 1."
            raise UserError("invalid-overlap", message, overlap=overlap)
        accumulation, estimates = self.recipe.train.grad_accumulation, []
        bits = self.parameters * (32 if self.recipe.grad_sync.dtype == "fp32" else 16)
        for nodes in sorted({1, 2, 4, 8, 16, self.nodes}):
            ranks = nodes * self.gpus_per_node
            if any(phase.global_batch % (ranks * accumulation) for phase in self.timeline.phases):
                continue
            wire = 2 * (nodes - 1) / nodes * bits / (bandwidth * 1e9)
            total = communication = 0.0
            for phase in self.timeline.phases:
                computing = phase.global_batch / ranks / images_per_second
                visible = wire - min(overlap * wire, computing)
                communication += (phase.end - phase.begin) * visible
                total += (phase.end - phase.begin) * (computing + visible)
            estimates.append(Estimate(nodes, ranks, total, communication / total, total / 3600 * nodes * price))
        return estimates


def plan(
    recipe: str | Path | Recipe,
    overrides: Overrides | None = None,
    *,
    nodes: int = 1,
    gpus_per_node: Procs = "auto",
    train_images: int = 0,
    scale_batch: str = "",
) -> TrainingPlan:
    """Return the phases, steps and learning rate of a recipe, without training.

    `gpus_per_node`, the ranks per node, is the number of visible GPUs of this machine by default, or 1.
    """
    from paceline.data.kinds import resolve

    nodes, gpus_per_node = check_count("nodes", nodes), check_procs("gpus_per_node", gpus_per_node)
    check_choice("scale_batch", scale_batch, ("", "linear", "sqrt"))
    planned = loaded(recipe, overrides)
    load_imports(planned)
    each = procs_per_node(planned, gpus_per_node)
    ranks = nodes * each
    if scale_batch:
        planned = scaled(planned, ranks, scale_batch)
    layouts(planned, ranks)
    if planned.data.path and Path(planned.data.path).exists():
        planned = resolve(planned)
    planned = with_preprocessing(planned)
    samples = train_images or _known_samples(planned)
    timeline = Timeline.of(planned, samples)
    check_samples(timeline, samples, planned.data.path or planned.data.name)
    made = TrainingPlan(planned, nodes, each, samples, timeline, None if train_images else _prepared(planned))
    for phase in timeline.phases:
        made.evaluation_variant(phase)  # raises if the data has no such variant
    return made


def _prepared(recipe: Recipe) -> "Dataset | None":
    from paceline.data.shards import Dataset, default_folder

    place = Path(recipe.data.path or default_folder(recipe.data.name))
    return Dataset.open(place) if recipe.data.name in ("imagenet", "shards") and place.exists() else None


def with_preprocessing(recipe: Recipe) -> Recipe:
    """Return the recipe with the preprocessing of its weights, such as the image size."""
    if recipe.model.weights == "random":
        return recipe  # without the seconds of an import
    from paceline.models.preprocessing import resolve

    load_imports(recipe)
    return resolve(recipe)[0]


def _known_samples(recipe: Recipe) -> int:
    from paceline.data.listing import list_images
    from paceline.data.registered import open_registered
    from paceline.data.shards import Dataset, default_folder
    from paceline.data.splits import no_split

    data = recipe.data
    if data.name == "synthetic":
        return data.synthetic.train_samples
    if data.name and data.name not in (*IN_MEMORY, *FROM_FILES):
        return len(open_registered(data)[0]["train"])
    place = Path(data.path or default_folder(data.name))
    if data.name in ("folder", "list") and place.exists():
        return len(list_images(place).splits["train"])
    if data.name not in IN_MEMORY and place.exists():
        splits = Dataset.open(place).description["splits"]
        if "train" not in splits:
            raise no_split(place, "train", splits)
        return int(splits["train"]["samples"])
    if data.name not in _SAMPLES:
        raise UserError(
            "unknown-dataset-size",
            f"the number of training images of {data.path or data.name} is unknown. Give it with --train-images N.",
        )
    return _SAMPLES[data.name]


def measured_speed(run: str | Path) -> float:
    """Return the images per second of one rank of a finished run, without the time of communication."""
    from paceline.track.records import RunFolder

    path = Path(run)
    try:
        summary = RunFolder(path).read_summary()
        seconds = summary["seconds"]
        if summary["status"] != "finished":
            message = f"{path}: the run is not finished (status {summary['status']}). Give a finished run."
            raise UserError("run-not-finished", message, path=path)
        if "sync" not in seconds:
            message = f"{path}: the run has no measured synchronization time (FSDP). Give a run with DDP."
            raise UserError("run-without-sync-time", message, path=path)
        total = summary["train_seconds"]
        busy = (total - seconds["sync"]) / total
        speed = float(summary["images_per_second"] / summary["ranks"] / busy)
        if speed > 0:
            return speed
    except (KeyError, TypeError, ZeroDivisionError):
        pass
    message = f"{path}: summary.json has no throughput. Give the folder of a finished run."
    raise UserError("run-without-speed", message, path=path)


def check_machine(*, quick: bool = False, runs: str | Path = "runs") -> "list[Finding]":
    """Check this machine: packages, CPU, GPUs, folders, limits; unless `quick`, an all-reduce of two processes."""
    from paceline.launch.machine import check

    return list(check(Path(runs), quick))
