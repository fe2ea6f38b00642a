"""Check what is launched before anything starts: data that nodes can reach, batch layout, names, code to copy."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import paceline
from paceline.config import import_files
from paceline.config.batch import check_strategy, layouts
from paceline.config.data import BUILT_IN, FROM_FILES, IN_MEMORY, Data
from paceline.config.io import dump_recipe
from paceline.config.recipe import Recipe
from paceline.data.shards import default_folder
from paceline.errors import UserError
from paceline.launch.backends import backend_of
from paceline.launch.job import all_ids, load
from paceline.launch.procs import total, with_procs
from paceline.launch.specs import ElasticSpec, LaunchSpec, ManifestSpec, RemoteSpec, Spec
from paceline.launch.states import ACTIVE
from paceline.launch.values import run_name
from paceline.system.remote import is_remote

_MAX_EXTENSION_BYTES = 4 << 20
SpecT = TypeVar("SpecT", bound=Spec | ManifestSpec)


def with_reachable_data(recipe: Recipe, backend: str) -> Recipe:
    """Return the recipe with an absolute data path on local nodes; elsewhere, refuse a relative path."""
    return replace(recipe, data=reachable(recipe.data, backend))


def reachable(data: Data, backend: str) -> Data:
    """Return the data with an absolute path on local nodes; elsewhere, refuse a relative path."""
    registered = data.name and data.name not in (*IN_MEMORY, *FROM_FILES)
    if registered or data.name in BUILT_IN or is_remote(data.path):
        return data
    if Path(data.path).is_absolute() or data.path.startswith("~"):
        return data
    if backend == "local":
        return replace(data, path=str(Path(data.path or default_folder(data.name)).absolute()))
    if data.path and backend in ("ssh", "ec2"):
        message = (
            f"data.path={data.path!r} is relative, but each node has its own working directory. "
            "Use an absolute path on the nodes, or an s3:// URL."
        )
        raise UserError("data-path-relative", message, path=data.path)
    return data


def check_spec(spec: Spec | ManifestSpec) -> None:
    """Refuse too few nodes, and a run name that is taken."""
    nodes = len(spec.hosts)
    if isinstance(spec, ElasticSpec) and spec.min_nodes > nodes:
        message = f"--min-nodes {spec.min_nodes} is more than the {nodes} nodes of the job."
        raise UserError("too-few-nodes", message, min_nodes=spec.min_nodes, nodes=nodes)
    if not spec.name or not isinstance(spec, LaunchSpec):
        return
    run_name("--name", spec.name)
    if folder := next(filter(Path.exists, (Path(spec.runs) / name for name in spec.run_names)), None):
        fix = "Move it away." if isinstance(spec, ElasticSpec) and spec.resume else "Choose another --name."
        raise UserError("run-exists", f"{folder} already exists. {fix}", path=folder)
    for job in map(load, all_ids()):
        same = (job.spec.name, job.spec.runs) == (spec.name, spec.runs)
        if same and any(node.state in ACTIVE for node in backend_of(job.spec).status(job)):
            message = f"job {job.id} with the name {spec.name} is still running. Choose another --name, or stop it."
            raise UserError("job-running", message, job=job.id)


def new_spec(kind: type[SpecT], recipe: Recipe, options: Mapping[str, Any]) -> SpecT:
    """Return a checked spec of a recipe; `options` are fields of the spec."""
    given = {**options, "recipe": dump_recipe(recipe), "extensions": extension_files(recipe)}
    given["code"] = str(source_tree() or "")
    if issubclass(kind, LaunchSpec):
        given["runs"] = str(Path(options.get("runs", "runs")).resolve())
        given["python"] = options.get("python") or ("" if issubclass(kind, RemoteSpec) else sys.executable)
    spec = kind(**given)
    check_spec(spec)
    spec = with_procs(spec, recipe)
    ranks = total(spec) or len(spec.hosts)
    check_strategy(recipe, ranks)
    layouts(recipe, ranks)  # refuses a batch that the ranks cannot share
    return spec


def extension_files(recipe: Recipe) -> dict[str, str]:
    """Return the files of the packages that a recipe imports, to be copied to the nodes."""
    files = import_files.files_of(recipe.imports)
    if (size := sum(map(len, files.values()))) > _MAX_EXTENSION_BYTES:
        message = (
            f"the packages of imports={list(recipe.imports)} have {size >> 20} MB, and at most "
            f"{_MAX_EXTENSION_BYTES >> 20} MB are copied to nodes. Install them there, and name a small module that "
            "imports them."
        )
        raise UserError("extensions-too-large", message, size=size)
    return files


def source_tree() -> Path | None:
    """Return the checkout that this program runs from, if it does."""
    root = Path(paceline.__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None
