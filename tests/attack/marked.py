"""Jobs whose processes are found by an environment variable, even if another process has adopted them."""

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
    """A command in its own session, with pipes that its processes inherit."""

    def __init__(self, folder: Path, words: list[str], **variables: str):
        self._mark = uuid4().hex
        marked = environment() | variables | {_MARK: self._mark}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.launcher = subprocess.Popen(words, cwd=folder, env=marked, start_new_session=True, **pipes)

    def processes(self, folder: str = "", words: str = "") -> list[psutil.Process]:
        """Return the live processes in a folder with this name and with these words in their command line."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) != self._mark or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.cwd().endswith(folder) and words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def by_role(self) -> dict[str, psutil.Process]:
        """Return the live processes by their role in the job."""
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

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; the launcher must not end before."""
        deadline = time.monotonic() + HANG
        while not condition():
            assert self.launcher.poll() is None, self.launcher.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_roles(self, *roles: str) -> dict[str, psutil.Process]:
        """Wait until processes of these roles exist, and return them by role."""
        found: dict[str, psutil.Process] = {}

        def all_exist() -> bool:
            found.update(self.by_role())
            return set(roles) <= found.keys()

        self.wait_for(all_exist)
        return found

    def wait_for_step(self, run: Path, step: int) -> None:
        self.wait_for(lambda: last_step(run) >= step)

    def end(self) -> tuple[int, str]:
        """Return exit status and standard error after all processes of the job have ended and closed the pipes."""
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
    """Kill a process unless it has ended."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


@contextmanager
def jobs(folder: Path) -> Iterator[Begin]:
    """Yield a function that starts a command. Processes that a failed test leaves are killed."""
    started: list[Job] = []

    def begin(words: list[str], **variables: str) -> Job:
        started.append(Job(folder, words, **variables))
        return started[-1]

    try:
        yield begin
    finally:
        for job in started:
            job.kill_all()


def last_step(run: Path) -> int:
    """Return the last recorded step of a run."""
    return max((record["step"] for record in RunFolder(run).records()), default=0)
