"""Completion in shells: the generated scripts, and what they complete."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import HANG, command, environment

CHECKS = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}


@pytest.mark.parametrize("shell", CHECKS)
def test_script_is_valid(here, tmp_path: Path, shell: str) -> None:
    answer = here("completion", shell)
    assert answer.returncode == 0, answer.stderr
    assert "paceline" in answer.stdout
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    (tmp_path / "script").write_text(answer.stdout)
    subprocess.run([*CHECKS[shell], tmp_path / "script"], check=True)


def test_other_shells_are_refused(here) -> None:
    answer = here("completion", "cmd")
    assert answer.returncode == 2
    assert "[usage]" in answer.stderr


def _completions(line: str, folder: Path) -> set[str]:
    """Ask as the script of a shell does at TAB; return the completions."""
    out = folder / "completions"
    question = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "|"}
    question |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(out), "PACELINE_HOME": str(folder / "home")}
    subprocess.run(command(), cwd=folder, env=environment() | question, check=True, timeout=HANG)
    return {word.strip() for word in out.read_text().split("|")}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("tr", {"train"}),
        ("pro", {""}),  # internal commands are not offered
        ("train dig", {"digits"}),
        ("train digits --optim.lr 0.1 --res", {"--resume", "--results"}),
        ("train digits --optim.l", {"--optim.lr", "--optim.layer_decay"}),
        ("train digits --strategy f", {"fsdp"}),
        ("launch local digits --evaluate.tta fl", {"flip", "flip-translate"}),
        ("compare --optim.l", {""}),
        ("recipes --optim.l", {""}),
        ("plan digi", {"digits"}),
        ("prepare cif", {"cifar10", "cifar100"}),
        ("evaluate runs/on", {"runs/one"}),
        ("watch runs/", {"runs/one", "runs/other/"}),
        ("launch s", {"slurm", "ssh"}),
        ("launch ssh --hosts a,b dig", {"digits"}),
        ("launch ec2 digits --optim.lr 0.1 --sp", {"--spot"}),
        ("launch local --sp", {""}),
        ("stop ", {"a-1", "b-2"}),
    ],
)
def test_completions(tmp_path: Path, line: str, wanted: set[str]) -> None:
    for name in ("runs/one", "runs/other", "home/jobs/a-1", "home/jobs/b-2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/one/recipe.yaml", "home/jobs/a-1/job.json", "home/jobs/b-2/job.json"):
        (tmp_path / name).touch()
    assert _completions(f"paceline {line}", tmp_path) == wanted


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_tab_in_bash(tmp_path: Path) -> None:
    """An interactive bash on a terminal, with the script as in ~/.bashrc."""
    (tmp_path / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    (tmp_path / "paceline").chmod(0o755)
    (tmp_path / "bashrc").write_text('eval "$(paceline completion bash)"; PS1="ready>"\n')
    variables = environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb", "INPUTRC": "/dev/null"}
    terminal, side = pty.openpty()
    words = ["bash", "--noprofile", "--rcfile", str(tmp_path / "bashrc"), "-i"]
    with subprocess.Popen(
        words, stdin=side, stdout=side, stderr=side, env=variables, cwd=tmp_path, start_new_session=True
    ) as bash:
        os.close(side)
        try:
            _read_until(terminal, "ready>")
            os.write(terminal, b"paceline tr\t")
            _read_until(terminal, "paceline train ")
        finally:
            bash.kill()
            os.close(terminal)


def _read_until(terminal: int, text: str) -> None:
    shown, deadline = "", time.monotonic() + HANG
    while text not in shown:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], shown
        shown += os.read(terminal, 1 << 16).decode(errors="replace")
