"""Checks of a recipe that involve several fields."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from paceline import extensions
from paceline.config.data import BUILT_IN, FROM_FILES, IN_MEMORY, Data, augment_problems
from paceline.config.duration import parse
from paceline.config.optim import SCHEDULES, SPECIAL_FIELDS, Ema, MomentumSchedule, Optim, Schedule
from paceline.config.phases import problems as phase_problems
from paceline.config.phases import ramp_problems
from paceline.config.recipe import GradSync, Recipe, near_multiples
from paceline.errors import Problem, UserError

LOSSES = ("cross-entropy", "bce")


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Every problem that involves several fields; types and ranges of single fields are checked before."""
    train = recipe.train
    if train.global_batch % train.grad_accumulation:
        choices = " or ".join(map(str, near_multiples(train.global_batch, train.grad_accumulation)))
        yield Problem(
            "batch-not-divisible",
            f"train.global_batch={train.global_batch} is not a multiple of train.grad_accumulation="
            f"{train.grad_accumulation}. Try --train.global_batch {choices}.",
        )
    if not recipe.imports:  # otherwise names are checked after the imports
        yield from (Problem(error.code, str(error)) for error in unknown_names(recipe))
    yield from _data_problems(recipe.data)
    if recipe.model.drop_path and "drop_path_rate" in recipe.model.options:
        yield Problem(
            "drop-path-twice",
            f"model.drop_path={recipe.model.drop_path:g} and model.options.drop_path_rate="
            f"{recipe.model.options['drop_path_rate']} set the same value twice. Remove one.",
        )
    if train.loss not in LOSSES and train.label_smoothing and not (train.mixup or train.cutmix):
        yield Problem(
            "label-smoothing-unused",
            f"train.label_smoothing={train.label_smoothing} is not used by the registered loss {train.loss!r}. Set it "
            "to 0, and pass it in train.loss_options if the loss takes it.",
        )
    if train.loss in LOSSES and train.loss_options:
        yield Problem("loss-options-unused", f"train.loss_options are not used by {train.loss}. Remove them.")
    if train.loss != "bce" and train.bce_target_threshold:
        yield Problem(
            "bce-threshold-unused",
            f"train.bce_target_threshold={train.bce_target_threshold:g} is only used by the loss bce, but train.loss="
            f"{train.loss}. Set it to 0, or set train.loss to bce.",
        )
    yield from _imbalance_problems(recipe)
    yield from _schedule_problems(recipe.optim.schedule)
    yield from _momentum_problems(recipe.optim)
    yield from _ema_problems(recipe.ema)
    length = parse(train.duration)
    yield from phase_problems(recipe.phases, length.value if length.unit == "ep" else 0.0, train.global_batch)
    yield from ramp_problems(recipe.ramp)
    if recipe.ramp.sizes[1] and recipe.phases:
        yield Problem("ramp-and-phases", "ramp and phases both set the image size over time. Remove one.")
    if recipe.ramp.sizes[1] and length.unit != "ep":
        yield Problem(
            "ramp-needs-epochs",
            f"ramp needs train.duration in epochs, but it is {train.duration}. Write e.g. 16ep.",
        )
    epochs = [epoch for epoch, _ in recipe.curve.points]
    if any(begin >= end for begin, end in pairwise(epochs)):
        yield Problem(
            "points-not-ordered",
            f"curve.points are not in ascending order: {', '.join(f'{epoch:g}' for epoch in epochs)}. Sort them.",
        )
    yield from recipe.about.measured.problems()
    yield from _grad_sync_problems(recipe.grad_sync, recipe.strategy)
    yield from _stopping_problems(recipe)


def unknown_names(recipe: Recipe) -> Iterator[UserError]:
    """An error for every name of the recipe that is neither built in nor registered; models and optimizers of timm are
    checked when they are created."""
    named = [
        ("dataset", "data.name", recipe.data.name, ("", *IN_MEMORY, *FROM_FILES)),
        ("loss", "train.loss", recipe.train.loss, LOSSES),
        *(("augmentation", "data.augment.custom", name, ()) for name in recipe.data.augment.custom),
        *(("callback", "callbacks", name, ()) for name in recipe.callbacks),
    ]
    for kind, key, name, built_in in named:
        if name not in built_in and not extensions.find(kind, name):
            yield extensions.unknown(kind, key, name, built_in)


