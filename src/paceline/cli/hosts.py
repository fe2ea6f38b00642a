"""`doctor --hosts`, the internal commands that run on other hosts, and `rendezvous`."""

import argparse
import json
import os
from pathlib import Path

from paceline.cli.options import count, count_or_auto, make_parser, positive
from paceline.cli.ranks import start_ranks
from paceline.distributed.env import under_launcher
from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.gpus import default_procs

_RENDEZVOUS = """Run the rendezvous store of an elastic job that you start by hand, until it is interrupted.

    export PACELINE_TOKEN=...           the same secret on every node
    paceline rendezvous --address 10.0.0.1 --port 29400
    paceline train RECIPE --nodes 1:4 --rendezvous 10.0.0.1:29400          on each node

`paceline launch` does this itself."""


def hosts_from(text: str) -> list[str]:
    """Return the host names of --hosts: a comma-separated list, or a file with one per line."""
    from paceline.launch.job_hosts import HERE
    from paceline.launch.values import host_name

    if not text:
        message = "--hosts is missing. Write --hosts a,b, or name a file with one host per line."
        raise UserError("missing-option", message, option="--hosts")
    if os.path.isfile(text):
        content = Path(text).read_text(encoding="utf-8", errors="replace")
        names = [name for line in content.splitlines() if (name := line.partition("#")[0].strip())]
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
    names = [host_name("--hosts", name) for name in names]
    if not names:
        raise UserError("missing-hosts", f"--hosts {text[:100]} names no host.", hosts=text)
    if len(set(names)) != len(names):
        raise UserError("duplicate-hosts", f"--hosts {text[:100]} lists a host twice. List each host once.", hosts=text)
    if HERE in names:
        message = f"--hosts {text[:100]}: {HERE!r} is reserved for this machine. Use another name in ~/.ssh/config."
        raise UserError("reserved-host-name", message, hosts=text)
    return names


def add_host_options(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Add the options that name other hosts, and return their group."""
    group = parser.add_argument_group("other hosts")
    group.add_argument("--hosts", metavar="A,B|FILE", help="names of hosts, or a file with one per line")
    group.add_argument("--ssh-config", type=Path, metavar="FILE", help="use this file instead of ~/.ssh/config")
    group.add_argument("--python", default="python3", metavar="PATH", help="Python on the hosts that has paceline")
    return group


def doctor_of_hosts(options: argparse.Namespace) -> int:
    """Check whether hosts can train together; return 1 if there are problems."""
    from paceline.launch.api import check_hosts
    from paceline.launch.doctor import described
    from paceline.system.tables import new_table, show

    names = hosts_from(options.hosts)
    report = check_hosts(names, python=options.python, data=options.data, ssh_config=options.ssh_config or "")
    if report.facts:
        rows = [(name, *described(one)) for name, one in report.facts.items()]
        show(new_table(("host", "cores", "memory", "GPUs", "torch"), rows))
    if report.connections:
        show(new_table(("connection", "bandwidth", "round trip"), report.connections))
    for problem in report.problems:
        print(printable(f"! {problem}"))
    count = len(report.problems)
    print(f"{count} problem{'s' * (count > 1)} found" if count else "no problems found")
    return 1 if count else 0


def facts(arguments: list[str]) -> int:
    """Print facts about this machine for `doctor --hosts` on another one."""
    parser = make_parser("facts", "[--data PATH]", "Print facts about this machine as JSON.")
    parser.add_argument("--data", default="")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.launch.host_facts import facts as collect

    print(json.dumps(collect(options.data)))
    return 0


def probe(arguments: list[str]) -> int:
    """Measure a connection between two hosts, as server or client, for `doctor --hosts`."""
    parser = make_parser("probe", "--serve | --call HOST:PORT", "Measure the connection between two hosts.")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--call", default="")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.launch.host_facts import call, serve

    if options.serve:
        serve()
        return 0
    host, _, port = options.call.rpartition(":")
    try:
        print(json.dumps(call(host, int(port))))
    except (OSError, ValueError) as error:
        raise UserError("connection-failed", f"cannot connect to {options.call}: {error}") from None
    return 0


def test_allreduce(arguments: list[str]) -> int:
    """Run an all-reduce between all ranks, and between pairs of them, and print the bandwidths."""
    usage = "--procs N|auto | --nodes N --node-rank K --rendezvous HOST:PORT"
    parser = make_parser("test-allreduce", usage, "Run an all-reduce for a while.")
    parser.add_argument("--procs", type=count_or_auto, default=1, metavar="N|auto")
    parser.add_argument("--nodes", type=count, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--seconds", type=positive, default=3.0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args(arguments)
    if not under_launcher(os.environ):
        from paceline.distributed.plan import JoinSpec

        join = JoinSpec(options.nodes, options.rendezvous, options.node_rank, join_timeout=30)
        procs = default_procs(options.device) if options.procs == "auto" else options.procs
        return start_ranks(["test-allreduce", *arguments], procs, join)
    from paceline.distributed.bandwidth import measure

    if figures := measure(options.device, options.seconds):
        print(json.dumps(figures), flush=True)
    return 0


def rendezvous(arguments: list[str]) -> int:
    """Run the rendezvous store of a job."""
    parser = make_parser("rendezvous", "--address ADDRESS --port PORT", _RENDEZVOUS)
    parser.add_argument("--address", required=True, help="address of this machine to listen on")
    parser.add_argument("--port", type=count, required=True, metavar="PORT", help="port to listen on")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.distributed.server import serve

    serve(options.address, options.port)
    return 0
