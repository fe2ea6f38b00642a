"""Hosts that send hostile output: it runs nothing elsewhere, fills no memory, and controls no terminal."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import raises

from attack.stubbed import Stubs, canaries, stubs
from paceline.distributed import preemption
from paceline.errors import UserError
from paceline.launch import doctor, rendezvous, sessions
from paceline.launch.host_facts import facts
from paceline.launch.hosts import Host, HostError, free_port
from paceline.launch.job import Job
from paceline.launch.specs import SshSpec
from paceline.launch.states import NodeState
from paceline.system import remote
from paceline.system.files import say

JOB = Job("j", SshSpec(name="j", recipe="data: {}\n", hosts=("attacker", "victim"), python="python"))
ESCAPES = "\x1b]0;owned\x07\x1b[2J"
WORDS = (
    "$(>CANARY)",
    "`>CANARY`",
    "1.2.3.4;>CANARY",
    "'>CANARY'",
    "1.2.3.4|>CANARY",
    "-h",
    "fe80::1%$(>CANARY)",
    ESCAPES,
)


@dataclass(frozen=True)
class HostileHost(Host):
    """Sends a forged output for commands that contain a word, and runs other commands in a shell."""

    outputs: dict[str, bytes] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def argv(self, command: str) -> list[str]:
        self.commands.append(command)
        for word, output in self.outputs.items():
            if word in command:
                path = Path(self.folder) / f"output-{len(self.commands)}"
                path.write_bytes(output)
                return ["cat", str(path)]
        return ["sh", "-c", f"cd {self.folder} && {command}"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch) -> Stubs:
    """A python that prints what paceline would."""
    made = stubs(tmp_path / "stubs")
    (tmp_path / "facts.json").write_text(json.dumps(facts()))
    link = json.dumps({"seconds": 0.001, "bytes_per_second": 1e9})
    figures = json.dumps({"ranks": ["a cpu", "b cpu"], "bus_bytes_per_second": 1e9, "pairs": [[0, 1, 1e9]]})
    replies = {"facts": f"cat {tmp_path}/facts.json", "--call": f"echo '{link}'"}
    replies |= {"test-allreduce": f"echo '{figures}'"}
    replies |= {"--serve": "echo 29400", "create_server": "echo 29400"}
    cases = " ".join(f"*{word}*) {reply} ;;" for word, reply in replies.items())
    made.add(made.folder / "python", f'case "$*" in {cases} esac')
    for name, value in made.variables(SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22").items():
        monkeypatch.setenv(name, value)
    return made


def _hosts(folder: Path, **outputs: bytes) -> tuple[HostileHost, HostileHost]:
    commands = {"connection": "SSH_CONNECTION", "serve": "--serve", "port": "create_server", "facts": "facts"}
    forged = {commands[name]: output for name, output in outputs.items()}
    return HostileHost("attacker", str(folder), forged), HostileHost("victim", str(folder))


def _is_plain(text: str) -> bool:
    return text.isprintable() and len(text) < 1000


def _is_plain_report(report: doctor.HostReport) -> bool:
    rows = (*map(doctor.described, report.facts.values()), *report.connections)
    return all(map(_is_plain, (*map(str, report.problems), *(cell for row in rows for cell in row))))


def test_honest_hosts_have_no_problems(programs: Stubs, tmp_path: Path) -> None:
    """Otherwise the other tests would prove nothing."""
    report = doctor.check(_hosts(tmp_path), "python", "")
    assert report.connections[-1][0].startswith("all-reduce"), report.problems


def test_addresses_and_ports(programs: Stubs, tmp_path: Path, monkeypatch, survived) -> None:
    """They become part of commands on other hosts."""
    forged = [{"connection": f"127.0.0.1 1 {word} 22".encode()} for word in WORDS]
    forged += [{"connection": f"{word} 1 127.0.0.1 22".encode()} for word in WORDS]
    forged += [{"serve": word.encode()} for word in (*WORDS, "", "0", "65536", "-1", "9" * 10**6)]
    forged += [{"connection": b"\xff\xfe 1 2"}, {"serve": b"\xff"}, {"connection": b"1.2.3.4 1 2.3.4.5\n;>CANARY 22"}]
    for outputs in forged:
        attacker, victim = _hosts(tmp_path, **outputs)
        report = doctor.check([attacker, victim], "python", "")
        assert any("attacker" in problem.message for problem in report.problems), outputs
        assert _is_plain_report(report)
        assert not any("CANARY" in command for command in victim.commands)
        hosts = {one.name: one for one in (attacker, victim)}
        monkeypatch.setattr(rendezvous, "hosts_of", lambda job, hosts=hosts: hosts)
        if "connection" in outputs:
            with pytest.raises(HostError) as caught:
                rendezvous.choose(JOB)
            assert caught.value.code in ("host-address-invalid", "host-address-unknown")
            assert caught.value.fields == {"host": "attacker"}
        assert not canaries(tmp_path)
    for word in (*WORDS, "", "0", "65536", "9" * 10**6):
        with raises("host-port-invalid", HostError):
            free_port(_hosts(tmp_path, port=word.encode())[0], "python")
    survived("forged addresses and ports of hosts", len(forged) + len(WORDS) + 4)


def _forged_facts() -> Iterator[bytes]:
    yield from (b"", b"{}", b"[]", b"null", b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b"1" * 10**6, ESCAPES.encode())
    valid = facts()
    for key, value in (
        ("time", "now"), ("time", float("nan")), ("time", 1e300), ("cores", 0), ("cores", -1), ("cores", "8"),
        ("cores", 10**30), ("memory_bytes", float("inf")), ("disk_bytes", []), ("gpus", {"name": "a"}), ("gpus", [1]),
        ("gpus", [{}]), ("gpus", [{"name": "x"}] * 10**4), ("gpu_processes", ["$(>CANARY)"]), ("torch", {"a": 1}),
        ("torch", "x" * 10**6), ("code", None), ("driver", 7), ("python", ["3.11"]),
    ):  # fmt: skip
        yield json.dumps(valid | {key: value}).encode()


def test_facts(programs: Stubs, tmp_path: Path, survived) -> None:
    forged = list(_forged_facts())
    for output in forged:
        report = doctor.check(_hosts(tmp_path, facts=output), "python", "")
        assert [problem for problem in report.problems if problem.message.startswith("attacker: ")], output[:100]
        assert _is_plain_report(report)
        with raises("host-facts-invalid", HostError) as caught:
            doctor.refuse_different_code(_hosts(tmp_path, facts=output), "python")
        assert caught.value.fields == {"host": "attacker"}
    printed = json.dumps(facts() | {"torch": ESCAPES, "driver": "\u202e"}).encode()
    assert _is_plain_report(doctor.check(_hosts(tmp_path, facts=printed), "python", ""))
    survived("forged facts of hosts", len(forged) + 1)


@dataclass(frozen=True)
class EndlessHost(Host):
    """Runs one command, whatever it is asked to run."""

    command: str = ""

    def argv(self, command: str) -> list[str]:
        return ["sh", "-c", self.command]


def test_states_and_endless_answers(tmp_path: Path, capsys, survived) -> None:
    states = (b"ended", b"ended $(>CANARY)", b"ended -1", b"ended 99999", b"\xff", b"running" + ESCAPES.encode(), b"")
    for state in states:
        node = sessions.NodeMonitor(HostileHost("attacker", str(tmp_path), {"sh -s": state + b"\nlog\n"}))
        assert node.poll() == []
        assert node.state is NodeState.UNREACHABLE
        assert str(node.status).startswith("unreachable: attacker"), state
        assert str(node.status).isprintable()
    log = b"running\n" + ESCAPES.encode() + b"\n\xff" * 9
    node = sessions.NodeMonitor(HostileHost("attacker", str(tmp_path), {"sh -s": log}))
    for line in node.poll():
        say(line)
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    names = f"node rendezvous $(>CANARY) {ESCAPES}".encode()
    lines = sessions.stop([HostileHost("attacker", str(tmp_path), {"sh -s": names})], grace=0)
    assert [line.split("'")[:2] for line in lines] == [
        ["attacker: process ", "node"],
        ["attacker: process ", "rendezvous"],
    ]
    endless = ("yes", "yes >&2", "cat /dev/zero", "echo running; cat /dev/zero", "echo running; yes")
    for command in endless:
        with raises("host-output-too-large", HostError):
            EndlessHost("attacker", str(tmp_path), command).run("true")
    with raises("host-timeout", HostError):
        EndlessHost("attacker", str(tmp_path), "exec sleep 1000").run("true", timeout=1)
    survived("forged states and endless output of hosts", len(states) + len(endless) + 3)


class Service(BaseHTTPRequestHandler):
    """A hostile metadata service of EC2, or a hostile HTTP server."""

    body = b""
    reason = "Found"
    requests = 0

    def _answer(self) -> None:
        type(self).requests += 1
        moved = self.body.startswith(b"http") and "token" not in self.path
        self.send_response(302 if moved else 404 if "missing" in self.path else 200, self.reason)
        if moved:
            self.send_header("Location", self.body.decode())
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_PUT = _answer

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service(monkeypatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_hostile_metadata_service(service: str, monkeypatch, survived) -> None:
    monkeypatch.setattr(preemption, "_SERVICE", service)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used
    forged = (
        b"", b"null", b"[]", b"{}", b"[" * 10**6, b'{"action": []}', b'{"action": "\x1b[2J"}', b"\xff",
        b"token\r\nX: 1",
    )  # fmt: skip
    for body in (*forged, f"{service}/elsewhere".encode()):
        Service.body, Service.requests = body, 0
        assert preemption._ask() == ""
        assert Service.requests <= 2  # redirects are not followed
    Service.body = b'{"action": "terminate", "time": "2030-01-01T00:00:00Z"}'
    assert preemption._ask() == "terminate"
    survived("forged responses of a metadata service", len(forged) + 1)


def test_hostile_http_server(service: str, monkeypatch, survived) -> None:
    Service.body, Service.reason = b"", f"gone {ESCAPES}"
    with pytest.raises(UserError) as refused, remote.opened(f"{service}/missing"):
        pass
    assert _is_plain(str(refused.value))
    with pytest.raises(UserError) as refused, remote.opened("https://me:secret@127.0.0.1:9/x"):
        pass
    assert "secret" not in str(refused.value)
    survived("responses of a hostile HTTP server", 2)
