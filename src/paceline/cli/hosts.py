"""What machines do for launches and their doctor: the verbs that other machines call, and doctor --hosts."""

import argparse
import json
import os
from pathlib import Path

from paceline.cli.options import count, make_parser, positive
from paceline.cli.ranks import start_ranks
from paceline.distributed.env import under_launcher
from paceline.errors import UserError
from paceline.system.files import printable


def hosts_from(text: str) -> list[str]:
    """Names of machines, or a file with one a line."""
    from paceline.launch.nodes import HERE
    from paceline.launch.values import host_name

    if not text:
        raise UserError("which machines? --hosts a,b, or a file with a name a line")
    if os.path.isfile(text):
        content = Path(text).read_text(encoding="utf-8", errors="replace")
        names = [name for line in content.splitlines() if (name := line.partition("#")[0].strip())]
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
    names = [host_name("--hosts", name) for name in names]
    if len(set(names)) != len(names) or not names or HERE in names:
        raise UserError(f"--hosts {text[:100]}: give each machine once, by its name in ssh, which may not be {HERE!r}")
    return names


def add_host_options(group: "argparse._ArgumentGroup") -> None:
    """Of the verb doctor."""
    group.add_argument("--hosts", metavar="A,B|FILE", help="names of machines, or a file with them")
    group.add_argument("--ssh-config", type=Path, metavar="FILE", help="instead of ~/.ssh/config")
    group.add_argument("--python", default="python3", metavar="PATH", help="interpreter there that has paceline")
    group.add_argument("--data", default="", metavar="PATH", help="of prepared data on the machines, to compare them")


def doctor_of_hosts(options: argparse.Namespace) -> int:
    """Of the verb doctor: machines instead of runs."""
    from paceline.launch.doctor import check
    from paceline.launch.hosts import SshHost
    from paceline.launch.values import operand, plain

    operand("--python", options.python)
    plain("--data", options.data)
    words = ("-F", str(options.ssh_config.resolve())) if options.ssh_config else ()
    found = check([SshHost(name, "$HOME", words) for name in hosts_from(options.hosts)], options.python, options.data)
    for line in (*found.lines, *(f"! {finding}" for finding in found.findings)):
        print(printable(line))
    count = len(found.findings)
    print(f"{count} problem{'s' * (count > 1)} found" if count else "no problems found")
    return 1 if count else 0


def facts(arguments: list[str]) -> int:
    """What this machine is, for a doctor elsewhere."""
    parser = make_parser("facts", "[--data PATH]", "Tell what this machine is and has, as JSON.")
    parser.add_argument("--data", default="")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.launch.host_facts import facts as told

    print(json.dumps(told(options.data)))
    return 0


def probe(arguments: list[str]) -> int:
    """One end of a connection between two machines, for a doctor elsewhere."""
    parser = make_parser("probe", "--serve | --call HOST:PORT", "Measure the connection between two machines.")
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
        raise UserError(str(error)) from None
    return 0


def try_exchange(arguments: list[str]) -> int:
    """A rehearsal of exchanging gradients between machines."""
    usage = "--procs N | --nodes N --node-rank K --rendezvous HOST:PORT"
    parser = make_parser("test-allreduce", usage, "All-reduce for a while.")
    parser.add_argument("--procs", type=count, default=1)
    parser.add_argument("--nodes", type=count, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--seconds", type=positive, default=3.0)
    options = parser.parse_args(arguments)
    if not under_launcher(os.environ):
        from paceline.distributed.plan import JoinSpec

        join = JoinSpec(options.nodes, options.rendezvous, options.node_rank, join_timeout=30)
        return start_ranks(["test-allreduce", *arguments], options.procs, join)
    from paceline.distributed.allreduce_test import exchange

    if (rate := exchange(options.seconds)) is not None:
        print(json.dumps({"bytes_per_second": rate}), flush=True)
    return 0


def rendezvous(arguments: list[str]) -> int:
    """Keep the list of a job's machines."""
    usage = "--address ADDRESS --port PORT"
    parser = make_parser("rendezvous", usage, "Run the rendezvous server of an elastic job (PACELINE_TOKEN).")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=count, required=True)
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.distributed.server import serve

    serve(options.address, options.port)
    return 0
