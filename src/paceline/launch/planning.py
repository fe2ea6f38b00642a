"""Plan the steps of a job on hosts that take shell scripts: this machine, ssh hosts, EC2 instances.

On every host, node.sh runs in its own session (sessions.py). Nothing is executed here (execution.py).
"""

import hashlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import yaml

import paceline
from paceline.config.seeds import seed_words
from paceline.errors import UserError
from paceline.launch import procs
from paceline.launch.hosts import tracked_files
from paceline.launch.job import Job
from paceline.launch.job_hosts import HERE
from paceline.launch.sessions import detached
from paceline.launch.specs import ElasticSpec, JobSpec, LaunchSpec, LocalSpec, RemoteSpec
from paceline.launch.values import operand, plain, quoted, variable
from paceline.system.host import cores
from paceline.system.remote import is_remote, refuse_password

RENDEZVOUS = "rendezvous"
EXTENSIONS = "extensions"
"""Folder with the packages that the recipe imports."""
SELFTEST = "selftest"
SECRETS = "secrets"
"""File in a job's folder with what must not be in a command line or a plan; removed as soon as it is read."""


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


def preview(job: Job) -> list[HostStep]:
    """Return the steps of a job that is not launched yet: its rendezvous endpoint is not known."""
    spec = job.spec
    wanted = spec.rendezvous_host if isinstance(spec, RemoteSpec) else ""
    return plan(replace(job, rendezvous="ADDRESS:PORT", rendezvous_host=wanted if wanted in spec.hosts else ""))


def plan(job: Job) -> list[HostStep]:
    """Return all steps in order: preparation, selftest, rendezvous, start."""
    steps = [step for host in job.spec.hosts for step in node_steps(job, host)]
    starts = [step for step in steps if step.title == "start"]
    preparation = [step for step in steps if step.title != "start"]
    here = [] if job.rendezvous_host else [HostStep(HERE, "files", files={SECRETS: ""})]
    tests = [_selftest_step(job, host) for host in job.spec.hosts] if job.spec.selftest else []
    return [*here, *preparation, *tests, _rendezvous_step(job), *starts]


def _selftest_step(job: Job, host: str) -> HostStep:
    return HostStep(host, SELFTEST, _foreground(job, host, "selftest", shlex.join(selftest_words(job.spec))))


def _rendezvous_step(job: Job) -> HostStep:
    address, _, port = job.rendezvous.rpartition(":")
    words = f"rendezvous --address {shlex.quote(address)} --port {shlex.quote(port)}"
    if job.rendezvous_host:
        script = detached(
            "rendezvous", _program(job, job.rendezvous_host, "rendezvous", words), _read_secrets(job.spec)
        )
        return HostStep(job.rendezvous_host, RENDEZVOUS, script)
    program = f"{shlex.quote(sys.executable)} -m paceline {words}"
    return HostStep(HERE, RENDEZVOUS, detached("rendezvous", program, f". ./{SECRETS}; rm -f {SECRETS}"))


def node_steps(job: Job, host: str) -> Iterator[HostStep]:
    """Yield the steps that start one node; also used to restart a lost one."""
    spec = job.spec
    creates_environment = not spec.python and not spec.container
    tree = Path(spec.code) if spec.code and creates_environment else None
    files = {"recipe.yaml": spec.recipe, "node.sh": _node_script(job, host), SECRETS: ""}
    files |= {f"{EXTENSIONS}/{path}": text for path, text in spec.extensions.items()}
    yield HostStep(host, "files", _CHECK, files, tree)
    if job.setup_scripts.get(host):
        yield HostStep(host, "disks", job.setup_scripts[host])
    if creates_environment:
        yield HostStep(host, "environment", _environment(spec))
    if url := remote_data(spec):
        yield HostStep(host, "data", _foreground(job, host, "data", f"data {url}"))
    yield HostStep(host, "start", detached("node", 'sh "$PWD/node.sh"'))


