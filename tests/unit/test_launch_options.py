"""Every option that a backend of `launch` offers reaches its plan, or its spec where a plan cannot show it."""

from pathlib import Path

import pytest

from paceline.cli.launch_parser import _parsers, parse_launch
from paceline.cli.launch_spec import spec_of
from paceline.cli.options import options_of
from paceline.launch.backends import backend_of, manifest
from paceline.launch.specs import ManifestSpec, SlurmSpec

# what happens to the plan, the engine that the cases below choose, and what other tests need a server for
_ELSEWHERE = {"-h", "--help", "--detach", "--dry-run", "--for", "--gpu-type", "--rdma", "--resume"}

# an option's value, and what it becomes
_ALL = {
    "--procs": ("4", "--procs 4"),
    "--selftest": ("", "paceline selftest"),
    "--rank-timeout": ("77", "PACELINE_RANK_TIMEOUT=77"),
    "--name": ("mine", "--name mine"),
    "--results": ("s3://bucket/a", "--results s3://bucket/a"),
    "--data": ("/elsewhere", "path: /elsewhere"),
    "--seeds": ("3,5", "--seeds 3,5,"),
}
_LAUNCHED = _ALL | {
    "--runs": ("/my/runs", "/my/runs"),
    "--python": ("/my/python", "/my/python -m paceline"),
    "--container": ("my/image", "my/image"),
    "--pass": ("A,B", "pass_env=('A', 'B')"),
}
_NODES = {"--nodes": ("4", "--nodes 1:4")}
_ELASTIC = _LAUNCHED | {
    "--min-nodes": ("2", "--nodes 2:2"),
}
_REMOTE = {
    "--ssh-config": ("/my/config", "ssh_config='/my/config'"),
    "--rendezvous-host": ("h1", "rendezvous_host='h1'"),
}
_SNAPSHOT = "--from-snapshot snap-1"
_EC2 = {
    "--instance-type": ("p5.48xlarge", "2 x p5.48xlarge"),
    "--spot": ("", ", spot,"),
    "--max-price": ("0.5 --spot", "spot at most $0.5"),
    "--region": ("eu-west-1", "# EC2, eu-west-1"),
    "--zone": ("eu-west-1a", "zone='eu-west-1a'"),
    "--subnet": ("subnet-1", "subnet='subnet-1'"),
    "--image-id": ("ami-1", "# image: ami-1"),
    "--image-name": ("mine", "# image: mine"),
    "--user": ("me", "user='me'"),
    "--public-key": (__file__, f": {__file__}"),
    "--ssh-from": ("10.0.0.0/8", "ssh from 10.0.0.0/8"),
    "--private": ("", "private=True"),
    "--addresses": ("10.0.0.1,10.0.0.2", "addresses=('10.0.0.1', '10.0.0.2')"),
    "--root-gb": ("200", ", 200 GB"),
    "--attach-volume": ("images", "attaches volumes images_0"),
    "--from-snapshot": ("snap-1", "creates a volume from snap-1"),
    "--user-data": ("user-data.sh", "user-data.sh"),
    "--mount": (f"/images {_SNAPSHOT}", "mount_point=/images"),
    "--efs": ("fs-1:/here", "path=/here"),
    "--security-groups": ("a,b", "security_groups=('a', 'b')"),
    "--volume-gb": (f"50 {_SNAPSHOT}", "volume_gb=50"),
    "--volume-type": (f"io2 {_SNAPSHOT}", "volume_type='io2'"),
    "--iops": (f"5000 {_SNAPSHOT}", "iops=5000"),
    "--throughput": (f"500 {_SNAPSHOT}", "throughput=500"),
    "--linger": ("60", "60 s after the job"),
    "--idle": ("70", "after 70 s without one"),
    "--keep": ("", "instances keep running"),
    "--efa": ("", "fi_info -p efa"),
    "--instance-profile": ("role", "# instance profile role"),
}
_SLURM = {
    "--nodes": ("4", "#SBATCH --nodes=4"),
    "--procs": ("4", "#SBATCH --ntasks-per-node=4"),
    "--selftest": ("", "paceline selftest"),
    "--gpus-per-node": ("2", "#SBATCH --gpus-per-node=2"),
    "--partition": ("gpu", "#SBATCH --partition=gpu"),
    "--account": ("lab", "#SBATCH --account=lab"),
    "--time": ("4:00:00", "#SBATCH --time=4:00:00"),
    "--cpus-per-task": ("6", "#SBATCH --cpus-per-task=6"),
    "--pass": ("A,B", "#SBATCH --export=ALL,A,B"),
    "--sbatch": ("mem=64G", "#SBATCH --mem=64G"),
    "--container-runtime": ("pyxis --container i", "--container-image=i"),
    "--seeds": ("3,5", "seeds=(3 5)"),
    "--notice": ("60", "USR1@60"),
}
_MANIFEST = _ALL | {"--nodes": ("4", "--nodes 4"), "--image": ("my/image", "my/image")}
_POD = {
    "--rank-timeout": ("77", "value: '77'"),
    "--gpus-per-node": ("2", "nvidia.com/gpu: '2'"),
    "--rdma": ("vpc.amazonaws.com/efa=4", "vpc.amazonaws.com/efa: '4'"),
}
_TASK = {
    "--rank-timeout": ("77", "PACELINE_RANK_TIMEOUT: '77'"),
    "--gpus-per-node": ("2 --gpu-type L4", "L4:2"),
    "--gpu-type": ("A100 --gpus-per-node 1", "A100:1"),
}

