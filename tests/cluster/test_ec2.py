"""Renting from moto's EC2, whose machines have the addresses of real ones made of namespaces; results to its S3."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
from conftest import command, environment
from jobs import on_disk
from machines import Cluster, cluster_of

from paceline.errors import UserError
from paceline.launch import ec2
from paceline.launch.cloud import Cloud

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
SMALL = ("--train.duration", "30ba", "--checkpoint.every", "10ba", "--log.every", "1ba", "--log.tensorboard", "false")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("cluster"), "n1", "n2") as made:
        yield made


@pytest.fixture
def aws(monkeypatch, tmp_path: Path, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """A region with a subnet that has the machines' addresses, a snapshot, and a bucket that they can reach."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(cluster.gateway, 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "canary-id", "AWS_REGION": "us-east-1",
        "AWS_SECRET_ACCESS_KEY": "canary-secret", "AWS_DEFAULT_REGION": "us-east-1",
        "PACELINE_HOME": str(tmp_path / "home"),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("ec2")
    wide = f"{cluster.gateway.rpartition('.')[0]}.0/24"
    network = client.create_vpc(CidrBlock=wide)["Vpc"]["VpcId"]
    subnet = client.create_subnet(VpcId=network, CidrBlock=wide, AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    volume = client.create_volume(Size=8, AvailabilityZone="us-east-1a")["VolumeId"]
    snapshot = client.create_snapshot(VolumeId=volume)["SnapshotId"]
    client.delete_volume(VolumeId=volume)
    image = client.describe_images()["Images"][0]["ImageId"]
    boto3.client("s3").create_bucket(Bucket="results")
    yield {"client": client, "subnet": subnet, "snapshot": snapshot, "image": image, "variables": variables}
    server.stop()
    import moto.backends

    moto.backends.get_backend("ec2").reset()
    moto.backends.get_backend("s3").reset()


def _words(cluster: Cluster, aws: dict[str, Any], *more: object) -> list[str]:
    addresses = ",".join(machine.address for machine in cluster.machines.values())
    options = (
        *("--nodes", 2, "--instance-type", "g4dn.2xlarge", "--spot", "--subnet", aws["subnet"]),
        *("--image-id", aws["image"], "--private", "--addresses", addresses, "--user", "root"),
        *("--ssh-config", cluster.config, "--public-key", cluster.folder / "key.pub", "--ssh-from", "192.0.2.7/32"),
        *("--from-snapshot", aws["snapshot"], "--volume-gb", 9, "--python", sys.executable, "--patience", 10),
    )
    return command("launch", "ec2", *options, "digits", *SMALL, *more)


def _what_is_left(client: Any) -> list[str]:
    groups = client.describe_instances()["Reservations"]
    alive = [own for group in groups for own in group["Instances"] if own["State"]["Name"] != "terminated"]
    found = [own["InstanceId"] for own in alive]
    found += [own["VolumeId"] for own in client.describe_volumes()["Volumes"]]
    found += [own["KeyName"] for own in client.describe_key_pairs()["KeyPairs"]]
    groups = client.describe_security_groups()["SecurityGroups"]
    return found + [own["GroupName"] for own in groups if own["GroupName"] != "default"]


def test_rent_train_bring_results_home_and_give_everything_back(cluster: Cluster, aws, tmp_path: Path) -> None:
    client = aws["client"]
    secrets = ",".join(name for name in aws["variables"] if name.startswith("AWS_"))
    words = _words(cluster, aws, "--pass", secrets, "--results", "s3://results/here", "--name", "rented")
    launcher = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment() | aws["variables"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen: dict[str, Any] = {}
    while launcher.poll() is None and not seen:
        if on_disk(cluster):  # it trains: look at what was rented
            groups = client.describe_instances()["Reservations"]
            seen["machines"] = [own for group in groups for own in group["Instances"]]
            seen["volumes"] = client.describe_volumes()["Volumes"]
            seen["rules"] = client.describe_security_groups()["SecurityGroups"]
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output
    assert "finished: top-1" in output
    assert len(seen["machines"]) == 2
    for machine in seen["machines"]:
        assert machine["InstanceLifecycle"] == "spot"
        assert any(own["Key"] == "paceline-job" for own in machine["Tags"])
    made = [own for own in seen["volumes"] if own.get("SnapshotId") == aws["snapshot"]]
    assert [own["Size"] for own in made] == [9, 9]
    ssh = [rule for group in seen["rules"] for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    assert [own["CidrIp"] for rule in ssh for own in rule["IpRanges"]] == ["192.0.2.7/32"]
    assert (tmp_path / "runs" / "rented" / "summary.json").is_file()
    import boto3

    keys = {own["Key"] for own in boto3.client("s3").list_objects_v2(Bucket="results")["Contents"]}
    assert "here/rented/summary.json" in keys
    assert _what_is_left(client) == []
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if b"canary" in path.read_bytes()]
    assert "canary" not in output


STEPS = ("image", "key", "firewall", "run", "wait_until_running", "volume", "attach")


@pytest.mark.parametrize("step", STEPS)
def test_whatever_fails_nothing_is_left(cluster: Cluster, aws, tmp_path: Path, monkeypatch, step: str) -> None:
    """The second call of a step that is done for each machine, so that something is there to give back."""
    from paceline.cli.launch import launch

    honest, calls = getattr(Cloud, step), []

    def failing(self, *words: Any, **more: Any) -> Any:
        calls.append(step)
        if len(calls) == (2 if step in ("run", "volume", "attach") else 1):
            raise UserError(f"{step} failed")
        return honest(self, *words, **more)

    monkeypatch.setattr(Cloud, step, failing)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{step} failed"):
        launch(_words(cluster, aws)[4:])
    assert _what_is_left(aws["client"]) == []


def test_a_start_that_fails_gives_the_machines_back(cluster: Cluster, aws, tmp_path: Path, monkeypatch) -> None:
    from paceline.cli.launch import launch

    monkeypatch.chdir(tmp_path)
    words = _words(cluster, aws)[4:]
    words[words.index("--python") + 1] = "/nowhere/python"
    monkeypatch.setattr(ec2, "_wait_for_ssh", lambda job: (_ for _ in ()).throw(UserError("no ssh")))
    with pytest.raises(UserError, match="no ssh"):
        launch(words)
    assert _what_is_left(aws["client"]) == []


def test_what_aws_says_comes_with_a_cure(cluster: Cluster, aws, tmp_path: Path, monkeypatch) -> None:
    import botocore.exceptions

    from paceline.cli.launch import launch

    monkeypatch.chdir(tmp_path)
    words = _words(cluster, aws)[4:]
    for code, cure in (
        ("InsufficientInstanceCapacity", "try another --zone or --instance-type, or without --spot"),
        ("VcpuLimitExceeded", "ask for more under Service Quotas"),
        ("UnauthorizedOperation", "your AWS user may not do that"),
    ):
        refusal = botocore.exceptions.ClientError({"Error": {"Code": code, "Message": "no"}}, "RunInstances")

        def refused(self, wish: dict[str, Any], refusal: Exception = refusal) -> Any:
            from paceline.launch.cloud import told_clearly

            with told_clearly("renting"):
                raise refusal

        monkeypatch.setattr(Cloud, "run", refused)
        with pytest.raises(UserError, match=cure):
            launch(words)
        assert _what_is_left(aws["client"]) == []
    monkeypatch.setattr(Cloud, "spot_price", lambda *_: 9.0)
    with pytest.raises(UserError, match=r"costs 9\.0 \$ an hour in us-east-1a now, above --max-price 1"):
        launch([*words, "--max-price", "1"])
    there = aws["client"].create_volume(Size=8, AvailabilityZone="us-east-1b")["VolumeId"]
    aws["client"].create_tags(Resources=[there], Tags=[{"Key": "Name", "Value": "photos_0"}])
    with pytest.raises(UserError, match="volume photos_0 is in us-east-1b, the machines in us-east-1a; say --zone"):
        launch([*words, "--attach-volume", "photos"])
    aws["client"].delete_volume(VolumeId=there)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match="there are no AWS credentials"):
        launch(words)
