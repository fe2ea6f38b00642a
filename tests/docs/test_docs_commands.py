"""Run the commands, Python blocks and recipes of README and docs as a reader would, in a folder with small runs."""

import fcntl
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import HANG, environment
from docs_workspace import STEPS, make, provide, remove
from documents import all_commands, blocks, documents

from paceline.config.io import load_recipe
from paceline.system.logs import log

Run = Callable[..., subprocess.CompletedProcess[str]]
DOCUMENTS = documents()
NOT_RUN = {
    r"prepare cifar100?": "downloads it",
    r"prepare (hf:|s3://).*": "reads the Hugging Face Hub or an object store",
    r"train flowers\.yaml.*": "downloads pretrained weights",
    r"export .* --to hf:.*": "uploads a model; tests/unit/test_export_hub.py does",
    r"export .* --to FOLDER": "needs a timm model; tests/unit/test_export.py has one",
    r"(data|train .*|launch .*--resume) s3://.*": "reads an object store",
    r"ec2 .*": "needs an AWS account",
    r"(doctor|selftest) --hosts .*": "needs other hosts",
    r"find-(batch|lr) .*--hosts .*": "needs other hosts; tests/cluster/test_find_on_hosts.py has some",
    r"selftest --import .*": "needs a module of the user; tests/gpu/test_selftest.py imports one",
    r"train .*--rendezvous .*": "needs a second node at the same time; tests/cluster/test_two_nodes.py starts both",
    r"rendezvous .*": "serves until it is stopped",
    r"serve runs/.*": "serves until it is stopped; tests/unit/test_serve.py starts it",
    r"predict runs/flowers - .*": "reads names from another command; tests/unit/test_predict.py does",
    r"train .* --name demo-.*": "printed by `paceline demo`, which tests/docs/test_demo.py runs",
    r"sweep --show .*": "shows a sweep; tests/search/test_sweep.py has one",
    r"train runs/.*/best\.yaml": "trains the best recipe of a sweep; tests/search/test_sweep.py loads one",
    r"find-batch cifar10-vit-b32-fsdp .*": "trains a ViT-B",
    r"recipes ([\w.-]+ )?--record .*": "needs finished runs of that recipe; tests/unit/test_recording.py has them",
    r"train .*--profile .*": "profiles more steps than are trained here; tests/unit/test_profiling.py runs it",
    **dict.fromkeys(
        ("train", "evaluate", "plan", "launch", "export", "compare", "prepare", "find-batch", "predict", "serve"),
        "names a command in a sentence",
    ),
}
"""Commands that cannot run here, and the reason."""
STATUSES = {r"train digits --optim\.lrr .*": {1}, r"doctor": {0, 1}, r"selftest .*--only .*": {0, 1}}
"""Commands that show an error, and one whose status depends on the machine."""
JOBS = ("stop", "status", "logs", "jobs --quick", "resume", "logs -f", "attach", "fetch")
"""Commands that need a job, in an order in which all of them succeed."""
JOB = "launch local --nodes 2 digits"
PLACEHOLDERS = {
    r"(launch ec2)(?!.*--instance-type)(.*)": r"\1\2 --instance-type g4dn.2xlarge RECIPE",  # written as ...
    r"(launch .*)RECIPE": r"\1imagenet-rn18-2ep",
    r"\b(RECIPE|NAME)\b": "digits",
    r"(?<!/)\bRUN\b": "runs/RUN",
    r"\bDIR\b": "data/images",
    r"--seed S\b": "--seed 1",
    r"--seeds \d\b": "--seeds 2",  # fewer than a reader would train
    r"step-\d+": f"step-{STEPS:08}",
}
SHORT = ("--train.duration", f"{STEPS + 1}ba")
SHORT_PYTHON = {'"digits"': '"recipe.yaml"', r'"\d+ep"': f'"{STEPS + 1}ba"', r"max_batch=\d+": "max_batch=2"}


def _filled(command: str) -> str:
    """Return a command with values in place of its placeholders."""
    for placeholder, value in PLACEHOLDERS.items():
        command = re.sub(placeholder, value, command)
    return command


