"""Hosts that lie: what they answer runs nothing elsewhere, fills no memory, and moves no cursor."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from attack.stubbed import Stubs, canaries, stubs
from paceline.base import remote
from paceline.distributed import notice
from paceline.errors import UserError
from paceline.launch import control, doctor, sessions
from paceline.launch.facts import facts
from paceline.launch.hosts import Host, HostError, free_port
from paceline.launch.job import Job

JOB = Job("j", "ssh", "j", "data: {}\n", ("liar", "victim"), python="python", extra={"meet": "auto"})
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
class Liar(Host):
    """Answers what it is told to, to questions in which a word occurs; others it takes for shell commands."""

    lies: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def argv(self, command: str) -> list[str]:
        self.asked.append(command)
        for word, lie in self.lies.items():
            if word in command:
                path = Path(self.folder) / f"lie-{len(self.asked)}"
                path.write_bytes(lie)
                return ["cat", str(path)]
        return ["sh", "-c", f"cd {self.folder} && {command}"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch) -> Stubs:
    """A python that answers as paceline does."""
    made = stubs(tmp_path / "stubs")
    (tmp_path / "facts.json").write_text(json.dumps(facts()))
    link = json.dumps({"seconds": 0.001, "bytes_per_second": 1e9})
    replies = {"facts": f"cat {tmp_path}/facts.json", "--call": f"echo '{link}'", "exchange": f"echo '{link}'"}
    replies |= {"--serve": "echo 29400", "create_server": "echo 29400"}
    cases = " ".join(f"*{word}*) {reply} ;;" for word, reply in replies.items())
    made.add(made.folder / "python", f'case "$*" in {cases} esac')
    for name, value in made.variables(SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22").items():
        monkeypatch.setenv(name, value)
    return made


def _hosts(folder: Path, **lies: bytes) -> tuple[Liar, Liar]:
    named = {"connection": "SSH_CONNECTION", "serve": "--serve", "port": "create_server", "facts": "facts"}
    return Liar("liar", str(folder), {named[name]: lie for name, lie in lies.items()}), Liar("victim", str(folder))


def _is_plain(text: str) -> bool:
    return text.isprintable() and len(text) < 1000


def test_honest_hosts_are_well(programs: Stubs, tmp_path: Path) -> None:
    """Otherwise the rest would show nothing."""
    found = doctor.check(_hosts(tmp_path), "python", "")
    assert [line for line in found.lines if "together" in line], found.findings


def test_addresses_and_ports(programs: Stubs, tmp_path: Path, monkeypatch, survived) -> None:
    """What one host says would be part of a command of another."""
    lies = [{"connection": f"127.0.0.1 1 {word} 22".encode()} for word in WORDS]
    lies += [{"connection": f"{word} 1 127.0.0.1 22".encode()} for word in WORDS]
    lies += [{"serve": word.encode()} for word in (*WORDS, "", "0", "65536", "-1", "9" * 10**6)]
    lies += [{"connection": b"\xff\xfe 1 2"}, {"serve": b"\xff"}, {"connection": b"1.2.3.4 1 2.3.4.5\n;>CANARY 22"}]
    for lie in lies:
        liar, victim = _hosts(tmp_path, **lie)
        found = doctor.check([liar, victim], "python", "")
        assert any("liar" in text for text in found.findings), lie
        assert all(map(_is_plain, (*found.findings, *found.lines)))
        assert not any("CANARY" in command for command in victim.asked)
        monkeypatch.setattr(control, "hosts_of", lambda job, pair=(liar, victim): {own.name: own for own in pair})
        if "connection" in lie:
            with pytest.raises(HostError, match="liar: SSH_CONNECTION"):
                control.with_meeting_place(JOB, "auto")
        assert not canaries(tmp_path)
    for word in (*WORDS, "", "0", "65536", "9" * 10**6):
        with pytest.raises(HostError, match="liar: it told"):
            free_port(_hosts(tmp_path, port=word.encode())[0], "python")
    survived("addresses and ports of hosts that lie", len(lies) + len(WORDS) + 4)


def _false_facts() -> Iterator[bytes]:
    yield from (b"", b"{}", b"[]", b"null", b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b"1" * 10**6, ESCAPES.encode())
    true = facts()
    for key, value in (
        ("time", "now"), ("time", float("nan")), ("time", 1e300), ("cores", 0), ("cores", -1), ("cores", "8"),
        ("cores", 10**30), ("memory_bytes", float("inf")), ("disk_bytes", []), ("gpus", {"name": "a"}), ("gpus", [1]),
        ("gpus", [{}]), ("gpus", [{"name": "x"}] * 10**4), ("gpu_processes", ["$(>CANARY)"]), ("torch", {"a": 1}),
        ("torch", "x" * 10**6), ("code", None), ("driver", 7), ("python", ["3.11"]),
    ):  # fmt: skip
        yield json.dumps(true | {key: value}).encode()


def test_facts(programs: Stubs, tmp_path: Path, survived) -> None:
    lies = list(_false_facts())
    for lie in lies:
        found = doctor.check(_hosts(tmp_path, facts=lie), "python", "")
        assert [text for text in found.findings if text.startswith("liar: ")], lie[:100]
        assert all(map(_is_plain, (*found.findings, *found.lines)))
        with pytest.raises(HostError, match=r"^liar: "):
            doctor.refuse_different_code(_hosts(tmp_path, facts=lie), "python")
    shown = json.dumps(facts() | {"torch": ESCAPES, "driver": "\u202e"}).encode()
    found = doctor.check(_hosts(tmp_path, facts=shown), "python", "")
    assert all(map(_is_plain, (*found.findings, *found.lines)))
    survived("facts of hosts that lie", len(lies) + 1)


@dataclass(frozen=True)
class Endless(Host):
    command: str = ""

    def argv(self, command: str) -> list[str]:
        return ["sh", "-c", self.command]


def test_states_and_endless_answers(tmp_path: Path, capsys, survived) -> None:
    states = (b"ended", b"ended $(>CANARY)", b"ended -1", b"ended 99999", b"\xff", b"running" + ESCAPES.encode(), b"")
    for state in states:
        seen = sessions.Progress(Liar("liar", str(tmp_path), {"sh -s": state + b"\nlog\n"}))
        assert seen.look() == []
        assert seen.state.startswith("unreachable: liar"), state
    seen = sessions.Progress(Liar("liar", str(tmp_path), {"sh -s": b"running\n" + ESCAPES.encode() + b"\n\xff" * 9}))
    for line in seen.look():
        control.say(line)
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    lie = f"node meet $(>CANARY) {ESCAPES}".encode()
    told = sessions.stop([Liar("liar", str(tmp_path), {"sh -s": lie})], grace=0)
    assert told == ["liar: meet could not be ended", "liar: node could not be ended"]
    endless = ("yes", "yes >&2", "cat /dev/zero", "echo running; cat /dev/zero", "echo running; yes")
    for command in endless:
        with pytest.raises(HostError, match="liar answered with more than 16 MB"):
            Endless("liar", str(tmp_path), command).run("true")
    with pytest.raises(HostError, match="liar did not answer within 1 s"):
        Endless("liar", str(tmp_path), "exec sleep 1000").run("true", timeout=1)
    survived("states and endless answers of hosts", len(states) + len(endless) + 3)


class Service(BaseHTTPRequestHandler):
    """In the place of EC2's own, or of a server of data."""

    told = b""
    reason = "Found"
    asked = 0

    def _answer(self) -> None:
        type(self).asked += 1
        moved = self.told.startswith(b"http") and "token" not in self.path
        self.send_response(302 if moved else 404 if "missing" in self.path else 200, self.reason)
        if moved:
            self.send_header("Location", self.told.decode())
        self.send_header("Content-Length", str(len(self.told)))
        self.end_headers()
        self.wfile.write(self.told)

    do_GET = do_PUT = _answer

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service(monkeypatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_metadata_service_that_lies(service: str, monkeypatch, survived) -> None:
    monkeypatch.setattr(notice, "_SERVICE", service)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # somebody else's
    lies = (
        b"",
        b"null",
        b"[]",
        b"{}",
        b"[" * 10**6,
        b'{"action": []}',
        b'{"action": "\x1b[2J"}',
        b"\xff",
        b"token\r\nX: 1",
    )
    for told in (*lies, f"{service}/elsewhere".encode()):
        Service.told, Service.asked = told, 0
        assert notice._ask() == ""
        assert Service.asked <= 2  # it is not led elsewhere
    Service.told = b'{"action": "terminate", "time": "2030-01-01T00:00:00Z"}'
    assert notice._ask() == "terminate"
    survived("answers of a metadata service that lies", len(lies) + 1)


def test_a_server_of_data_that_lies(service: str, monkeypatch, survived) -> None:
    Service.told, Service.reason = b"", f"gone {ESCAPES}"
    with pytest.raises(UserError) as refused, remote.opened(f"{service}/missing"):
        pass
    assert _is_plain(str(refused.value))
    with pytest.raises(UserError) as refused, remote.opened("https://me:secret@127.0.0.1:9/x"):
        pass
    assert "secret" not in str(refused.value)
    survived("answers of a server that lies", 2)
