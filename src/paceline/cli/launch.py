"""The verb launch: from a recipe and places to a job."""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.ec2 import add_ec2_options, ec2_spec
from paceline.cli.hosts import hosts_from
from paceline.cli.jobs import backend_of, follow_to_the_end
from paceline.cli.options import check_words, count, make_parser, plain_name, positive, results_place, split_source
from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.config.data import Data
    from paceline.config.recipe import Recipe
    from paceline.launch.job import Job

_MOST = 1 << 20  # bytes of a recipe or summary
_BACKENDS = ("local", "ssh", "slurm", "ec2", "manifest")

_LAUNCH = """Train a recipe on several machines, and follow it.

    paceline launch local --nodes 2 RECIPE        several "nodes" on this machine: a rehearsal
    paceline launch ssh --hosts a,b RECIPE        machines that you can ssh to
    paceline launch slurm --nodes 2 RECIPE        a SLURM cluster, from one of its machines
    paceline launch ec2 --nodes 2 --instance-type g4dn.2xlarge --spot RECIPE      rented, and given back at the end
    paceline launch manifest --for kubernetes RECIPE       a file for SkyPilot, Kubeflow or Kubernetes

Fields of the recipe are overridden as for `paceline train`. The job goes on without this terminal; `paceline attach`
comes back to it. `--dry-run` prints what would be done, and does nothing."""


def launch(arguments: list[str]) -> int:
    parser = make_parser("launch", "local|ssh|slurm|ec2|manifest RECIPE [options] [--dotted.field VALUE ...]", _LAUNCH)
    parser.add_argument("--hosts", default="", metavar="A,B|FILE", help="ssh: names of machines, or a file with them")
    parser.add_argument("--ssh-config", type=Path, metavar="FILE", help="ssh: instead of ~/.ssh/config")
    parser.add_argument("--nodes", type=count, default=2, metavar="N", help="how many, but for ssh (default 2)")
    parser.add_argument(
        "--procs-per-node", type=count, default=1, metavar="N", help="processes on each machine, e.g. GPUs (default 1)"
    )
    parser.add_argument(
        "--min-nodes", type=count, default=1, metavar="N", help="machines that are enough to go on (default 1)"
    )
    parser.add_argument("--name", default="", help="name of the run (default: recipe and time)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where its folder is brought to (default: runs)"
    )
    parser.add_argument(
        "--results", default="", metavar="s3://BUCKET/PREFIX", help="copy the run folder there while it goes on"
    )
    parser.add_argument(
        "--resume", default="", metavar="s3://BUCKET/PREFIX/RUN", help="go on with such results, in place of RECIPE"
    )
    parser.add_argument(
        "--data", default="", metavar="PLACE", help="prepared data: a folder there, or s3://..., which is fetched first"
    )
    parser.add_argument("--python", default="", metavar="PATH", help="interpreter on the machines that has paceline")
    parser.add_argument(
        "--container", default="", metavar="IMAGE", help="run in it: docker, on slurm apptainer or pyxis"
    )
    parser.add_argument("--pass", dest="pass_env", default="", metavar="A,B", help="variables to pass on to the ranks")
    parser.add_argument(
        "--rank-timeout",
        type=positive,
        default=15,
        metavar="S",
        help="a rank that is silent so long is lost (default 15)",
    )
    parser.add_argument(
        "--rendezvous-host", default="auto", metavar="WHERE", help="where the rendezvous runs: auto, here, HOST"
    )
    slurm = parser.add_argument_group("slurm")
    for name in ("partition", "account", "time", "cpus-per-task"):
        slurm.add_argument(f"--{name}", metavar="X", help="as for sbatch")
    slurm.add_argument("--gpus-per-node", type=count, metavar="N", help="as for sbatch; also for manifests")
    slurm.add_argument(
        "--sbatch", default="", metavar="'a=b c'", help="further options for sbatch: 'mem=64G exclusive'"
    )
    slurm.add_argument("--container-runtime", choices=["apptainer", "pyxis"], default="apptainer")
    slurm.add_argument("--seeds", default="", metavar="0,1,2", help="an array of jobs, one for each seed")
    slurm.add_argument(
        "--notice", type=count, default=120, metavar="S", help="save so long before the time is up (default 120)"
    )
    manifest = parser.add_argument_group("manifest")
    manifest.add_argument("--for", dest="engine", default="", metavar="ENGINE", help="skypilot, kubeflow or kubernetes")
    manifest.add_argument("--gpu-type", default="", metavar="NAME", help="for skypilot: A100, L4 ...")
    manifest.add_argument("--image", default="", metavar="IMAGE", help="container with paceline in it")
    add_ec2_options(parser)
    parser.add_argument("--detach", action="store_true", help="do not follow it")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    backend, rest = split_source(arguments)
    if backend not in _BACKENDS:
        if backend:
            raise UserError(f"launch {backend}: there is no such back end; known are {', '.join(_BACKENDS)}")
        parser.parse_args(rest)
        raise UserError(f"launch where? {', '.join(_BACKENDS)}; `paceline launch --help`")
    source, words = _find_source(parser, rest)
    options, overrides = parser.parse_known_args(words)
    _refuse_options_of_others(parser, backend, options)
    check_words(options)
    job = _job(backend, source, options, overrides)
    if backend == "manifest":
        from paceline.launch.manifests import manifest as made

        print(made(job, options.engine, options.image, int(options.gpus_per_node or 0)), end="")
        return 0
    from paceline.launch import job as jobs

    back = backend_of(job)
    try:
        plan = back.plan(job)  # refuses what no script can hold, before anything starts or costs money
        if options.dry_run:
            print("\n\n".join(map(str, plan)))
            return 0
        job = back.submit(job)
    except BaseException:
        if not jobs.is_known(job):
            jobs.forget(job)  # its name had been reserved
        raise
    print(f"{job.id}: handed to {', '.join(job.hosts)}", file=sys.stderr)
    return 0 if options.detach else follow_to_the_end(job)