def _data_problems(data: Data) -> Iterator[Problem]:
    if not data.name and not data.path:
        yield Problem(
            "data-missing",
            "data is not set. Set data.path to a prepared folder, an image folder or a list, or data.name to "
            "digits, cifar10, cifar100, imagenet or synthetic.",
        )
    if data.path and data.name in BUILT_IN:
        yield Problem(
            "data-path-unused",
            f"data.path={data.path!r}: data.name={data.name} is built in and reads no files. Remove data.path, or "
            "remove data.name (--data.name '') to detect it from the path.",
        )
    registered = data.name and data.name not in (*IN_MEMORY, *FROM_FILES)
    if data.path and registered:
        yield Problem(
            "data-path-unused",
            f"data.path={data.path!r} is not used by the registered dataset {data.name!r}. Pass it in data.options.",
        )
    if data.options and not registered:
        yield Problem(
            "data-options-unused", f"data.options are only used by registered datasets. Remove {data.options}."
        )
    if len(data.mean) != len(data.std):
        yield Problem(
            "mean-std-mismatch",
            f"data.mean has {len(data.mean)} values, but data.std has {len(data.std)}. Set both or neither.",
        )
    yield from augment_problems(data)


def _imbalance_problems(recipe: Recipe) -> Iterator[Problem]:
    train, data = recipe.train, recipe.data
    if train.class_weights != "none" and train.loss not in LOSSES:
        yield Problem(
            "class-weights-unused",
            f"train.class_weights is not used by the registered loss {train.loss!r}. Set it to none, and pass "
            "weights in train.loss_options if the loss takes them.",
        )
    if data.sampler == "balanced" and train.class_weights == "balanced":
        yield Problem(
            "balanced-twice",
            "data.sampler=balanced and train.class_weights=balanced both correct the imbalance, so that rare classes "
            "would dominate. Use one of them.",
        )
    if data.sampler == "balanced" and data.aug_repeats > 1:
        yield Problem(
            "sampler-and-aug-repeats",
            f"data.sampler=balanced and data.aug_repeats={data.aug_repeats} both set how often an epoch shows an "
            "image. Use one of them.",
        )


def _schedule_problems(schedule: Schedule) -> Iterator[Problem]:
    path = "optim.schedule.points"
    if schedule.name == "piecewise" and not schedule.points:
        yield Problem(
            "schedule-points-missing",
            f"{path} is empty, but a piecewise schedule needs them. Write e.g. [{{at: 0ep, factor: 1.0}}].",
        )
    if schedule.name != "piecewise" and schedule.points:
        yield Problem(
            "schedule-points-unused",
            f"{path} is only used by a piecewise schedule, but optim.schedule.name={schedule.name}. Remove the points "
            "(with [] if the base recipe has them), or set the name to piecewise.",
        )
    if schedule.name in SCHEDULES and schedule.options:
        yield Problem(
            "schedule-options-unused",
            f"optim.schedule.options has no effect: optim.schedule.name={schedule.name} is built in. Remove it.",
        )
    for field, owner in SPECIAL_FIELDS.items():
        value = getattr(schedule, field)
        if schedule.name in SCHEDULES and schedule.name != owner and value != getattr(Schedule(), field):
            yield Problem(
                "schedule-field-unused",
                f"optim.schedule.{field}={value} is only used by the schedule {owner}, but optim.schedule.name="
                f"{schedule.name}. Remove it, or set the name to {owner}.",
            )
            break
    yield from _order_problems(path, [point.at for point in schedule.points])


def _momentum_problems(optim: Optim) -> Iterator[Problem]:
    given, path, default = optim.momentum_schedule, "optim.momentum_schedule", MomentumSchedule()
    if given.name == "one-cycle" and optim.schedule.name != "one-cycle":
        yield Problem(
            "momentum-schedule-unmatched",
            f"{path}.name=one-cycle needs the learning rate schedule one-cycle, but optim.schedule.name="
            f"{optim.schedule.name}. Use one-cycle for both, or piecewise for the momentum.",
        )
    if given.name == "piecewise" and not given.points:
        yield Problem(
            "schedule-points-missing",
            f"{path}.points is empty, but a piecewise schedule needs them. Write e.g. [{{at: 0ep, momentum: 0.9}}].",
        )
    for field, owner in (("low", "one-cycle"), ("high", "one-cycle"), ("points", "piecewise")):
        if given.name != owner and getattr(given, field) != getattr(default, field):
            yield Problem(
                "schedule-field-unused",
                f"{path}.{field} is only used by the schedule {owner}, but {path}.name={given.name}. Remove it, or set "
                f"the name to {owner}.",
            )
    yield from _order_problems(f"{path}.points", [point.at for point in given.points])


