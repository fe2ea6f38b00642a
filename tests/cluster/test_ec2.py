"""Renting from moto's EC2, with the addresses of machines made of namespaces; data and results in a real store."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machines
import pytest
from jobs import last_step, noticed, on_disk, ranks_now, slow_variables, slowed, starts, wait_for
from machines import Cluster, cluster_of
from object_store import ObjectStore, object_store
from rented import devices, from_snapshot, launcher_of, loop_device, no_disks, what_is_left, words_of
from sample_images import tree

from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.errors import UserError
from paceline.launch import control, disks, nodes
from paceline.launch.ec2_client import Cloud, tag
from paceline.logbook.read import read
from paceline.track.records import RunFolder

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
needs_disks = pytest.mark.skipif(bool(no_disks()), reason=no_disks())
SHARDS = (
    *("--data.name", "shards", "--data.size", "24", "--data.augment", "{flip: random}", "--train.global_batch", "16"),
    *("--model.options", "{widths: [8, 16], norm: group}"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with cluster_of(folder, "n1", "n2", "n3", variables=slow_variables(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    prepare(source(tree(folder / "in", classes=4, images=20), "folder"), folder / "out", [Variant()], 2)
    return folder / "out"


@pytest.fixture(scope="module")
def bucket(cluster: Cluster, photographs: Path, tmp_path_factory) -> Iterator[ObjectStore]:
    """A store that the machines can reach, with prepared images in it."""
    with object_store(tmp_path_factory.mktemp("store"), cluster.gateway) as made:
        for path in (own for own in photographs.rglob("*") if own.is_file()):
            made.client.upload_file(str(path), "results", f"photographs/{path.relative_to(photographs)}")
        yield made


@pytest.fixture
def aws(monkeypatch, tmp_path: Path, cluster: Cluster, bucket: ObjectStore) -> Iterator[dict[str, Any]]:
    """A region with a subnet that has the machines' addresses, a snapshot, and a store."""
    import moto.backends
    from moto.server import ThreadedMotoServer

    # what the user has set up for AWS and for the network counts for nothing
    for name in [*os.environ]:
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    server = ThreadedMotoServer(cluster.gateway, 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        engine = dict.fromkeys(("AWS_ENDPOINT_URL_EC2", "AWS_ENDPOINT_URL_SSM"), f"http://{host}:{port}")
        variables = bucket.variables | engine | {"PACELINE_HOME": str(tmp_path / "home")}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(Cloud, "price", lambda *_: None)  # moto has no price list
        yield _region(cluster) | {"variables": variables}
    finally:
        server.stop()
        moto.backends.get_backend("ec2").reset()


def _region(cluster: Cluster) -> dict[str, Any]:
    import boto3

    client = boto3.client("ec2")
    wide = f"{cluster.gateway.rpartition('.')[0]}.0/24"
    network = client.create_vpc(CidrBlock=wide)["Vpc"]["VpcId"]
    subnet = client.create_subnet(VpcId=network, CidrBlock=wide, AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    volume = client.create_volume(Size=8, AvailabilityZone="us-east-1a")["VolumeId"]
    snapshot = client.create_snapshot(VolumeId=volume)["SnapshotId"]
    client.delete_volume(VolumeId=volume)
    image = client.describe_images()["Images"][0]["ImageId"]
    return {"client": client, "subnet": subnet, "snapshot": snapshot, "image": image}


@needs_disks
def test_rent_train_bring_results_home_and_give_everything_back(
    cluster: Cluster, aws, bucket: ObjectStore, photographs: Path, tmp_path: Path, monkeypatch
) -> None:
    client, mount = aws["client"], tmp_path / "data"
    data = ("--mount", mount, *SHARDS, "--data.path", mount)
    results = ("--results", "s3://results/here", "--name", "rented", "--train.duration", "60ba")
    words = words_of(cluster, aws, *from_snapshot(aws), *data, *results)
    with (
        devices(cluster, client, tmp_path, photographs),
        slowed(cluster.folder) as at_full_speed,
        launcher_of(cluster, words, aws, tmp_path) as launcher,
    ):
        wait_for(lambda: on_disk(cluster), launcher)  # it trains: look at what was rented
        groups = client.describe_instances()["Reservations"]
        rented = [own for group in groups for own in group["Instances"]]
        volumes = client.describe_volumes()["Volumes"]
        rules = client.describe_security_groups()["SecurityGroups"]
        at_full_speed()
        output = launcher.wait()
    assert launcher.status == 0, output
    assert "finished: top-1" in output
    assert not list(mount.iterdir())  # it was mounted on the machines, not here
    assert len(rented) == 2
    for machine in rented:
        assert machine["InstanceLifecycle"] == "spot"
        assert any(own["Key"] == "paceline-job" for own in machine["Tags"])
    made = [own for own in volumes if own.get("SnapshotId") == aws["snapshot"]]
    assert [own["Size"] for own in made] == [9, 9]
    ssh = [rule for group in rules for rule in group["IpPermissions"] if rule.get("FromPort") == 22]
    assert [own["CidrIp"] for rule in ssh for own in rule["IpRanges"]] == ["192.0.2.7/32"]
    run = tmp_path / "runs" / "rented"
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert read(run).price == Cloud().spot_price("g4dn.2xlarge", "us-east-1a")  # compare makes the cost of it
    keys = {own["Key"] for own in bucket.client.list_objects_v2(Bucket="results", Prefix="here/")["Contents"]}
    assert "here/rented/summary.json" in keys
    assert what_is_left(client) == []
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".img"]
    assert not [path for path in written if b"canary" in path.read_bytes()]
    assert "canary" not in output


@pytest.mark.parametrize("how", ["told", "gone"])
def test_a_machine_that_is_taken_is_replaced(
    cluster: Cluster, aws, bucket: ObjectStore, tmp_path: Path, how: str
) -> None:
    """With and without notice; the one in its place has an empty disk, and nobody knows its host key."""
    client = aws["client"]
    words = words_of(cluster, aws, "--data", "s3://results/photographs", *SHARDS, "--train.duration", "200ba")

    def rented() -> dict[str, str]:
        groups = client.describe_instances()["Reservations"]
        return {own["InstanceId"]: tag(own, "Name") for group in groups for own in group["Instances"]}

    def is_replaced() -> bool:
        return bool(cluster.machines["n3"].ranks()) and ranks_now(cluster) == 2 and len(starts(cluster)) > 1

    words += ["--name", "taken"]
    try:
        with (
            slowed(cluster.folder) as at_full_speed,
            noticed(cluster, "n2", tmp_path) as note,
            launcher_of(cluster, words, aws, tmp_path) as launcher,
        ):
            wait_for(lambda: last_step(cluster) >= 25, launcher)
            if how == "told":
                note.touch()
            else:
                client.terminate_instances(InstanceIds=[own for own, name in rented().items() if name.endswith("-1")])
                cluster.machines["n2"].lose()
            wait_for(is_replaced, launcher)
            at_full_speed()
            output = launcher.wait()
    finally:
        if how == "gone":
            cluster.machines["n2"].lose()
            cluster.start("n2")  # for other tests
    assert launcher.status == 0, output
    assert "node-1 was taken: renting another" in output
    run = RunFolder(tmp_path / "runs" / "taken")
    assert [record["step"] for record in run.records() if record["kind"] == "train"] == list(range(1, 201))
    assert [start["ranks"] for start in run.read_starts()][-1] == 2
    assert sorted(name[-2:] for name in rented().values()) == ["-0", "-1", "-1"]  # only the lost one
    assert what_is_left(client) == []


@needs_disks
def test_what_is_fetched_goes_to_the_disk_of_the_machine(tmp_path: Path) -> None:
    """In a mount namespace of its own, with a blank device that says that it is such a disk."""
    image, tools = tmp_path / "disk.img", tmp_path / "tools"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    tools.mkdir()
    script = disks.script("", "", "", "", fetches=True)
    told = "df --output=source,fstype /mnt/nvme | tail -1; cat disks"
    hidden = "for place in /mnt /opt; do mount -t tmpfs none $place; done"  # whatever disks are mounted there
    with loop_device(image) as device:
        (tools / "lsblk").write_text(f"#!/bin/sh\necho '{device} Amazon EC2 NVMe Instance Storage'\n")
        (tools / "lsblk").chmod(0o700)
        answer = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", f"{hidden}; {script}; {told}"],
            cwd=tmp_path, env={"PATH": f"tools:{os.environ['PATH']}"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    where, variable = answer.stdout.splitlines()
    assert where.split() == [str(device), "ext4"]
    assert variable == "export PACELINE_CACHE=/mnt/nvme/paceline"


STEPS = [
    *((Cloud, name) for name in ("subnet", "kind", "spot_price", "image", "key", "firewall", "run")),
    *((Cloud, name) for name in ("wait_until_running", "volume", "attach", "machines")),
    *((ec2_provision, "wait_for_ssh"), (control, "with_rendezvous"), (nodes, "plan"), (nodes, "carry_out")),
]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[name for _, name in STEPS])
def test_whatever_fails_nothing_is_left(
    cluster: Cluster, aws, tmp_path: Path, monkeypatch, owner: Any, step: str
) -> None:
    """The second call of a step that is done for each machine, so that something is there to give back."""
    from paceline.cli.launch import launch

    honest, calls = getattr(owner, step), []

    def failing(*words: Any, **more: Any) -> Any:
        calls.append(step)
        if len(calls) == (2 if step in ("run", "volume", "attach") else 1):
            raise UserError(f"{step} failed")
        return honest(*words, **more)

    monkeypatch.setattr(owner, step, failing)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{step} failed"):
        launch([str(word) for word in words_of(cluster, aws, *from_snapshot(aws))[4:]])
    assert what_is_left(aws["client"]) == []


def test_a_launcher_that_is_ended_while_it_rents_leaves_nothing(cluster: Cluster, aws, tmp_path: Path) -> None:
    client = aws["client"]
    nobody = ",".join(f"{cluster.gateway.rpartition('.')[0]}.{number}" for number in (201, 202))
    words = words_of(cluster, aws, "--addresses", nobody)
    with launcher_of(cluster, words, aws, tmp_path) as launcher:
        wait_for(lambda: len(client.describe_instances()["Reservations"]) == 2, launcher)
        launcher.process.send_signal(signal.SIGHUP)
        output = launcher.wait()
    assert launcher.status == 128 + signal.SIGHUP, output
    assert what_is_left(client) == []


def test_a_start_that_fails_gives_the_machines_back(cluster: Cluster, aws, tmp_path: Path, monkeypatch) -> None:
    from paceline.cli.launch import launch

    monkeypatch.chdir(tmp_path)
    words = words_of(cluster, aws)[4:]
    words[words.index("--python") + 1] = "/nowhere/python"
    with pytest.raises(UserError, match="/nowhere/python cannot run paceline there"):
        launch(words)
    assert what_is_left(aws["client"]) == []


def test_what_aws_says_comes_with_a_cure(cluster: Cluster, aws, tmp_path: Path, monkeypatch) -> None:
    import botocore.exceptions

    from paceline.cli.launch import launch

    monkeypatch.chdir(tmp_path)
    words = words_of(cluster, aws)[4:]
    for code, cure in (
        ("InsufficientInstanceCapacity", "try another --zone or --instance-type, or without --spot"),
        ("VcpuLimitExceeded", "ask for more under Service Quotas"),
        ("UnauthorizedOperation", "your AWS user may not do that"),
    ):
        refusal = botocore.exceptions.ClientError({"Error": {"Code": code, "Message": "no"}}, "RunInstances")

        def refused(self, spec: dict[str, Any], refusal: Exception = refusal) -> Any:
            from paceline.launch.ec2_client import translate_aws_errors

            with translate_aws_errors("renting"):
                raise refusal

        monkeypatch.setattr(Cloud, "run", refused)
        with pytest.raises(UserError, match=cure):
            launch(words)
        assert what_is_left(aws["client"]) == []
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
