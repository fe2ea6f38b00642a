"""Jobs on machines that take shell scripts: this one, those behind ssh, rented ones. A plan first, then its steps.

On every machine a session of its own runs node.sh, which outlives the launcher; its log, process number and exit status
are files in the job's folder there, so that another terminal can go on.
"""

import hashlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import paceline
from paceline.errors import UserError
from paceline.launch.hosts import Host, HostError, tracked_files
from paceline.launch.job import Job

HERE = "here"


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
    program = _program(job) if job.meeting_host else f"{shlex.quote(sys.executable)} -m paceline"
    meet = f"{program} meet --port {job.meeting.rpartition(':')[2]}"
    meeting = Step(job.meeting_host or HERE, "keep the meeting place", _detached("meet", meet))
    return [*ready, meeting, *starts]


def node_steps(job: Job, host: str) -> Iterator[Step]:
    """Of one machine; also when it takes the place of a lost one."""
    makes = not job.python and not job.container
    tree = Path(job.code) if job.code and makes else None
    yield Step(host, "files", files={"recipe.yaml": job.recipe, "node.sh": _node_script(job, host)}, tree=tree)
    if makes:
        yield Step(host, "environment", _environment(job))
    yield Step(host, "start", _detached("node", 'sh "$PWD/node.sh"'))


def _program(job: Job) -> str:
    """What starts paceline on a machine, for a shell."""
    if job.container:
        # the host's network and shared memory, and its GPUs if it has some; variables by name only
        names = ("PACELINE_HOST", "PACELINE_PATIENCE", "PACELINE_SPOT", *job.passed)
        given = " ".join(f"-e {name}" for name in names)
        gpus = "$(command -v nvidia-smi > /dev/null && echo --gpus all)"
        place = '--network host --ipc host -v "$PWD:$PWD" -w "$PWD"'
        return f"docker run --rm --init {gpus} {place} {given} {shlex.quote(job.container)} paceline"
    python = shlex.quote(job.python) if job.python else f'"{_environment_folder(job)}/bin/python"'
    return f"{python} -m paceline"


def _environment_folder(job: Job) -> str:
    digest = hashlib.sha256(paceline.__version__.encode())
    for path in sorted(tracked_files(Path(job.code))) if job.code else ():
        if path.suffix in (".py", ".c", ".h", ".toml", ".txt", ".yaml"):
            digest.update(path.read_bytes())
    return f"$HOME/.paceline/envs/{digest.hexdigest()[:16]}"


def _environment(job: Job) -> str:
    what = "-c code/constraints.txt ./code" if job.code else f"paceline=={paceline.__version__}"
    return f"""env="{_environment_folder(job)}"
mkdir -p "$(dirname "$env")" && exec 9> "$env.lock" && flock 9 || exit 1  # machines may share the user's home
if [ ! -x "$env/bin/paceline" ]; then
    python3 -m venv "$env" && "$env/bin/pip" install --quiet --disable-pip-version-check {what} || exit 1
fi"""


def _node_script(job: Job, host: str) -> str:
    words = ["train", "recipe.yaml", "--name", job.name, "--procs", str(job.procs), "--job", job.id]
    words += ["--nodes", f"{job.fewest}:{len(job.hosts)}", "--rendezvous", job.meeting]
    words += ["--results", job.results] if job.results else []
    return f"""cd "$(dirname "$0")" || exit 1
# what must be in no command line and in no plan
if [ -f secrets ]; then . ./secrets; rm -f secrets; fi
export PACELINE_HOST={shlex.quote(host)} PACELINE_PATIENCE={job.patience}
{_program(job)} {shlex.join(words)}
echo $? > node.exit
"""


def _detached(name: str, command: str) -> str:
    """In a session of its own, without a terminal: what ends the launcher does not end it."""
    inner = shlex.quote(f"echo $$ > {name}.pid; exec {command}")
    return f"""rm -f {name}.exit {name}.pid
setsid nohup sh -c {inner} >> {name}.log 2>&1 < /dev/null &
i=0; while [ ! -s {name}.pid ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
[ -s {name}.pid ]"""


@dataclass
class Progress:
    """Of one machine, as far as it has been seen."""

    host: Host
    state: str = "unknown"
    """running, ended N, lost, absent, or unreachable and why."""
    seen: int = 0
    """Bytes of its log."""
    tail: bytes = b""

    @property
    def over(self) -> bool:
        return self.state.startswith("ended")

    def look(self) -> list[str]:
        """Ask once; whole new lines of its log."""
        try:
            answer = self.host.run(f"{_STATUS}\ntail -c +{self.seen + 1} node.log 2> /dev/null || true", timeout=30)
        except HostError as error:
            self.state = f"unreachable: {error}"
            return []
        if answer.status == 97:
            self.state = "absent"
            return []
        state, _, log = answer.out.partition(b"\n")
        self.state = state.decode()
        self.seen += len(log)
        *lines, self.tail = (self.tail + log).split(b"\n")
        if self.over and self.tail:
            lines, self.tail = [*lines, self.tail], b""
        return [line.decode(errors="replace") for line in lines]


_STATUS = """if [ -f node.exit ]; then echo "ended $(cat node.exit)"
elif [ -s node.pid ] && pgrep -s "$(cat node.pid)" > /dev/null; then echo running
elif [ -s node.pid ]; then echo lost; else echo absent; fi"""

_STOP = """for name in node meet; do
    [ -s $name.pid ] || continue
    sid=$(cat $name.pid)
    pkill -TERM -s "$sid" -f 'paceline (train|meet)'
    i=0; while pgrep -s "$sid" > /dev/null && [ $i -lt {tenths} ]; do sleep 0.1; i=$((i+1)); done
    pkill -KILL -s "$sid"
    i=0; while pgrep -s "$sid" > /dev/null && [ $i -lt 50 ]; do sleep 0.1; i=$((i+1)); done
    pgrep -s "$sid" > /dev/null && echo "$name"
done
true"""


def carry_out(steps: Sequence[Step], hosts: dict[str, Host], secrets: dict[str, str]) -> None:
    """Steps of one title on all machines at once, one title after the other."""
    for title in dict.fromkeys(step.title for step in steps):
        own = [step for step in steps if step.title == title]
        with ThreadPoolExecutor(len(own)) as pool:
            for done in [pool.submit(_carry_out, step, hosts[step.host], secrets) for step in own]:
                done.result()


def _carry_out(step: Step, host: Host, secrets: dict[str, str]) -> None:
    if step.files:
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items())
        content = {name: text.encode() for name, text in step.files.items()} | {"secrets": lines.encode()}
        host.send(content, step.tree)
    elif step.host == HERE:
        Path(host.folder).mkdir(parents=True, exist_ok=True)
    if step.script:
        host.must(step.script, step.title, timeout=3600)


def secrets_of(job: Job) -> dict[str, str]:
    missing = [name for name in job.passed if name not in os.environ]
    if missing:
        raise UserError(f"--pass {', '.join(missing)}: not set in this environment; export it first")
    return {name: os.environ[name] for name in job.passed}


def stop(hosts: Sequence[Host], grace: float) -> list[str]:
    """End the job everywhere; what is left over, which should be nothing."""

    def one(host: Host) -> list[str]:
        try:
            answer = host.run(_STOP.format(tenths=int(10 * grace)), timeout=grace + 60)
        except HostError as error:
            return [str(error)]
        names = answer.text.split() if answer.status != 97 else []
        return [f"{host.name}: {name} could not be ended" for name in names]

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return [left for found in pool.map(one, hosts) for left in found]
