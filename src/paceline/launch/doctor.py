"""Check whether hosts can train together, before anything costs money: find the problems of each, with a fix."""

import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import permutations
from threading import Timer
from typing import Any

from paceline.distributed.channel import TOKEN, new_token
from paceline.errors import Problem
from paceline.launch.host_facts import AllReduceFigures, Facts, Link, code_digest, validated
from paceline.launch.hosts import Host, HostError, addresses, free_port, last_line, port_of
from paceline.launch.rdma import rdma_problems
from paceline.launch.values import quoted

# facts that must be the same on all hosts: code and message
_SAME = {
    "code": (
        "code-differs",
        "the code of paceline differs: {values}. Install the same version on all hosts, or omit --python to copy it.",
    ),
    "torch": ("torch-differs", "the version of torch differs: {values}. Install the same version on all hosts."),
    "python": ("python-differs", "the version of Python differs: {values}. Use the same version on all hosts."),
    "driver": ("driver-differs", "the NVIDIA driver differs: {values}. Install the same version on all hosts."),
    "data": ("data-differs", "the data differs: {values}. Copy the same prepared data to all hosts."),
}
_ALL_REDUCE_TIMEOUT = 600.0  # seconds; 128 ranks have 256 pairs
_THIS_MACHINE = "this machine"
_START_TIMEOUT = 60.0  # seconds until a program prints its first line
MIN_DISK, MIN_SHARED_MEMORY, _MIN_CORES_PER_GPU, _MAX_SKEW = 10e9, 1e9, 4, 1.0


@dataclass
class HostReport:
    """Facts, measurements and problems of hosts."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    connections: list[tuple[str, str, str]] = field(default_factory=list)
    """What was measured between hosts: hosts, bandwidth, round trip."""
    problems: list[Problem] = field(default_factory=list)


def check(hosts: Sequence[Host], python: str, data: str) -> HostReport:
    """Return what was measured on the hosts, and the problems found."""
    report = HostReport()
    with ThreadPoolExecutor(len(hosts)) as pool:
        for host, answer in zip(hosts, pool.map(lambda host: _facts_or_error(host, python, data), hosts), strict=True):
            if isinstance(answer, HostError):
                report.problems.append(_problem(answer))
            else:
                report.facts[host.name] = answer
    for name, facts in report.facts.items():
        report.problems += [Problem(code, f"{name}: {text}") for code, text in _problems_of_host(facts)]
    report.problems += _differences(report.facts)
    reached = [host for host in hosts if host.name in report.facts]
    for source, target in permutations(reached, 2):
        _measure_link(source, target, python, report)
    if len(reached) > 1 and not report.problems:
        try:
            _measure_all_reduce(reached, python, report)
        except HostError as error:
            report.problems.append(_problem(error))
    return report


def _problem(error: HostError) -> Problem:
    return Problem(error.code, str(error))


def refuse_different_code(hosts: Sequence[Host], python: str, with_this_machine: bool = False) -> None:
    """Raise HostError if the hosts have different code, which no record would show, or other code than this machine."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda host: _facts(host, python, ""), hosts))
    facts = {host.name: answer for host, answer in zip(hosts, answers, strict=True)}
    if with_this_machine:
        facts[_THIS_MACHINE] = {"code": code_digest()}
    if problems := list(_differences(facts, ("code", "torch"))):
        raise HostError(problems[0].code, " ".join(problem.message for problem in problems))


def _facts_or_error(host: Host, python: str, data: str) -> dict[str, Any] | HostError:
    try:
        return _facts(host, python, data)
    except HostError as error:
        return error


def _facts(host: Host, python: str, data: str) -> dict[str, Any]:
    """Return the facts of a host, and how far its clock is off."""
    begin = time.time()
    command = f"{quoted(python)} -m paceline facts" + (f" --data={quoted(data)}" if data else "")
    result = host.call(command, timeout=60)
    if result.status:
        message = f"{python} cannot run paceline there ({last_line(result)}). Install it, or pass --python PATH."
        raise host.error("paceline-not-installed", message)
    end = time.time()
    try:
        facts = validated(result.text, Facts)
    except ValueError as error:
        message = f"the output of `{python} -m paceline facts` is invalid ({error}). Install the same version there."
        raise host.error("host-facts-invalid", message) from None
    # the host read its clock between begin and end
    facts["skew"] = max(begin - facts["time"], facts["time"] - end, 0.0)
    return facts


