"""Hostile values in everything that a launch can be given: they arrive unchanged, or are refused by name.

Scripts are really run, with programs in the place of python, docker, srun ... that note how they were called. A value
that a shell ran would leave a file named CANARY.
"""

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from attack.stubbed import (
    HOSTILE,
    Launch,
    Option,
    Stubs,
    after,
    attack,
    canaries,
    directives,
    expanded,
    resolved,
    same,
    stubs,
)
from paceline.config import io as config_io
from paceline.launch import control, ec2, ec2_provision, nodes, ssh
from paceline.launch.job import Job
from paceline.launch.nodes import HERE, Step

# a recipe of a stranger's
RECIPE = "base: imagenet-rn18-2ep\nname: $(touch CANARY) `touch CANARY` $$ $(PACELINE_RECIPE)\n"


@pytest.fixture
def programs(tmp_path: Path, here: Launch, monkeypatch) -> Stubs:
    """After `here` has cleared variables."""
    made = stubs(tmp_path / "stubs")
    own = {"PACELINE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "stubs")}
    for name, value in made.variables(**own).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.executable", str(made.folder / "python"))
    monkeypatch.setattr(config_io, "fields", cache(config_io.fields))  # half of the time of a launch
    return made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.fixture
def launched(monkeypatch) -> list[Job]:
    """Jobs that would be started."""
    found: list[Job] = []

    def submit(job: Job) -> Job:
        found.append(job)
        return job

    monkeypatch.setattr(ssh, "submit", submit)
    monkeypatch.setattr(ec2, "submit", submit)
    return found


def _carry_out(steps: Sequence[Any], programs: Stubs, folder: Path, secret: bytes = b"") -> set[str]:
    """What happens on one machine and here, one script after the other; all words that programs got."""
    machines = {step.host for step in steps if isinstance(step, Step)} - {HERE}
    for step in (own for own in steps if isinstance(own, Step) and own.host in (HERE, min(machines))):
        own = folder / "machines" / step.host
        own.mkdir(parents=True, exist_ok=True)
        for name, text in step.files.items():
            (own / name).write_bytes(text.encode() or secret)
        # in the foreground, and as if a volume were there
        script = step.script.replace("< /dev/null &\n", "< /dev/null\n").replace('[ -b "$name" ]', "true")
        programs.run(["sh", "-s"], own, f"{script}\n")
    return {word for call in programs.calls() for word in call}


def _met(job: Job, keeper: str) -> list[Step]:
    return nodes.plan(replace(job, rendezvous="10.0.0.1:29400", rendezvous_host=keeper))


def test_machines_behind_ssh(
    here: Launch, programs: Stubs, recipe: Path, launched: list[Job], tmp_path: Path, survived
) -> None:
    def python(hostile: str) -> str:
        path = tmp_path / "bin" / hostile.replace("/", "_")
        if not {"\0", "\udcff"} & set(hostile) and len(hostile) < 200:
            programs.add(path)
        return str(path)

    def run(_: str) -> set[str]:
        got = _carry_out(_met(launched[-1], keeper="a") + _met(launched[-1], keeper=""), programs, tmp_path)
        control.hosts_of(launched[-1])["a"].call("true")
        return got | {word for call in programs.calls() for word in call}

    options = [
        Option("--hosts"),
        Option("--name"),
        Option("--pass"),
        Option("--runs", arrives=None),
        Option("--python", python),
        Option("--ssh-config", after(f"{tmp_path}/a/b/"), resolved),
        Option("--results", after("s3://bucket/")),
        Option("--data", after("s3://bucket/")),
        Option("--data.variant", json.dumps, lambda value: f"--variant={json.loads(value)}", "data.variant"),
    ]
    programs.add(programs.folder / "ssh")
    words = ["ssh", "--hosts", "a,b", "--python", "python", "--data", "s3://bucket/data", recipe, "--detach"]
    tried = attack(here, words, options, run, tmp_path)
    survived("hostile values in scripts for machines behind ssh", tried)


def test_containers_behind_ssh(
    here: Launch, programs: Stubs, recipe: Path, launched: list[Job], tmp_path: Path, survived
) -> None:
    def run(_: str) -> set[str]:
        return _carry_out(_met(launched[-1], keeper="a"), programs, tmp_path)

    options = [
        Option("--container"), Option("--name"), Option("--results", after("s3://bucket/")),
        Option("--data", after("/data/"), lambda path: f"{path}:{path}", named="data.path"),
    ]  # fmt: skip
    words = ["ssh", "--hosts", "a,b", "--container", "image", "--data", "/data", recipe, "--detach"]
    survived("hostile values in docker's arguments", attack(here, words, options, run, tmp_path))


def test_rented_machines(
    here: Launch, programs: Stubs, recipe: Path, launched: list[Job], tmp_path: Path, survived
) -> None:
    where = {"Image": "i", "Root": "r", "Subnet": "s", "Group": "g", "Placement": "p", "Zone": "z", "Used": []}

    def run(_: str) -> set[str]:
        job = launched[-1]
        rented, *steps = ec2.plan(job)
        assert all(line.startswith("# ") for line in str(rented).split("\n"))
        request = ec2_provision._request(replace(job, extra=job.extra | {"where": where}), 0)
        assert "touch CANARY" not in request["UserData"]
        subprocess.run(["sh", "-n"], input=request["UserData"], text=True, check=True)
        return _carry_out(steps, programs, tmp_path)

    nowhere = (
        "instance-type", "region", "zone", "subnet", "image-id", "image-name", "user", "ssh-from", "addresses",
        "security-groups", "volume-type", "name", "pass", "results", "public-key", "user-data",
    )  # fmt: skip
    options = [
        Option("--mount", after("/data/")),
        Option("--efs", after("server:/")),
        Option("--from-snapshot", arrives=None),
        *(Option(f"--{name}", arrives=None) for name in nowhere),
    ]
    words = [
        "ec2",
        "--instance-type",
        "x",
        "--python",
        programs.folder / "python",
        recipe,
        "--data",
        "/data",
        "--detach",
    ]
    survived("hostile values in scripts for rented machines", attack(here, words, options, run, tmp_path))


@pytest.mark.parametrize("runtime", ["", "apptainer", "pyxis"])
def test_slurm(here: Launch, programs: Stubs, recipe: Path, runtime: str, tmp_path: Path, survived) -> None:
    folder = tmp_path / "a" / "b"

    def run(_: str) -> set[str]:
        (sbatch,) = [call for call in programs.calls() if call[0].endswith("/sbatch")]
        script = Path(sbatch[-1])
        programs.run(["bash", str(script)], folder)
        return {*directives(script.read_text()), *(word for call in programs.calls() for word in call)}

    plain = ("partition", "account", "time", "cpus-per-task")
    options = [
        *(Option(f"--{name}", arrives=after(f"--{name}=")) for name in plain),
        Option("--sbatch", lambda value: f"comment={shlex.quote(value)}", _comment, "--comment"),
        Option("--name"), Option("--seeds"), Option("--results", after("s3://bucket/")),
        Option("--runs", after(f"{folder}/runs/"), resolved),
    ]  # fmt: skip
    folder.mkdir(parents=True)
    words = ["slurm", "--detach", "--data", "/data", recipe]
    if runtime:
        words += ["--container", "image", "--container-runtime", runtime]
        binds = {
            "apptainer": (same, lambda path: f"{folder},{path}"),
            "pyxis": (after("--container-image="), lambda path: f"--container-mounts={folder}:{folder},{path}:{path}"),
        }
        image, bind = binds[runtime]
        options = [
            Option("--container", arrives=image),
            Option("--data", after("/data/"), bind, named="data.path"),
        ]
    survived("hostile values in sbatch files", attack(here, words, options, run, tmp_path))


def _comment(given: str) -> str:
    return "--comment=" + shlex.split(given.removeprefix("comment="))[0]


def test_names_of_sbatch_options(here: Launch, survived) -> None:
    for hostile in (value for value in HOSTILE if value != "--privileged"):  # which could be one
        answer = here("launch", "slurm", "--sbatch", shlex.quote(hostile), "digits", "--dry-run")
        assert answer.returncode == 1
        assert "--sbatch" in answer.stderr
    survived("hostile names of sbatch options", len(HOSTILE) - 1)


@pytest.mark.parametrize("engine", ["kubernetes", "kubeflow", "skypilot"])
def test_manifests(here: Launch, programs: Stubs, recipe: Path, engine: str, tmp_path: Path, survived) -> None:
    def run(printed: str) -> set[str]:
        documents = list(yaml.safe_load_all(printed))
        command, text, image = _started(engine, documents)
        variables = {"PACELINE_RECIPE": text, "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"}
        programs.run(["sh", "-c", command], tmp_path, **variables, JOB_COMPLETION_INDEX="0", PET_NODE_RANK="0")
        (call,) = [call for call in programs.calls() if call[0].endswith("/paceline")]
        written = Path(call[call.index("train") + 1])
        assert yaml.safe_load(written.read_text())["data"] == yaml.safe_load(text)["data"]
        return {*call, image, yaml.safe_load(text)["data"]["path"]}

    options = [
        Option("--name"),
        Option("--image"),
        Option("--gpu-type", arrives=None),
        Option("--results", after("s3://bucket/")),
        Option("--data", after("/data/"), named="data.path"),
    ]
    words = ["manifest", "--for", engine, "--gpus-per-node", 1, "--gpu-type", "A", "--image", "image", recipe]
    survived("hostile values in manifests", attack(here, words, options, run, tmp_path))


def _started(engine: str, documents: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Command, recipe and image, after the engine has filled in what it fills in."""
    if engine == "skypilot":
        (task,) = documents
        return task["run"], task["envs"]["PACELINE_RECIPE"], task["resources"]["image_id"].removeprefix("docker:")
    if engine == "kubeflow":
        trainer = documents[-1]["spec"]["trainer"]
        text = expanded(trainer["env"][0]["value"], {})
        return expanded(trainer["command"][2], {"PACELINE_RECIPE": text}), text, trainer["image"]
    container = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    (text,) = (own["data"]["recipe.yaml"] for own in documents if own["kind"] == "ConfigMap")
    return expanded(container["command"][2], {"PACELINE_RECIPE": text}), text, container["image"]


@pytest.mark.parametrize("place", [("--python", "python"), ("--container", "image")])
def test_secrets(
    here: Launch,
    programs: Stubs,
    recipe: Path,
    launched: list[Job],
    place: tuple[str, str],
    tmp_path: Path,
    monkeypatch,
    survived,
) -> None:
    """Their values reach the ranks as they are, and no command line."""
    values = [value for value in HOSTILE if "\0" not in value]
    option, program = place
    words = ["--hosts", "a,b", "--pass", "SECRET", option, program, recipe, "--data", "s3://bucket/data", "--detach"]
    assert here("launch", "ssh", *words).returncode == 0
    for value in values:
        monkeypatch.setenv("SECRET", value)
        secrets = nodes.secrets_text(nodes.secrets_of(launched[-1]))
        monkeypatch.delenv("SECRET")
        got = _carry_out(_met(launched[-1], keeper="a"), programs, tmp_path, secrets)
        assert programs.secret == value
        assert not any(value in word for word in got)
        assert not canaries(tmp_path)
        assert not list(tmp_path.rglob("secrets"))
    survived("hostile values of secrets", len(values))