def _foreground(job: Job, host: str, name: str, words: str) -> str:
    """Return a script that runs paceline on a node before it starts, and waits for it."""
    prepare = f"rm -f {name}.cid\n{_read_secrets(job.spec)}\n{_DISKS}\n{_exports(job, host)}"
    return f"{prepare}\n{_program(job, host, name, words)}"


def selftest_words(spec: JobSpec) -> list[str]:
    """Return the command of paceline that tests a node."""
    device = yaml.safe_load(spec.recipe).get("device", "auto")
    return ["selftest", *([] if device == "auto" else ["--device", str(device)])]


_CHECK = """for program in setsid ps pkill flock; do
    command -v $program > /dev/null || { echo "$program is missing. Install procps and util-linux." >&2; exit 1; }
done"""

# sets PACELINE_CACHE, if disks.py found an instance store
_DISKS = "if [ -f disks ]; then . ./disks; fi"


def _read_secrets(spec: LaunchSpec) -> str:
    """Return what has to run before `_program`. Containers read a pipe, because `docker inspect` shows -e values."""
    return f"exec 3< {SECRETS}" if spec.container else f". ./{SECRETS}"


def _variables(job: Job, host: str) -> dict[str, str]:
    """Return the environment variables of a node that are not secret."""
    own = job.spec.node_variables.get(host, {}) if isinstance(job.spec, LocalSpec) else {}
    values = {"PACELINE_JOB": job.id, "PACELINE_HOST": host, "PACELINE_RANK_TIMEOUT": str(job.spec.rank_timeout)}
    return job.variables | own | values


def _exports(job: Job, host: str) -> str:
    values = _variables(job, host)
    exported = " ".join(f"{variable('variable', name)}={shlex.quote(value)}" for name, value in values.items())
    path = f' PYTHONPATH="$PWD/{EXTENSIONS}${{PYTHONPATH:+:$PYTHONPATH}}"' if job.spec.extensions else ""
    return f"export {exported}{path}"


def data_folders(spec: JobSpec) -> list[str]:
    """Return the data folders outside of the job's folder that a container has to mount."""
    path = plain("data.path", yaml.safe_load(spec.recipe)["data"].get("path") or "")
    if not path.startswith("/"):
        return []
    if {":", ","} & set(path):
        message = f"data.path={path!r} contains : or , which separate mounts of containers. Rename the folder."
        raise UserError("data-path-not-mountable", message, path=path)
    return [path]


def remote_data(spec: JobSpec) -> str:
    """Return the arguments of `paceline data` if every node has to fetch the data before training starts, else ""."""
    data = yaml.safe_load(spec.recipe)["data"]
    if not is_remote(data.get("path") or ""):
        return ""
    refuse_password("data.path", data["path"])
    variant = [f"--variant={plain('data.variant', data['variant'])}"] if data.get("variant") else []
    return shlex.join([plain("data.path", data["path"]), *variant])


def _program(job: Job, host: str, name: str, words: str) -> str:
    """Return the shell command that runs paceline with these arguments; the id of a container goes to NAME.cid."""
    if job.spec.container:
        # with the host's network, shared memory and GPUs; variables by name, so that no value is in a command line
        names = [*_variables(job, host), "PACELINE_CACHE", *(["PYTHONPATH"] if job.spec.extensions else [])]
        variables = " ".join(f"-e {variable('variable', one)}" for one in names)
        gpus = "$(command -v nvidia-smi > /dev/null && echo --gpus all)"
        # RDMA devices, which InfiniBand and EFA need, with memory that they may lock
        gpus += " $([ -d /dev/infiniband ] && echo --device /dev/infiniband) --ulimit memlock=-1"
        mounts = f'--cidfile {name}.cid --network host --ipc host -v "$PWD:$PWD" -w "$PWD"'
        mounts += "".join(f" -v {shlex.quote(f'{folder}:{folder}')}" for folder in data_folders(job.spec))
        mounts += ' ${PACELINE_CACHE:+-v "$PACELINE_CACHE:$PACELINE_CACHE"}'
        image = shlex.quote(operand("--container", job.spec.container))
        inside = """sh -c 'umask 077; eval "$(cat)"; exec paceline "$@"' paceline"""
        return f"docker run --rm --init -i {gpus} {mounts} {variables} {image} {inside} {words} <&3"
    if job.spec.python:
        return f"{quoted(operand('--python', job.spec.python))} -m paceline {words}"
    return f'"{_environment_folder(job.spec)}/bin/python" -m paceline {words}'


