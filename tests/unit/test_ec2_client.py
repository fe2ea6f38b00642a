"""Requests to AWS that moto does not cover."""

import json
import re
from datetime import UTC, datetime

import pytest
from conftest import raises

from paceline.launch.ec2_client import Ec2Client

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'paceline[dev]'")


@pytest.fixture
def client(monkeypatch) -> Ec2Client:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    return Ec2Client("eu-west-1")


@pytest.mark.parametrize("job", ["", "*", "a?", "a b"])
def test_nothing_is_released_without_a_job_id(client: Ec2Client, job: str) -> None:
    """An unset shell variable, or a pattern of AWS."""
    with raises("unknown-job"):
        client.release(job)


def test_on_demand_price_is_known_or_none(client: Ec2Client, monkeypatch) -> None:
    from botocore.stub import ANY, Stubber

    pricing = boto3.client("pricing", region_name="us-east-1")
    monkeypatch.setattr(client._session, "client", lambda *_, **__: pricing)
    term = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": "0.7520000000"}}}}}}}
    with Stubber(pricing) as stub:
        request = {"ServiceCode": "AmazonEC2", "Filters": ANY, "MaxResults": 10}
        stub.add_response("get_products", {"PriceList": [json.dumps(term)]}, request)
        stub.add_response("get_products", {"PriceList": []}, request)
        stub.add_client_error("get_products", "AccessDeniedException")
        assert client.on_demand_price("g4dn.2xlarge") == 0.752
        assert client.on_demand_price("g4dn.3xlarge") is None
        assert client.on_demand_price("g4dn.2xlarge") is None  # without permission


def test_resources_in_use_are_a_table(here, client: Ec2Client, monkeypatch) -> None:
    instance = {"InstanceId": "i-1", "InstanceType": "g4dn.xlarge", "State": {"Name": "running"}}
    instance |= {"Placement": {"AvailabilityZone": "eu-west-1a"}, "LaunchTime": datetime(2026, 1, 1, tzinfo=UTC)}
    instance |= {"PublicIpAddress": "1.2.3.4", "InstanceLifecycle": "spot", "Tags": [{"Key": "Name", "Value": "n0"}]}
    volume = {"VolumeId": "vol-1", "Size": 50, "VolumeType": "gp3", "AvailabilityZone": "eu-west-1a", "State": "in-use"}
    snapshot = {"SnapshotId": "snap-1", "VolumeSize": 50, "State": "completed"}
    found = {"instances": [instance], "volumes": [volume], "snapshots": [snapshot], "spot_price": 0.2}
    for name, value in found.items():
        monkeypatch.setattr(Ec2Client, name, lambda *_, value=value, **__: value)
    lines = here("ec2", "ls", "--region", "eu-west-1").stdout.splitlines()
    cells = [re.split(" {2,}", line) for line in lines]
    assert cells == [
        ["name", "id", "kind", "price", "zone", "state", "address", "since"],
        ["n0", "i-1", "g4dn.xlarge, spot", "0.2 $/h", "eu-west-1a", "running", "1.2.3.4", "2026-01-01T00:00+00:00"],
        ["-", "vol-1", "volume, 50 GB gp3", "-", "eu-west-1a", "in-use", "-", "-"],
        ["-", "snap-1", "snapshot, 50 GB", "-", "-", "completed", "-", "-"],
        ["3 resources in use"],
    ]
    assert lines[0].index("zone") == lines[1].index("eu-west-1a") == lines[2].index("eu-west-1a")
    for name in ("instances", "volumes", "snapshots"):
        monkeypatch.setattr(Ec2Client, name, lambda *_, **__: [])
    assert here("ec2", "ls", "--region", "eu-west-1").stdout == "no resources in use\n"


def test_without_keys_nothing_is_launched_and_no_job_stays(here, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    words = ("--instance-type", "g4dn.xlarge", "--region", "eu-west-1", "--procs", "1")
    answer = here("launch", "ec2", "digits", *words)
    assert answer.returncode == 1
    assert "[aws-credentials-missing]" in answer.stderr
    assert "terminating" not in answer.stderr
    assert here("jobs").stdout.startswith("no jobs in ")
