"""Launches on moto's EC2, whose instances have the addresses of simulated hosts; data and results in a real store."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
from conftest import raises
from fake_ec2 import (
    all_instances,
    from_snapshot,
    launch_command,
    launcher_of,
    no_disks,
    resources_in_use,
    volume_devices,
)
from jobs import last_step, metadata_service, on_disk, ranks_now, slow_variables, slowed, starts, wait_for
from machines import Cluster, cluster_of
from object_store import ObjectStore, object_store
from sample_images import tree

from paceline.analysis.read import read
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.errors import UserError
from paceline.launch import ec2_provision, execution, planning, rendezvous
from paceline.launch.aws_errors import translate_aws_errors
from paceline.launch.ec2_client import Ec2Client, tag
from paceline.track.records import RunFolder

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
needs_disks = pytest.mark.skipif(bool(no_disks()), reason=no_disks())
SHARDS = (
    *("--data.name", "shards", "--data.size", "24", "--data.augment", "{flip: random, translate: 0}"),
    *("--train.global_batch", "16", "--model.options", "{widths: [8, 16], norm: group}"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with cluster_of(folder, "n1", "n2", "n3", variables=slow_variables(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    prepare(source(tree(folder / "in", classes=4, images=20), "folder"), folder / "out", [Variant()], 2)
    return folder / "out"


@pytest.fixture(scope="module")
def bucket(cluster: Cluster, images: Path, tmp_path_factory) -> Iterator[ObjectStore]:
    """An object store that the hosts can reach, with prepared images."""
    with object_store(tmp_path_factory.mktemp("store"), cluster.gateway) as made:
        for path in (one for one in images.rglob("*") if one.is_file()):
            made.client.upload_file(str(path), "results", f"images/{path.relative_to(images)}")
        yield made


@pytest.fixture
def aws(monkeypatch, tmp_path: Path, cluster: Cluster, bucket: ObjectStore) -> Iterator[dict[str, Any]]:
    """A region with a subnet that has the addresses of the hosts, a snapshot, and an object store."""
    import moto.backends
    from moto.server import ThreadedMotoServer

    # ignore the AWS and proxy settings of the user
    for name in [*os.environ]:
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    server = ThreadedMotoServer(cluster.gateway, 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoints = dict.fromkeys(("AWS_ENDPOINT_URL_EC2", "AWS_ENDPOINT_URL_SSM"), f"http://{host}:{port}")
        variables = bucket.variables | endpoints | {"PACELINE_HOME": str(tmp_path / "home")}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Ec2Client, "on_demand_price", lambda *_: None)  # moto has no price list
        yield _region(cluster) | {"variables": variables}
    finally:
        server.stop()
        moto.backends.get_backend("ec2").reset()


def _region(cluster: Cluster) -> dict[str, Any]:
    import boto3

    client = boto3.client("ec2")
    block = f"{cluster.gateway.rpartition('.')[0]}.0/24"
    vpc = client.create_vpc(CidrBlock=block)["Vpc"]["VpcId"]
    subnet = client.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    volume = client.create_volume(Size=8, AvailabilityZone="us-east-1a")["VolumeId"]
    snapshot = client.create_snapshot(VolumeId=volume)["SnapshotId"]
    client.delete_volume(VolumeId=volume)
    image = client.describe_images()["Images"][0]["ImageId"]
    return {"client": client, "subnet": subnet, "snapshot": snapshot, "image": image}


@needs_disks
def test_launch_train_fetch_results_and_terminate(
    cluster: Cluster, aws, bucket: ObjectStore, images: Path, tmp_path: Path, monkeypatch
) -> None:
    client, mount = aws["client"], tmp_path / "data"
    data = ("--mount", mount, *SHARDS, "--data.path", mount)
    results = ("--results", "s3://results/here", "--name", "trained", "--train.duration", "60ba")
    words = launch_command(cluster, aws, *from_snapshot(aws), *data, *results)
    with (
        volume_devices(cluster, client, tmp_path, images),
        slowed(cluster.folder) as at_full_speed,
        launcher_of(cluster, words, aws, tmp_path) as launcher,
    ):
        wait_for(lambda: on_disk(cluster), launcher)
        instances = all_instances(client)
        volumes = client.describe_volumes()["Volumes"]
        rules = client.describe_security_groups()["SecurityGroups"]
        at_full_speed()
        output = launcher.wait()
    assert launcher.status == 0, output
    assert "finished: top-1" in output
    assert not list(mount.iterdir())  # it was mounted on the hosts, not here
    assert len(instances) == 2
    for instance in instances:
        assert instance["InstanceLifecycle"] == "spot"
        assert tag(instance, "paceline-job")
    created = [one for one in volumes if one.get("SnapshotId") == aws["snapshot"]]
    assert [one["Size"] for one in created] == [9, 9]
    ssh = [rule for group in rules for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    assert [one["CidrIp"] for rule in ssh for one in rule["IpRanges"]] == ["192.0.2.7/32"]
    run = tmp_path / "runs" / "trained"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert read(run).price == Ec2Client().spot_price("g4dn.2xlarge", "us-east-1a")  # for the cost in `compare`
    keys = {one["Key"] for one in bucket.client.list_objects_v2(Bucket="results", Prefix="here/")["Contents"]}
    assert "here/trained/summary.json" in keys
    assert resources_in_use(client) == []
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".img"]
    assert not [path for path in written if b"canary" in path.read_bytes()]
    assert "canary" not in output


@pytest.mark.parametrize("how", ["notice", "terminated"])
def test_preempted_instance_is_replaced(cluster: Cluster, aws, bucket: ObjectStore, tmp_path: Path, how: str) -> None:
    """With and without notice; the replacement has an empty disk and an unknown host key."""
    client = aws["client"]
    words = launch_command(cluster, aws, "--data", "s3://results/images", *SHARDS, "--train.duration", "200ba")

    def names() -> dict[str, str]:
        return {one["InstanceId"]: tag(one, "Name") for one in all_instances(client)}

    def is_replaced() -> bool:
        return bool(cluster.machines["n3"].ranks()) and ranks_now(cluster) == 2 and len(starts(cluster)) > 1

    words += ["--name", "preempted"]
    try:
        with (
            slowed(cluster.folder) as at_full_speed,
            metadata_service(cluster, "n2", tmp_path) as notice,
            launcher_of(cluster, words, aws, tmp_path) as launcher,
        ):
            wait_for(lambda: last_step(cluster) >= 25, launcher)
            if how == "notice":
                notice.touch()
            else:
                client.terminate_instances(InstanceIds=[one for one, name in names().items() if name.endswith("-1")])
                cluster.machines["n2"].lose()
            wait_for(is_replaced, launcher)
            at_full_speed()
            output = launcher.wait()
    finally:
        if how == "terminated":
            cluster.machines["n2"].lose()
            cluster.start("n2")  # for other tests
    assert launcher.status == 0, output
    assert "node-1 was preempted" in output
    run = RunFolder(tmp_path / "runs" / "preempted")
    assert [record["step"] for record in run.records() if record["kind"] == "train"] == list(range(1, 201))
    assert [start["ranks"] for start in run.read_starts()][-1] == 2
    assert sorted(name[-2:] for name in names().values()) == ["-0", "-1", "-1"]  # only the lost one was replaced
    assert resources_in_use(client) == []


STEPS = [
    *((Ec2Client, name) for name in ("subnet", "instance_type", "spot_price", "image", "create_key_pair")),
    *((Ec2Client, name) for name in ("create_security_group", "run_instance", "wait_until_running")),
    *((Ec2Client, name) for name in ("create_volume", "attach_volume", "instances")),
    *((ec2_provision, "wait_for_ssh"), (rendezvous, "choose"), (planning, "plan"), (execution, "execute")),
]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[name for _, name in STEPS])
def test_failed_step_releases_everything(
    cluster: Cluster, aws, tmp_path: Path, monkeypatch, owner: Any, step: str
) -> None:
    """Steps per instance fail at their second call, so that there is something to release."""
    from paceline.cli.launch import launch

    original, calls = getattr(owner, step), []

    def failing(*words: Any, **more: Any) -> Any:
        calls.append(step)
        if len(calls) == (2 if step in ("run_instance", "create_volume", "attach_volume") else 1):
            raise UserError("step-failed", f"{step} failed")
        return original(*words, **more)

    monkeypatch.setattr(owner, step, failing)
    monkeypatch.chdir(tmp_path)
    with raises("step-failed"):
        launch([str(word) for word in launch_command(cluster, aws, *from_snapshot(aws))[4:]])
    assert resources_in_use(aws["client"]) == []


def test_launcher_that_is_terminated_while_launching_releases_everything(cluster: Cluster, aws, tmp_path: Path) -> None:
    client = aws["client"]
    unused = ",".join(f"{cluster.gateway.rpartition('.')[0]}.{number}" for number in (201, 202))
    words = launch_command(cluster, aws, "--addresses", unused)
    with launcher_of(cluster, words, aws, tmp_path) as launcher:
        wait_for(lambda: len(client.describe_instances()["Reservations"]) == 2, launcher)
        launcher.process.send_signal(signal.SIGHUP)
        output = launcher.wait()
    assert launcher.status == 128 + signal.SIGHUP, output
    assert resources_in_use(client) == []


def test_failed_start_terminates_the_instances(cluster: Cluster, aws, tmp_path: Path, monkeypatch) -> None:
    from paceline.cli.launch import launch

    monkeypatch.chdir(tmp_path)
    words = launch_command(cluster, aws)[4:]
    words[words.index("--python") + 1] = "/nowhere/python"
    with raises("paceline-not-installed") as caught:
        launch(words)
    assert "/nowhere/python" in str(caught.value)
    assert resources_in_use(aws["client"]) == []


def test_errors_of_aws_are_translated(cluster: Cluster, aws, tmp_path: Path, monkeypatch) -> None:
    import botocore.exceptions

    from paceline.cli.launch import launch

    monkeypatch.chdir(tmp_path)
    words = launch_command(cluster, aws)[4:]
    for aws_code, code in (
        ("InsufficientInstanceCapacity", "ec2-no-capacity"),
        ("VcpuLimitExceeded", "ec2-quota-exceeded"),
        ("UnauthorizedOperation", "aws-not-authorized"),
    ):
        refusal = botocore.exceptions.ClientError({"Error": {"Code": aws_code, "Message": "no"}}, "RunInstances")

        def refuse(self, spec: dict[str, Any], refusal: Exception = refusal) -> Any:
            with translate_aws_errors("launching"):
                raise refusal

        monkeypatch.setattr(Ec2Client, "run_instance", refuse)
        with raises(code) as caught:
            launch(words)
        assert caught.value.fields == {"aws_code": aws_code}
        assert resources_in_use(aws["client"]) == []
    monkeypatch.setattr(Ec2Client, "spot_price", lambda *_: 9.0)
    with raises("ec2-price-above-limit") as caught:
        launch([*words, "--max-price", "1"])
    assert caught.value.fields == {"price": 9.0}
    volume = aws["client"].create_volume(Size=8, AvailabilityZone="us-east-1b")["VolumeId"]
    aws["client"].create_tags(Resources=[volume], Tags=[{"Key": "Name", "Value": "images_0"}])
    with raises("ec2-volume-in-other-zone") as caught:
        launch([*words, "--attach-volume", "images"])
    assert caught.value.fields == {"volume": "images_0", "zone": "us-east-1b"}
    aws["client"].delete_volume(VolumeId=volume)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with raises("aws-credentials-missing"):
        launch(words)
