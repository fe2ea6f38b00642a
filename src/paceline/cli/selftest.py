"""The command selftest, and the processes that it starts."""

import argparse
import os
from pathlib import Path
from typing import Any

from rich.status import Status

from paceline.cli.hosts import add_host_options, hosts_from
from paceline.cli.options import count_or_auto, make_parser, refuse_misspelled
from paceline.cli.ranks import add_group_options, start_group_ranks
from paceline.config.imports import allow_given
from paceline.distributed.env import under_launcher
from paceline.errors import UserError
from paceline.launch.groups import nodes_of
from paceline.selftest import page
from paceline.selftest.checks import CHECKS, HOSTS, HOSTS_TITLE, Row
from paceline.selftest.judges import FAIL, PASS, SKIPPED, SLOW
from paceline.selftest.run import Selftest
from paceline.selftest.scrub import Scrubber
from paceline.selftest.settings import DEVICES, Settings, check_overrides, exact_recipe
from paceline.system.files import say
from paceline.system.logs import console
from paceline.system.tables import new_table, print_row, show

_SELFTEST = """Test whether training is correct and fast on this machine or on several hosts. It takes a few minutes.

    paceline selftest                       all GPUs of this machine; two processes on CPUs
    paceline selftest --hosts a,b           two hosts over ssh, which have paceline installed
    paceline selftest --import my_nets --model.name my-net      with your own model

Each check passes, fails or is slow; a check of speed can be slow, but never fails. DIR gets selftest.json and
selftest.html, a page for bug reports without host names, user names and paths. The exit status is 1 if a check fails,
with --strict also if one is slow. docs/guides/selftest.md explains every line."""

_WIDTHS = (7, 11)  # of status and name


def selftest(arguments: list[str]) -> int:
    """Run `paceline selftest`; returns the exit status."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if options.list:
        titles = {HOSTS: f"{HOSTS_TITLE} (with --hosts)"} | {name: check.title for name, check in CHECKS.items()}
        show(new_table(("check", ""), list(titles.items())))
        return 0
    if under_launcher(os.environ):
        message = "selftest starts its own processes. Run it once, without torchrun or srun; --hosts names other hosts."
        raise UserError("selftest-under-launcher", message)
    if HOSTS in options.only and options.hosts is None:
        message = f"--only {HOSTS} needs --hosts. Add --hosts A,B, or omit --only {HOSTS}."
        raise UserError("missing-option", message, option="--hosts")
    refuse_misspelled(parser, overrides)
    check_overrides(overrides)
    allow_given(overrides)
    hosts = hosts_from(options.hosts) if options.hosts is not None else []
    procs = 0 if options.procs == "auto" else options.procs
    settings = Settings(options.device, ".", max(1, len(hosts)), procs, options.quick, tuple(overrides))
    exact_recipe(settings.resolved("cpu", 1))  # an invalid override is an error here, not in every process
    test = Selftest(settings, nodes_of(hosts, options.ssh_config, options.python), options.only)
    rows = _show_rows(test)
    facts = test.figures.get("facts", {})
    chosen = {"device": test.settings.device, "ranks": test.settings.ranks, "hosts": test.settings.hosts}
    chosen |= {"quick": options.quick, "overrides": list(overrides)}
    scrub = Scrubber(hosts) if not options.show_hosts else _unchanged
    written = page.write(options.out, page.report(_in_order(rows), facts, chosen, scrub))
    say(f"{_summary(rows)}; {' and '.join(map(str, written))}")
    failed = {FAIL, SLOW} if options.strict else {FAIL}
    return 1 if failed & {row.status for row in rows} else 0


def _parser() -> argparse.ArgumentParser:
    usage = "[--hosts A,B] [--device auto|cpu|cuda|mps] [--procs N|auto] [--out DIR] [--only NAME]"
    parser = make_parser("selftest", usage, _SELFTEST)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="device (default: auto)")
    parser.add_argument(
        "--procs",
        type=count_or_auto,
        default="auto",
        metavar="N|auto",
        help="processes per host (default auto: one per GPU; on CPUs two, with --hosts one)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("selftest"),
        metavar="DIR",
        help="folder for results, which replace earlier ones (default: selftest)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[HOSTS, *CHECKS],
        metavar="NAME",
        help="run only this check; repeatable",
    )
    parser.add_argument("--quick", action="store_true", help="measure speeds less accurately")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 also if a check is slow")
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--show-hosts", action="store_true", help="keep names of hosts and users, and paths, in files")
    add_host_options(parser)
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _unchanged(value: Any) -> Any:
    return value


def _show_rows(test: Selftest) -> list[Row]:
    """Print each row as soon as it is known, and below them what is being measured."""
    rows = []
    with Status("starting ...", console=console) as status:
        test.on_probe = lambda name: status.update(f"measuring: {name.replace('_', ' ')} ...")
        for row in test.rows():
            rows.append(row)
            print_row((row.status, row.name, row.reason), _WIDTHS)
    return rows


def _in_order(rows: list[Row]) -> list[Row]:
    names = [HOSTS, *CHECKS]
    return sorted(rows, key=lambda row: names.index(row.name))


def _summary(rows: list[Row]) -> str:
    counts = {status: sum(row.status == status for row in rows) for status in (FAIL, SLOW, PASS, SKIPPED)}
    words = {FAIL: "failed", SLOW: "slow", PASS: "passed", SKIPPED: "skipped"}
    return ", ".join(f"{number} {words[status]}" for status, number in counts.items() if number)


def selftest_probe(arguments: list[str]) -> int:
    """Run probes in new ranks on this node; the selftest on this or another host reads what they print."""
    parser = make_parser("selftest-probe", "--probes A,B --settings JSON", "Measure parts of a selftest.")
    parser.add_argument("--probes", required=True)
    parser.add_argument("--settings", type=Settings.from_text, required=True)
    add_group_options(parser)
    options = parser.parse_args(arguments)
    allow_given(options.settings.overrides)
    if (status := start_group_ranks(["selftest-probe", *arguments], options)) is not None:
        return status
    from paceline.selftest.rank import run_probes

    run_probes(options.probes.split(","), options.settings)
    return 0
