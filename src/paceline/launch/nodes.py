"""Plan and execute the steps of a job on hosts that take shell scripts: this machine, ssh hosts, EC2 instances.

On every host, node.sh runs in its own session (sessions.py).
"""

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import yaml

import paceline
from paceline.distributed.channel import TOKEN
from paceline.errors import UserError
from paceline.launch.hosts import Host, HostError, tracked_files
from paceline.launch.job import Job, token_of
from paceline.launch.sessions import detached
from paceline.launch.values import operand, plain, quoted, variable
from paceline.system.host import cores
from paceline.system.remote import is_remote, refuse_password

HERE, RENDEZVOUS = "here", "rendezvous"
SECRETS = "secrets"
"""File in a job's folder with what must not be in a command line or a plan; removed as soon as it is read."""
_STEP_TIMEOUT = 24 * 3600.0  # fetching all of ImageNet over a slow connection


@dataclass(frozen=True)
class HostStep:
    """One step on one host: files to copy to the job's folder, then a script to run in it."""

    host: str
    title: str
    script: str = ""
    files: dict[str, str] = field(default_factory=dict)
    tree: Path | None = None

    def __str__(self) -> str:
        lines = [f"# {self.host}: {self.title}"]
        lines += [f"# copies {name}" for name in self.files if name != "node.sh"]
        if self.tree:
            lines.append(f"# copies {self.tree} to code/, except files in .gitignore")
        shown = self.files.get("node.sh", "")
        return "\n".join([*lines, *(f"    {line}" for line in (shown + self.script).strip().splitlines())])


def plan(job: Job) -> list[HostStep]:
    """Return all steps in order: preparation, rendezvous, start."""
    steps = [step for host in job.hosts for step in node_steps(job, host)]
    starts = [step for step in steps if step.title == "start"]
    preparation = [step for step in steps if step.title != "start"]
    here = [] if job.rendezvous_host else [HostStep(HERE, "files", files={SECRETS: ""})]
    return [*here, *preparation, _rendezvous_step(job), *starts]


def _rendezvous_step(job: Job) -> HostStep:
    address, _, port = job.rendezvous.rpartition(":")
    words = f"rendezvous --address {shlex.quote(address)} --port {shlex.quote(port)}"
    if job.rendezvous_host:
        script = detached("rendezvous", _program(job, "rendezvous", words), _read_secrets(job))
        return HostStep(job.rendezvous_host, RENDEZVOUS, script)
    program = f"{shlex.quote(sys.executable)} -m paceline {words}"
    return HostStep(HERE, RENDEZVOUS, detached("rendezvous", program, f". ./{SECRETS}; rm -f {SECRETS}"))


def node_steps(job: Job, host: str) -> Iterator[HostStep]:
    """Yield the steps that start one node; also used to restart a lost one."""
    creates_environment = not job.python and not job.container
    tree = Path(job.code) if job.code and creates_environment else None
    files = {"recipe.yaml": job.recipe, "node.sh": _node_script(job, host), SECRETS: ""}
    yield HostStep(host, "files", _CHECK, files, tree)
    if job.setup_scripts.get(host):
        yield HostStep(host, "disks", job.setup_scripts[host])
    if creates_environment:
        yield HostStep(host, "environment", _environment(job))
    if url := remote_data(job):
        prepare = f"rm -f data.cid\n{_read_secrets(job)}\n{_DISKS}\n{_exports(job, host)}"
        yield HostStep(host, "data", f"{prepare}\n{_program(job, 'data', f'data {url}')}")
    yield HostStep(host, "start", detached("node", 'sh "$PWD/node.sh"'))


_CHECK = """for program in setsid ps pkill flock; do
    command -v $program > /dev/null || { echo "$program is missing. Install procps and util-linux." >&2; exit 1; }
done"""

# sets PACELINE_CACHE, if disks.py found an instance store
_DISKS = "if [ -f disks ]; then . ./disks; fi"


def _read_secrets(job: Job) -> str:
    """Return what has to run before `_program`. Containers read a pipe, because `docker inspect` shows -e values."""
    return f"exec 3< {SECRETS}" if job.container else f". ./{SECRETS}"


def _exports(job: Job, host: str) -> str:
    values = job.variables | {
        "PACELINE_JOB": job.id,
        "PACELINE_HOST": host,
        "PACELINE_RANK_TIMEOUT": str(job.rank_timeout),
    }
    return "export " + " ".join(f"{variable('variable', name)}={shlex.quote(value)}" for name, value in values.items())


def data_folders(job: Job) -> list[str]:
    """Return the data folders outside of the job's folder that a container has to mount."""
    path = plain("data.path", yaml.safe_load(job.recipe)["data"].get("path") or "")
    if not path.startswith("/"):
        return []
    if {":", ","} & set(path):
        message = f"data.path={path!r} contains : or , which separate mounts of containers. Rename the folder."
        raise UserError("data-path-not-mountable", message, path=path)
    return [path]


def remote_data(job: Job) -> str:
    """Return the arguments of `paceline data` if every node has to fetch the data before training starts, else ""."""
    data = yaml.safe_load(job.recipe)["data"]
    if not is_remote(data.get("path") or ""):
        return ""
    refuse_password("data.path", data["path"])
    variant = [f"--variant={plain('data.variant', data['variant'])}"] if data.get("variant") else []
    return shlex.join([plain("data.path", data["path"]), *variant])


