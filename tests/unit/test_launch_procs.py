"""The processes per node: one per GPU, from what each backend knows, said in every plan."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import complaint, raises

from paceline.launch import api, procs
from paceline.system.gpus import Gpu

NVIDIA = [Gpu("nvidia", "A100", f"GPU-{number}") for number in range(8)]
AMD = [Gpu("amd", "MI300X", f"GPU-{number:016x}") for number in range(4)]


@pytest.fixture(autouse=True)
def own_home(here, monkeypatch, tmp_path: Path) -> None:
    """Runs after `here`, which clears such variables."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def _plan(here, *words: object) -> str:
    answer = here("launch", *words, "digits", "--train.global_batch", 240, "--dry-run")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def _visible(monkeypatch, gpus: list[Gpu]) -> None:
    monkeypatch.setattr(procs, "visible_gpus", lambda: gpus)


# ---- local ----


@pytest.mark.parametrize(("nodes", "each"), [(1, 8), (2, 4), (3, 2), (8, 1)])
def test_simulated_nodes_share_no_gpu(here, monkeypatch, nodes: int, each: int) -> None:
    _visible(monkeypatch, NVIDIA)
    plan = _plan(here, "local", "--nodes", nodes)
    assert plan.startswith(f"# processes per node: {each} (8 visible GPUs on this machine)\n")
    assert plan.count(f"--procs {each} ") == nodes
    given = [line.split(",") for line in re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", plan)]
    assert len(given) == (nodes if nodes > 1 else 0)
    assert all(len(gpus) == each for gpus in given)
    assert len({gpu for gpus in given for gpu in gpus}) == each * len(given)


def test_amd_gpus_are_divided_too(here, monkeypatch) -> None:
    _visible(monkeypatch, AMD)
    plan = _plan(here, "local", "--nodes", 2)
    given = [line.split(",") for line in re.findall(r"ROCR_VISIBLE_DEVICES=(\S+)", plan)]
    assert [gpu for gpus in given for gpu in gpus] == [gpu.uuid for gpu in AMD]
    assert plan.count("HIP_VISIBLE_DEVICES=0,1") == 2  # of those that ROCr leaves


@pytest.mark.parametrize("words", [("--nodes", 2), ("--nodes", 1, "--procs", 2)])
def test_too_few_gpus_for_the_simulated_nodes(here, monkeypatch, words: tuple[object, ...]) -> None:
    _visible(monkeypatch, NVIDIA[:1])
    message = complaint(here("launch", "local", *words, "digits"))
    assert "[too-few-gpus]" in message
    assert "--device cpu" in message
    plan = _plan(here, "local", *words, "--device", "cpu")
    assert "VISIBLE_DEVICES" not in plan


def test_machine_without_gpus_and_cpu_recipes_start_one_process(here, monkeypatch) -> None:
    _visible(monkeypatch, NVIDIA)
    assert "# processes per node: 1 (device=cpu)" in _plan(here, "local", "--nodes", 2, "--device", "cpu")
    _visible(monkeypatch, [])
    plan = _plan(here, "local", "--nodes", 2)
    assert "# processes per node: 1 (no GPU is visible)" in plan
    assert plan.count("--procs 1 ") == 2
    assert "[no-gpu]" in complaint(here("launch", "local", "--nodes", 2, "--device", "cuda", "digits"))
    assert "# processes per node: 3 (--procs)" in _plan(here, "local", "--nodes", 2, "--procs", 3)


def test_batch_has_to_fit_all_gpus(here, monkeypatch) -> None:
    _visible(monkeypatch, NVIDIA[:7])
    message = complaint(here("launch", "local", "--nodes", 1, "digits", "--dry-run"))
    assert "[batch-not-divisible]" in message


def test_python_api_counts_as_well(monkeypatch) -> None:
    _visible(monkeypatch, NVIDIA[:2])
    assert "# processes per node: 1 (2 visible GPUs on this machine)" in api.dry_run("local", "digits", nodes=2)
    assert "# processes per node: 2 (--procs)" in api.dry_run("local", "digits", nodes=1, procs=2)
    for wrong in (0, "many", 1.5):
        with raises("invalid-procs"):
            api.dry_run("local", "digits", nodes=1, procs=wrong)


# ---- all backends ----


@pytest.mark.parametrize(
    "words",
    [
        ("local", "--nodes", 1, "--dry-run"),
        ("ssh", "--hosts", "x", "--dry-run"),
        ("ec2", "--nodes", 1, "--instance-type", "p4d.24xlarge", "--dry-run"),
        ("slurm", "--nodes", 1, "--gpus-per-node", 8, "--dry-run"),
        ("manifest", "--nodes", 1, "--for", "kubernetes", "--image", "i", "--gpus-per-node", 8),
    ],
)
def test_strategy_single_starts_one_process(here, monkeypatch, words: tuple[object, ...]) -> None:
    """As `paceline train` does; more ranks would refuse to train."""
    _visible(monkeypatch, NVIDIA)
    answer = here("launch", *words, "digits", "--strategy", "single")
    assert "# processes per node: 1 (strategy=single)" in answer.stdout, answer.stderr


@pytest.mark.parametrize("words", [("--nodes", 2), ("--nodes", 1, "--procs", 2)])
def test_strategy_single_with_more_ranks_is_refused_before_the_launch(
    here, monkeypatch, words: tuple[object, ...]
) -> None:
    _visible(monkeypatch, NVIDIA)
    message = complaint(here("launch", "local", *words, "digits", "--strategy", "single", "--dry-run"))
    assert "[strategy-needs-one-rank]" in message


# ---- ssh ----


@pytest.fixture
def hosts(monkeypatch, tmp_path: Path) -> dict[str, str]:
    """A stand-in for ssh, which runs commands here with the nvidia-smi of a host; a host without one is unreachable."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    ssh = """#!/bin/sh
while [ "$2" != -- ]; do shift; done
host=${1#me@}
[ -d "$STUBS/$host" ] || { echo "ssh: Could not resolve hostname $1" >&2; exit 255; }
[ ! -f "$STUBS/$host/variables" ] || . "$STUBS/$host/variables"
PATH="$STUBS/$host:$PATH" exec sh -c "$3"
"""
    (stubs / "ssh").write_text(ssh)
    (stubs / "ssh").chmod(0o700)
    for name, count in (("a", 8), ("b", 4), ("c", 0), ("liar", 1)):
        (stubs / name).mkdir()
        lines = "; ".join(f"echo GPU-{number}" for number in range(count)) or "echo no devices; exit 6"
        (stubs / name / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}\n")
        (stubs / name / "nvidia-smi").chmod(0o700)
    (stubs / "liar" / "variables").write_text("echo '$(touch canary)'\n")
    (stubs / "shared").mkdir()
    (stubs / "shared" / "variables").write_text("export CUDA_VISIBLE_DEVICES=0\n")
    monkeypatch.setenv("STUBS", str(stubs))
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return {}


def _nodes(plan: str) -> dict[str, str]:
    """Return the --procs of each host."""
    parts = re.split(r"^# ([a-z@]+): files\n(?=# copies recipe)", plan, flags=re.MULTILINE)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return {host: re.findall(r"train recipe.yaml .*--procs (\S+)", text)[0] for host, text in found.items()}


@pytest.mark.usefixtures("hosts")
def test_hosts_are_asked(here) -> None:
    plan = _plan(here, "ssh", "--hosts", "a,me@a")
    assert plan.startswith("# processes per node: 8 (GPUs that the hosts report)\n")
    assert _nodes(plan) == {"a": "8", "me@a": "8"}
    assert _nodes(_plan(here, "ssh", "--hosts", "c")) == {"c": "1"}
    message = complaint(here("launch", "ssh", "--hosts", "a", "digits", "--train.global_batch", 100, "--dry-run"))
    assert "[batch-not-divisible]" in message


@pytest.mark.usefixtures("hosts")
def test_hosts_with_different_numbers_of_gpus_are_refused(here) -> None:
    message = complaint(here("launch", "ssh", "--hosts", "a,b", "digits", "--dry-run"))
    assert "[gpus-differ]" in message
    assert "a 8, b 4" in message
    assert _nodes(_plan(here, "ssh", "--hosts", "a,b", "--procs", 4)) == {"a": "4", "b": "4"}


@pytest.mark.usefixtures("hosts")
def test_hosts_are_not_asked_if_the_number_is_known(here) -> None:
    assert _nodes(_plan(here, "ssh", "--hosts", "x,y", "--procs", 2)) == {"x": "2", "y": "2"}
    assert "# processes per node: 1 (device=cpu)" in _plan(here, "ssh", "--hosts", "x,y", "--device", "cpu")


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("host", "reason"), [("x", "(host "), ("shared", "a variable restricts them"), ("liar", "it answered")]
)
def test_host_of_unknown_size_counts_its_own_gpus(here, host: str, reason: str, tmp_path: Path) -> None:
    plan = _plan(here, "ssh", "--hosts", f"a,{host}")
    assert _nodes(plan) == {"a": "8", host: "auto"}
    first = plan.splitlines()[0]
    assert first.startswith(
        f"# processes per node: a 8, {host} auto (GPUs that the hosts report; {host} counts its own"
    )
    assert reason in first
    assert not (tmp_path / "canary").exists()


# ---- ec2 ----


@pytest.fixture
def aws(monkeypatch) -> Any:
    moto = pytest.importorskip("moto", reason="needs moto: pip install 'paceline[dev]'")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with moto.mock_aws():
        yield


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    ("kind", "count", "source"),
    [
        ("p4d.24xlarge", 8, "GPUs of a p4d.24xlarge"),
        ("g4dn.12xlarge", 4, "GPUs of a g4dn.12xlarge"),
        ("c5.large", 1, "a c5.large has no GPU"),
    ],
)
def test_instance_types_have_gpus(here, kind: str, count: int, source: str) -> None:
    plan = _plan(here, "ec2", "--nodes", 2, "--instance-type", kind)
    assert f"# processes per node: {count} ({source})" in plan
    assert plan.count(f"--procs {count} ") == 2
    assert "# processes per node: 1 (device=cpu)" in _plan(here, "ec2", "--instance-type", kind, "--device", "cpu")


@pytest.mark.usefixtures("aws")
def test_unknown_instance_type_is_refused_before_anything_is_launched(here) -> None:
    assert "[ec2-unknown-instance-type]" in complaint(here("launch", "ec2", "--instance-type", "p0.nano", "digits"))


def test_dry_run_needs_no_credentials(here) -> None:
    plan = _plan(here, "ec2", "--instance-type", "p4d.24xlarge", "--region", "us-east-1")
    assert "# processes per node: auto (each instance counts its GPUs; EC2 was not asked: no AWS credentials" in plan
    assert plan.count("--procs auto ") == 2
