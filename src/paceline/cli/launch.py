"""The command `launch`: make a job of a recipe and a backend, and start it."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.ec2 import ec2_spec
from paceline.cli.hosts import hosts_from
from paceline.cli.jobs import backend_of, follow_to_end
from paceline.cli.launch_options import BACKENDS, find_source, launch_parser, refuse_options_of_other_backends
from paceline.cli.options import check_option_values, check_results_url, plain_name, split_source, warn_of_readers
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.config.data import Data
    from paceline.config.recipe import Recipe
    from paceline.launch.job import Job

_MAX_BYTES = 1 << 20  # of a recipe or summary in an object store


def launch(arguments: list[str]) -> int:
    """Launch a job, and follow it unless --detach is given; return its exit status."""
    parser = launch_parser()
    backend_name, rest = split_source(arguments)
    known = ", ".join(BACKENDS)
    if backend_name not in BACKENDS:
        if backend_name:
            message = f"launch {backend_name}: the backend is unknown. Use {known}."
            raise UserError("unknown-backend", message, backend=backend_name)
        parser.parse_args(rest)
        raise UserError("missing-backend", f"launch needs a backend: {known}. See `paceline launch --help`.")
    source, words = find_source(parser, rest)
    options, overrides = parser.parse_known_args(words)
    refuse_options_of_other_backends(parser, backend_name, options)
    check_option_values(options)
    job = _job(backend_name, source, options, overrides)
    if backend_name == "manifest":
        from paceline.launch.manifests import manifest

        print(manifest(job, options.engine, options.image, int(options.gpus_per_node or 0)), end="")
        if len(job.hosts) > 1:
            warn_of_readers("the token of the job")
        return 0
    from paceline.launch import job as jobs

    backend = backend_of(job)
    try:
        plan = backend.plan(job)  # rejects values that no script can hold, before anything starts or costs money
        if options.dry_run:
            print("\n\n".join(map(str, plan)))
            return 0
        job = backend.submit(job)
    except BaseException:
        if not jobs.is_known(job):
            jobs.forget(job)  # its id was reserved
        raise
    print(f"{job.id}: started on {', '.join(job.hosts)}", file=sys.stderr)
    return 0 if options.detach else follow_to_end(job)


def _reachable(data: "Data", backend: str) -> "Data":
    """Return the data with an absolute path on local nodes; elsewhere, refuse a relative path."""
    from paceline.config.data import BUILT_IN
    from paceline.data.shards import default_folder
    from paceline.system.remote import is_remote

    if data.name in BUILT_IN or is_remote(data.path) or Path(data.path).is_absolute() or data.path.startswith("~"):
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


def _job(backend: str, source: str, options: argparse.Namespace, overrides: list[str]) -> "Job":
    from paceline.config.batch import layouts
    from paceline.config.io import dump_recipe, load_recipe
    from paceline.launch.job import Job, new_id

    if options.resume:
        recipe = _recipe_of_results(backend, source, overrides, options)
    elif source:
        # as JSON, because an override is parsed as YAML
        path = ["--data.path", json.dumps(options.data, ensure_ascii=False)] if options.data else []
        recipe = load_recipe(source, [*overrides, *path])
    else:
        raise UserError("missing-recipe", "launch needs a recipe. `paceline recipes` lists the shipped ones.")
    recipe = replace(recipe, data=_reachable(recipe.data, backend))
    hosts = hosts_from(options.hosts) if backend == "ssh" else [f"node-{number}" for number in range(options.nodes)]
    extra: dict[str, object] = {"rendezvous_host": options.rendezvous_host, "gpu_type": options.gpu_type}
    if options.ssh_config:
        extra["ssh"] = ["-F", str(options.ssh_config.resolve())]
    if backend == "slurm":
        extra["slurm"] = _slurm(options)
    if backend == "ec2":
        extra["ec2"] = ec2_spec(options)
    if options.min_nodes > len(hosts):
        message = f"--min-nodes {options.min_nodes} is more than the {len(hosts)} nodes of the job."
        raise UserError("too-few-nodes", message, min_nodes=options.min_nodes, nodes=len(hosts))
    layouts(recipe, len(hosts) * options.procs_per_node)
    _check_destination(options)
    job_id = new_id(options.name or recipe.name, reserve=not options.dry_run and backend != "manifest")
    default_python = "" if backend in ("ssh", "ec2") else sys.executable
    return Job(
        job_id,
        backend,
        options.name or job_id,
        dump_recipe(recipe),
        tuple(hosts),
        options.procs_per_node,
        options.min_nodes,
        rank_timeout=int(options.rank_timeout),
        python=options.python or default_python,
        container=options.container,
        code=str(_source_tree() or ""),
        pass_env=tuple(name for name in options.pass_env.split(",") if name),
        runs=str(options.runs.resolve()),
        resume=options.resume,
        results=options.results,
        extra=extra,
    )


def _check_destination(options: argparse.Namespace) -> None:
    """Check --results, and that no other run has the same name and folder."""
    from paceline.launch.values import run_name

    if options.results:
        check_results_url(options.results)
    if not options.name:
        return
    run_name("--name", plain_name(options.name))
    if (folder := options.runs / options.name).exists():
        fix = "Move it away." if options.resume else "Choose another --name."
        raise UserError("run-exists", f"{folder} already exists. {fix}", path=folder)
    from paceline.launch.job import all_ids, load

    destination = (options.name, str(options.runs.resolve()))
    for job in (one for one in map(load, all_ids()) if (one.name, one.runs) == destination):
        if any(state.startswith(("running", "RUNNING", "PENDING")) for _, state in backend_of(job).status(job)):
            message = f"job {job.id} with the name {options.name} is still running. Choose another --name, or stop it."
            raise UserError("job-running", message, job=job.id)


def _recipe_of_results(backend: str, source: str, overrides: Sequence[str], options: argparse.Namespace) -> "Recipe":
    """Return the recipe of the results to resume from, and set their name and URL as options."""
    import yaml

    from paceline.config import yamls
    from paceline.config.io import recipe_from_tree
    from paceline.system import remote
    from paceline.system.files import printable

    url = options.resume.rstrip("/")
    if backend not in ("local", "ssh", "ec2"):
        message = f"--resume applies to launch local, ssh, ec2, not to {backend}."
        raise UserError("option-not-applicable", message, option="--resume")
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
    options.results, _, options.name = url.rpartition("/")
    return recipe_from_tree(tree, url)


def _slurm(options: argparse.Namespace) -> dict[str, object]:
    from paceline.launch.slurm import options_of

    names = ("partition", "account", "time", "gpus-per-node", "cpus-per-task")
    given = {name: getattr(options, name.replace("-", "_")) for name in names}
    seeds = [int(seed) for seed in options.seeds.split(",") if seed.strip().isdecimal()]
    if len(seeds) != len([seed for seed in options.seeds.split(",") if seed]):
        message = f"--seeds {options.seeds} is not a list of whole numbers. Write e.g. 0,1,2."
        raise UserError("invalid-seeds", message, seeds=options.seeds)
    runtime = options.container_runtime
    return {"options": options_of(given, options.sbatch), "seeds": seeds, "notice": options.notice, "runtime": runtime}


def _source_tree() -> Path | None:
    """Return the checkout that this program runs from, if it does."""
    import paceline

    root = Path(paceline.__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None
