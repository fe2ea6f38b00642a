"""The command line of `launch`: one subparser per backend, and the words that are for the recipe."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.cli.launch_ec2 import add_ec2_options
from paceline.cli.options import (
    closest,
    complete_source,
    count,
    count_or_auto,
    make_parser,
    options_of,
    parser_settings,
    refuse_misspelled,
)
from paceline.errors import UserError

_LAUNCH = """Train a recipe on several nodes, and follow it.

    paceline launch local --nodes 2 RECIPE        several simulated nodes on this machine
    paceline launch ssh --hosts a,b RECIPE        hosts that you can ssh to
    paceline launch slurm --nodes 2 RECIPE        a SLURM cluster, from a login node
    paceline launch ec2 --nodes 2 --instance-type g4dn.2xlarge --spot RECIPE      EC2 instances, terminated at the end
    paceline launch manifest --for kubernetes RECIPE       a manifest for SkyPilot, Kubeflow or Kubernetes

Override fields of the recipe as for `paceline train`. The job continues without this terminal; `paceline attach`
follows it again. `--dry-run` prints what would be done, and does nothing. `paceline launch ssh --help` shows the
options of a backend."""

# the options of each usage line, and its summary
_BACKENDS = {
    "local": ("[--nodes N]", "Train a recipe on several simulated nodes on this machine, to try multi-node training."),
    "ssh": ("--hosts A,B", "Train a recipe on hosts that you can ssh to."),
    "slurm": ("[--nodes N]", "Train a recipe on a SLURM cluster, from a login node."),
    "ec2": ("--instance-type TYPE [--nodes N]", "Train a recipe on EC2 instances, terminated at the end."),
    "manifest": ("--for ENGINE", "Print a manifest for SkyPilot, Kubeflow or Kubernetes."),
}


def parse_launch(arguments: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """Return the options with the backend, the recipe, and the overrides of its fields."""
    parser, backends = _parsers()
    backend, known = next(iter(arguments), ""), ", ".join(backends)
    if not backend or backend.startswith("-"):
        parser.parse_known_args(arguments[:1])  # it may be --help
        raise UserError("missing-backend", f"launch needs a backend: {known}. See `paceline launch --help`.")
    if backend not in backends:
        close = closest(backend, backends)
        hint = f"Did you mean {close}?" if close else f"Use {known}."
        message = f"launch {backend}: the backend is unknown. {hint}"
        raise UserError("unknown-backend", message, backend=backend)
    options, words = parser.parse_known_args(arguments)
    _refuse_options_of_others(backend, words, backends)
    source, overrides = _split_recipe(words, options_of(backends[backend]))
    refuse_misspelled(backends[backend], overrides)
    return options, source, overrides


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of `launch`, and its subparsers by backend."""
    parser = make_parser("launch", "BACKEND RECIPE [options] [--dotted.field VALUE ...]", _LAUNCH)
    parser.add_argument("-h", "--help", action="help", help="show this help")
    commands = parser.add_subparsers(dest="backend", metavar="BACKEND")
    backends = {}
    for name, (options, summary) in _BACKENDS.items():
        usage = f"{options} RECIPE [options] [--dotted.field VALUE ...]"
        backend = commands.add_parser(name, help=summary, **parser_settings(f"launch {name}", usage, summary))
        _add_node_options(backend, name)
        _add_run_options(backend, name)
        if name == "slurm":
            _add_slurm_options(backend)
        elif name == "ec2":
            add_ec2_options(backend)
        elif name == "manifest":
            _add_manifest_options(backend)
        backend.add_argument("-h", "--help", action="help", help="show this help")
        complete_source(backend, "RECIPE")
        backends[name] = backend
    return parser, backends


def _add_node_options(parser: argparse.ArgumentParser, backend: str) -> None:
    add = parser.add_argument
    if backend == "ssh":
        add("--hosts", default="", metavar="A,B|FILE", help="names of hosts, or a file with one per line")
    else:
        add("--nodes", type=count, default=2, metavar="N", help="number of nodes (default: 2)")
    add(
        "--procs",
        type=count_or_auto,
        default="auto",
        metavar="N|auto",
        help="processes per node (default: auto, one per GPU, one on CPUs)",
    )
    is_elastic = backend in ("local", "ssh", "ec2")
    if is_elastic:
        add(
            "--min-nodes",
            type=count,
            default=1,
            metavar="N",
            help="fewest nodes to continue with (default: 1)",
        )
    add(
        "--rank-timeout",
        type=count,
        default=15 if is_elastic else 600,
        metavar="S",
        help="seconds without a response after which a rank is considered failed (default: %(default)s)",
    )
    if backend in ("ssh", "ec2"):
        add("--ssh-config", type=Path, metavar="FILE", help="use this file instead of ~/.ssh/config")
        add("--rendezvous-host", default="auto", metavar="HOST", help="host of the rendezvous store: auto, here, HOST")
    if backend in ("slurm", "manifest"):
        add("--gpus-per-node", type=count, metavar="N", help="GPUs per node")


