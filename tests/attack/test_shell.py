"""Hostile values in all options of launch: they arrive unchanged, or are refused with the name of the option.

The scripts run with stubs for python, docker, srun ... that record how they were called. A value that a shell executes
would create a file named CANARY.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import complaint

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
from paceline.launch import ec2_request, execution, planning
from paceline.launch.backends import ec2, ssh
from paceline.launch.job import Ec2Resources, Job, draft
from paceline.launch.job_hosts import HERE, hosts_of
from paceline.launch.planning import HostStep
from paceline.launch.specs import Spec

# an untrusted recipe
RECIPE = "base: imagenet-rn18-2ep\nname: $(touch CANARY) `touch CANARY` $$ $(PACELINE_RECIPE)\n"


@pytest.fixture
def programs(tmp_path: Path, here: Launch, monkeypatch) -> Stubs:
    """Runs after `here`, which clears variables."""
    made = stubs(tmp_path / "stubs")
    folders = {"PACELINE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "stubs")}
    for name, value in made.variables(**folders).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.executable", str(made.folder / "python"))
    monkeypatch.setattr(config_io, "fields", cache(config_io.fields))  # it takes half of the time of a launch
    return made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.fixture
def launched(monkeypatch) -> list[Job]:
    """Jobs that would be started, after their plan was made."""
    jobs: list[Job] = []
    for backend in (ssh, ec2):

        def launch(spec: Spec, backend: Any = backend) -> Job:
            backend.plan(spec)
            jobs.append(draft(spec))
            return jobs[-1]

        monkeypatch.setattr(backend, "launch", launch)
    return jobs


def _execute(steps: Sequence[Any], programs: Stubs, folder: Path, secret: bytes = b"") -> set[str]:
    """Execute the steps of one host and of this machine; return all arguments that programs received."""
    hosts = {step.host for step in steps if isinstance(step, HostStep)} - {HERE}
    for step in (one for one in steps if isinstance(one, HostStep) and one.host in (HERE, min(hosts))):
        host_folder = folder / "hosts" / step.host
        host_folder.mkdir(parents=True, exist_ok=True)
        for name, text in step.files.items():
            (host_folder / name).write_bytes(text.encode() or secret)
        # in the foreground, and as if a volume were attached
        script = step.script.replace("< /dev/null &\n", "< /dev/null\n").replace('[ -b "$name" ]', "true")
        programs.run(["sh", "-s"], host_folder, f"{script}\n")
    return {word for call in programs.calls() for word in call}


def _plan(job: Job, rendezvous_host: str) -> list[HostStep]:
    return planning.plan(replace(job, rendezvous="10.0.0.1:29400", rendezvous_host=rendezvous_host))


def test_ssh_hosts(here: Launch, programs: Stubs, recipe: Path, launched: list[Job], tmp_path: Path, survived) -> None:
    def python(hostile: str) -> str:
        path = tmp_path / "bin" / hostile.replace("/", "_")
        if not {"\0", "\udcff"} & set(hostile) and len(hostile) < 200:
            programs.add(path)
        return str(path)

    def run(_: str) -> set[str]:
        received = _execute(_plan(launched[-1], "a") + _plan(launched[-1], ""), programs, tmp_path)
        hosts_of(launched[-1])["a"].call("true")
        return received | {word for call in programs.calls() for word in call}

    options = [
        Option("--hosts"),
        Option("--name"),
        Option("--pass"),
        Option("--runs", arrives=None),
        Option("--python", python),
        Option("--ssh-config", after(f"{tmp_path}/a/b/"), resolved),
        Option("--results", after("s3://bucket/")),
        Option("--data", after("s3://bucket/")),
        Option("--data.variant", json.dumps, lambda value: f"--variant={json.loads(value)}", alias="data.variant"),
    ]
    programs.add(programs.folder / "ssh")
    words = ["ssh", "--hosts", "a,b", "--python", "python", "--data", "s3://bucket/data", recipe, "--detach"]
    tried = attack(here, words, options, run, tmp_path)
    survived("hostile values in scripts for ssh hosts", tried)


def test_containers_on_ssh_hosts(
    here: Launch, programs: Stubs, recipe: Path, launched: list[Job], tmp_path: Path, survived
) -> None:
    def run(_: str) -> set[str]:
        return _execute(_plan(launched[-1], "a"), programs, tmp_path)

    options = [
        Option("--container"), Option("--name"), Option("--results", after("s3://bucket/")),
        Option("--data", after("/data/"), lambda path: f"{path}:{path}", alias="data.path"),
    ]  # fmt: skip
    words = ["ssh", "--hosts", "a,b", "--container", "image", "--data", "/data", recipe, "--detach"]
    survived("hostile values in arguments of docker", attack(here, words, options, run, tmp_path))


def test_ec2_instances(
    here: Launch, programs: Stubs, recipe: Path, launched: list[Job], tmp_path: Path, survived
) -> None:
    names = ("region", "zone", "subnet", "image", "root_device", "security_group", "placement_group")
    resources = Ec2Resources(**dict.fromkeys(names, "x"))

    def run(_: str) -> set[str]:
        job = launched[-1]
        summary, *steps = ec2.plan(job.spec)
        assert all(line.startswith("# ") for line in str(summary).split("\n"))
        request = ec2_request.request_of(job.id, job.spec, resources, 0, "")
        assert "touch CANARY" not in request["UserData"]
        subprocess.run(["sh", "-n"], input=request["UserData"], text=True, check=True)
        return _execute(steps, programs, tmp_path)

    unused = (
        "instance-type", "region", "zone", "subnet", "image-id", "image-name", "user", "ssh-from", "addresses",
        "security-groups", "volume-type", "name", "pass", "results", "public-key", "user-data",
    )  # fmt: skip
    options = [
        Option("--mount", after("/data/")),
        Option("--efs", after("server:/")),
        Option("--from-snapshot", arrives=None),
        *(Option(f"--{name}", arrives=None) for name in unused),
    ]
    python = programs.folder / "python"
    words = ["ec2", "--instance-type", "x", "--python", python, recipe, "--data", "/data", "--detach"]
    survived("hostile values in scripts for EC2 instances", attack(here, words, options, run, tmp_path))


@pytest.mark.parametrize("runtime", ["", "apptainer", "pyxis"])
def test_slurm(here: Launch, programs: Stubs, recipe: Path, runtime: str, tmp_path: Path, survived) -> None:
    folder = tmp_path / "a" / "b"

    def run(_: str) -> set[str]:
        (sbatch,) = [call for call in programs.calls() if call[0].endswith("/sbatch")]
        script = Path(sbatch[-1])
        programs.run(["bash", str(script)], folder)
        return {*directives(script.read_text()), *(word for call in programs.calls() for word in call)}

    unchanged = ("partition", "account", "time", "cpus-per-task")
    options = [
        *(Option(f"--{name}", arrives=after(f"--{name}=")) for name in unchanged),
        Option("--sbatch", lambda value: f"comment={shlex.quote(value)}", _comment, alias="--comment"),
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
            Option("--data", after("/data/"), bind, alias="data.path"),
        ]
    survived("hostile values in sbatch files", attack(here, words, options, run, tmp_path))


def _comment(given: str) -> str:
    return "--comment=" + shlex.split(given.removeprefix("comment="))[0]


def test_names_of_sbatch_options(here: Launch, survived) -> None:
    for hostile in (value for value in HOSTILE if value != "--privileged"):  # a valid option name
        answer = here("launch", "slurm", "--sbatch", shlex.quote(hostile), "digits", "--dry-run")
        message = complaint(answer)
        assert "--sbatch" in message
        assert re.search(r"\[(invalid-sbatch-option|invalid-character|value-too-long)\]", message)
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
        *([Option("--gpu-type", arrives=None)] if engine == "skypilot" else []),
        Option("--results", after("s3://bucket/")),
        Option("--data", after("/data/"), alias="data.path"),
    ]
    gpus = ["--gpus-per-node", 1, "--gpu-type", "A"] if engine == "skypilot" else []
    words = ["manifest", "--for", engine, *gpus, "--image", "image", recipe]
    survived("hostile values in manifests", attack(here, words, options, run, tmp_path))


def _started(engine: str, documents: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return command, recipe and image, after the engine has expanded its variables."""
    if engine == "skypilot":
        (task,) = documents
        return task["run"], task["envs"]["PACELINE_RECIPE"], task["resources"]["image_id"].removeprefix("docker:")
    if engine == "kubeflow":
        trainer = documents[-1]["spec"]["trainer"]
        text = expanded(trainer["env"][0]["value"], {})
        return expanded(trainer["command"][2], {"PACELINE_RECIPE": text}), text, trainer["image"]
    container = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    (text,) = (one["data"]["recipe.yaml"] for one in documents if one["kind"] == "ConfigMap")
    return expanded(container["command"][2], {"PACELINE_RECIPE": text}), text, container["image"]


@pytest.mark.parametrize("interpreter", [("--python", "python"), ("--container", "image")])
def test_secrets(
    here: Launch,
    programs: Stubs,
    recipe: Path,
    launched: list[Job],
    interpreter: tuple[str, str],
    tmp_path: Path,
    monkeypatch,
    survived,
) -> None:
    """Their values reach the ranks unchanged, and appear in no command line."""
    values = [value for value in HOSTILE if "\0" not in value]
    option, program = interpreter
    words = ["--hosts", "a,b", "--pass", "SECRET", option, program, recipe, "--data", "s3://bucket/data", "--detach"]
    assert here("launch", "ssh", *words).returncode == 0
    for value in values:
        monkeypatch.setenv("SECRET", value)
        secrets = execution.secrets_text(execution.secrets_of(launched[-1]))
        monkeypatch.delenv("SECRET")
        received = _execute(_plan(launched[-1], "a"), programs, tmp_path, secrets)
        assert programs.secret == value
        assert not any(value in word for word in received)
        assert not canaries(tmp_path)
        assert not list(tmp_path.rglob("secrets"))
    survived("hostile values of secrets", len(values))