def _ema_problems(ema: Ema) -> Iterator[Problem]:
    changed = [
        name for name in ("every", "decay_schedule", "start", "lookahead") if getattr(ema, name) != getattr(Ema(), name)
    ]
    if not ema.decay and changed:
        name = changed[0]
        yield Problem(
            "ema-field-unused",
            f"ema.{name}={getattr(ema, name)} has no effect, because ema.decay=0 turns the average off. Set ema.decay, "
            f"or leave {name} at {getattr(Ema(), name)}.",
        )
    if ema.decay_schedule == "cubic" and parse(ema.start).value:
        yield Problem(
            "ema-start-and-cubic",
            f"ema.start={ema.start}: the cubic schedule already starts with a decay of 0. Set ema.start to 0ba.",
        )


def _order_problems(path: str, times: Sequence[str]) -> Iterator[Problem]:
    amounts = [parse(time) for time in times]
    if len({amount.unit for amount in amounts}) > 1:
        yield Problem("mixed-units", f"{path} mix the units ep and ba: {', '.join(times)}. Use one unit.")
    elif amounts != sorted(amounts):
        yield Problem("points-not-ordered", f"{path} are not in ascending order: {', '.join(times)}. Sort them.")


def _stopping_problems(recipe: Recipe) -> Iterator[Problem]:
    stop, best = recipe.early_stop, recipe.checkpoint.best
    if not stop.patience and (stop.min_delta or stop.metric):
        yield Problem(
            "early-stop-without-patience",
            "early_stop has a metric or a min_delta, but early_stop.patience=0 never stops. Set it to a number of "
            "evaluations, e.g. --early_stop.patience 5.",
        )
    if (stop.metric or best) != "loss" and stop.min_delta >= 1:
        yield Problem(
            "min-delta-too-large",
            f"early_stop.min_delta={stop.min_delta:g} is not below 1, so no {stop.metric or best} could improve "
            "by it. Use a fraction: 0.001 is 0.1 percentage points.",
        )
    if recipe.optim.schedule.name != "plateau":
        return
    if any(phase.lr for phase in recipe.phases):
        yield Problem(
            "plateau-and-phase-lr",
            "optim.schedule.name=plateau has no effect, because the phases set the learning rate. Remove `lr` from all "
            "phases, or use another schedule.",
        )
    every, length = parse(recipe.evaluate.every), parse(recipe.train.duration)
    if every.unit == length.unit and every.value >= length.value:
        yield Problem(
            "plateau-without-evaluations",
            f"optim.schedule.name=plateau needs evaluations before the end, but evaluate.every={recipe.evaluate.every} "
            f"and train.duration={recipe.train.duration}. Evaluate more often.",
        )


def _grad_sync_problems(grad_sync: GradSync, strategy: str) -> Iterator[Problem]:
    if grad_sync.powersgd_rank and strategy == "fsdp":
        yield Problem(
            "powersgd-needs-ddp",
            f"grad_sync.powersgd_rank={grad_sync.powersgd_rank} needs unsharded gradients, which strategy fsdp does "
            "not have. Use strategy ddp, or set it to 0.",
        )
    if grad_sync.powersgd_rank and grad_sync.dtype != "fp32":
        yield Problem(
            "powersgd-and-dtype",
            f"grad_sync.dtype={grad_sync.dtype} and grad_sync.powersgd_rank={grad_sync.powersgd_rank} both compress "
            "gradients. Use one of them.",
        )
    if grad_sync.transport == "shm" and strategy == "fsdp":
        yield Problem(
            "shm-needs-ddp",
            "grad_sync.transport=shm works with strategy ddp only; fsdp communicates over the network. Use auto.",
        )
