"""The command `doctor`: this machine, other hosts, or runs."""

from pathlib import Path

from paceline.cli.evidence import doctor_of_runs
from paceline.cli.hosts import add_host_options, doctor_of_hosts
from paceline.cli.options import make_parser
from paceline.errors import UserError
from paceline.system.tables import print_row

_DOCTOR = """Diagnose problems and suggest fixes.

    paceline doctor                   this machine and its installation: packages, CPU, GPUs, folders, limits, other
                                      processes, RDMA, and an all-reduce over all GPUs or two CPU processes
    paceline doctor --hosts A,B       whether these hosts can train together: reachable, same code, torch, driver and
                                      data, clock, disk, shared memory, cores, other processes on the GPUs, bandwidth
                                      in both directions, RDMA, an all-reduce over all GPUs and between pairs of them
    paceline doctor RUN [RUN ...]     where the time of a run went, and what would make it faster

RUN is a run folder, or a log of another program (PyTorch's ImageNet example, DAWNBench's TSV, Lightning's metrics.csv,
TensorBoard's event files). The exit status is 1 if a problem is found."""

_WIDTHS = (7, 14)  # of level and subject


def doctor(arguments: list[str]) -> int:
    parser = make_parser(
        "doctor", "[--quick] [--runs DIR] | --hosts A,B [--python PATH] [--data PATH] | RUN ...", _DOCTOR
    )
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help="run folders or logs")
    here = parser.add_argument_group("this machine")
    here.add_argument("--quick", action="store_true", help="skip the all-reduce")
    here.add_argument("--runs", type=Path, metavar="DIR", help="folder for runs (default: runs)")
    add_host_options(parser).add_argument(
        "--data", default="", metavar="PATH", help="folder of prepared data on the hosts, to compare them"
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    if options.run and (options.hosts is not None or options.quick or options.runs):
        message = "doctor checks either runs, or --hosts, or this machine (--quick, --runs). Choose one of them."
        raise UserError("conflicting-options", message)
    if options.hosts is not None:
        return doctor_of_hosts(options)
    if options.run:
        return doctor_of_runs(options.run)
    return _check_this_machine(options.runs or Path("runs"), options.quick)


def _check_this_machine(runs: Path, quick: bool) -> int:
    from paceline.launch.machine import check, summarized

    findings = []
    for finding in check(runs, quick):
        findings.append(finding)
        print_row((finding.level, finding.subject, finding.text), _WIDTHS)
    last, status = summarized(findings)
    print(last)
    return status
