"""Process options of train and evaluate, and the ranks that they start."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import count, count_or_auto
from paceline.distributed.env import under_launcher
from paceline.errors import UserError
from paceline.system.host import expand_gpu_segments, limit_openmp_spinning
from paceline.system.signals import interrupts_end

if TYPE_CHECKING:
    from paceline.distributed.plan import JoinSpec


def add_process_options(parser: argparse.ArgumentParser, help_action: str = "store_true") -> None:
    """Add the options for processes and nodes, and --help."""
    group = parser.add_argument_group("processes")
    add_procs(group)
    group.add_argument(
        "--nodes",
        type=_nodes,
        default=(0, 1),
        metavar="N|MIN:MAX",
        help="nodes, each started by hand (default 1); MIN:MAX: an elastic job, whose nodes may leave and join",
    )
    group.add_argument("--node-rank", type=int, default=0, metavar="K", help="rank of this node, from 0")
    group.add_argument(
        "--rendezvous",
        default="",
        metavar="HOST:PORT",
        help="address of node 0; with MIN:MAX, address of `paceline rendezvous`",
    )
    group.add_argument("--job", default="", metavar="ID", help="with MIN:MAX: job ID, if several share the rendezvous")
    group.add_argument(
        "--join-timeout",
        type=count,
        default=300,
        metavar="SECONDS",
        help="how long to wait for the other nodes (default 300)",
    )
    group.add_argument(
        "--threads", type=count, metavar="N", help="compute threads per process (default: cores / processes)"
    )
    parser.add_argument("-h", "--help", action=help_action, help="show this help")


def add_procs(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add --procs, which is parsed as a number or "auto"."""
    parser.add_argument(
        "--procs",
        type=count_or_auto,
        default="auto",
        metavar="N|auto",
        help="processes on this node (default auto: one per visible GPU, one on CPUs)",
    )


def _nodes(text: str) -> tuple[int, int]:
    """The minimum number of nodes (0: the job is not elastic) and the maximum."""
    min_nodes, colon, max_nodes = text.partition(":")
    if not colon:
        return 0, count(text)
    if count(min_nodes) > count(max_nodes):
        raise argparse.ArgumentTypeError(f"{text!r}: the minimum is larger than the maximum")
    return int(min_nodes), int(max_nodes)


def world_size(options: argparse.Namespace) -> int:
    """The number of ranks of the whole job, whether a launcher or paceline starts them."""
    from paceline.distributed.env import rank_env

    ranks: int = rank_env(os.environ).size if under_launcher(os.environ) else options.procs * options.nodes[1]
    return ranks


def choose_procs(options: argparse.Namespace, automatic: Callable[[], int]) -> None:
    """Replace --procs auto by a number, unless a launcher has started the processes already."""
    options.chosen = ""
    if options.procs == "auto" and not under_launcher(os.environ):
        options.procs = automatic()
        options.chosen = "one per visible GPU" if options.procs > 1 else ""


def needs_agent(options: argparse.Namespace) -> bool:
    """Whether the options ask for more than one process; UserError if they contradict each other."""
    min_nodes, nodes = options.nodes
    if (nodes > 1 or min_nodes) and not options.rendezvous:
        raise UserError(
            "missing-rendezvous",
            f"--nodes {nodes} needs a rendezvous. Give the same --rendezvous HOST:PORT on every node.",
            nodes=nodes,
        )
    if not 0 <= options.node_rank < nodes:
        raise UserError(
            "invalid-node-rank",
            f"--node-rank {options.node_rank} is out of range. Use a number from 0 to {nodes - 1}.",
            node_rank=options.node_rank,
        )
    return bool(options.procs > 1 or nodes > 1 or min_nodes > 0)


def enter_rank(options: argparse.Namespace) -> None:
    """Prepare this process to run as a rank."""
    from paceline.distributed.env import rank_env

    started = rank_env(os.environ).local_size
    if under_launcher(os.environ) and options.procs not in ("auto", started):
        raise UserError(
            "procs-mismatch",
            f"--procs {options.procs} does not match the {started} processes that torchrun or srun started on this "
            "node. Leave --procs out.",
            procs=options.procs,
            started=started,
        )
    if options.threads:
        os.environ["PACELINE_THREADS"] = str(options.threads)
    limit_openmp_spinning()
    expand_gpu_segments()


def start_with_options(command: list[str], options: argparse.Namespace) -> int:
    """Run a command in the ranks that the process options ask for; returns the exit status."""
    from paceline.distributed.plan import JoinSpec

    min_nodes, nodes = options.nodes
    place = (options.rendezvous, options.node_rank, min_nodes, options.join_timeout, options.job)
    join, procs = JoinSpec(nodes, *place), options.procs
    why = f" ({options.chosen})" if options.chosen else ""
    print(f"{join}starting {procs} process{'es' if procs > 1 else ''}{why} ...", file=sys.stderr)
    return start_ranks(command, procs, join)


def add_group_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which a command starts the nodes of an internal command (launch/groups.py)."""
    parser.add_argument("--procs", type=count, default=1)
    parser.add_argument("--nodes", type=count, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")


def start_group_ranks(command: list[str], options: argparse.Namespace) -> int | None:
    """Start the ranks of this node, which end with the command that started them; None if this process is a rank."""
    if under_launcher(os.environ):
        return None
    from paceline.distributed.plan import JoinSpec
    from paceline.distributed.starter import follow_starter

    follow_starter()
    if options.procs * options.nodes == 1:
        return None
    return start_ranks(command, options.procs, JoinSpec(options.nodes, options.rendezvous, options.node_rank, 0, 60))


def start_ranks(command: list[str], procs: int, join: "JoinSpec | None" = None) -> int:
    """Run a command in `procs` ranks on this node, alone or as one of several nodes; returns the exit status."""
    from paceline.distributed import forkserver
    from paceline.distributed.plan import JoinSpec, plan

    with interrupts_end():
        planned = plan(command, procs, join or JoinSpec())
        os.environ.update(planned.environment)
        limit_openmp_spinning()
        expand_gpu_segments()
        multiprocessing.set_forkserver_preload(["paceline.engine.preload"])
        forkserver.start_server()  # it imports torch at the same time as this process
        from paceline.cli.main import main
        from paceline.distributed import run
        from paceline.track.records import RunFolder

        try:
            return run.run(planned, main)
        except UserError as error:
            if "run" in error.fields and error.code != "rank-killed":  # a killed run can be resumed
                RunFolder(Path(str(error.fields["run"]))).record_failure(str(error))
            raise
