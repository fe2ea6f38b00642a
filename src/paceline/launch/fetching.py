"""Fetch the run folders of a job from its most advanced nodes."""

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


def fetch(job: Job) -> list[Path]:
    """Copy the run folders here, one per seed, from the node where each is most advanced; return their paths."""
    hosts, unreachable = hosts_of(job), dict[str, str]()
    fetched = []
    for name in job.spec.run_names:
        progress, with_telemetry = _progress_on_hosts(job, name, hosts, unreachable)
        if progress:
            fetched.append(_fetch_run(job, name, hosts, progress, with_telemetry))
    if not fetched and unreachable:  # a run folder may exist there
        message = f"{'; '.join(unreachable.values())}. Fetch again when the nodes are reachable."
        raise HostError("nodes-unreachable", message, job=job.id)
    for line in unreachable.values():
        say(line)
    if not fetched:
        message = f"no node of {job.id} has a run folder. `paceline logs {job.id}` shows why."
        raise NoRunFolder("no-run-folder", message, job=job.id)
    return fetched


def _fetch_run(
    job: Job, name: str, hosts: dict[str, Host], progress: dict[str, _Progress], with_telemetry: list[str]
) -> Path:
    """Copy the most advanced folder of a run here, with the telemetry of all nodes; return its path."""
    run, target = f"runs/{name}", Path(job.spec.runs) / name
    if target.exists() and not _is_fetched(job, target):
        message = f"{target} is the folder of another run. Move it away, then run `paceline fetch {job.id}`."
        raise UserError("run-exists", message, path=target)
    newest = max(progress, key=lambda name: progress[name])
    if target.exists() and (here := _progress(_text(target / "summary.json"))) > progress[newest][:2]:
        message = (
            f"{target} is at step {here[1]}, but {newest} only at step {progress[newest][1]}. "
            "Move the folder away to fetch again."
        )
        raise UserError("local-run-newer", message, path=target)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as scratch:
        for host in with_telemetry:
            if host != newest:
                hosts[host].fetch([f"{run}/telemetry"], Path(scratch))
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


def _progress_on_hosts(
    job: Job, run: str, hosts: dict[str, Host], unreachable: dict[str, str]
) -> tuple[dict[str, _Progress], list[str]]:
    """Return the progress of a run per host that has its folder, and the hosts that have telemetry.

    Hosts that do not answer are added to `unreachable`, and not asked again.
    """
    folder = shlex.quote(f"runs/{run}")
    script = f"cat {folder}/summary.json || exit 1; echo; cd {folder}; ls -d log.txt telemetry 2> /dev/null; true"
    progress: dict[str, _Progress] = {}
    with_telemetry = []
    for name in job.spec.hosts:
        if name in unreachable:
            continue
        try:
            result = hosts[name].run(script)
        except HostError as error:
            unreachable[name] = str(error)
            continue
        if result.status == 0:
            text, _, files = result.text.rpartition("}")
            progress[name] = (*_progress(text + "}"), "log.txt" in files)
            with_telemetry += [name] if "telemetry" in files else []
    return progress, with_telemetry


def fetched_folders(job: Job) -> list[Path]:
    """Return the run folders on this machine that were fetched."""
    folders = [Path(job.spec.runs) / name for name in job.spec.run_names]
    return [folder for folder in folders if _is_fetched(job, folder)]


def _is_fetched(job: Job, folder: Path) -> bool:
    return _text(folder / _JOB_ID) == job.id


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
