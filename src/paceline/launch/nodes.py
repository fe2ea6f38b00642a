"""Jobs on machines that take shell scripts: this one, those behind ssh, rented ones. A plan first, then its steps.

On every machine a session of its own (sessions.py) runs node.sh.
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
"""File in the folder of a job, with what must be in no command line and in no plan; removed as soon as it is read."""
_LONGEST = 24 * 3600.0  # fetching all of ImageNet over a slow line


@dataclass(frozen=True)
class Step:
    """Something to do on one machine: files to put there, then a script to run in the job's folder."""

    host: str
    title: str
    script: str = ""
    files: dict[str, str] = field(default_factory=dict)
    tree: Path | None = None

    def __str__(self) -> str:
        lines = [f"# {self.host}: {self.title}"]
        lines += [f"# puts {name}" for name in self.files if name != "node.sh"]
        if self.tree:
            lines.append(f"# copies {self.tree} to code/, but for what .gitignore names")
        shown = self.files.get("node.sh", "")
        return "\n".join([*lines, *(f"    {line}" for line in (shown + self.script).strip().splitlines())])


def plan(job: Job) -> list[Step]:
    """What happens where, in order."""
    steps = [step for host in job.hosts for step in node_steps(job, host)]
    starts = [step for step in steps if step.title == "start"]
    ready = [step for step in steps if step.title != "start"]
    here = [] if job.rendezvous_host else [Step(HERE, "files", files={SECRETS: ""})]
    return [*here, *ready, _meeting(job), *starts]


def _meeting(job: Job) -> Step:
    address, _, port = job.rendezvous.rpartition(":")
    words = f"rendezvous --address {shlex.quote(address)} --port {shlex.quote(port)}"
    if job.rendezvous_host:
        script = detached("rendezvous", _program(job, "rendezvous", words), _read_secrets(job))
        return Step(job.rendezvous_host, RENDEZVOUS, script)
    program = f"{shlex.quote(sys.executable)} -m paceline {words}"
    return Step(HERE, RENDEZVOUS, detached("rendezvous", program, f". ./{SECRETS}; rm -f {SECRETS}"))


def node_steps(job: Job, host: str) -> Iterator[Step]:
    """Of one machine; also when it takes the place of a lost one."""
    makes = not job.python and not job.container
    tree = Path(job.code) if job.code and makes else None
    files = {"recipe.yaml": job.recipe, "node.sh": _node_script(job, host), SECRETS: ""}
    yield Step(host, "files", _CHECK, files, tree)
    if job.setup_scripts.get(host):
        yield Step(host, "disks", job.setup_scripts[host])
    if makes:
        yield Step(host, "environment", _environment(job))
    if fetched := remote_data(job):
        prepared = f"rm -f data.cid\n{_read_secrets(job)}\n{_DISKS}\n{_exports(job, host)}"
        yield Step(host, "data", f"{prepared}\n{_program(job, 'data', f'data {fetched}')}")
    yield Step(host, "start", detached("node", 'sh "$PWD/node.sh"'))


_CHECK = """for program in setsid ps pkill flock; do
    command -v $program > /dev/null || { echo "it has no $program: install procps and util-linux" >&2; exit 1; }
done"""

# where the machine has room for data
_DISKS = "if [ -f disks ]; then . ./disks; fi"


def _read_secrets(job: Job) -> str:
    """Before `_program`. A container gets them through a pipe: `docker inspect` shows what -e gives it."""
    return f"exec 3< {SECRETS}" if job.container else f". ./{SECRETS}"


def _exports(job: Job, host: str) -> str:
    named = job.variables | {
        "PACELINE_JOB": job.id,
        "PACELINE_HOST": host,
        "PACELINE_RANK_TIMEOUT": str(job.rank_timeout),
    }
    return "export " + " ".join(f"{variable('variable', name)}={shlex.quote(value)}" for name, value in named.items())


def data_folders(job: Job) -> list[str]:
    """Outside of the job's own folder, which a container has to see."""
    path = plain("data.path", yaml.safe_load(job.recipe)["data"].get("path") or "")
    if not path.startswith("/"):
        return []
    if {":", ","} & set(path):
        raise UserError(f"data.path={path!r}: containers take : and , as separators; rename the folder")
    return [path]


def remote_data(job: Job) -> str:
    """Where the recipe's images are, if every machine has to fetch them before any begins."""
    data = yaml.safe_load(job.recipe)["data"]
    if not is_remote(data.get("path") or ""):
        return ""
    refuse_password("data.path", data["path"])
    variant = [f"--variant={plain('data.variant', data['variant'])}"] if data.get("variant") else []
    return shlex.join([plain("data.path", data["path"]), *variant])


def _program(job: Job, name: str, words: str) -> str:
    """What runs paceline with these words on a machine, for a shell; a container's id goes to NAME.cid."""
    if job.container:
        # the host's network and shared memory, and its GPUs if it has some; variables by name only
        names = ("PACELINE_JOB", "PACELINE_HOST", "PACELINE_RANK_TIMEOUT", "PACELINE_CACHE", *job.variables)
        given = " ".join(f"-e {variable('variable', own)}" for own in names)
        gpus = "$(command -v nvidia-smi > /dev/null && echo --gpus all)"
        place = f'--cidfile {name}.cid --network host --ipc host -v "$PWD:$PWD" -w "$PWD"'
        place += "".join(f" -v {shlex.quote(f'{own}:{own}')}" for own in data_folders(job))
        place += ' ${PACELINE_CACHE:+-v "$PACELINE_CACHE:$PACELINE_CACHE"}'
        image = shlex.quote(operand("--container", job.container))
        inside = """sh -c 'umask 077; eval "$(cat)"; exec paceline "$@"' paceline"""
        return f"docker run --rm --init -i {gpus} {place} {given} {image} {inside} {words} <&3"
    python = quoted(operand("--python", job.python)) if job.python else f'"{_environment_folder(job)}/bin/python"'
    return f"{python} -m paceline {words}"


