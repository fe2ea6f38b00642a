"""Train, resume and evaluate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from paceline.analysis.details.slices import DetailsSpec
from paceline.api.arguments import Procs, check_count, check_name, check_path, check_procs, invalid
from paceline.api.in_process import in_this_process
from paceline.api.processes import run_in_processes
from paceline.api.runs import Run, check_best_or_last, path_of
from paceline.config.imports import load_imports
from paceline.config.io import load_recipe as _load_recipe
from paceline.config.io import recipe_from_tree, shipped, to_tree
from paceline.config.overrides import Overrides, words_of
from paceline.config.recipe import Recipe
from paceline.config.seeds import parse_seeds, seed_conflict, seed_words
from paceline.errors import UserError


def load_recipe(source: str | Path, overrides: Overrides | None = None) -> Recipe:
    """Return a shipped recipe or one in a YAML file, with some of its fields overridden."""
    return _load_recipe(str(check_path("recipe", source)), words_of(overrides))


def list_recipes() -> list[Recipe]:
    """Return the shipped recipes. `about` has their source, published and measured accuracy."""
    return [_load_recipe(name) for name in shipped()]


def loaded(recipe: str | Path | Recipe, overrides: Overrides | None) -> Recipe:
    """Return a recipe, or the one that a name or file means, with some of its fields overridden."""
    if isinstance(recipe, Recipe):
        return recipe_from_tree(to_tree(recipe), recipe.name, words_of(overrides))
    return load_recipe(recipe, overrides)


@overload
def train(
    recipe: str | Path | Recipe,
    overrides: Overrides | None = None,
    *,
    procs: Procs = "auto",
    name: str = "",
    runs: str | Path = "runs",
    results: str = "",
    seeds: None = None,
    parallel: int | None = None,
    in_process: bool = False,
) -> Run: ...


@overload
def train(
    recipe: str | Path | Recipe,
    overrides: Overrides | None = None,
    *,
    procs: Procs = "auto",
    name: str = "",
    runs: str | Path = "runs",
    results: str = "",
    seeds: int | Sequence[int],
    parallel: int | None = None,
    in_process: bool = False,
) -> list[Run]: ...


def train(
    recipe: str | Path | Recipe,
    overrides: Overrides | None = None,
    *,
    procs: Procs = "auto",
    name: str = "",
    runs: str | Path = "runs",
    results: str = "",
    seeds: int | Sequence[int] | None = None,
    parallel: int | None = None,
    in_process: bool = False,
) -> Run | list[Run]:
    """Train a recipe in `procs` new processes and return the run. An unfinished run of that name is resumed.

    `seeds`: train one run per seed, and return them all: a number of seeds, or a list such as [0, 3, 7]. Finished ones
    are skipped. `parallel`: how many of them to train side by side, by default as many as fit on the GPUs.

    By default there is one process per visible GPU, and one on CPUs.
    Notebooks show progress and curves. `in_process` trains in this process, on one rank, so that a debugger works.
    Ctrl-C stops after a checkpoint.
    """
    folder, name, procs = check_path("runs", runs), check_name(name), check_procs("procs", procs)
    if not isinstance(results, str):
        raise invalid("results", results, "a URL")
    trained = loaded(recipe, overrides)
    numbers = None if seeds is None else parse_seeds(seeds)
    if numbers is None and parallel is not None:
        raise UserError("missing-option", "parallel needs seeds, e.g. seeds=5.", option="seeds")
    if in_process and parallel is not None:
        message = "parallel has no effect with in_process=True, which trains the seeds in turn. Omit one of them."
        raise UserError("conflicting-options", message, option="parallel")
    if numbers and "seed" in (overrides or {}):
        raise seed_conflict()
    if in_process and numbers:
        return _train_seeds_here(trained, numbers, procs, folder, name, results)
    if in_process:
        return _train_here(trained, procs, folder, name, None, results, overrides)
    options = {"--runs": str(folder), "--name": name, "--results": results}
    options |= {"--parallel": str(check_count("parallel", parallel))} if parallel is not None else {}
    words = [f"{option}={value}" for option, value in options.items() if value]
    imports = {key: value for key, value in (overrides or {}).items() if key == "import"}  # also in the current folder
    found = run_in_processes(["train"], trained, [*words, *seed_words(numbers or ()), *words_of(imports)], procs)
    return list(map(Run, found["runs"])) if numbers else Run(found["run"])


def resume(
    run: str | Path | Run,
    overrides: Overrides | None = None,
    *,
    procs: Procs = "auto",
    in_process: bool = False,
) -> Run:
    """Resume an interrupted run, on any number of processes."""
    path, procs = path_of(run), check_procs("procs", procs)
    if in_process:
        recipe = load_recipe(path / "recipe.yaml", overrides)
        return _train_here(recipe, procs, path.parent, path.name, path, "", overrides)
    return Run(run_in_processes(["train"], None, [f"--resume={path}", *words_of(overrides)], procs)["run"])


def _train_here(
    recipe: Recipe,
    procs: Procs,
    runs: Path,
    name: str,
    run: Path | None,
    results: str,
    overrides: Overrides | None,
) -> Run:
    from paceline.engine.session import train_recipe

    _check_one_rank(procs)
    with in_this_process():
        load_imports(recipe)
        return Run(train_recipe(recipe, runs, check_name(name or recipe.name), run, results, list(overrides or {})))


def _train_seeds_here(
    recipe: Recipe, seeds: Sequence[int], procs: Procs, runs: Path, name: str, results: str
) -> list[Run]:
    from paceline.engine.seeds import train_seeds

    _check_one_rank(procs)
    with in_this_process():
        load_imports(recipe)
        return list(map(Run, train_seeds(recipe, seeds, runs, check_name(name or recipe.name), results)))


def _check_one_rank(procs: Procs) -> None:
    if procs not in (1, "auto"):
        message = f"in_process=True trains on one rank, but procs={procs}. Omit one of them."
        raise UserError("in-process-needs-one-rank", message, procs=procs)


def evaluate(
    run: str | Path | Run,
    overrides: Overrides | None = None,
    *,
    checkpoint: str = "best",
    split: str = "",
    data: str | Path = "",
    details: bool = False,
    slice_by: str = "",
    slice_file: str | Path = "",
    out: str | Path = "",
    procs: Procs = "auto",
    in_process: bool = False,
) -> dict[str, Any]:
    """Evaluate the best or the last checkpoint of a run, or a checkpoint folder, and return its metrics.

    `split`: train, val or test; by default the validation images. `data`: other prepared data, an image folder or a
    list. Fields of data and evaluate can be overridden, e.g. {"evaluate.tta": "flip"}.

    `details` also writes what the model gets wrong to a folder, `out` or one below the run, and the metrics have its
    path as `details`; `Run.evaluations` reads it. `slice_by`: also figures per value of a column of the list or of
    `slice_file`, or per text that a regular expression finds in the paths of images.
    """
    check_best_or_last(checkpoint)
    if data and "data.path" in (overrides or {}):
        raise UserError(
            "conflicting-options", f"data={str(data)!r} and data.path are both given. Leave one out.", option="data"
        )
    overrides = {**(overrides or {}), **({"data.path": str(check_path("data", data))} if data else {})}
    words, procs = words_of(overrides), check_procs("procs", procs)
    spec = _details_spec(details, slice_by, slice_file, out)
    if in_process:
        from paceline.engine.evaluation.saved import evaluate_path

        _check_one_rank(procs)
        with in_this_process():
            return evaluate_path(path_of(run), checkpoint, words, split, spec)[1]
    given = {
        "--checkpoint": checkpoint,
        "--split": split,
        "--slice-by": slice_by,
        "--slice-file": slice_file,
        "--out": out,
    }
    options = [f"{option}={value}" for option, value in given.items() if value]
    options += ["--details"] * details
    command = ["evaluate", str(path_of(run))]
    metrics: dict[str, Any] = run_in_processes(command, None, [*options, *words], procs)["metrics"]
    return metrics


def _details_spec(details: bool, slice_by: str, slice_file: str | Path, out: str | Path) -> DetailsSpec | None:
    file = check_path("slice_file", slice_file) if slice_file else None
    spec = DetailsSpec(slice_by, file, check_path("out", out) if out else None)
    if details:
        spec.check()
        return spec
    if spec != DetailsSpec():
        message = "slice_by, slice_file and out need details=True. Add it, or leave them out."
        raise UserError("missing-option", message, option="details")
    return None
