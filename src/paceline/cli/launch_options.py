"""The command line of `launch`: its options, and which backend each is for."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.ec2 import add_ec2_options
from paceline.cli.options import count, make_parser, positive
from paceline.errors import UserError

BACKENDS = ("local", "ssh", "slurm", "ec2", "manifest")

_LAUNCH = """Train a recipe on several nodes, and follow it.

    paceline launch local --nodes 2 RECIPE        several local nodes on this machine, to try multi-node training
    paceline launch ssh --hosts a,b RECIPE        hosts that you can ssh to
    paceline launch slurm --nodes 2 RECIPE        a SLURM cluster, from a login node
    paceline launch ec2 --nodes 2 --instance-type g4dn.2xlarge --spot RECIPE      EC2 instances, terminated at the end
    paceline launch manifest --for kubernetes RECIPE       a manifest for SkyPilot, Kubeflow or Kubernetes

Override fields of the recipe as for `paceline train`. The job continues without this terminal; `paceline attach`
follows it again. `--dry-run` prints what would be done, and does nothing."""


def launch_parser() -> argparse.ArgumentParser:
    """Return the parser of `launch`."""
    parser = make_parser("launch", "local|ssh|slurm|ec2|manifest RECIPE [options] [--dotted.field VALUE ...]", _LAUNCH)
    _add_node_options(parser)
    _add_run_options(parser)
    _add_slurm_options(parser)
    manifest = parser.add_argument_group("manifest")
    manifest.add_argument("--for", dest="engine", default="", metavar="ENGINE", help="skypilot, kubeflow or kubernetes")
    manifest.add_argument("--gpu-type", default="", metavar="NAME", help="skypilot: type of GPU, e.g. A100 or L4")
    manifest.add_argument("--image", default="", metavar="IMAGE", help="container image with paceline")
    add_ec2_options(parser)
    parser.add_argument("--detach", action="store_true", help="do not follow the job")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _add_node_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", default="", metavar="A,B|FILE", help="ssh: names of hosts, or a file with one per line")
    add("--ssh-config", type=Path, metavar="FILE", help="ssh: use it instead of ~/.ssh/config")
    add("--nodes", type=count, default=2, metavar="N", help="number of nodes, except for ssh (default: 2)")
    add("--procs-per-node", type=count, default=1, metavar="N", help="processes per node, e.g. GPUs (default: 1)")
    add("--min-nodes", type=count, default=1, metavar="N", help="fewest nodes to continue with (default: 1)")
    add(
        "--rank-timeout",
        type=positive,
        default=15,
        metavar="S",
        help="seconds without a response after which a rank is considered failed (default: 15)",
    )
    add("--rendezvous-host", default="auto", metavar="HOST", help="host of the rendezvous store: auto, here or HOST")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--name", default="", help="name of the run (default: recipe and time)")
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder that it is fetched to (default: runs)")
    add("--results", default="", metavar="s3://BUCKET/PREFIX", help="copy the run folder there during training")
    add("--resume", default="", metavar="s3://BUCKET/PREFIX/RUN", help="resume from such results, instead of RECIPE")
    add("--data", default="", metavar="PATH", help="prepared data: a folder on the nodes, or s3:// to fetch first")
    add("--python", default="", metavar="PATH", help="Python on the nodes that has paceline")
    add("--container", default="", metavar="IMAGE", help="run in it: docker; on slurm, apptainer or pyxis")
    add("--pass", dest="pass_env", default="", metavar="A,B", help="environment variables to pass to the ranks")


def _add_slurm_options(parser: argparse.ArgumentParser) -> None:
    slurm = parser.add_argument_group("slurm")
    for name in ("partition", "account", "time", "cpus-per-task"):
        slurm.add_argument(f"--{name}", metavar="X", help="as for sbatch")
    slurm.add_argument("--gpus-per-node", type=count, metavar="N", help="as for sbatch; also for manifests")
    slurm.add_argument("--sbatch", default="", metavar="'a=b c'", help="further options of sbatch: 'mem=64G exclusive'")
    slurm.add_argument("--container-runtime", choices=["apptainer", "pyxis"], default="apptainer")
    slurm.add_argument("--seeds", default="", metavar="0,1,2", help="submit an array with one task per seed")
    slurm.add_argument(
        "--notice", type=count, default=120, metavar="S", help="checkpoint S seconds before the limit (default: 120)"
    )


def find_source(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the recipe, which is the first word that is not the value of an option, and the other words."""
    from paceline.config.io import fields
    from paceline.config.synonyms import replacement_hint

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
            hint = replacement_hint(name.strip("-").replace("-", "_"), None, on_command_line=True)
            raise _unknown_option(name, hint, sorted(known | plain))
        takes = (word in takes_value or word in plain or "." in word) and "=" not in word
        position += 2 if takes else 1
    return "", list(words)


def _unknown_option(name: str, hint: str, options: Sequence[str]) -> UserError:
    if not hint:
        close = [option for option in options if option.startswith(name)] or difflib.get_close_matches(name, options)
        hint = f"did you mean {close[0]}?" if close else ""
    message = f"launch has no option {name}{f'; {hint}' if hint else ''}"
    return UserError("unknown-option", message, option=name)


def refuse_options_of_other_backends(
    parser: argparse.ArgumentParser, backend: str, options: argparse.Namespace
) -> None:
    """Raise UserError for an option that this backend would ignore."""
    groups = {"slurm": ("slurm",), "manifest": ("manifest",), "ec2": ("ec2",)}
    single = {
        "hosts": ("ssh",), "ssh_config": ("ssh", "ec2"), "rendezvous_host": ("ssh", "ec2"),
        "gpus_per_node": ("slurm", "manifest"),
        "nodes": ("local", "slurm", "ec2", "manifest"),
    }  # fmt: skip
    for group in parser._action_groups:
        for action in group._group_actions:
            backends = single.get(action.dest) or groups.get(group.title or "")
            if backends and backend not in backends and getattr(options, action.dest) != action.default:
                option = action.option_strings[0]
                message = f"{option} applies to launch {', '.join(backends)}, not to {backend}."
                raise UserError("option-not-applicable", message, option=option)
