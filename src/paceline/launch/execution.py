"""Execute the steps of a plan on hosts. Secrets are sent separately, so that no plan contains them."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import psutil

from paceline.distributed.channel import TOKEN
from paceline.errors import UserError
from paceline.launch import job as jobs
from paceline.launch import planning, sessions
from paceline.launch.final_state import clear_final_state, is_stopped
from paceline.launch.hosts import Host, HostError
from paceline.launch.job import Job, token_of
from paceline.launch.job_hosts import HERE, hosts_of
from paceline.launch.planning import SECRETS, HostStep
from paceline.launch.specs import LaunchSpec
from paceline.launch.values import variable
from paceline.system.files import say

_STEP_TIMEOUT = 24 * 3600.0  # fetching all of ImageNet over a slow connection


def start(job: Job, secrets: dict[str, str]) -> Job:
    """Start a job that has its rendezvous on all hosts; if one fails, stop it on all. Return the job."""
    hosts = hosts_of(job)
    was_known = jobs.is_known(job)
    jobs.save(job)
    clear_final_state(job)
    with exit_on_signals():
        try:
            execute(planning.plan(job), hosts, secrets, partial(is_stopped, job))
        except BaseException:
            with ignore_signals():
                remaining = sessions.stop([hosts[name] for name in (*job.spec.hosts, HERE)], grace=2)
            for line in remaining:
                say(f"not stopped: {line}")
            if not remaining and not was_known:
                jobs.forget(job)  # it never started
            raise
    return job


def execute(
    steps: Sequence[HostStep], hosts: dict[str, Host], secrets: dict[str, str], is_stopped: Callable[[], bool]
) -> None:
    """Execute steps with the same title on all hosts in parallel, one title after the other."""
    for title in dict.fromkeys(step.title for step in steps):
        group = [step for step in steps if step.title == title]
        print(f"{', '.join(step.host for step in group)}: {title} ...", file=sys.stderr, flush=True)
        try:
            if is_stopped():
                raise UserError("job-stopped", "the job was stopped while it was starting")
            with ThreadPoolExecutor(len(group)) as pool:
                futures = [pool.submit(_execute_step, step, hosts[step.host], secrets) for step in group]
                try:
                    for done in as_completed(futures):
                        done.result()
                except BaseException:
                    _terminate_children()  # the steps of other hosts may take hours, and are useless now
                    raise
        except BaseException:
            for name in {step.host for step in steps}:
                with suppress(HostError):
                    hosts[name].run(f"rm -f {SECRETS}")
            raise


def _terminate_children() -> None:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            child.terminate()


def _execute_step(step: HostStep, host: Host, secrets: dict[str, str]) -> None:
    if step.files:
        content = {name: text.encode() for name, text in step.files.items()} | {SECRETS: secrets_text(secrets)}
        host.send(content, step.tree)
    if step.title == planning.SELFTEST:
        _run_selftest(step, host)
    elif step.script:
        host.run_checked(step.script, step.title, timeout=_STEP_TIMEOUT)


def _run_selftest(step: HostStep, host: Host) -> None:
    """Run the selftest of a host and print its table; raise HostError if it fails."""
    result = host.run(step.script, _STEP_TIMEOUT)
    for line in (*result.text.splitlines(), *result.err.splitlines()):
        say(f"{host.name} | {line}")
    if result.status:
        message = (
            "the selftest failed (see above), so the job is not started. Fix the checks that failed, or omit "
            "--selftest."
        )
        raise host.error("selftest-failed", message)


def secrets_text(secrets: dict[str, str]) -> bytes:
    """Return a script that exports the secrets; values need not be Unicode."""
    lines = (f"export {variable('--pass', name)}={shlex.quote(value)}\n" for name, value in secrets.items())
    return os.fsencode("".join(lines))


def passed_variables(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of this environment that --pass names."""
    missing = [name for name in spec.pass_env if name not in os.environ]
    if missing:
        message = f"--pass {', '.join(missing)}: not set in this environment. Export it first."
        raise UserError("variable-not-set", message, names=missing)
    return {name: os.environ[name] for name in spec.pass_env}


def secrets_of(job: Job) -> dict[str, str]:
    """Return the secret environment variables of the ranks."""
    return passed_variables(job.spec) | {TOKEN: token_of(job)}


@contextmanager
def _signal_handler(handler: Any, *signums: signal.Signals) -> Iterator[None]:
    previous = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def exit_on_signals() -> AbstractContextManager[None]:
    """Turn signals into SystemExit, so that a terminated launcher cleans up."""
    return _signal_handler(lambda number, _: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)


def ignore_signals() -> AbstractContextManager[None]:
    """Ignore signals during the clean-up: closing a terminal may send several."""
    return _signal_handler(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