def described(facts: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return cores, memory, GPUs and version of torch of a host."""
    gpus = Counter(gpu["name"] for gpu in facts["gpus"])
    devices = ", ".join(f"{count} x {name}" for name, count in gpus.items())
    return str(facts["cores"]), f"{facts['memory_bytes'] / 1e9:.0f} GB", devices or "-", facts["torch"] or "-"


def _problems_of_host(facts: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a single host."""
    if facts["torch"] is None:
        yield Problem("torch-not-installed", "torch is not installed. Install paceline with its dependencies.")
    if facts["skew"] > _MAX_SKEW:
        text = f"the clock is {facts['skew']:.1f} s off. Synchronize it with NTP (timedatectl set-ntp true)."
        yield Problem("clock-skew", text)
    if facts["disk_bytes"] is not None and facts["disk_bytes"] < MIN_DISK:
        text = (
            f"only {facts['disk_bytes'] / 1e9:.1f} GB of disk space is free. Free some space for checkpoints and data."
        )
        yield Problem("disk-space-low", text)
    if facts["shared_memory_bytes"] is not None and facts["shared_memory_bytes"] < MIN_SHARED_MEMORY:
        size = facts["shared_memory_bytes"] / 1e6
        text = f"/dev/shm has only {size:.0f} MB free. In a container, use --shm-size or --ipc=host."
        yield Problem("shared-memory-low", text)
    if facts["gpus"] and facts["cores"] / len(facts["gpus"]) < _MIN_CORES_PER_GPU:
        text = f"{facts['cores']} cores are few for {len(facts['gpus'])} GPUs. Prepare the data to make loading cheap."
        yield Problem("few-cores-per-gpu", text)
    if facts["gpu_processes"]:
        pids = ", ".join(map(str, facts["gpu_processes"]))
        text = f"processes {pids} already use the GPUs. Terminate them if nobody needs them."
        yield Problem("gpu-in-use", text)
    if facts.get("data") == "missing":
        yield Problem("data-not-found", "the data folder does not exist. Prepare or copy the data.")
    yield from rdma_problems(facts["rdma"])


def _differences(facts: dict[str, dict[str, Any]], keys: Iterable[str] = _SAME) -> Iterator[Problem]:
    for key in keys:
        code, message = _SAME[key]
        values = {host: one[key] for host, one in facts.items() if one.get(key) not in (None, "missing")}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value} on {host}" for host, value in values.items())
            yield Problem(code, message.format(values=listed))


def _measure_link(source: Host, target: Host, python: str, report: HostReport) -> None:
    """Measure the connection from one host to another."""
    server = target.start(f"{quoted(python)} -m paceline probe --serve")
    try:
        address = addresses(target)[1]
        endpoint = shlex.quote(f"{address}:{port_of(target, _first_line(server))}")
        result = source.call(f"{quoted(python)} -m paceline probe --call {endpoint}", timeout=60)
        if not result.status:
            link = validated(result.text, Link)
    except (HostError, ValueError) as error:
        message = f"{source.name} -> {target.name} was not measured: {error}"
        report.problems.append(Problem("connection-not-measured", message))
        return
    finally:
        server.kill()
        server.wait()
    if result.status:
        message = (
            f"{source.name} cannot connect to {target.name} ({endpoint}): {last_line(result)}. "
            "Nodes must reach each other on all TCP ports: open the firewall or security group."
        )
        report.problems.append(Problem("connection-blocked", message))
        return
    rate, round_trip = 8 * link["bytes_per_second"] / 1e9, 1000 * link["seconds"]
    report.connections.append((f"{source.name} -> {target.name}", f"{figure(rate)} Gbit/s", f"{round_trip:.2g} ms"))


def _first_line(process: "subprocess.Popen[bytes]") -> str:
    """Return the first line that a process prints, within limits of time and length."""
    timer = Timer(_START_TIMEOUT, process.kill)
    timer.start()
    try:
        return (process.stdout.readline(100) if process.stdout else b"").decode(errors="replace").strip()
    finally:
        timer.cancel()


def _measure_all_reduce(hosts: Sequence[Host], python: str, report: HostReport) -> None:
    """Run an all-reduce between all GPUs of all hosts for three seconds, then between pairs of them."""
    endpoint = f"{addresses(hosts[0])[1]}:{free_port(hosts[0], python)}"
    nodes = f"--procs auto --nodes {len(hosts)} --rendezvous {shlex.quote(endpoint)}"
    command = f"{quoted(python)} -m paceline test-allreduce {nodes} --node-rank"
    # through standard input: every user can read command lines
    secret = f"export {TOKEN}={new_token()}\nexec"
    with ThreadPoolExecutor(len(hosts)) as pool:
        variables = [f"PACELINE_HOST={shlex.quote(host.name)}" for host in hosts]  # the name that the user knows
        scripts = [f"{secret} env {name} {command} {number}\n".encode() for number, name in enumerate(variables)]
        calls = [
            pool.submit(host.call, "sh -s", script, _ALL_REDUCE_TIMEOUT)
            for host, script in zip(hosts, scripts, strict=True)
        ]
        results = [call.result() for call in calls]
    lines = [line for result in results for line in result.text.splitlines() if line.startswith("{")]
    reasons = {last_line(result) for result in results if result.status}
    try:
        report.connections += described_all_reduce(validated(lines[0] if lines else "", AllReduceFigures))
    except ValueError as error:
        reasons = reasons or {str(error)}
    if reasons:
        message = f"the all-reduce between all nodes failed: {'; '.join(sorted(reasons))}"
        report.problems.append(Problem("all-reduce-failed", message))


def described_all_reduce(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows of hosts, bus bandwidth and "-": of each pair of ranks, and of all of them."""
    ranks, pairs = figures["ranks"], figures["pairs"]
    if any(rank >= len(ranks) for low, high, _ in pairs for rank in (low, high)):
        raise ValueError("pairs: a rank that does not exist")
    rows = [(f"all-reduce {ranks[low]} - {ranks[high]}", rate) for low, high, rate in pairs]
    rows.append((f"all-reduce over all {len(ranks)} ranks", figures["bus_bytes_per_second"]))
    return [(text, f"{figure(8 * rate / 1e9)} Gbit/s", "-") for text, rate in rows]


def figure(value: float) -> str:
    """Return a measured value with two digits, or more if it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
