"""Before anything costs money: whether machines can train together, and what is wrong with each, with a cure."""

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
from paceline.launch.host_facts import Facts, Link, Rate, believed
from paceline.launch.hosts import Host, HostError, addresses, free_port, last_line, port_of
from paceline.launch.values import quoted

_SAME = {
    "code": ("the code of paceline", "install the same version everywhere, or leave --python out: then it is copied"),
    "torch": ("torch", "install the same version everywhere"),
    "python": ("Python", "use the same version everywhere"),
    "driver": ("the NVIDIA driver", "install the same version everywhere"),
    "data": ("the data", "bring the same prepared data to every machine"),
}
_SOON = 60.0  # seconds, for a program to begin
LEAST_DISK, LEAST_SHARED, _LEAST_CORES, _MOST_SKEW = 10e9, 1e9, 4, 1.0


@dataclass
class Checked:
    """What was seen of the machines, and what is wrong."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """What was measured."""
    findings: list[str] = field(default_factory=list)


def check(hosts: Sequence[Host], python: str, data: str) -> Checked:
    found = Checked()
    with ThreadPoolExecutor(len(hosts)) as pool:
        for host, answer in zip(hosts, pool.map(lambda host: _ask(host, python, data), hosts), strict=True):
            if isinstance(answer, str):
                found.findings.append(answer)
            else:
                found.facts[host.name] = answer
    for name, facts in found.facts.items():
        found.lines.append(f"{name}: {_described(facts)}")
        found.findings += [f"{name}: {text}" for text in _alone(facts)]
    found.findings += _differences(found.facts)
    reached = [host for host in hosts if host.name in found.facts]
    for one, other in permutations(reached, 2):
        _between(one, other, python, found)
    if len(reached) > 1 and not found.findings:
        try:
            _together(reached, python, found)
        except HostError as error:
            found.findings.append(str(error))
    return found


def refuse_different_code(hosts: Sequence[Host], python: str) -> None:
    """Before a job starts: ranks of different code would train what no record shows."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda host: _ask(host, python, ""), hosts))
    for answer in answers:
        if isinstance(answer, str):
            raise HostError(answer)
    told = {host.name: answer for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, dict)}
    if found := list(_differences(told, ("code", "torch"))):
        raise HostError("; ".join(found))


def _ask(host: Host, python: str, data: str) -> dict[str, Any] | str:
    begin = time.time()
    try:
        words = f"{quoted(python)} -m paceline facts" + (f" --data={quoted(data)}" if data else "")
        answer = host.call(words, timeout=60)
    except HostError as error:
        return str(error)
    if answer.status:
        return (
            f"{host.name}: {python} cannot run paceline there ({last_line(answer)}); install it, or say --python PATH"
        )
    end = time.time()
    try:
        facts = believed(answer.text, Facts)
    except ValueError as error:
        return f"{host.name}: `{python} -m paceline facts` is not understood ({error}); install the same version there"
    # it told its time somewhere between the two
    facts["skew"] = max(begin - facts["time"], facts["time"] - end, 0.0)
    return facts


def _described(facts: dict[str, Any]) -> str:
    gpus = Counter(gpu["name"] for gpu in facts["gpus"])
    devices = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    return f"{facts['cores']} cores, {facts['memory_bytes'] / 1e9:.0f} GB, {devices}, torch {facts['torch']}"


