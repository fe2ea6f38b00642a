"""EC2 of one region: finds and makes what jobs need, tags all of it, and gives it back. boto3 is imported only here."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.system.files import make_folder, printable, write_text

JOB = "paceline-job"
"""Tag of everything that a job made, with its id."""
_ALIVE = ("pending", "running", "stopping", "stopped")
_IMAGE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
"""Older ones have Python 3.10."""
_TROUBLES = {
    "InsufficientInstanceCapacity": "there is no capacity; try another --zone or --instance-type, or without --spot",
    "SpotMaxPriceTooLow": "the price is above --max-price; raise it, or wait",
    "MaxSpotInstanceCountExceeded": "your quota of spot machines is used up; ask for more under Service Quotas",
    "VcpuLimitExceeded": "your quota of such machines is used up; ask for more under Service Quotas",
    "InstanceLimitExceeded": "your quota of such machines is used up; ask for more under Service Quotas",
    "InvalidInstanceType": "there is no such type in this region; check --instance-type and --region",
    "InvalidAMIID.NotFound": "there is no such image in this region; check --image-id and --region",
    "InvalidVolume.ZoneMismatch": "the volume is in another zone; say --zone, or replicate it from a snapshot",
    "VolumeInUse": "the volume is attached to another machine; detach it, or replicate it from a snapshot",
    "UnauthorizedOperation": "your AWS user may not do that; it needs rights on EC2 (docs/launch.md lists them)",
    "AuthFailure": "AWS does not take your credentials; `aws configure`, or check the AWS_* variables",
    "InvalidClientTokenId": "AWS does not take your credentials; `aws configure`, or check the AWS_* variables",
    "InvalidParameterValue": "AWS refuses a value; check --instance-type, --zone and the volume's options",
}


@contextmanager
def translate_aws_errors(what: str) -> Iterator[None]:
    """What AWS says, with a cure."""
    import botocore.exceptions as aws
    from botocore.parsers import ResponseParserError

    try:
        yield
    except aws.NoCredentialsError:
        raise UserError(f"{what}: there are no AWS credentials; `aws configure`, or set the AWS_* variables") from None
    except aws.NoRegionError:
        raise UserError(f"{what}: which region? Say --region, or set AWS_REGION") from None
    except aws.ClientError as error:
        told = error.response["Error"]
        cure = _TROUBLES.get(told["Code"], "see AWS's message")
        raise UserError(printable(f"{what} failed: {told['Message']} ({told['Code']}); {cure}")) from None
    except aws.ParamValidationError as error:
        raise UserError(f"{what}: {' '.join(str(error).split())}") from None
    except (aws.BotoCoreError, ResponseParserError) as error:
        raise UserError(f"{what} failed: {error}; check the network and the AWS_* variables") from None


class Cloud:
    def __init__(self, region: str = ""):
        try:
            import boto3
        except ImportError:
            raise UserError("EC2 needs boto3; pip install 'paceline[aws]'") from None
        with translate_aws_errors("asking AWS"):
            self._session: Any = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
            self.ec2: Any = self._session.client("ec2")
            self.ssm: Any = self._session.client("ssm")
            self.region: str = self.ec2.meta.region_name

    # ---- finding ----

    def kind(self, name: str) -> dict[str, Any]:
        """What a type of machine is and can do."""
        with translate_aws_errors(f"--instance-type {name}"):
            return dict(self.ec2.describe_instance_types(InstanceTypes=[name])["InstanceTypes"][0])

    def image(self, identifier: str, name: str, architectures: Sequence[str]) -> dict[str, Any]:
        """By id or name; without either, AWS's own image for deep learning."""
        with translate_aws_errors("looking for the image"):
            if not identifier and not name:
                arch = "x86_64" if "x86_64" in architectures else "arm64"
                identifier = self.ssm.get_parameter(Name=_IMAGE.format(arch=arch))["Parameter"]["Value"]
            own: dict[str, Any] = {"ImageIds": [identifier]} if identifier else {"Filters": [_named("name", name)]}
            found = self.ec2.describe_images(**own)["Images"]
        if not found:
            raise UserError(f"{identifier or name}: there is no such image in {self.region}; --image-id, --image-name")
        newest: dict[str, Any] = max(found, key=lambda image: str(image.get("CreationDate", "")))
        return newest

    def subnet(self, identifier: str, zone: str) -> dict[str, Any]:
        """The one that was given, or one of the default network."""
        own = {"SubnetIds": [identifier]} if identifier else {}
        filters = [] if identifier else [_named("default-for-az", "true")]
        filters += [_named("availability-zone", zone)] if zone else []
        with translate_aws_errors("looking for a subnet"):
            found = self.ec2.describe_subnets(Filters=filters, **own)["Subnets"]
        if not found:
            raise UserError(f"there is no subnet{f' in {zone}' if zone else ''} to put machines into; say --subnet")
        return dict(sorted(found, key=lambda subnet: str(subnet["AvailabilityZone"]))[0])

    def spot_price(self, kind: str, zone: str = "") -> float | None:
        filters = [_named("availability-zone", zone)] if zone else []
        with translate_aws_errors("asking for prices"):
            history = self.ec2.describe_spot_price_history(
                InstanceTypes=[kind], ProductDescriptions=["Linux/UNIX"], Filters=filters, MaxResults=20
            )["SpotPriceHistory"]
        newest = sorted(history, key=lambda entry: entry["Timestamp"])
        return float(newest[-1]["SpotPrice"]) if newest else None

    def price(self, kind: str) -> float | None:
        """Of a machine on demand for an hour; None if it cannot be found out, for which no job has to fail."""
        wanted = {
            "instanceType": kind, "regionCode": self.region, "operatingSystem": "Linux", "tenancy": "Shared",
            "preInstalledSw": "NA", "capacitystatus": "Used",
        }  # fmt: skip
        filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()]
        try:
            with translate_aws_errors("asking for prices"):
                pricing = self._session.client("pricing", region_name="us-east-1")  # one of the few that have it
                found = pricing.get_products(ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)["PriceList"]
            terms = [term for one in found for term in json.loads(one)["terms"]["OnDemand"].values()]
            units = [unit for term in terms for unit in term["priceDimensions"].values()]
            return max((float(unit["pricePerUnit"]["USD"]) for unit in units), default=0.0) or None
        except (UserError, KeyError, ValueError):
            return None

    def machines(self, job: str = "*", states: Sequence[str] = _ALIVE) -> list[Any]:
        filters = [_named(f"tag:{JOB}", job), _named("instance-state-name", *states)]
        with translate_aws_errors("listing machines"):
            pages = self.ec2.get_paginator("describe_instances").paginate(Filters=filters)
            found = [machine for page in pages for group in page["Reservations"] for machine in group["Instances"]]
        return sorted(found, key=lambda machine: tag(machine, "Name"))

    def volumes(self, name: str = "", job: str | None = None) -> list[Any]:
        filters = [_named("tag:Name", name)] if name else []
        filters += [_named(f"tag:{JOB}", job)] if job is not None else []
        with translate_aws_errors("listing volumes"):
            return list(self.ec2.describe_volumes(Filters=filters)["Volumes"])

    # ---- making ----

    def key(self, name: str, job: str, public: Path | None, private: Path) -> None:
        """The user's own public key under the job's name, or a new pair whose private half stays in its folder."""
        tags = tagged("key-pair", job, name)
        with translate_aws_errors("making a key pair"):
            if public:
                self.ec2.import_key_pair(KeyName=name, PublicKeyMaterial=public.read_bytes(), TagSpecifications=tags)
                return
            made = self.ec2.create_key_pair(KeyName=name, KeyType="ed25519", TagSpecifications=tags)
        make_folder(private.parent)
        write_text(private, made["KeyMaterial"], 0o600)  # nobody else has it

    def firewall(self, job: str, network: str, ssh_from: str) -> str:
        """Open between its machines, and to one address for ssh."""
        with translate_aws_errors("making a security group"):
            made = self.ec2.create_security_group(
                GroupName=job, Description=f"machines of {job}", VpcId=network,
                TagSpecifications=tagged("security-group", job, job),
            )  # fmt: skip
            group = str(made["GroupId"])
            ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": ssh_from}]}
            each_other = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
            self.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[ssh, each_other])
        return group

    def placement(self, job: str) -> str:
        """Machines close to each other; not every account and region has it."""
        try:
            with translate_aws_errors("making a placement group"):
                tags = tagged("placement-group", job, job)
                self.ec2.create_placement_group(GroupName=job, Strategy="cluster", TagSpecifications=tags)
        except UserError:
            return ""
        return job

    def run(self, spec: dict[str, Any]) -> Any:
        with translate_aws_errors(f"renting a {spec['InstanceType']}"):
            return self.ec2.run_instances(MinCount=1, MaxCount=1, **spec)["Instances"][0]

    def wait_until_running(self, identifiers: Sequence[str]) -> None:
        with translate_aws_errors("waiting for the machines"):
            self.ec2.get_waiter("instance_running").wait(InstanceIds=[*identifiers], WaiterConfig={"Delay": 5})

    def volume(self, job: str, name: str, **spec: Any) -> str:
        tags = tagged("volume", job, name)
        with translate_aws_errors(f"making volume {name}"):
            made = str(self.ec2.create_volume(TagSpecifications=tags, **spec)["VolumeId"])
            self.ec2.get_waiter("volume_available").wait(VolumeIds=[made], WaiterConfig={"Delay": 3})
        return made

    def snapshots(self) -> list[Any]:
        with translate_aws_errors("listing snapshots"):
            return list(self.ec2.describe_snapshots(Filters=[_named(f"tag:{JOB}", "*")])["Snapshots"])

    def attach(self, volume: str, machine: str, ends_with_it: bool) -> None:
        with translate_aws_errors(f"attaching {volume}"):
            self.ec2.get_waiter("volume_available").wait(VolumeIds=[volume], WaiterConfig={"Delay": 3})
            self.ec2.attach_volume(VolumeId=volume, InstanceId=machine, Device="/dev/sdf")
            if ends_with_it:
                mapping = {"DeviceName": "/dev/sdf", "Ebs": {"DeleteOnTermination": True}}
                self.ec2.modify_instance_attribute(InstanceId=machine, BlockDeviceMappings=[mapping])

    # ---- giving back ----

    def end(self, machines: Sequence[str]) -> None:
        """Machines that may be gone already."""
        with suppress(UserError), translate_aws_errors("ending machines"):
            self.ec2.terminate_instances(InstanceIds=[*machines])

    def _delete_volume(self, volume: str) -> None:
        # it may have gone with its machine
        if self.ec2.describe_volumes(Filters=[_named("volume-id", volume)])["Volumes"]:
            self.ec2.delete_volume(VolumeId=volume)

    def switch(self, machines: Sequence[str], on: bool) -> None:
        """Off: only their disks cost money. Spot machines cannot be switched off, only ended."""
        action = self.ec2.start_instances if on else self.ec2.stop_instances
        with translate_aws_errors(f"switching machines {'on' if on else 'off'}"):
            action(InstanceIds=[*machines])

    def release(self, job: str) -> list[str]:
        """Everything that the job made; what could not be given back, as lines for the user."""
        left: list[str] = []
        if not re.fullmatch(r"[A-Za-z0-9.-]+", job):  # AWS takes others for patterns
            raise UserError(f"{job!r} is no job; `paceline ec2 ls` lists what is rented")

        def attempt(what: str, action: Callable[[], object], seconds: float = 0.0) -> None:
            deadline = time.monotonic() + seconds
            while True:
                try:
                    with translate_aws_errors(what):
                        action()
                    return
                except UserError as error:
                    if time.monotonic() >= deadline:
                        left.append(str(error))
                        return
                    time.sleep(3)

        machines = [machine["InstanceId"] for machine in self.machines(job)]
        if machines:
            attempt("ending machines", lambda: self.ec2.terminate_instances(InstanceIds=machines))
            gone = self.ec2.get_waiter("instance_terminated")
            attempt("waiting for their end", lambda: gone.wait(InstanceIds=machines, WaiterConfig={"Delay": 5}))
        for volume in self.volumes(job=job):
            attempt("deleting a volume", partial(self._delete_volume, volume["VolumeId"]), 60)
        of_job = [_named(f"tag:{JOB}", job)]
        with suppress(UserError), translate_aws_errors("listing"):
            for group in self.ec2.describe_security_groups(Filters=of_job)["SecurityGroups"]:
                delete = partial(self.ec2.delete_security_group, GroupId=group["GroupId"])
                attempt("deleting a security group", delete, 60)
            for key in self.ec2.describe_key_pairs(Filters=of_job)["KeyPairs"]:
                attempt("deleting a key pair", partial(self.ec2.delete_key_pair, KeyName=key["KeyName"]))
        with suppress(Exception):  # there may be none, or no such thing
            self.ec2.delete_placement_group(GroupName=job)
        return left


def _named(name: str, *values: str) -> dict[str, Any]:
    """A filter, as AWS wants it."""
    return {"Name": name, "Values": [*values]}


def tag(thing: Any, key: str) -> str:
    """Anybody of the account may have written it."""
    return next((printable(str(own["Value"])) for own in thing.get("Tags", []) if own["Key"] == key), "")


def tagged(kind: str, job: str, name: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": JOB, "Value": job}, {"Key": "Name", "Value": name}]}]
