"""Jobs whose processes are known by a mark in their environment, whoever has become their parent."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil
from conftest import HANG, environment

from paceline.track.records import RunFolder

RANKS = ("paceline-rank-0", "paceline-rank-1")
ROLES = ("launcher", "forkserver", "resource_tracker", *RANKS)
Begin = Callable[..., "Job"]
_MARK = "ATTACKED_JOB"


class Job:
    """A command in a session of its own, with pipes that its processes inherit."""

    def __init__(self, folder: Path, words: list[str], **variables: str):
        self._mark = uuid4().hex
        own = environment() | variables | {_MARK: self._mark}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.launcher = subprocess.Popen(words, cwd=folder, env=own, start_new_session=True, **pipes)

    def processes(self, folder: str = "", words: str = "") -> list[psutil.Process]:
        """Those that live; only those that work in a folder of that name, and have these words in their command."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) != self._mark or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.cwd().endswith(folder) and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def by_role(self) -> dict[str, psutil.Process]:
        found = {}
        for process in self.processes():
            with suppress(psutil.Error):
                found[self._role(process)] = process
        return found

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self.launcher.pid:
            return "launcher"
        if process.name() in RANKS:
            return process.name()
        line = " ".join(process.cmdline())
        return next((role for role in ROLES if f"multiprocessing.{role}" in line), line)

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + HANG
        while not what():
            assert self.launcher.poll() is None, self.launcher.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_roles(self, *roles: str) -> dict[str, psutil.Process]:
        found: dict[str, psutil.Process] = {}

        def all_there() -> bool:
            found.update(self.by_role())
            return set(roles) <= found.keys()

        self.wait_for(all_there)
        return found

    def wait_for_step(self, run: Path, step: int) -> None:
        self.wait_for(lambda: last_step(run) >= step)

    def end(self) -> tuple[int, str]:
        """Exit status and standard error, once nobody holds the pipes and no process of the job is left."""
        _, errors = self.launcher.communicate(timeout=HANG)
        deadline = time.monotonic() + HANG
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        return self.launcher.returncode, errors

    def kill_all(self) -> None:
        for process in self.processes():
            kill(process)
        self.launcher.wait()


def kill(process: psutil.Process) -> None:
    """Unless it has ended with another one."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


@contextmanager
def jobs(folder: Path) -> Iterator[Begin]:
    """A function that starts a command; what a failed test leaves of it is killed."""
    begun: list[Job] = []

    def begin(words: list[str], **variables: str) -> Job:
        begun.append(Job(folder, words, **variables))
        return begun[-1]

    try:
        yield begin
    finally:
        for job in begun:
            job.kill_all()


def last_step(run: Path) -> int:
    return max((record["step"] for record in RunFolder(run).records()), default=0)