def _alone(facts: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a machine, whatever the others are like."""
    if facts["torch"] is None:
        yield "torch is not installed there; install paceline with its dependencies"
    if facts["skew"] > _MOST_SKEW:
        yield f"its clock is {facts['skew']:.1f} s off; let it follow a time server (timedatectl set-ntp true)"
    if facts["disk_bytes"] is not None and facts["disk_bytes"] < LEAST_DISK:
        yield f"only {facts['disk_bytes'] / 1e9:.1f} GB of disk are free; make room for saves and data"
    if facts["shared_memory_bytes"] is not None and facts["shared_memory_bytes"] < LEAST_SHARED:
        size = facts["shared_memory_bytes"] / 1e6
        yield f"/dev/shm has only {size:.0f} MB free; in a container use --shm-size or --ipc=host"
    if facts["gpus"] and facts["cores"] / len(facts["gpus"]) < _LEAST_CORES:
        number = len(facts["gpus"])
        yield f"{facts['cores']} cores for {number} GPUs are few; prepare the data, so that loading is cheap"
    if facts["gpu_processes"]:
        numbers = ", ".join(map(str, facts["gpu_processes"]))
        yield f"processes {numbers} compute on its GPUs already; end them if they are left over"
    if facts.get("data") == "missing":
        yield "the data are not there; prepare or copy them"


def _differences(facts: dict[str, dict[str, Any]], keys: Iterable[str] = _SAME) -> Iterator[str]:
    for key in keys:
        name, cure = _SAME[key]
        values = {host: own[key] for host, own in facts.items() if own.get(key) not in (None, "missing")}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{value} on {host}" for host, value in values.items())
            yield f"{name} differs: {told}; {cure}"


def _between(one: Host, other: Host, python: str, found: Checked) -> None:
    """Whether one can connect to the other, how quickly and how fast."""
    answering = other.start(f"{quoted(python)} -m paceline probe --serve")
    try:
        address = addresses(other)[1]
        place = shlex.quote(f"{address}:{port_of(other, _first_line(answering))}")
        answer = one.call(f"{quoted(python)} -m paceline probe --call {place}", timeout=60)
        if not answer.status:
            told = believed(answer.text, Link)
    except (HostError, ValueError) as error:
        found.findings.append(f"{one.name} -> {other.name} was not measured: {error}")
        return
    finally:
        answering.kill()
        answering.wait()
    if answer.status:
        found.findings.append(
            f"{one.name} cannot connect to {other.name} ({place}): {last_line(answer)}; "
            "machines need all TCP ports between each other: open the firewall or security group"
        )
        return
    rate, trip = 8 * told["bytes_per_second"] / 1e9, 1000 * told["seconds"]
    found.lines.append(f"{one.name} -> {other.name}: {rate:.2g} Gbit/s, {trip:.2g} ms there and back")


def _first_line(process: "subprocess.Popen[bytes]") -> str:
    """Of what it prints; a short one, and soon."""
    ending = Timer(_SOON, process.kill)
    ending.start()
    try:
        return (process.stdout.readline(100) if process.stdout else b"").decode(errors="replace").strip()
    finally:
        ending.cancel()


def _together(hosts: Sequence[Host], python: str, found: Checked) -> None:
    """Ranks on all of them exchange for three seconds."""
    place = f"{addresses(hosts[0])[1]}:{free_port(hosts[0], python)}"
    nodes = f"--nodes {len(hosts)} --rendezvous {shlex.quote(place)}"
    words = f"{quoted(python)} -m paceline test-allreduce {nodes} --node-rank"
    # through standard input: command lines are for everybody to read
    secret = f"export {TOKEN}={new_token()}\nexec"
    with ThreadPoolExecutor(len(hosts)) as pool:
        scripts = [f"{secret} {words} {number}\n".encode() for number in range(len(hosts))]
        calls = [pool.submit(host.call, "sh -s", script, 120) for host, script in zip(hosts, scripts, strict=True)]
        answers = [call.result() for call in calls]
    told = [line for answer in answers for line in answer.text.splitlines() if line.startswith("{")]
    reasons = {last_line(answer) for answer in answers if answer.status}
    try:
        rate = 8 * believed(told[0] if told else "", Rate)["bytes_per_second"] / 1e9
    except ValueError as error:
        reasons = reasons or {str(error)}
    if reasons:
        found.findings.append(f"exchanging between all machines failed: {'; '.join(sorted(reasons))}")
        return
    found.lines.append(f"all machines together exchange gradients at {rate:.2g} Gbit/s")