# the words of a launch, and its options
_BACKENDS = {
    "local": ("local", _ELASTIC | _NODES),
    "ssh": ("ssh --hosts h0,h1", _ELASTIC | _REMOTE | {"--hosts": ("h5,h6", "# h6: start")}),
    "ec2": ("ec2 --instance-type g4dn.xlarge", _ELASTIC | _NODES | _REMOTE | _EC2),
    "slurm": ("slurm", _LAUNCHED | _SLURM),
    "kubernetes": ("manifest --for kubernetes --image i", _MANIFEST | _POD),
    "kubeflow": ("manifest --for kubeflow --image i", _MANIFEST | _POD),
    "skypilot": ("manifest --for skypilot", _MANIFEST | _TASK),
}


@pytest.fixture(autouse=True)
def own_home(here, monkeypatch, tmp_path: Path) -> None:
    """Runs after `here`, which clears such variables."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("paceline.launch.procs._gpus_of", lambda _: 0)  # instead of ssh
    (tmp_path / "user-data.sh").write_text("#!/bin/sh\n")


def _reached(words: str) -> str:
    """Return the recipe and the plan; with the spec, if its plan is not all that is done with it."""
    spec = spec_of(*parse_launch([*words.split(), "imagenet-rn18-2ep"]))
    if isinstance(spec, ManifestSpec):
        return spec.recipe + "".join(manifest.plan(spec))
    plan = spec.recipe + "\n".join(map(str, backend_of(spec).plan(spec)))
    return plan if isinstance(spec, SlurmSpec) else f"{plan}\n{spec}"


@pytest.mark.parametrize("backend", _BACKENDS)
def test_every_option_reaches_the_plan(monkeypatch, backend: str) -> None:
    monkeypatch.setattr("paceline.launch.procs._of_instance_type", lambda _: {})  # a client of EC2 for each option
    words, cases = _BACKENDS[backend]
    offered = options_of(_parsers()[1][words.split()[0]])
    assert set(cases) <= offered
    assert offered - _ELSEWHERE <= set(cases)
    without = _reached(words)
    for option, (value, expected) in cases.items():
        assert expected not in without, option
        assert expected in _reached(f"{words} {option} {value}"), option
