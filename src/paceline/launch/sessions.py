"""What goes on on a machine without its launcher: a session of its own.

Its log, process number and exit status are files in the job's folder there, so that another terminal can go on.
"""

import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.launch.hosts import Host, HostError

# whether the session of NAME.pid lives: numbers are used again, and dead entries stay until somebody clears them away
_STARTED = """started() { sed 's/.*) //' "/proc/$1/stat" 2> /dev/null | cut -d' ' -f20; }"""
_ALIVE = f"""{_STARTED}
alive() {{
    [ -s "$1.pid" ] && read -r sid begun < "$1.pid" || return 1
    [ ! -e "/proc/$sid" ] || [ "$(started "$sid")" = "$begun" ] || return 1
    ps -s "$sid" -o stat= 2> /dev/null | grep -qv '^Z'
}}"""


_STATE = re.compile(rb"running|lost|absent|ended [0-9]{1,3}")
_CHUNK = 1 << 20  # bytes of a log that are asked for at once
_LONGEST_LINE = 1 << 16


def detached(name: str, command: str, prepare: str = ":") -> str:
    """In a session of its own, without a terminal: what ends the launcher does not end it.

    `prepare` is done before others are told that it has begun.
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
class Progress:
    """Of one machine, as far as it has been seen."""

    host: Host
    state: str = "unknown"
    """running, ended N, lost, absent, or unreachable and why."""
    seen: int = 0
    """Bytes of its log."""
    tail: bytes = b""
    behind: bool = False
    """Whether more of its log is there than was asked for."""

    @property
    def over(self) -> bool:
        return self.state.startswith("ended")

    def look(self) -> list[str]:
        """Ask once; whole new lines of its log."""
        self.behind = False
        tail = f"tail -c +{self.seen + 1} node.log 2> /dev/null | head -c {_CHUNK}"
        try:
            answer = self.host.run(f"{_STATUS}\n{tail}", timeout=30)
        except HostError as error:
            self.state = f"unreachable: {error}"
            return []
        if answer.status == 97:
            self.state = "absent"
            return []
        state, _, log = answer.out.partition(b"\n")
        if not _STATE.fullmatch(state):
            self.state = f"unreachable: {self.host.name} tells no state but {state[:100]!r}; look at what it runs"
            return []
        self.state = state.decode()
        self.seen += len(log)
        self.behind = len(log) >= _CHUNK
        *lines, self.tail = (self.tail + log).split(b"\n")
        if self.tail and ((self.over and not self.behind) or len(self.tail) > _LONGEST_LINE):
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
    """End the job everywhere; what is left over, which should be nothing."""

    def one(host: Host) -> list[str]:
        try:
            answer = host.run(_STOP.format(alive=_ALIVE, tenths=int(10 * grace)), timeout=grace + 60)
        except HostError as error:
            return [str(error)]
        names = {"node", "rendezvous"} & set(answer.text.split()) if answer.status != 97 else ()
        return [f"{host.name}: {name} could not be ended" for name in sorted(names)]

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return [left for found in pool.map(one, hosts) for left in found]
