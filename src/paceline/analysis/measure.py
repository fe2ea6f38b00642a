"""Results of the runs of a recipe, for about.measured; runs that are not comparable are refused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.analysis.fairness import fairness
from paceline.analysis.folder import experiment_fields
from paceline.analysis.run import LoggedRun
from paceline.config.data import IMAGENET_IMAGES
from paceline.config.io import recipe_from_tree, to_tree
from paceline.config.recipe import Recipe
from paceline.config.tracking import Measured
from paceline.errors import UserError

_MAX_NAMED = 8
_COLUMNS = ("seeds", "top1", "top5", "seconds")
_PER_RUN = (*_COLUMNS, "commits", "date", "disturbed")


def measure(recipe: Recipe, source: str, runs: Sequence[LoggedRun]) -> Measured:
    """Return the result of finished runs of one recipe, which differ in nothing but their seeds."""
    for run in runs:
        _check_run(run, recipe)
    _check_recipe(recipe, source, runs)
    results = sorted(map(_result, runs), key=lambda result: result.seeds)
    seeds = [seed for result in results for seed in result.seeds]
    if again := [seed for seed in seeds if seeds.count(seed) > 1]:
        message = f"seed {again[0]}: {len(again)} runs have this seed. Record one run for each seed."
        raise UserError("record-same-seed", message, seed=again[0])
    return _joined(results)


def _check_run(run: LoggedRun, recipe: Recipe) -> None:
    path, notes = run.origin, "; ".join(run.notes)
    if run.kind != "paceline":
        message = f"{path} is the log of another program. Only run folders are recorded."
        raise UserError("record-needs-run-folder", message, run=path)
    if run.status != "finished" or not (run.complete and run.starts and run.recipe and run.train_seconds):
        message = (
            f"{path} is not a complete run ({notes}). Record runs that finished with the settings they started with."
        )
        raise UserError("record-incomplete-run", message, run=path, status=run.status)
    if run.folder and run.folder.recipe_is_unchanged is False:
        message = (
            f"{path}/recipe.yaml was changed after the run started, so the run's settings are unknown. Train again."
        )
        raise UserError("record-changed-recipe", message, run=path)
    if run.final.get("top1") is None or run.final["step"] != run.trained[-1]["step"]:
        raise UserError("record-not-evaluated", f"{path} was not evaluated after its last step. Train again.", run=path)
    data = run.summary.get("data")
    images = (data.get("train_images") if isinstance(data, dict) else None, run.final.get("samples"))
    if recipe.data.name == "imagenet" and images != IMAGENET_IMAGES:
        message = (
            f"{path}: ImageNet has {IMAGENET_IMAGES[0]:,} training and {IMAGENET_IMAGES[1]:,} validation images, but "
            f"the run used {images[0]} and {images[1]}. Record runs on the whole dataset."
        )
        raise UserError("record-part-of-data", message, run=path)


def _check_recipe(recipe: Recipe, source: str, runs: Sequence[LoggedRun]) -> None:
    """Check that the runs have the settings of the recipe, apart from the seed and settings that affect speed."""
    tree = to_tree(recipe)
    fields = experiment_fields(tree)
    if recipe.precision == "auto":
        del fields["precision"]
    last_batch = recipe.all_phases()[-1].global_batch or recipe.train.global_batch
    written = LoggedRun(source, Path(source), recipe=tree, facts=fields, summary={"global_batch": last_batch})
    trained = list(map(_completed, runs))
    compared = fairness([written, *trained]).differences
    differences = [str(each) for each in compared if each.matters and each.fact != "seed"]
    paths = [recipe.data.path, *(run.recipe["data"]["path"] for run in trained)]
    if not recipe.data.name and len(set(paths)) > 1:
        differences.append(f"data.path: {' / '.join(paths)}")
    if differences:
        more = [f"and {len(differences) - _MAX_NAMED} more"] if differences[_MAX_NAMED:] else []
        named = "; ".join([*differences[:_MAX_NAMED], *more])
        message = (
            f"{source} and the runs are not the same experiment. {named}. The first value is that of "
            "the recipe. Record runs of this recipe only."
        )
        raise UserError("record-other-recipe", message, differences=differences)


def _completed(run: LoggedRun) -> LoggedRun:
    """Return the run with the defaults of fields that its recipe does not have yet."""
    tree = to_tree(recipe_from_tree(run.recipe | {"about": {}}, str(run.origin / "recipe.yaml")))
    facts = experiment_fields(tree) | run.facts
    return LoggedRun(run.name, run.origin, recipe=tree, facts=facts, summary=run.summary, starts=run.starts)


def _result(run: LoggedRun) -> Measured:
    start = run.starts[-1]
    packages, code = start.get("packages", {}), start.get("code", {})
    assert run.train_seconds
    return Measured(
        seeds=(run.facts["seed"],),
        top1=(round(run.final["top1"], 6),),
        top5=() if run.top5 is None else (round(run.top5, 6),),
        seconds=(round(run.train_seconds, 2),),
        hardware=_hardware(run),
        precision=start.get("precision", ""),
        torch=packages.get("torch", ""),
        paceline=packages.get("paceline", ""),
        commits=(code["commit"] + "+" * bool(code.get("changed")),) if code.get("commit") else (),
        date=start.get("started", "")[:10],
        disturbed=bool(run.disturbance),
    )


def _hardware(run: LoggedRun) -> str:
    hardware = run.starts[-1].get("hardware", {})
    cpu, count = hardware.get("cpu") or "an unknown CPU", run.devices or 1
    if hardware.get("device") == "cuda":
        text = f"{count} x {hardware.get('gpu') or 'unknown GPU'}"
    elif hardware.get("device") == "mps":
        text = f"the GPU of {cpu}"
    else:
        text = f"{count} {'thread' if count == 1 else 'threads'} of {cpu}"
    return f"{text} on {len(run.hosts)} nodes" if len(run.hosts) > 1 else text


def _joined(results: Sequence[Measured]) -> Measured:
    for name in (name for name in Measured.__dataclass_fields__ if name not in _PER_RUN):
        values = list(dict.fromkeys(getattr(result, name) or "unknown" for result in results))
        if len(values) > 1:
            message = f"{name} differs between the runs: {', '.join(values)}. Record runs under the same conditions."
            raise UserError("record-other-conditions", message, field=name)
    columns: dict[str, Any] = {name: tuple(chain(*(getattr(result, name) for result in results))) for name in _COLUMNS}
    columns["commits"] = tuple(dict.fromkeys(commit for result in results for commit in result.commits))
    last = max(results, key=lambda result: result.date)
    return replace(last, **columns, disturbed=any(result.disturbed for result in results))
