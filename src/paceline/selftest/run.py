"""Runs a selftest: starts the probes that its checks need, and yields a row per check."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.launch import doctor
from paceline.launch.groups import Nodes, with_folders
from paceline.launch.hosts import HostError
from paceline.selftest.checks import CHECKS, ENVIRONMENT, HOSTS, HOSTS_TITLE, Check, Row
from paceline.selftest.groups import measure
from paceline.selftest.judges import FAIL, PASS, SKIPPED, SLOW, Verdict
from paceline.selftest.probes import PROBES
from paceline.selftest.settings import Settings

_NOTES = (
    *("clock-skew", "disk-space-low", "shared-memory-low", "few-cores-per-gpu", "gpu-in-use"),
    *("python-differs", "driver-differs"),
    *("efa-provider-missing", "efa-plugin-missing", "rdma-devices-missing", "locked-memory-low"),  # NCCL may use TCP
)
"""Problems of hosts that need not keep them from training; if they do, the other checks show it."""


@dataclass
class Selftest:
    """A selftest and what it has found so far."""

    settings: Settings
    nodes: Nodes
    only: Sequence[str] = ()
    """Names of checks; empty: all."""
    on_probe: Callable[[str], object] = lambda _: None
    """Called with the name of a probe before it starts."""
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By probe."""

    def rows(self) -> Iterator[Row]:
        """Yield the row of each check as soon as it is known."""
        if self.nodes.hosts:
            row = self._hosts()
            yield row
            if row.status == FAIL:
                yield from self._skipped(f"the hosts cannot train together, see {HOSTS}")
                return
        with self._folders():
            yield from self._measured()

    def _measured(self) -> Iterator[Row]:
        waiting = {name: CHECKS[name] for name in self._chosen()}
        needed = {probe for check in waiting.values() for probe in check.probes}
        first = [name for name in PROBES if name in needed and PROBES[name].is_first]
        for name in self._run(first, self.nodes.one_rank):
            if name == "facts":
                if "error" in self.figures[name]:
                    yield self._row(ENVIRONMENT)
                    yield from self._skipped(f"no process could start, see {ENVIRONMENT}")
                    return
                facts = self.figures[name]
                self.settings = replace(self.settings, device=facts["device"], procs=facts["procs"])
                for name in [name for name, check in waiting.items() if check.needs_ranks and self.settings.ranks < 2]:
                    title = waiting.pop(name).title
                    yield Row(name, title, SKIPPED, _reason_of_one_rank(facts), {})
            yield from self._known(waiting)
        left = {probe for check in waiting.values() for probe in check.probes} - self.figures.keys()
        for nodes, probes in self._launches(left):
            for _ in self._run(probes, nodes):
                yield from self._known(waiting)

    def _known(self, waiting: dict[str, Check]) -> Iterator[Row]:
        """Yield the rows of the checks whose figures are known, and remove these from `waiting`."""
        for name in [name for name, check in waiting.items() if self.figures.keys() >= set(check.probes)]:
            del waiting[name]
            yield self._row(name)

    def _chosen(self) -> list[str]:
        return [name for name in CHECKS if not self.only or name in (ENVIRONMENT, *self.only)]

    def _launches(self, probes: set[str]) -> Iterator[tuple[Nodes, list[str]]]:
        """Yield which probes share processes, and where these run."""
        nodes = replace(self.nodes, procs=self.settings.procs)
        ordered = [name for name in PROBES if name in probes]
        if self.settings.ranks == 1:
            if ordered:
                yield nodes, ordered
            return
        if shared := [name for name in ordered if not PROBES[name].own_session]:
            yield nodes, shared
        for name in ordered:
            if PROBES[name].own_session:
                yield nodes.one_rank if PROBES[name].one_rank else nodes, [name]

    def _run(self, probes: Sequence[str], nodes: Nodes) -> Iterator[str]:
        """Run probes; yield their names when their figures are known."""
        left = list(probes)
        self.on_probe(left[0])
        for name, figures in _measured_or_error(nodes, probes, self.settings):
            self.figures[name] = figures
            left.remove(name)
            yield name
            if left:
                self.on_probe(left[0])

    def _row(self, name: str) -> Row:
        check = CHECKS[name]
        verdict = _judged(check, [self.figures[probe] for probe in check.probes])
        found = {probe: self.figures[probe] for probe in check.probes}
        seconds = sum(float(figures.get("probe_seconds", 0.0)) for figures in found.values())
        return Row(name, check.title, *verdict, found, round(seconds, 2))

    def _skipped(self, reason: str) -> Iterator[Row]:
        for name in self._chosen():
            if name not in (ENVIRONMENT, HOSTS):
                yield Row(name, CHECKS[name].title, SKIPPED, reason, {})

    def _hosts(self) -> Row:
        """Check that the hosts can train together."""
        self.on_probe(HOSTS)
        report = doctor.check(self.nodes.hosts, self.nodes.python, "")
        figures = {"facts": report.facts, "connections": [list(row) for row in report.connections]}
        serious = [str(problem) for problem in report.problems if problem.code not in _NOTES]
        notes = [str(problem) for problem in report.problems if problem.code in _NOTES]
        speeds = [f"{between} {rate}" for between, rate, *_ in report.connections]
        status = FAIL if serious else SLOW if notes else PASS
        text = "; ".join([*serious, *notes] or [f"{len(self.nodes.hosts)} {HOSTS_TITLE}", *speeds])
        return Row(HOSTS, HOSTS_TITLE, status, text, figures)

    @contextmanager
    def _folders(self) -> Iterator[None]:
        """Provide a folder for run folders, here or on every host, and remove it at the end."""
        if not self.nodes.hosts:
            with tempfile.TemporaryDirectory(prefix="paceline-selftest-") as folder:
                self.settings = replace(self.settings, folder=folder)
                yield
            return
        with with_folders(self.nodes, "selftest", {}) as nodes:
            self.nodes = nodes
            yield


def _measured_or_error(nodes: Nodes, probes: Sequence[str], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield figures; a host that cannot be reached is the error of all probes that are left."""
    left = list(probes)
    try:
        for name, figures in measure(nodes, probes, settings):
            left.remove(name)
            yield name, figures
    except HostError as error:
        yield from ((name, {"error": error.report}) for name in left)


def _judged(check: Check, figures: list[dict[str, Any]]) -> Verdict:
    for probe, found in zip(check.probes, figures, strict=True):
        if "error" in found and probe not in check.expects_failure:
            return Verdict(FAIL, str(found["error"]))
    return check.judge(*figures)


def _reason_of_one_rank(facts: Mapping[str, Any]) -> str:
    """Return why a check is skipped on one rank, and what gives two on such a machine."""
    if facts["device"] == "cpu" or len(facts["gpus"]) > 1:
        fix = "--procs 2 or --hosts A,B"
    elif facts["device"] == "cuda":
        fix = "a machine with several GPUs, --hosts A,B or --device cpu"
    else:
        fix = "--device cpu"
    return f"needs two ranks. Use {fix}"
