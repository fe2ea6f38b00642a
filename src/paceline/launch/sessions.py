"""Detached processes of a job on a host, each in its own session, so that they survive the launcher.

Log, process id and exit status are files in the job's folder on the host, so that another terminal can take over.
"""

import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread

from paceline.errors import UserError
from paceline.launch.hosts import NO_FOLDER, Host, HostError
from paceline.launch.states import NodeState, NodeStatus, parse_node, unreachable

# whether the session of NAME.pid is alive: compares start times, since process ids are reused, and ignores zombies
_STARTED = """started() { sed 's/.*) //' "/proc/$1/stat" 2> /dev/null | cut -d' ' -f20; }"""
_ALIVE = f"""{_STARTED}
alive() {{
    [ -s "$1.pid" ] && read -r sid begun < "$1.pid" || return 1
    [ ! -e "/proc/$sid" ] || [ "$(started "$sid")" = "$begun" ] || return 1
    ps -s "$sid" -o stat= 2> /dev/null | grep -qv '^Z'
}}"""

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
    """The status and the log of one node, as far as they were read."""

    host: Host
    status: NodeStatus = field(init=False)
    offset: int = 0
    """Bytes of its log that were read."""
    tail: bytes = b""
    has_more: bool = False
    """Whether the host has more of the log than the last request returned."""

    def __post_init__(self) -> None:
        self.status = NodeStatus(self.host.name, NodeState.UNKNOWN)

    @property
    def state(self) -> NodeState:
        return self.status.state

    def poll(self) -> list[str]:
        """Ask the host once for status and log; return the new complete lines of the log."""
        self.has_more, name = False, self.host.name
        tail = f"tail -c +{self.offset + 1} node.log 2> /dev/null | head -c {_CHUNK}"
        try:
            result = self.host.run(f"{_STATUS}\n{tail}", timeout=30)
            if result.status == NO_FOLDER:
                self.status = NodeStatus(name, NodeState.NOT_STARTED)
                return []
            line, _, log = result.out.partition(b"\n")
            self.status = parse_node(name, line)
        except UserError as error:
            self.status = unreachable(name, error)
            return []
        self.offset += len(log)
        self.has_more = len(log) >= _CHUNK
        *lines, self.tail = (self.tail + log).split(b"\n")
        has_ended = self.status.exit_status is not None
        if self.tail and ((has_ended and not self.has_more) or len(self.tail) > _MAX_LINE):
            lines, self.tail = [*lines, self.tail], b""
        return [line.decode(errors="replace") for line in lines]


def poll_all(hosts: Sequence[Host]) -> list[NodeMonitor]:
    """Return the nodes on these hosts, each asked once, in parallel."""
    monitors = [NodeMonitor(host) for host in hosts]
    # daemon threads: listing jobs does not wait for hosts that do not answer
    threads = [Thread(target=node.poll, daemon=True) for node in monitors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return monitors


# a full disk leaves node.exit empty; a node that is not alive may have ended since the first look
_STATUS = f"""{_ALIVE}
ended() {{ [ -f node.exit ] && echo "ended $(grep . node.exit || echo 1)"; }}
if ended; then :
elif alive node; then echo running
elif ended; then :
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
        names = {"node", "rendezvous"} & set(result.text.split()) if result.status != NO_FOLDER else ()
        return [f"{host.name}: process {name!r} did not stop" for name in sorted(names)]

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return [line for lines in pool.map(stop_on, hosts) for line in lines]
