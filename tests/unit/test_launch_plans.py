"""Plans of launches, as --dry-run prints them: nothing is done, and nothing secret is in them."""

import subprocess
from pathlib import Path

import pytest

from paceline.launch import job as jobs
from paceline.launch.hosts import tracked_files
from paceline.system.files import private_folder


def _plan(here, *words: object) -> str:
    answer = here("launch", *words, "--dry-run")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(autouse=True)
def own_home(here, monkeypatch, tmp_path: Path) -> None:
    """After `here` has cleared such variables."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def test_ssh(here, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TOKEN", "canary")
    (tmp_path / "hosts").write_text("a  # the first\n\nb\n")
    plan = _plan(here, "ssh", "--hosts", tmp_path / "hosts", "digits", "--pass", "TOKEN", "--rendezvous-host", "b")
    assert plan.count("# a: ") == plan.count("# b: ") - 1 == 3  # files, environment, start; b keeps the meeting place
    assert "--nodes 1:2" in plan
    assert 'bin/pip" install' in plan
    assert "canary" not in plan
    assert not (tmp_path / "home").exists()


def test_containers(here) -> None:
    plan = _plan(here, "ssh", "--hosts", "a,b", "--container", "me/paceline:1", "--pass", "TOKEN", "digits")
    assert "docker run --rm --init" in plan
    assert "--network host --ipc host" in plan
    assert 'me/paceline:1 sh -c \'umask 077; eval "$(cat)"; exec paceline "$@"\' paceline train recipe.yaml' in plan
    assert "-e TOKEN" not in plan  # `docker inspect` would show it
    assert "-m venv" not in plan
    apptainer = _plan(here, "slurm", "--container", "me.sif", "digits")
    assert 'srun --wait=60 --export=ALL apptainer exec --nv --bind "$PWD" --pwd "$PWD" me.sif paceline' in apptainer
    pyxis = _plan(here, "slurm", "--container", "me/paceline:1", "--container-runtime", "pyxis", "digits")
    assert 'srun --wait=60 --export=ALL --container-image=me/paceline:1 --container-mounts="$PWD":"$PWD"' in pyxis


def test_ec2(here, tmp_path: Path) -> None:
    words = (
        "--nodes",
        2,
        "--instance-type",
        "g4dn.2xlarge",
        "--spot",
        "--max-price",
        "0.5",
        "--attach-volume",
        "imagenet",
    )
    plan = _plan(here, "ec2", *words, "digits")
    assert "2 x g4dn.2xlarge, spot at most 0.5 $ an hour" in plan
    assert "ssh from your address" in plan
    assert "attaches volumes imagenet_0" in plan
    own = ("--efs", "fs-1:/here", "--data", "s3://bucket/data", "--mount", "/photos", "--region", "eu-west-1")
    plan = _plan(here, "ec2", *words, *own, "imagenet-rn18-2ep")
    assert "nvme-Amazon_Elastic_Block_Store_" in plan
    assert "place=/photos" in plan
    assert "server=fs-1.efs.eu-west-1.amazonaws.com\n    path=/here\n    place=/efs" in plan
    assert "paceline data s3://bucket/data" in plan
    assert "[s3]" in plan  # what it needs to fetch is installed
    (tmp_path / "plan.sh").write_text(plan)
    subprocess.run(["sh", "-n", tmp_path / "plan.sh"], check=True)


def test_mistakes(here) -> None:
    for words, complaint in (
        (("ssh", "digits"), "which machines? --hosts a,b"),
        (("ssh", "--hosts", "a,a", "digits"), "give each machine once"),
        (("ssh", "--hosts", "a,b", "--min-nodes", 3, "digits"), "--min-nodes 3, but there are only 2 machines"),
        (("moon", "digits"), "launch moon: there is no such back end; known are local, ssh"),
        (("local",), "launch which recipe?"),
        (("local", "--nodes", 3, "digits"), "128"),
        (("ec2", "digits"), "launch ec2 needs --instance-type"),
        (("ec2", "--instance-type", "x", "--max-price", "1", "digits"), "--max-price is for spot machines"),
        (("local", "--name", "a/b", "digits"), "--name 'a/b' is not a plain folder name"),
        (("slurm", "--seeds", "a", "digits"), "--seeds a: write whole numbers"),
        (("slurm", "--name", "a$(b)", "digits"), "use letters, digits, dots and dashes"),
        (("local", "--spot", "digits"), "--spot is for launch ec2, not for local"),
        (("ssh", "--hosts", "a,b", "--nodes", 3, "digits"), "--nodes is for launch local and slurm and ec2"),
        (("local", "--procs", 2, "digits"), "--procs: there is no such option; did you mean --procs-per-node?"),
        (("local", "--results", "/here", "digits"), "--results /here: write s3://BUCKET/PREFIX"),
        (("local", "--resume", "runs/x"), "--resume runs/x: write s3://BUCKET/PREFIX/RUN"),
        (
            ("local", "--results", "https://me:canary@host/x", "digits"),
            "--results https://host/x: addresses cannot hold",
        ),
        (("ssh", "--hosts", "a,user@-oProxyCommand=x", "digits"), "'user@-oProxyCommand=x' is not a host name"),
        (("ssh", "--hosts", "a,..", "digits"), "'..' is not a host name"),
        (("ssh", "--hosts", "a,here", "digits"), "which may not be 'here'"),
        (("local", "--pass", "A B", "digits"), "--pass 'A B' is not the name of a variable"),
        (("slurm", "--partition", "a\nb", "digits"), "--partition 'a\\nb' contains a control character"),
        (("slurm", "--sbatch", "comment='a", "digits"), "no closing quotation; close its quotes"),
    ):
        answer = here("launch", *words)
        assert answer.returncode == 1
        assert complaint in answer.stderr, answer.stderr
    for verb in ("status", "logs", "attach", "stop", "fetch"):
        answer = here(verb)
        assert answer.returncode == 1
        assert "there is no job yet" in answer.stderr


def test_a_corrupt_job_file_is_named(here, tmp_path: Path) -> None:
    folder = jobs.folder_of("broken")
    for own in (folder.parents[1], folder.parent, folder):
        private_folder(own)
    (folder / "job.json").write_text("{")
    answer = here("status", "broken")
    assert answer.returncode == 1
    assert "job.json is corrupt" in answer.stderr


def test_ignored_files_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "kept.py").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "big").touch()
    assert [path.name for path in tracked_files(tmp_path)] == ["kept.py"]  # without git, by common sense