def _environment_folder(spec: JobSpec) -> str:
    return f"$HOME/.paceline/envs/{_digest(spec.code, extras_of(spec))}"


@cache
def _digest(code: str, extras: str) -> str:
    """Return a digest of what an environment is created from."""
    digest = hashlib.sha256(f"{paceline.__version__} {extras}".encode())
    for path in sorted(tracked_files(Path(code))) if code else ():
        if path.suffix in (".py", ".c", ".h", ".toml", ".txt", ".yaml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def extras_of(spec: JobSpec) -> str:
    """Return the extras of the package that the job needs, e.g. [s3]."""
    recipe = yaml.safe_load(spec.recipe)
    urls = (spec.results, recipe["data"].get("path") or "")
    wanted = {"s3": any(url.startswith("s3://") for url in urls)}
    wanted |= {name: bool(recipe.get("log", {}).get(name)) for name in ("mlflow", "wandb")}
    names = ",".join(name for name, needed in sorted(wanted.items()) if needed)
    return f"[{names}]" if names else ""


def _environment(spec: JobSpec) -> str:
    extras = extras_of(spec)
    what = f"-c code/constraints.txt './code{extras}'" if spec.code else f"'paceline{extras}=={paceline.__version__}'"
    return f"""env="{_environment_folder(spec)}"
mkdir -p "$(dirname "$env")" && exec 9> "$env.lock" && flock 9 || exit 1  # hosts may share the home folder
if [ ! -x "$env/bin/paceline" ]; then
    for python in python3 python3.13 python3.12 python3.11 ""; do
        if $python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then break; fi
    done
    [ -n "$python" ] || {{ echo "Python 3.11+ with venv is missing. Install it, or pass --python PATH." >&2; exit 1; }}
    $python -m venv "$env" && "$env/bin/pip" install --quiet --disable-pip-version-check {what} || exit 1
fi"""


def _node_script(job: Job, host: str) -> str:
    spec = job.spec
    assert isinstance(spec, ElasticSpec)
    what = ["--resume", spec.resume] if spec.resume else ["recipe.yaml", "--name", spec.name, *seed_words(spec.seeds)]
    words = ["train", *what, *procs.words_for(spec, host), "--job", job.id]
    words += ["--nodes", f"{spec.min_nodes}:{len(spec.hosts)}", "--rendezvous", job.rendezvous]
    words += ["--join-timeout", str(job.join_timeout)]
    words += ["--results", spec.results] if spec.results else []
    if isinstance(spec, LocalSpec):  # its nodes share the cores
        words += ["--threads", str(max(1, cores() // (procs.total(spec) or 1)))]
    return f"""cd "$(dirname "$0")" || exit 1
{_read_secrets(spec)}
rm -f {SECRETS}
{_DISKS}
{_exports(job, host)}
PACELINE_PARENT=$$ {_program(job, host, "node", shlex.join(words))}
status=$?
# ranks of a killed agent
for pid in $(ps -s $$ -o pid=); do [ $pid = $$ ] || kill -KILL $pid 2> /dev/null; done
echo $status > node.exit.new  # renamed, so that nobody reads it before it is written
mv node.exit.new node.exit
rm -f node.pid
"""
