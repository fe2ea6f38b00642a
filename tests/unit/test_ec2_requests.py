"""What is asked of EC2 for EFA and instance profiles, against moto, and what a role gives the job."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import HANG, complaint, raises

from paceline.config.io import dump_recipe, load_recipe
from paceline.launch import ec2_provision
from paceline.launch.ec2_client import Ec2Client, efa_interfaces_of
from paceline.launch.ec2_request import request_of
from paceline.launch.job import Ec2Resources, Job
from paceline.launch.specs import Ec2Spec

moto = pytest.importorskip("moto", reason="needs moto: pip install 'paceline[dev]'")
NETWORK = {"EfaSupported": True, "EfaInfo": {"MaximumEfaInterfaces": 4}}
RESOURCES = Ec2Resources(
    region="us-east-1", zone="us-east-1a", subnet="subnet-1", image="ami-1", root_device="/dev/sda1",
    security_group="sg-1", placement_group="",
)  # fmt: skip


def _spec(**options: Any) -> Ec2Spec:
    recipe = dump_recipe(load_recipe("digits", []))
    given = {"hosts": ("node-0", "node-1"), "instance_type": "p4d.24xlarge", "name": "x", "ssh_from": "10.0.0.0/8"}
    return Ec2Spec(recipe=recipe, **(given | options))


@pytest.fixture
def client(monkeypatch, tmp_path: Path) -> Iterator[Ec2Client]:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with moto.mock_aws():
        yield Ec2Client("us-east-1")


def _rules(client: Ec2Client, group: str, key: str) -> list[dict[str, Any]]:
    return client.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0][key]


def _allows_itself(rules: list[dict[str, Any]], group: str) -> bool:
    return any(
        rule["IpProtocol"] == "-1" and group in [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] for rule in rules
    )


@pytest.mark.parametrize("efa", [False, True])
def test_efa_needs_a_security_group_that_allows_itself_both_ways(client: Ec2Client, efa: bool) -> None:
    vpc = client.ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = client.create_security_group("job", vpc, "10.0.0.0/8", efa)
    assert _allows_itself(_rules(client, group, "IpPermissions"), group)
    assert _allows_itself(_rules(client, group, "IpPermissionsEgress"), group) == efa


def test_every_network_card_gets_an_efa_interface() -> None:
    spec = _spec(efa=True, security_groups=("sg-2",))
    request = request_of("job", spec, replace(RESOURCES, efa_interfaces=4), 0, "10.0.0.5")
    interfaces = request["NetworkInterfaces"]
    assert [one["NetworkCardIndex"] for one in interfaces] == [0, 1, 2, 3]
    assert [one["DeviceIndex"] for one in interfaces] == [0, 1, 1, 1]
    assert all(one["InterfaceType"] == "efa" and one["Groups"] == ["sg-1", "sg-2"] for one in interfaces)
    assert [one.get("PrivateIpAddress") for one in interfaces] == ["10.0.0.5", None, None, None]
    # AWS refuses it for several interfaces
    assert not any("AssociatePublicIpAddress" in one for one in interfaces)
    (single,) = request_of("job", spec, replace(RESOURCES, efa_interfaces=1), 0, "")["NetworkInterfaces"]
    assert (single["InterfaceType"], single["AssociatePublicIpAddress"]) == ("efa", True)
    (plain,) = request_of("job", _spec(), RESOURCES, 0, "")["NetworkInterfaces"]
    assert "InterfaceType" not in plain


def test_number_of_interfaces_is_that_of_the_instance_type() -> None:
    assert efa_interfaces_of({"NetworkInfo": NETWORK}) == 4
    assert efa_interfaces_of({"NetworkInfo": {"EfaSupported": True}}) == 1
    assert efa_interfaces_of({"NetworkInfo": {"EfaSupported": False}}) == efa_interfaces_of({}) == 0


def test_types_without_efa_are_refused_before_anything_is_created(client: Ec2Client) -> None:
    with raises("ec2-efa-not-supported") as caught:
        ec2_provision.provision(Job("job", _spec(efa=True, instance_type="t3.micro")), client)
    assert caught.value.fields == {"instance_type": "t3.micro"}
    assert client.ec2.describe_key_pairs()["KeyPairs"] == []


def _provisioned(client: Ec2Client, monkeypatch, **options: Any) -> tuple[Job, list[dict[str, Any]]]:
    """Return a job on moto's EC2, and the requests for its instances; moto gets only what it knows of them."""
    image = client.ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    describe, requests = client.instance_type, []
    monkeypatch.setattr(client, "instance_type", lambda name: describe(name) | {"NetworkInfo": NETWORK})
    run = client.run_instance

    def run_instance(request: dict[str, Any]) -> Any:
        requests.append(request)
        known = {key: value for key, value in request["NetworkInterfaces"][0].items() if key != "NetworkCardIndex"}
        return run(request | {"NetworkInterfaces": [known]})

    monkeypatch.setattr(client, "run_instance", run_instance)
    monkeypatch.setattr(client, "on_demand_price", lambda _: None)
    monkeypatch.setattr(client, "create_placement_group", lambda _: "")  # moto does not know them
    return ec2_provision.provision(Job("job", _spec(image_id=image, **options)), client), requests