def _add_run_options(parser: argparse.ArgumentParser, backend: str) -> None:
    add = parser.add_argument
    add("--name", default="", help="name of the run (default: recipe and time)")
    how = "in a job array with a task per seed" if backend == "slurm" else "one after the other"
    add(
        "--seeds",
        metavar="N|0,3,7",
        help=f"train N seeds, or the listed ones, {how}, as runs NAME-seed0, ...",
    )
    add("--results", default="", metavar="s3://BUCKET/PREFIX", help="copy the run folder there during training")
    if backend in ("local", "ssh", "ec2"):
        add(
            "--resume",
            default="",
            metavar="s3://BUCKET/PREFIX/RUN",
            help="resume a run copied by --results; omit RECIPE",
        )
    add(
        "--data",
        default="",
        metavar="PATH",
        help="prepared data: a folder on the nodes, or an s3:// URL to download first",
    )
    add("--selftest", action="store_true", help="run `paceline selftest` on every node first; train only if it passes")
    if backend == "manifest":
        return
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="fetch the run folder to DIR (default: runs)")
    add("--python", default="", metavar="PATH", help="Python interpreter on the nodes, with paceline installed")
    runtime = "apptainer or pyxis" if backend == "slurm" else "docker"
    add("--container", default="", metavar="IMAGE", help=f"run in this image with {runtime}")
    add("--pass", dest="pass_", default="", metavar="A,B", help="environment variables to pass to the ranks")
    add("--detach", action="store_true", help="do not follow the job")
    add("--dry-run", action="store_true", help="print the plan and exit")


def _add_slurm_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("slurm").add_argument
    for name in ("partition", "account", "time", "cpus-per-task"):
        add(f"--{name}", metavar="X", help="passed to sbatch")
    add("--sbatch", default="", metavar="'a=b c'", help="additional sbatch options: 'mem=64G exclusive'")
    add("--container-runtime", choices=["apptainer", "pyxis"], default="apptainer")
    add(
        "--notice",
        type=count,
        default=120,
        metavar="S",
        help="checkpoint S seconds before the time limit (default: 120)",
    )


def _add_manifest_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("manifest").add_argument
    add("--for", dest="for_", default="", metavar="ENGINE", help="skypilot, kubeflow or kubernetes")
    add("--gpu-type", default="", metavar="NAME", help="skypilot: GPU type, e.g. A100 or L4")
    add("--image", default="", metavar="IMAGE", help="container image with paceline")
    add("--rdma", default="", metavar="RESOURCE=N", help="RDMA devices per node, e.g. vpc.amazonaws.com/efa=4")


def _refuse_options_of_others(backend: str, words: Iterable[str], backends: dict[str, argparse.ArgumentParser]) -> None:
    """Raise UserError for a word that is an option of other backends only."""
    known = {name: options_of(parser) for name, parser in backends.items()}
    for option in (word.partition("=")[0] for word in words):
        others = [name for name in known if option in known[name]]
        if others and backend not in others:
            message = f"{option} applies to launch {', '.join(others)}, not to {backend}."
            raise UserError("option-not-applicable", message, option=option)


def _split_recipe(words: Sequence[str], options: set[str]) -> tuple[str, list[str]]:
    """Return the recipe, which is the first word that is not the value of a field, and the other words."""
    from paceline.config.io import fields

    plain = {f"--{row.path}" for row in fields() if "." not in row.path}
    position = 0
    while position < len(words):
        name, equals, _ = words[position].partition("=")
        if not name.startswith("-"):
            return words[position], [*words[:position], *words[position + 1 :]]
        if name not in plain and "." not in name:
            raise _unknown_option(name, sorted(options | plain))
        position += 1 if equals else 2
    return "", list(words)


def _unknown_option(name: str, options: Sequence[str]) -> UserError:
    from paceline.config.synonyms import replacement_hint

    hint = replacement_hint(name.strip("-").replace("-", "_"), None, on_command_line=True)
    if not hint:
        close = closest(name, options)
        hint = f"did you mean {close}?" if close else ""
    message = f"launch has no option {name}{f'; {hint}' if hint else ''}"
    return UserError("unknown-option", message, option=name)
