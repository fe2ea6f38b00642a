"""Turn the options of `launch` and a recipe into the typed spec of a backend."""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.cli.hosts import hosts_from
from paceline.cli.launch_ec2 import ec2_fields
from paceline.cli.options import check_results_url, option_name, plain_name
from paceline.config.imports import allow_given, load_imports
from paceline.config.io import load_recipe, split_overrides
from paceline.config.recipe import Recipe
from paceline.config.seeds import parse_seeds, seed_conflict
from paceline.errors import UserError
from paceline.launch.checks import new_spec, with_reachable_data
from paceline.launch.specs import Ec2Spec, LocalSpec, ManifestSpec, SlurmSpec, Spec, SshSpec
from paceline.launch.values import operand, plain
from paceline.system.files import say
from paceline.system.signals import interrupts_end

_MAX_BYTES = 1 << 20  # of a recipe or summary in an object store
_KINDS = {"local": LocalSpec, "ssh": SshSpec, "slurm": SlurmSpec, "ec2": Ec2Spec, "manifest": ManifestSpec}


def spec_of(options: argparse.Namespace, source: str, overrides: Sequence[str]) -> Spec | ManifestSpec:
    """Return the spec of a launch after checking it; its fields are the options of the same name, unless changed."""
    _check_option_values(options)
    recipe, resumed = _recipe(options, source, overrides)
    given = _backend_fields(options) | resumed
    if options.backend != "manifest":
        given |= _launch_fields(options)
    given["seeds"] = _seeds(options, overrides)
    check_results_url(given.get("results", options.results))
    if options.name:
        plain_name(options.name)
    kind = _KINDS[options.backend]
    same = {field.name: getattr(options, field.name) for field in fields(kind) if hasattr(options, field.name)}
    spec: Spec | ManifestSpec = new_spec(kind, recipe, same | given)
    _check_names(recipe, bool(resumed))
    return spec


def _seeds(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[int, ...]:
    if options.seeds is None:
        return ()
    if getattr(options, "resume", ""):
        message = "--resume continues one run. Omit --seeds."
        raise UserError("conflicting-options", message, option="--seeds")
    if any(key == "seed" for key, _ in split_overrides(overrides)):
        raise seed_conflict()
    return parse_seeds(options.seeds)


def _check_names(recipe: Recipe, resume: bool) -> None:
    """Refuse what training would refuse on the nodes. Packages that only the nodes have leave that to them."""
    try:
        with interrupts_end():
            from paceline.engine.parts import check_parts
        load_imports(recipe)
        check_parts(recipe, resume)
    except (ImportError, UserError) as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if not isinstance(cause, ImportError):
            raise
        say(f"paceline: names in the recipe are checked on the nodes only ({cause})", error=True)


def _check_option_values(options: argparse.Namespace) -> None:
    """Check all values: they become part of scripts, and some cannot be quoted."""
    for name, value in vars(options).items():
        if isinstance(value, str | Path):
            plain(option_name(name), str(value))
    for name in ("python", "container", "image"):
        operand(option_name(name), getattr(options, name, ""))


def _recipe(options: argparse.Namespace, source: str, overrides: Sequence[str]) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe with data that the nodes can reach; with --resume, also the name and place of its results."""
    resumed: dict[str, str] = {}
    if getattr(options, "resume", ""):
        recipe, resumed = _from_results(options, source, overrides)
    elif source:
        # as JSON, because an override is parsed as YAML
        path = ["--data.path", json.dumps(options.data, ensure_ascii=False)] if options.data else []
        allow_given(overrides)
        recipe = load_recipe(source, [*overrides, *path])
    else:
        raise UserError("missing-recipe", "launch needs a recipe. `paceline recipes` lists the shipped ones.")
    return with_reachable_data(recipe, options.backend), resumed


def _from_results(options: argparse.Namespace, source: str, overrides: Sequence[str]) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe of the results to resume from, and their name and place."""
    import yaml

    from paceline.config import yamls
    from paceline.config.io import recipe_from_tree
    from paceline.system import remote
    from paceline.system.files import printable

    url = options.resume.rstrip("/")
    if not url.startswith("s3://"):
        raise UserError("resume-url-invalid", f"--resume {url} is invalid. Write s3://BUCKET/PREFIX/RUN.", url=url)
    if source or overrides or options.name or options.data:
        message = "--resume uses the recipe, data and name of the run. Omit the recipe, overrides, --name and --data."
        raise UserError("conflicting-options", message, option="--resume")
    try:
        with remote.opened(remote.join(url, "recipe.yaml")) as stream:
            tree = dict(yamls.parse(stream.read(yamls.MAX_BYTES).decode()))
        with remote.opened(remote.join(url, "summary.json")) as stream:
            summary = dict(json.loads(stream.read(_MAX_BYTES)))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = printable(" ".join(str(error).split())[:200])
        message = f"--resume {url}: its recipe.yaml or summary.json is corrupt ({reason})."
        raise UserError("results-corrupt", message, url=url) from None
    if summary.get("status") == "finished":
        raise UserError("run-finished", f"--resume {url}: the run is finished.", url=url)
    results, _, name = url.rpartition("/")
    return recipe_from_tree(tree, url), {"results": results, "name": name}


def _launch_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of jobs that paceline starts itself, if they differ from the options."""
    return {
        "pass_env": tuple(filter(None, options.pass_.split(","))),
        "runs": plain("--runs", str(options.runs)),
    }


def _backend_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of one backend that differ from the options."""
    backend = options.backend
    names = hosts_from(options.hosts) if backend == "ssh" else [f"node-{number}" for number in range(options.nodes)]
    given: dict[str, Any] = {"hosts": tuple(names)}
    if backend in ("ssh", "ec2"):
        given["ssh_config"] = str(options.ssh_config.resolve()) if options.ssh_config else ""
    if backend == "slurm":
        given |= _slurm_fields(options)
    elif backend == "ec2":
        given |= ec2_fields(options)
    elif backend == "manifest":
        given |= {"engine": options.for_, "gpus_per_node": options.gpus_per_node or 0}
    return given


def _slurm_fields(options: argparse.Namespace) -> dict[str, Any]:
    names = ("partition", "account", "time", "gpus_per_node", "cpus_per_task")
    given = {name.replace("_", "-"): str(value) for name in names if (value := getattr(options, name))}
    return {"sbatch_options": given | _sbatch_options(options.sbatch)}


def _sbatch_options(text: str) -> dict[str, str | None]:
    """Return the options in --sbatch; None: an option without a value."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        message = f"--sbatch {text!r}: {str(error).lower()}. Close the quotes."
        raise UserError("invalid-sbatch-option", message) from None
    parts = [word.removeprefix("--").partition("=") for word in words]
    return {key: value if equals else None for key, equals, value in parts}
