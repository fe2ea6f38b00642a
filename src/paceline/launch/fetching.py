"""Fetch the run folder of a job from its most advanced node."""

import json
import shlex
import tempfile
from pathlib import Path

from paceline.errors import NoRunFolder, UserError
from paceline.launch.hosts import Host, HostError
from paceline.launch.job import Job
from paceline.launch.job_hosts import hosts_of
from paceline.system.files import make_folder, say, sync, sync_tree

_JOB_ID = ".job"  # file in a fetched run folder

_Progress = tuple[bool, int, bool]
"""Of a run folder: finished, step, has the log, which only rank 0 writes. The largest is fetched."""


def fetch(job: Job) -> Path:
    """Copy the most advanced run folder here, with the telemetry of all nodes; return its path."""
    run, target = f"runs/{job.spec.name}", _target(job)
    if target.exists() and not fetched_folder(job):
        message = f"{target} is the folder of another run. Move it away, then run `paceline fetch {job.id}`."
        raise UserError("run-exists", message, path=target)
    hosts = hosts_of(job)
    progress, with_telemetry = _progress_on_hosts(job, hosts)
    newest = max(progress, key=lambda name: progress[name])
    if target.exists() and (here := _progress(_text(target / "summary.json"))) > progress[newest][:2]:
        message = (
            f"{target} is at step {here[1]}, but {newest} only at step {progress[newest][1]}. "
            "Move the folder away to fetch again."
        )
        raise UserError("local-run-newer", message, path=target)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        for name in with_telemetry:
            if name != newest:
                hosts[name].fetch([f"{run}/telemetry"], Path(scratch))
        hosts[newest].fetch([run], Path(scratch))
        fetched = Path(scratch) / run
        if not fetched.is_dir():
            message = f"{run} is not a folder there. Check what runs on the host."
            raise hosts[newest].error("host-fetch-failed", message)
        (fetched / _JOB_ID).write_text(job.id)
        sync_tree(fetched)
        if target.exists():
            target.rename(Path(scratch) / "replaced")
        fetched.rename(target)
        sync(target.parent)
    return target


def _progress_on_hosts(job: Job, hosts: dict[str, Host]) -> tuple[dict[str, _Progress], list[str]]:
    """Return the progress of the run per host that has its folder, and the hosts that have telemetry."""
    folder = shlex.quote(f"runs/{job.spec.name}")
    script = f"cat {folder}/summary.json || exit 1; echo; cd {folder}; ls -d log.txt telemetry 2> /dev/null; true"
    progress: dict[str, _Progress] = {}
    unreachable, with_telemetry = [], []
    for name in job.spec.hosts:
        try:
            result = hosts[name].run(script)
            if result.status == 0:
                text, _, files = result.text.rpartition("}")
                progress[name] = (*_progress(text + "}"), "log.txt" in files)
                with_telemetry += [name] if "telemetry" in files else []
        except HostError as error:
            unreachable.append(str(error))
    if not progress and unreachable:  # the run folder may exist there
        message = f"{'; '.join(unreachable)}. Fetch again when the nodes are reachable."
        raise HostError("nodes-unreachable", message, job=job.id)
    for line in unreachable:
        say(line)
    if not progress:
        message = f"no node of {job.id} has a run folder. `paceline logs {job.id}` shows why."
        raise NoRunFolder("no-run-folder", message, job=job.id)
    return progress, with_telemetry


def fetched_folder(job: Job) -> Path | None:
    """Return the run folder on this machine, if it was fetched."""
    target = _target(job)
    return target if _text(target / _JOB_ID) == job.id else None


def _target(job: Job) -> Path:
    return Path(job.spec.runs) / job.spec.name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _progress(summary: str) -> tuple[bool, int]:
    """Return whether a run is finished, and its step, from its untrusted summary.json."""
    try:
        content = json.loads(summary)
        return content.get("status") == "finished", int(content.get("step", -1))
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return False, -1
