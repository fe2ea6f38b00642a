"""Detached processes of a job on a host, each in its own session, so that they survive the launcher.

Log, process id and exit status are files in the job's folder on the host, so that another terminal can take over.
"""

import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.launch.hosts import Host, HostError

# whether the session of NAME.pid is alive: compares start times, since process ids are reused, and ignores zombies
_STARTED = """started() { sed 's/.*) //' "/proc/$1/stat" 2> /dev/null | cut -d' ' -f20; }"""
_ALIVE = f"""{_STARTED}
alive() {{
    [ -s "$1.pid" ] && read -r sid begun < "$1.pid" || return 1
    [ ! -e "/proc/$sid" ] || [ "$(started "$sid")" = "$begun" ] || return 1
    ps -s "$sid" -o stat= 2> /dev/null | grep -qv '^Z'
}}"""


_STATE = re.compile(rb"running|lost|absent|ended [0-9]{1,3}")
_CHUNK = 1 << 20  # bytes of a log per request
_MAX_LINE = 1 << 16


def detached(name: str, command: str, prepare: str = ":") -> str:
    """Return a script that starts a command in its own session without a terminal, so that it survives the launcher.

    `prepare` runs before NAME.pid shows that the session has started.
    """
    inner = shlex.quote(f"{prepare}; {_STARTED}; echo $$ $(started $$) > {name}.pid; exec {command}")
    return f"""{_ALIVE}
if alive {name}; then pkill -KILL -s "$(cut -d' ' -f1 {name}.pid)"; fi  # of an earlier start
rm -f {name}.exit {name}.pid {name}.cid
setsid nohup sh -c {inner} >> {name}.log 2>&1 < /dev/null &
begun() {{ [ -s {name}.pid ] || [ -f {name}.exit ]; }}
i=0; while ! begun && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
begun"""


@dataclass
class NodeMonitor:
    """The state and the log of one node, as far as they were read."""

    host: Host
    state: str = "unknown"
    """running, ended N, lost, absent, or unreachable with the reason."""
    offset: int = 0
    """Bytes of its log that were read."""
    tail: bytes = b""
    has_more: bool = False
    """Whether the host has more of the log than the last request returned."""

    @property
    def ended(self) -> bool:
        return self.state.startswith("ended")

    def poll(self) -> list[str]:
        """Ask the host once for state and log; return the new complete lines of the log."""
        self.has_more = False
        tail = f"tail -c +{self.offset + 1} node.log 2> /dev/null | head -c {_CHUNK}"
        try:
            result = self.host.run(f"{_STATUS}\n{tail}", timeout=30)
        except HostError as error:
            self.state = f"unreachable: {error}"
            return []
        if result.status == 97:
            self.state = "absent"
            return []
        state, _, log = result.out.partition(b"\n")
        if not _STATE.fullmatch(state):
            self.state = (
                f"unreachable: {self.host.name} sent {state[:100]!r} instead of a state. Check what runs on it."
            )
            return []
        self.state = state.decode()
        self.offset += len(log)
        self.has_more = len(log) >= _CHUNK
        *lines, self.tail = (self.tail + log).split(b"\n")
        if self.tail and ((self.ended and not self.has_more) or len(self.tail) > _MAX_LINE):
            lines, self.tail = [*lines, self.tail], b""
        return [line.decode(errors="replace") for line in lines]


# a full disk leaves node.exit empty
_STATUS = f"""{_ALIVE}
if [ -f node.exit ]; then echo "ended $(grep . node.exit || echo 1)"
elif alive node; then echo running
elif [ -s node.pid ]; then echo lost; else echo absent; fi"""

_STOP = """{alive}
rm -f secrets
for name in node rendezvous; do
    alive $name || continue
    sid=$(cut -d' ' -f1 $name.pid)
    pkill -TERM -s "$sid" -f 'paceline (train|rendezvous)'
    i=0; while alive $name && [ $i -lt {tenths} ]; do sleep 0.1; i=$((i+1)); done
    pkill -KILL -s "$sid"
    [ ! -s $name.cid ] || docker rm -f "$(cat $name.cid)" > /dev/null 2>&1
    i=0; while alive $name && [ $i -lt 50 ]; do sleep 0.1; i=$((i+1)); done
    alive $name && echo "$name"
done
true"""


def is_alive(host: Host, name: str) -> bool:
    return host.run(f"{_ALIVE}\nalive {name}").status == 0


def stop(hosts: Sequence[Host], grace: float) -> list[str]:
    """Stop the sessions of a job on all hosts; return a line for each that could not be stopped."""

    def stop_on(host: Host) -> list[str]:
        try:
            result = host.run(_STOP.format(alive=_ALIVE, tenths=int(10 * grace)), timeout=grace + 60)
        except HostError as error:
            return [str(error)]
        names = {"node", "rendezvous"} & set(result.text.split()) if result.status != 97 else ()
        return [f"{host.name}: process {name!r} did not stop" for name in sorted(names)]

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return [line for lines in pool.map(stop_on, hosts) for line in lines]
