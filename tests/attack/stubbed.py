"""Launches with hostile values, whose scripts run with stub programs that record how they were called."""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Launch = Callable[..., subprocess.CompletedProcess[str]]
Make = Callable[[str], str]

HOSTILE = (
    "$(touch CANARY)",
    "`touch CANARY`",
    "' ; touch CANARY ; '",
    '" ; touch CANARY ; "',
    "a'b\"c$(touch CANARY)`touch CANARY`;touch CANARY|touch CANARY&&touch CANARY>CANARY",
    "a  b * ? [a-z] ~ {x,y} $HOME ${HOME} #c !! %j %% \\ \\n \\",
    "$(PACELINE_RECIPE) $$ $$(PACELINE_RECIPE)",
    "x\ntouch CANARY",
    "x\n#SBATCH --wrap='touch CANARY'",
    "x\r\ntouch CANARY\r",
    "-oProxyCommand=touch CANARY",
    "user@-oProxyCommand=touch CANARY",
    "--privileged",
    "../../outside",
    "a\0b",
    "\x1b]0;owned\x07\x1b[2J",
    "Zürich, 東京 \u202eelif",
    "not UTF-8: \udcff",
    "x" * 100_000,
)

# number of arguments, then program and arguments
_RECORD = """#!/bin/sh
printf '%s\\0' "$#" "$0" "$@" >> "$NOTES"
[ -z "$SECRET" ] || printf '%s' "$SECRET" > "$NOTES.secret"
"""
_PROGRAMS = (
    "apptainer", "blkid", "flock", "mount", "paceline", "pkill", "ps", "python", "python3", "sleep", "srun", "torchrun",
)  # fmt: skip
_BEHAVIOR = {
    "sbatch": "echo 123",
    "mountpoint": "exit 1",
    "docker": 'while [ "$1" != sh ] && [ $# -gt 0 ]; do shift; done; exec "$@"',  # the command in the container
    "setsid": 'shift; exec "$@"',  # without nohup
    "sudo": 'shift; exec "$@"',
}


@dataclass(frozen=True)
class Stubs:
    """A folder of stub programs, first in PATH."""

    folder: Path

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def secret(self) -> str:
        """Return the value of $SECRET in the last program that had one."""
        return os.fsdecode((self.folder / "notes.secret").read_bytes())

    def add(self, path: Path, then: str = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_RECORD + then)
        path.chmod(0o700)
        return path

    def variables(self, **more: str) -> dict[str, str]:
        path = f"{self.folder}:{os.environ['PATH']}"
        return {name: value for name, value in os.environ.items() if name != "SECRET"} | {
            "PATH": path,
            "NOTES": str(self.notes),
            **more,
        }

    def run(self, words: Iterable[str], folder: Path, script: str = "", **more: str) -> int:
        """Run a command in a folder, with a script on standard input; return its exit status."""
        stdin, variables = os.fsencode(script), self.variables(**more)
        result = subprocess.run([*words], cwd=folder, input=stdin, env=variables, capture_output=True, check=False)
        return result.returncode

    def calls(self) -> list[list[str]]:
        """Return the calls since the last time, each as program path and arguments."""
        if not self.notes.exists():
            return []
        words = iter(os.fsdecode(self.notes.read_bytes()).split("\0")[:-1])
        self.notes.unlink()
        return [[next(words) for _ in range(int(count) + 1)] for count in words]


def stubs(folder: Path) -> Stubs:
    programs = Stubs(folder)
    for name in _PROGRAMS:
        programs.add(folder / name)
    for name, then in _BEHAVIOR.items():
        programs.add(folder / name, then)
    return programs


def canaries(folder: Path) -> list[Path]:
    return list(folder.rglob("CANARY"))


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand as Kubernetes does in commands and variables: $(NAME) is replaced, $$ becomes $."""
    out, position = "", 0
    while position < len(text):
        letter, rest = text[position], text[position + 1 :]
        if letter == "$" and rest.startswith("$"):
            out, position = out + "$", position + 2
        elif letter == "$" and rest.startswith("(") and ")" in rest:
            name = rest[1 : rest.index(")")]
            out += variables.get(name, f"$({name})")
            position += len(name) + 3
        else:
            out, position = out + letter, position + 1
    return out


def directives(script: str) -> list[str]:
    """Return the options that sbatch reads from a script, up to its first command; backslashes escape everywhere."""
    words: list[str] = []
    for line in script.split("\n")[1:]:
        if line.strip() and not line.lstrip().startswith("#"):
            break
        rest = iter(line.removeprefix("#SBATCH")) if line.startswith("#SBATCH") else iter("")
        word, quote, started = "", "", False
        for letter in rest:
            if letter == "\\":
                word, started = word + next(rest, ""), True
            elif quote:
                quote, word = ("", word) if letter == quote else (quote, word + letter)
            elif letter in "\"'":
                quote, started = letter, True
            elif letter == "#":
                break
            elif letter.isspace():
                words, word, started = [*words, word] if started else words, "", False
            else:
                word, started = word + letter, True
        words += [word] if started else []
    return words


def same(value: str) -> str:
    return value


def after(prefix: str) -> Make:
    return lambda value: prefix + value


def resolved(path: str) -> str:
    return str(Path(path).resolve())


@dataclass(frozen=True)
class Option:
    """An option of launch, how to make a hostile value for it, and the argument that a program must receive."""

    word: str
    make: Make = same
    arrives: Make | None = same
    """From the value; None: no program receives it."""
    alias: str = ""
    """Another name in error messages."""


def attack(
    here: Launch, words: Sequence[object], options: Sequence[Option], run: Callable[[str], set[str]], folder: Path
) -> int:
    """Launch with each hostile value in all options that are not refused; return the number of values tried.

    `run` gets the output of the launch, and returns all arguments that programs received.
    """
    for hostile in HOSTILE:
        accepted = {option.word: (option, option.make(hostile)) for option in options}
        while True:
            answer = here("launch", *words, *(f"{word}={value}" for word, (_, value) in accepted.items()))
            assert "Traceback" not in answer.stderr, answer.stderr
            if answer.returncode == 0:
                break
            assert "\x1b" not in answer.stderr
            assert len(answer.stderr) < 1000
            assert re.search(r"\[[a-z0-9-]+\]\n$", answer.stderr), answer.stderr
            named = set(_words(answer.stderr))
            refused = [word for word, (option, _) in accepted.items() if {word, option.alias} & named]
            assert refused, (hostile[:100], answer.stderr)
            del accepted[refused[0]]
        received = run(answer.stdout)
        for option, value in accepted.values():
            assert option.arrives is None or option.arrives(value) in received, (option.word, value, received)
        assert not canaries(folder), hostile
        assert not (folder.parent / "outside").exists()
    return len(HOSTILE) * len(options)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z.-]+", text)