def _program(job: Job, name: str, words: str) -> str:
    """Return the shell command that runs paceline with these arguments; the id of a container goes to NAME.cid."""
    if job.container:
        # with the host's network, shared memory and GPUs; variables by name, so that no value is in a command line
        names = ("PACELINE_JOB", "PACELINE_HOST", "PACELINE_RANK_TIMEOUT", "PACELINE_CACHE", *job.variables)
        variables = " ".join(f"-e {variable('variable', one)}" for one in names)
        gpus = "$(command -v nvidia-smi > /dev/null && echo --gpus all)"
        mounts = f'--cidfile {name}.cid --network host --ipc host -v "$PWD:$PWD" -w "$PWD"'
        mounts += "".join(f" -v {shlex.quote(f'{folder}:{folder}')}" for folder in data_folders(job))
        mounts += ' ${PACELINE_CACHE:+-v "$PACELINE_CACHE:$PACELINE_CACHE"}'
        image = shlex.quote(operand("--container", job.container))
        inside = """sh -c 'umask 077; eval "$(cat)"; exec paceline "$@"' paceline"""
        return f"docker run --rm --init -i {gpus} {mounts} {variables} {image} {inside} {words} <&3"
    python = quoted(operand("--python", job.python)) if job.python else f'"{_environment_folder(job)}/bin/python"'
    return f"{python} -m paceline {words}"


def _environment_folder(job: Job) -> str:
    return f"$HOME/.paceline/envs/{_digest(job.code, extras_of(job))}"


@cache
def _digest(code: str, extras: str) -> str:
    """Return a digest of what an environment is created from."""
    digest = hashlib.sha256(f"{paceline.__version__} {extras}".encode())
    for path in sorted(tracked_files(Path(code))) if code else ():
        if path.suffix in (".py", ".c", ".h", ".toml", ".txt", ".yaml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def extras_of(job: Job) -> str:
    """Return the extras of the package that the job needs, e.g. [s3]."""
    recipe = yaml.safe_load(job.recipe)
    urls = (job.results, recipe["data"].get("path") or "")
    wanted = {"s3": any(url.startswith("s3://") for url in urls)}
    wanted |= {name: bool(recipe.get("log", {}).get(name)) for name in ("mlflow", "wandb")}
    names = ",".join(name for name, needed in sorted(wanted.items()) if needed)
    return f"[{names}]" if names else ""


def _environment(job: Job) -> str:
    extras = extras_of(job)
    what = f"-c code/constraints.txt './code{extras}'" if job.code else f"'paceline{extras}=={paceline.__version__}'"
    return f"""env="{_environment_folder(job)}"
mkdir -p "$(dirname "$env")" && exec 9> "$env.lock" && flock 9 || exit 1  # hosts may share the home folder
if [ ! -x "$env/bin/paceline" ]; then
    for python in python3 python3.13 python3.12 python3.11 ""; do
        if $python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then break; fi
    done
    [ -n "$python" ] || {{ echo "Python 3.11+ with venv is missing. Install it, or pass --python PATH." >&2; exit 1; }}
    $python -m venv "$env" && "$env/bin/pip" install --quiet --disable-pip-version-check {what} || exit 1
fi"""


def _node_script(job: Job, host: str) -> str:
    what = ["--resume", job.resume] if job.resume else ["recipe.yaml", "--name", job.name]
    words = ["train", *what, "--procs", str(job.procs), "--job", job.id]
    words += ["--nodes", f"{job.min_nodes}:{len(job.hosts)}", "--rendezvous", job.rendezvous]
    words += ["--join-timeout", str(job.join_timeout)]
    words += ["--results", job.results] if job.results else []
    if job.backend == "local":  # its nodes share the cores
        words += ["--threads", str(max(1, cores() // (job.procs * len(job.hosts))))]
    return f"""cd "$(dirname "$0")" || exit 1
{_read_secrets(job)}
rm -f {SECRETS}
{_DISKS}
{_exports(job, host)}
PACELINE_PARENT=$$ {_program(job, "node", shlex.join(words))}
status=$?
# ranks of a killed agent
for pid in $(ps -s $$ -o pid=); do [ $pid = $$ ] || kill -KILL $pid 2> /dev/null; done
echo $status > node.exit
rm -f node.pid
"""


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
    if step.script:
        host.run_checked(step.script, step.title, timeout=_STEP_TIMEOUT)


def secrets_text(secrets: dict[str, str]) -> bytes:
    """Return a script that exports the secrets; values need not be Unicode."""
    lines = (f"export {variable('--pass', name)}={shlex.quote(value)}\n" for name, value in secrets.items())
    return os.fsencode("".join(lines))


def passed_variables(job: Job) -> dict[str, str]:
    """Return the variables of this environment that --pass names."""
    missing = [name for name in job.pass_env if name not in os.environ]
    if missing:
        message = f"--pass {', '.join(missing)}: not set in this environment. Export it first."
        raise UserError("variable-not-set", message, names=missing)
    return {name: os.environ[name] for name in job.pass_env}


def secrets_of(job: Job) -> dict[str, str]:
    """Return the secret environment variables of the ranks."""
    return passed_variables(job) | {TOKEN: token_of(job)}
