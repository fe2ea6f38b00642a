"""Plans of launches, as --dry-run prints them: nothing is started, and they contain no secrets."""

import subprocess
from pathlib import Path

import pytest
from conftest import complaint
from extension_recipe import IMPORTS, USED

from paceline.launch.hosts import tracked_files

EXTENSION = Path(__file__).parents[1] / "extension"


def _plan(here, *words: object) -> str:
    answer = here("launch", *words, "--dry-run")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(autouse=True)
def own_home(here, monkeypatch, tmp_path: Path) -> None:
    """Runs after `here`, which clears such variables."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def test_ssh(here, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TOKEN", "canary")
    (tmp_path / "hosts").write_text("a  # the first\n\nb\n")
    plan = _plan(here, "ssh", "--hosts", tmp_path / "hosts", "digits", "--pass", "TOKEN", "--rendezvous-host", "b")
    assert (
        plan.count("# a: ") == plan.count("# b: ") - 1 == 3
    )  # files, environment, start; b also runs the rendezvous store
    assert "--nodes 1:2" in plan
    assert 'bin/pip" install' in plan
    assert "canary" not in plan
    assert not (tmp_path / "home").exists()


def test_containers(here) -> None:
    plan = _plan(here, "ssh", "--hosts", "a,b", "--container", "me/paceline:1", "--pass", "TOKEN", "digits")
    assert "docker run --rm --init" in plan
    assert "--network host --ipc host" in plan
    assert "$([ -d /dev/infiniband ] && echo --device /dev/infiniband) --ulimit memlock=-1" in plan
    assert 'me/paceline:1 sh -c \'umask 077; eval "$(cat)"; exec paceline "$@"\' paceline train recipe.yaml' in plan
    assert "-e TOKEN" not in plan  # `docker inspect` would show it
    assert "-m venv" not in plan
    apptainer = _plan(here, "slurm", "--container", "me.sif", "digits")
    assert '--wait=60 --export=ALL apptainer exec --nv --bind "$PWD" --pwd "$PWD" me.sif paceline' in apptainer
    pyxis = _plan(here, "slurm", "--container", "me/paceline:1", "--container-runtime", "pyxis", "digits")
    assert '--wait=60 --export=ALL --container-image=me/paceline:1 --container-mounts="$PWD":"$PWD"' in pyxis


def test_ec2(here, tmp_path: Path) -> None:
    words = ("--nodes", 2, "--instance-type", "g4dn.2xlarge", "--spot", "--max-price", "0.5")
    words += ("--attach-volume", "imagenet")
    plan = _plan(here, "ec2", *words, "digits")
    assert "2 x g4dn.2xlarge, spot at most $0.5 per hour" in plan
    assert "ssh from your IP address" in plan
    assert "attaches volumes imagenet_0" in plan
    options = ("--efs", "fs-1:/here", "--data", "s3://bucket/data", "--mount", "/images", "--region", "eu-west-1")
    plan = _plan(here, "ec2", *words, *options, "imagenet-rn18-2ep")
    assert "nvme-Amazon_Elastic_Block_Store_" in plan
    assert "mount_point=/images" in plan
    assert "server=fs-1.efs.eu-west-1.amazonaws.com\n    path=/here\n    mount_point=/efs" in plan
    assert "paceline data s3://bucket/data" in plan
    assert "[s3]" in plan  # for fetching the data
    (tmp_path / "plan.sh").write_text(plan)
    subprocess.run(["sh", "-n", tmp_path / "plan.sh"], check=True)


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("ssh", "digits"), "missing-option", "--hosts"),
        (("ssh", "--hosts", "a,a", "digits"), "duplicate-hosts", "a,a"),
        (("ssh", "--hosts", ",", "digits"), "missing-hosts", "--hosts"),
        (("ssh", "--hosts", "a,b", "--min-nodes", 3, "digits"), "too-few-nodes", "--min-nodes 3"),
        (("moon", "digits"), "unknown-backend", "moon"),
        ((), "missing-backend", "local, ssh"),
        (("local",), "missing-recipe", "paceline recipes"),
        (("local", "--nodes", 3, "digits"), "batch-not-divisible", "128"),
        (("ec2", "digits"), "missing-option", "--instance-type"),
        (("ec2", "--instance-type", "x", "--max-price", "1", "digits"), "conflicting-options", "--max-price"),
        (("local", "--name", "a/b", "digits"), "invalid-name", "--name 'a/b'"),
        (("slurm", "--seeds", "a", "digits"), "invalid-seeds", "--seeds a"),
        (("slurm", "--name", "a$(b)", "digits"), "invalid-name", "--name"),
        (("local", "--spot", "digits"), "option-not-applicable", "--spot"),
        (("ssh", "--hosts", "a,b", "--nodes", 3, "digits"), "option-not-applicable", "local, slurm, ec2"),
        (("ssh", "--hosts", "a,b", "digits", "--partition=gpu"), "option-not-applicable", "slurm, not to ssh"),
        (("--dry-run", "local", "digits"), "missing-backend", "local, ssh"),
        (("local", "--spott", "digits"), "unknown-option", "--spott"),
        (("local", "digits", "--optim.lrr", "1"), "unknown-field", "optim.lr"),
        (("local", "digits", "--model.name", "resnet81"), "unknown-model", "model.name='resnet81'"),
        (("local", "digits", "--optim.name", "adamm"), "unknown-optimizer", "optim.name='adamm'"),
        (("local", "digits", "--optim.schedule", "{name: cosin}"), "unknown-schedule", "'cosin'"),
        (("local", "digits", "--train.loss", "focall"), "unknown-loss", "train.loss='focall'"),
        (("local", "--procs", 0, "digits"), "usage", "--procs"),
        (("slurm", "--procs", 2, "--sbatch", "ntasks-per-node=4", "digits"), "conflicting-options", "--procs 2"),
        (("slurm", "--sbatch", "gpus-per-task=1", "digits"), "missing-option", "--procs N"),
        (("slurm", "--sbatch", "gpus-per-node=x", "digits"), "invalid-sbatch-option", "'x'"),
        (("local", "--results", "/here", "digits"), "results-url-invalid", "--results"),
        (("local", "--resume", "runs/x"), "resume-url-invalid", "--resume runs/x"),
        (("slurm", "--resume", "s3://a/b"), "option-not-applicable", "--resume"),
        (("slurm", "--min-nodes", 1, "digits"), "option-not-applicable", "local, ssh, ec2, not to slurm"),
        (("manifest", "--pass", "TOKEN", "digits"), "option-not-applicable", "--pass"),
        (("ec2", "--instance-type", "x", "--iops", 1, "digits"), "conflicting-options", "--from-snapshot"),
        (("local", "--resume", "s3://a/b", "--name", "c"), "conflicting-options", "--resume"),
        (("local", "--results", "https://me:canary@host/x", "digits"), "password-in-url", "--results"),
        (("ssh", "--hosts", "a,user@-oProxyCommand=x", "digits"), "invalid-host-name", "'user@-oProxyCommand=x'"),
        (("ssh", "--hosts", "a,..", "digits"), "invalid-host-name", "'..'"),
        (("ssh", "--hosts", "a,here", "digits"), "reserved-host-name", "'here'"),
        (("local", "--pass", "A B", "digits"), "invalid-variable-name", "--pass 'A B'"),
        (("slurm", "--partition", "a\nb", "digits"), "invalid-character", "--partition 'a\\nb'"),
        (("slurm", "--sbatch", "comment='a", "digits"), "invalid-sbatch-option", "--sbatch"),
    ],
)
def test_wrong_options_are_refused(here, words: tuple[object, ...], code: str, named: str) -> None:
    message = complaint(here("launch", *words))
    assert f"[{code}]" in message
    assert named in message
    assert "canary" not in message


@pytest.mark.parametrize(
    ("field", "name", "code"),
    [
        ("model.name", "shapes-nett", "unknown-model"),
        ("optim.name", "plain-sdg", "unknown-optimizer"),
        ("optim.schedule.name", "triangl", "unknown-schedule"),
        ("train.loss", "focall", "unknown-loss"),
        ("data.name", "shape", "unknown-dataset"),
    ],
)
def test_names_are_checked_with_the_imports(here, monkeypatch, field: str, name: str, code: str) -> None:
    monkeypatch.syspath_prepend(EXTENSION)
    assert "shapes/training.py" in _plan(here, "local", "digits", *USED, *IMPORTS)
    message = complaint(here("launch", "local", "digits", *USED, *IMPORTS, f"--{field}", name, "--dry-run"))
    assert f"[{code}]" in message
    assert f"'{name}'" in message


@pytest.mark.parametrize("backend", [("local",), ("ssh", "--hosts", "a"), ("slurm",)])
def test_plans_list_the_files_of_imported_packages(here, monkeypatch, tmp_path: Path, backend: tuple[str, ...]) -> None:
    (package := tmp_path / "code" / f"listed_{backend[0]}").mkdir(parents=True)
    for name in ("__init__.py", "labels.json", "secrets.env"):
        (package / name).touch()
    monkeypatch.syspath_prepend(package.parent)
    plan = _plan(here, *backend, "digits", "--import", package.name)
    assert f"{package.name}/__init__.py" in plan
    assert f"{package.name}/labels.json" in plan
    assert "secrets.env" not in plan


def test_names_that_a_package_of_the_nodes_registers_are_left_to_them(here, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "needs_more.py").write_text("import only_on_the_nodes\n")
    monkeypatch.syspath_prepend(tmp_path / "code")
    answer = here("launch", "local", "digits", "--import", "needs_more", "--model.name", "theirs", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    assert "only_on_the_nodes" in answer.stderr
    monkeypatch.syspath_prepend(EXTENSION)
    broken = complaint(here("launch", "local", "digits", "--import", "shapes.broken", "--dry-run"))
    assert "[import-failed]" in broken
    missing = complaint(here("launch", "local", "digits", "--import", "shapes.nothing", "--dry-run"))
    assert "[import-not-found]" in missing


def test_modules_beside_an_imported_one_have_to_be_named(here, tmp_path: Path) -> None:
    (tmp_path / "needs_sibling.py").write_text("import sibling\n")
    (tmp_path / "sibling.py").touch()
    alone = complaint(here("launch", "local", "digits", "--import", "needs_sibling", "--dry-run"))
    assert "[import-failed]" in alone
    assert "--import sibling" in alone
    plan = _plan(here, "local", "digits", "--import", "needs_sibling", "--import", "sibling")
    assert "# copies extensions/sibling.py" in plan


@pytest.mark.parametrize("verb", ["status", "logs", "attach", "resume", "stop", "fetch"])
def test_without_jobs(here, verb: str) -> None:
    assert "[no-jobs]" in complaint(here(verb))


def test_ignored_files_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "kept.py").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "big").touch()
    assert [path.name for path in tracked_files(tmp_path)] == [
        "kept.py"
    ]  # without git, known build folders are skipped