def _find_source(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe may stand anywhere among the launch's own options: it is the first word that no option takes."""
    from paceline.config.io import fields
    from paceline.config.synonyms import instead

    known = {option for action in parser._actions for option in action.option_strings}
    plain = {f"--{row.path}" for row in fields() if "." not in row.path}
    takes_value = {
        option
        for action in parser._actions
        for option in action.option_strings
        if action.nargs is None and action.const is None
    }
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("-"):
            return word, [*words[:position], *words[position + 1 :]]
        name = word.partition("=")[0]
        if name not in known | plain and "." not in name:
            if hint := instead(name.strip("-").replace("-", "_"), None, on_command_line=True):
                raise UserError(f"{name}: no such option; {hint}")
            options = sorted(known | plain)
            close = [own for own in options if own.startswith(name)] or difflib.get_close_matches(name, options)
            raise UserError(f"{name}: there is no such option{f'; did you mean {close[0]}?' if close else ''}")
        takes = (word in takes_value or word in plain or "." in word) and "=" not in word
        position += 2 if takes else 1
    return "", list(words)


def _reachable(data: "Data", backend: str) -> "Data":
    """Nodes run in folders of their own: here relative paths are made absolute, elsewhere they mean nothing."""
    from paceline.config.data import BUILT_IN
    from paceline.data.shards import default_folder
    from paceline.system.remote import is_remote

    if data.name in BUILT_IN or is_remote(data.path) or Path(data.path).is_absolute() or data.path.startswith("~"):
        return data
    if backend == "local":
        return replace(data, path=str(Path(data.path or default_folder(data.name)).absolute()))
    if data.path and backend in ("ssh", "ec2"):
        raise UserError(
            f"data.path={data.path!r} is relative, but each node has its own working directory; use the absolute path "
            "on the nodes, or an s3:// URL"
        )
    return data


def _job(backend: str, source: str, options: argparse.Namespace, overrides: list[str]) -> "Job":
    from paceline.config.batch import layouts
    from paceline.config.io import dump_recipe, load_recipe
    from paceline.launch.job import Job, new_id

    if options.resume:
        recipe = _brought_recipe(backend, source, overrides, options)
    elif source:
        # as it is, where an override would be read as YAML
        place = ["--data.path", json.dumps(options.data, ensure_ascii=False)] if options.data else []
        recipe = load_recipe(source, [*overrides, *place])
    else:
        raise UserError("launch which recipe? `paceline recipes` lists them")
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
        raise UserError(f"--min-nodes {options.min_nodes}, but there are only {len(hosts)} machines")
    layouts(recipe, len(hosts) * options.procs_per_node)
    _check_places(options)
    job_id = new_id(options.name or recipe.name, reserve=not options.dry_run and backend != "manifest")
    own_python = "" if backend in ("ssh", "ec2") else sys.executable
    return Job(
        job_id,
        backend,
        options.name or job_id,
        dump_recipe(recipe),
        tuple(hosts),
        options.procs_per_node,
        options.min_nodes,
        rank_timeout=int(options.rank_timeout),
        python=options.python or own_python,
        container=options.container,
        code=str(_source_tree() or ""),
        pass_env=tuple(name for name in options.pass_env.split(",") if name),
        runs=str(options.runs.resolve()),
        resume=options.resume,
        results=options.results,
        extra=extra,
    )


def _refuse_options_of_others(parser: argparse.ArgumentParser, backend: str, options: argparse.Namespace) -> None:
    """What another back end would heed must not be passed over in silence."""
    groups = {"slurm": ("slurm",), "manifest": ("manifest",), "ec2": ("ec2",)}
    single = {
        "hosts": ("ssh",), "ssh_config": ("ssh", "ec2"), "rendezvous_host": ("ssh", "ec2"),
        "gpus_per_node": ("slurm", "manifest"),
        "nodes": ("local", "slurm", "ec2", "manifest"),
    }  # fmt: skip
    for group in parser._action_groups:
        for action in group._group_actions:
            of = single.get(action.dest) or groups.get(group.title or "")
            if of and backend not in of and getattr(options, action.dest) != action.default:
                raise UserError(f"{action.option_strings[0]} is for launch {' and '.join(of)}, not for {backend}")


def _check_places(options: argparse.Namespace) -> None:
    """Where the run folder will be, here and in an object store."""
    from paceline.launch.values import run_name

    if options.results:
        results_place(options.results)
    if not options.name:
        return
    run_name("--name", plain_name(options.name))
    if (folder := options.runs / options.name).exists():
        cure = "move it away" if options.resume else "choose another --name"
        raise UserError(f"{folder} exists already; {cure}")
    from paceline.launch.job import all_ids, load

    place = (options.name, str(options.runs.resolve()))
    for job in (own for own in map(load, all_ids()) if (own.name, own.runs) == place):
        if any(state.startswith(("running", "RUNNING", "PENDING")) for _, state in backend_of(job).status(job)):
            raise UserError(f"{job.id} of that name still runs; choose another --name, or stop it")


def _brought_recipe(backend: str, source: str, overrides: Sequence[str], options: argparse.Namespace) -> "Recipe":
    """The recipe of the run to go on with, whose name and place of results are those that it had."""
    import yaml

    from paceline.config.io import recipe_from_tree
    from paceline.system import remote
    from paceline.system.files import printable

    place = options.resume.rstrip("/")
    if backend not in ("local", "ssh", "ec2") or not place.startswith("s3://"):
        raise UserError(f"--resume {place}: write s3://BUCKET/PREFIX/RUN, for local, ssh or ec2")
    if source or overrides or options.name or options.data:
        raise UserError("--resume goes on with the run's own recipe, data and name; leave others out")
    try:
        with remote.opened(remote.join(place, "recipe.yaml")) as stream:
            tree = dict(yaml.safe_load(stream.read(_MOST)))
        with remote.opened(remote.join(place, "summary.json")) as stream:
            summary = dict(json.loads(stream.read(_MOST)))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = printable(" ".join(str(error).split())[:200])
        raise UserError(f"--resume {place}: its recipe.yaml or summary.json is corrupt ({reason})") from None
    if summary.get("status") == "finished":
        raise UserError(f"--resume {place}: that run is finished")
    options.results, _, options.name = place.rpartition("/")
    return recipe_from_tree(tree, place)


def _slurm(options: argparse.Namespace) -> dict[str, object]:
    from paceline.launch.slurm import options_of

    names = ("partition", "account", "time", "gpus-per-node", "cpus-per-task")
    given = {name: getattr(options, name.replace("-", "_")) for name in names}
    seeds = [int(seed) for seed in options.seeds.split(",") if seed.strip().isdecimal()]
    if len(seeds) != len([seed for seed in options.seeds.split(",") if seed]):
        raise UserError(f"--seeds {options.seeds}: write whole numbers, e.g. 0,1,2")
    runtime = options.container_runtime
    return {"options": options_of(given, options.sbatch), "seeds": seeds, "notice": options.notice, "runtime": runtime}


def _source_tree() -> Path | None:
    """The checkout that this program runs from, if it does."""
    import paceline

    root = Path(paceline.__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None