def test_instances_with_several_interfaces_get_an_elastic_address(client: Ec2Client, monkeypatch) -> None:
    job, requests = _provisioned(client, monkeypatch, efa=True)
    assert [len(request["NetworkInterfaces"]) for request in requests] == [4, 4]
    addresses = client.ec2.describe_addresses()["Addresses"]
    assert {one["PublicIp"] for one in addresses} == {one.address for one in job.ec2.instances.values()}
    assert len(addresses) == 2
    assert all("fi_info -p efa" in script for script in job.setup_scripts.values())
    assert client.release("job") == []
    assert client.ec2.describe_addresses()["Addresses"] == []
    job, _ = _provisioned(client, monkeypatch, efa=True, private=True)
    assert client.ec2.describe_addresses()["Addresses"] == []


@pytest.mark.parametrize("tool", ["exit 0", "exit 1", ""])
def test_instance_without_efa_software_ends_the_launch(tmp_path: Path, tool: str) -> None:
    script = ec2_provision.setup_script(_spec(efa=True, python="python3"), "", "us-east-1")
    if tool:
        (tmp_path / "fi_info").write_text(f'#!/bin/sh\n[ "$*" = "-p efa" ] || exit 9\n{tool}\n')
        (tmp_path / "fi_info").chmod(0o700)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh"], input=script, text=True, env=environment, capture_output=True, check=False)
    assert done.returncode == (0 if tool == "exit 0" else 1)
    assert ("EFA software" in done.stderr) == bool(done.returncode)


def test_instance_profile_replaces_keys(client: Ec2Client, monkeypatch, here) -> None:
    iam = client._session.client("iam")
    iam.create_instance_profile(InstanceProfileName="trainer")
    job, requests = _provisioned(client, monkeypatch, instance_profile="trainer")
    assert all(request["IamInstanceProfile"] == {"Name": "trainer"} for request in requests)
    assert job.variables["AWS_REGION"] == "us-east-1"
    arn = "arn:aws:iam::1:instance-profile/trainer"
    assert request_of("job", _spec(instance_profile=arn), RESOURCES, 0, "")["IamInstanceProfile"] == {"Arn": arn}
    words = ("--instance-type", "g4dn.xlarge", "--instance-profile", "trainer", "--pass", "A,AWS_SECRET_ACCESS_KEY")
    message = complaint(here("launch", "ec2", *words, "digits"))
    assert "[conflicting-options]" in message
    assert "AWS_SECRET_ACCESS_KEY" in message


class _Metadata(BaseHTTPRequestHandler):
    """The metadata service of an instance with a role, and an S3 that records who asks."""

    def do_PUT(self) -> None:
        self._answer("token")

    def do_GET(self) -> None:
        if not self.path.startswith("/latest/"):
            self.server.seen.append((self.headers["authorization"], self.headers["x-amz-security-token"]))
            self._answer("content")
        elif self.path.endswith("/security-credentials/"):
            self._answer("role")
        else:
            self._answer(
                '{"Code": "Success", "AccessKeyId": "FROMROLE", "SecretAccessKey": "s", "Token": "session", '
                '"Expiration": "2999-01-01T00:00:00Z", "Type": "AWS-HMAC", "LastUpdated": "2020-01-01T00:00:00Z"}'
            )

    do_HEAD = do_GET

    def _answer(self, text: str) -> None:
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Range", f"bytes 0-{len(text) - 1}/{len(text)}")
        self.send_header("Content-Length", str(len(text)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_object_store_takes_the_keys_of_a_role_from_the_metadata_service() -> None:
    """In a process without AWS_* keys, as on an instance with --instance-profile."""
    pytest.importorskip("obstore", reason="needs obstore: pip install 'paceline[s3]'")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    server.seen = []
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    kept |= {"AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL": url, "AWS_METADATA_ENDPOINT": url}
    code = "from paceline.system.remote import opened\nwith opened('s3://bucket/key') as file: print(file.read())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=HANG, check=False
    )
    server.shutdown()
    assert done.stdout == "b'content'\n", done.stderr
    assert server.seen
    assert all("Credential=FROMROLE/" in key and token == "session" for key, token in server.seen)
    assert all("/eu-west-1/s3/" in key for key, _ in server.seen)
