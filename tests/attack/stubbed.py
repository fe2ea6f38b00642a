"""Launches with hostile values, whose scripts are run with programs that only note how they were called."""

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

# how many words, then the words
_NOTE = """#!/bin/sh
printf '%s\\0' "$#" "$0" "$@" >> "$NOTES"
[ -z "$SECRET" ] || printf '%s' "$SECRET" > "$NOTES.secret"
"""
_SILENT = (
    "apptainer",
    "blkid",
    "flock",
    "mount",
    "paceline",
    "pkill",
    "ps",
    "python",
    "python3",
    "sleep",
    "srun",
    "torchrun",
)
_ANSWERS = {
    "sbatch": "echo 123",
    "mountpoint": "exit 1",
    "docker": 'while [ "$1" != sh ] && [ $# -gt 0 ]; do shift; done; exec "$@"',  # what runs in the container
    "setsid": 'shift; exec "$@"',  # without nohup
    "sudo": 'shift; exec "$@"',
}


@dataclass(frozen=True)
class Stubs:
    """A folder of programs that stand before all others."""

    folder: Path

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def secret(self) -> str:
        """The value of $SECRET in the last program that had one."""
        return os.fsdecode((self.folder / "notes.secret").read_bytes())

    def add(self, path: Path, then: str = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_NOTE + then)
        path.chmod(0o700)
        return path

    def variables(self, **more: str) -> dict[str, str]:
        path = f"{self.folder}:{os.environ['PATH']}"
        return {name: own for name, own in os.environ.items() if name != "SECRET"} | {
            "PATH": path,
            "NOTES": str(self.notes),
            **more,
        }

    def run(self, words: Iterable[str], folder: Path, script: str = "", **more: str) -> int:
        """A shell in a folder; its exit status."""
        given, variables = os.fsencode(script), self.variables(**more)
        done = subprocess.run([*words], cwd=folder, input=given, env=variables, capture_output=True, check=False)
        return done.returncode

    def calls(self) -> list[list[str]]:
        """Since the last time they were asked for, word by word; the first is the program's path."""
        if not self.notes.exists():
            return []
        words = iter(os.fsdecode(self.notes.read_bytes()).split("\0")[:-1])
        self.notes.unlink()
        return [[next(words) for _ in range(int(count) + 1)] for count in words]


def stubs(folder: Path) -> Stubs:
    made = Stubs(folder)
    for name in _SILENT:
        made.add(folder / name)
    for name, then in _ANSWERS.items():
        made.add(folder / name, then)
    return made


def canaries(folder: Path) -> list[Path]:
    return list(folder.rglob("CANARY"))


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does it with commands and variables: $(NAME) is filled in, $$ is one $."""
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
    """Words that sbatch reads from a script: until the first command; a backslash counts everywhere."""
    words: list[str] = []
    for line in script.split("\n")[1:]:
        if line.strip() and not line.lstrip().startswith("#"):
            break
        rest = iter(line.removeprefix("#SBATCH")) if line.startswith("#SBATCH") else iter("")
        word, quote, begun = "", "", False
        for letter in rest:
            if letter == "\\":
                word, begun = word + next(rest, ""), True
            elif quote:
                quote, word = ("", word) if letter == quote else (quote, word + letter)
            elif letter in "\"'":
                quote, begun = letter, True
            elif letter == "#":
                break
            elif letter.isspace():
                words, word, begun = [*words, word] if begun else words, "", False
            else:
                word, begun = word + letter, True
        words += [word] if begun else []
    return words


def same(value: str) -> str:
    return value


def after(prefix: str) -> Make:
    return lambda value: prefix + value


def resolved(path: str) -> str:
    return str(Path(path).resolve())


@dataclass(frozen=True)
class Option:
    """Of a launch; what makes a hostile value of its kind, and the word that a program is to get."""

    word: str
    make: Make = same
    arrives: Make | None = same
    """Given the value that was made; None: it goes to no program."""
    named: str = ""
    """In complaints, beside what it is called."""


def attack(
    here: Launch, words: Sequence[object], options: Sequence[Option], run: Callable[[str], set[str]], folder: Path
) -> int:
    """Every hostile value in all options at once, less those that are refused; the number of values that were tried.

    `run` is given what the launch printed, and tells all words that programs got.
    """
    for hostile in HOSTILE:
        left = {option.word: (option, option.make(hostile)) for option in options}
        while True:
            answer = here("launch", *words, *(f"{word}={value}" for word, (_, value) in left.items()))
            assert "Traceback" not in answer.stderr, answer.stderr
            if answer.returncode == 0:
                break
            assert "\x1b" not in answer.stderr
            assert len(answer.stderr) < 1000
            refused = [word for word, (option, _) in left.items() if {word, option.named} & set(_words(answer.stderr))]
            assert refused, (hostile[:100], answer.stderr)
            del left[refused[0]]
        got = run(answer.stdout)
        for option, value in left.values():
            assert option.arrives is None or option.arrives(value) in got, (option.word, value, got)
        assert not canaries(folder), hostile
        assert not (folder.parent / "outside").exists()
    return len(HOSTILE) * len(options)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z.-]+", text)