COMMANDS = {_filled(shlex.join(command.words)): command.page for command in all_commands()}
RUN = [
    command
    for command in COMMANDS
    if command not in (JOB, *JOBS) and not any(re.fullmatch(rule, command) for rule in NOT_RUN)
]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    """The files of all tests, made once, also by several workers of xdist."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    finished = root / "docs-finished"
    with (root / "docs.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            folder = tmp_path_factory.mktemp("docs")
            patch.chdir(folder)
            patch.setenv("PACELINE_THREADS", "1")
            make(folder)
            log.handlers, log.propagate = [], True
            finished.symlink_to(folder)
    return finished.resolve()


@pytest.fixture
def run(tmp_path: Path, here: Run, paceline: Run, monkeypatch) -> Run:
    """Run a command in tmp_path: in this process, which saves the import of torch, unless it would change it."""
    variables = {
        "PACELINE_HOME": str(tmp_path / "home"),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    variables |= dict.fromkeys(("WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"), "value")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        apart = re.search(r"--(procs [2-9]|import|log\.(wandb|mlflow)) ", " ".join(words))
        return paceline(*words, env=environment() | variables) if apart else here(*words)

    return start


def _typed(command: str) -> list[str]:
    """Return the words of a command, with what makes it short and keeps it from contacting other hosts."""
    words = [
        found
        for word in shlex.split(command)
        for found in (sorted(map(str, Path().glob(word))) if word.startswith("runs/") and "*" in word else [word])
    ]
    if {"--help", "--dry-run"} & set(words):
        return words
    if words[0] == "launch" and words[1] in ("ssh", "slurm", "ec2"):
        words.append("--dry-run")
    if words[0] == "train" or words[:2] == ["launch", "local"]:
        words += SHORT
        words += [] if {"--resume", "--train.global_batch"} & set(words) else ["--train.global_batch", "8"]
    if words[0] == "sweep":
        words += [*SHORT, "--trials", "1"]
    if words[0] == "plan":
        words += ["--train-images", "1281167"]  # data/imagenet is smaller here
    if words[0] == "find-batch":
        words += ["--max-batch", "2", "--steps", "1"]
    return words


def _runs(text: str) -> set[str]:
    """Return the names of the runs that a text assumes, and two more for commands on all runs."""
    found = re.findall(r"\bruns/([\w-]+)(\*?)", text)
    return {"one", "two", *(f"{name}{end}" for name, star in found for end in (("0", "1") if star else ("",)))}


def _write_blocks(page: str) -> None:
    """Write the recipes of a page, and the Python blocks that begin with the name of their file."""
    for block in blocks(DOCUMENTS[page], "yaml"):
        if name := yaml.safe_load(block).get("name"):
            Path(f"{name}.yaml").write_text(block)
    for block in blocks(DOCUMENTS[page], "python"):
        if match := re.match(r"# (\S+\.py)\n", block):
            Path(match[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(match[1]).write_text(block)


@pytest.mark.parametrize("command", RUN, ids=RUN)
def test_command_runs(command: str, run: Run, workspace: Path, tmp_path: Path) -> None:
    page = COMMANDS[command]
    provide(workspace, tmp_path, _runs(command))
    for option, made in re.findall(r"--(out|to|name) (\S+)", command):
        remove(tmp_path / "runs" / made if option == "name" else tmp_path / made)
    _write_blocks(page)
    expected = next((statuses for rule, statuses in STATUSES.items() if re.fullmatch(rule, command)), {0})
    words = shlex.split(command) if expected == {1} else _typed(command)
    answer = run(*words)
    assert answer.returncode in expected, f"{page}: {shlex.join(words)}\n{answer.stdout}{answer.stderr}"
    if expected == {1}:
        codes = re.findall(r"\[([a-z-]+)\]$", answer.stderr, re.MULTILINE)
        assert codes
        assert all(f"[{code}]" in DOCUMENTS[page] for code in codes), answer.stderr


def test_commands_of_jobs_run(run: Run) -> None:
    """Stopping at once is before the end of training on any machine."""
    assert run(*_typed(JOB), "--detach").returncode == 0
    for command in JOBS:
        answer = run(*shlex.split(command))
        assert answer.returncode == 0, f"{command}\n{answer.stdout}{answer.stderr}"


def test_every_rule_is_needed() -> None:
    assert not [rule for rule in (*NOT_RUN, *STATUSES) if not any(re.fullmatch(rule, command) for command in COMMANDS)]
    assert not [command for command in (JOB, *JOBS) if command not in COMMANDS]


@pytest.mark.parametrize("page", [page for page, text in DOCUMENTS.items() if blocks(text, "python")])
@pytest.mark.usefixtures("run")
def test_python_blocks_run(page: str, workspace: Path, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, with short trainings."""
    script = "\n".join(blocks(DOCUMENTS[page], "python"))
    provide(workspace, tmp_path, _runs(script))
    _write_blocks(page)
    for long, short in SHORT_PYTHON.items():
        script = re.sub(long, short, script)
    Path("script.py").write_text(script)
    words = [sys.executable, "script.py"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=HANG, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


RECIPES = [(page, block) for page, text in DOCUMENTS.items() for block in blocks(text, "yaml")]
RECIPES += [
    (page, line)
    for page, text in DOCUMENTS.items()
    for line in re.findall(r"^    (\w+: \{.*\})(?: +#.*)?$", text, re.MULTILINE)
]


@pytest.mark.parametrize(("page", "recipe"), RECIPES)
def test_recipes_load(page: str, recipe: str, tmp_path: Path) -> None:
    """Parts of recipes are loaded as parts of a recipe for ImageNet."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        recipe if "name" in yaml.safe_load(recipe) else f"base: imagenet-rn50-torchvision-v1\nname: part\n{recipe}"
    )
    load_recipe(str(path))