def _environment_folder(job: Job) -> str:
    return f"$HOME/.paceline/envs/{_digest(job.code, extras_of(job))}"


@cache
def _digest(code: str, extras: str) -> str:
    """Of what an environment is made from."""
    digest = hashlib.sha256(f"{paceline.__version__} {extras}".encode())
    for path in sorted(tracked_files(Path(code))) if code else ():
        if path.suffix in (".py", ".c", ".h", ".toml", ".txt", ".yaml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def extras_of(job: Job) -> str:
    """What the job needs beside the plain package."""
    recipe = yaml.safe_load(job.recipe)
    places = (job.results, recipe["data"].get("path") or "")
    wanted = {"s3": any(place.startswith("s3://") for place in places)}
    wanted |= {name: bool(recipe.get("log", {}).get(name)) for name in ("mlflow", "wandb")}
    names = ",".join(name for name, needed in sorted(wanted.items()) if needed)
    return f"[{names}]" if names else ""


def _environment(job: Job) -> str:
    extras = extras_of(job)
    what = f"-c code/constraints.txt './code{extras}'" if job.code else f"'paceline{extras}=={paceline.__version__}'"
    return f"""env="{_environment_folder(job)}"
mkdir -p "$(dirname "$env")" && exec 9> "$env.lock" && flock 9 || exit 1  # machines may share the user's home
if [ ! -x "$env/bin/paceline" ]; then
    for python in python3 python3.13 python3.12 python3.11 ""; do
        if $python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then break; fi
    done
    [ -n "$python" ] || {{ echo "it needs Python 3.11 with venv or newer: install it, or say --python" >&2; exit 1; }}
    $python -m venv "$env" && "$env/bin/pip" install --quiet --disable-pip-version-check {what} || exit 1
fi"""


def _node_script(job: Job, host: str) -> str:
    what = ["--resume", job.resume] if job.resume else ["recipe.yaml", "--name", job.name]
    words = ["train", *what, "--procs", str(job.procs), "--job", job.id]
    words += ["--nodes", f"{job.min_nodes}:{len(job.hosts)}", "--rendezvous", job.rendezvous]
    words += ["--join-timeout", str(job.join_timeout)]
    words += ["--results", job.results] if job.results else []
    if job.backend == "local":  # its nodes share the processors
        words += ["--threads", str(max(1, cores() // (job.procs * len(job.hosts))))]
    return f"""cd "$(dirname "$0")" || exit 1
{_read_secrets(job)}
rm -f {SECRETS}
{_DISKS}
{_exports(job, host)}
PACELINE_PARENT=$$ {_program(job, "node", shlex.join(words))}
status=$?
# ranks whose agent was killed
for pid in $(ps -s $$ -o pid=); do [ $pid = $$ ] || kill -KILL $pid 2> /dev/null; done
echo $status > node.exit
rm -f node.pid
"""


def carry_out(
    steps: Sequence[Step], hosts: dict[str, Host], secrets: dict[str, str], is_stopped: Callable[[], bool]
) -> None:
    """Steps of one title on all machines at once, one title after the other."""
    for title in dict.fromkeys(step.title for step in steps):
        own = [step for step in steps if step.title == title]
        print(f"{', '.join(step.host for step in own)}: {title} ...", file=sys.stderr, flush=True)
        try:
            if is_stopped():
                raise UserError("the job was stopped while it was started")
            with ThreadPoolExecutor(len(own)) as pool:
                for done in as_completed([pool.submit(_carry_out, step, hosts[step.host], secrets) for step in own]):
                    if done.exception():
                        _end_children()  # what others do may take hours, and is of no use now
                    done.result()
        except BaseException:
            for name in {step.host for step in steps}:
                with suppress(HostError):
                    hosts[name].run(f"rm -f {SECRETS}")
            raise


def _end_children() -> None:
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            child.terminate()


def _carry_out(step: Step, host: Host, secrets: dict[str, str]) -> None:
    if step.files:
        content = {name: text.encode() for name, text in step.files.items()} | {SECRETS: secrets_text(secrets)}
        host.send(content, step.tree)
    if step.script:
        host.must(step.script, step.title, timeout=_LONGEST)


def secrets_text(secrets: dict[str, str]) -> bytes:
    """For a shell to read; a variable need not be Unicode."""
    lines = (f"export {variable('--pass', name)}={shlex.quote(value)}\n" for name, value in secrets.items())
    return os.fsencode("".join(lines))


def passed_of(job: Job) -> dict[str, str]:
    """Variables of this environment that the user wants the ranks to have."""
    missing = [name for name in job.pass_env if name not in os.environ]
    if missing:
        raise UserError(f"--pass {', '.join(missing)}: not set in this environment; export it first")
    return {name: os.environ[name] for name in job.pass_env}


def secrets_of(job: Job) -> dict[str, str]:
    """What ranks get in their environment, and nobody else is to see."""
    return passed_of(job) | {TOKEN: token_of(job)}
