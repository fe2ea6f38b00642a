"""Client of EC2 in one region: finds, creates, tags and releases what jobs need. boto3 is imported only here."""

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.launch.aws_errors import translate_aws_errors
from paceline.system.files import make_folder, printable, write_text
from paceline.system.packages import needs_package

JOB = "paceline-job"
"""Tag of all resources of a job; the value is its id."""
_ALIVE = ("pending", "running", "stopping", "stopped")
_IMAGE = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
"""AMIs with older Ubuntu versions have Python 3.10."""


class Ec2Client:
    def __init__(self, region: str = ""):
        with needs_package("boto3", "EC2", extra="aws"):
            import boto3
            from botocore.config import Config
        with translate_aws_errors("connecting to AWS"):
            self._session: Any = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
            config = Config(
                connect_timeout=10, retries={"mode": "standard"}
            )  # the default is minutes without a network
            self.ec2: Any = self._session.client("ec2", config=config)
            self.ssm: Any = self._session.client("ssm", config=config)
            self.region: str = self.ec2.meta.region_name

    # ---- find ----

    def instance_type(self, name: str) -> dict[str, Any]:
        """Return the description of an instance type."""
        with translate_aws_errors(f"--instance-type {name}"):
            return dict(self.ec2.describe_instance_types(InstanceTypes=[name])["InstanceTypes"][0])

    def image(self, identifier: str, name: str, architectures: Sequence[str]) -> dict[str, Any]:
        """Return an image by id or name; without either, the AWS Deep Learning AMI."""
        with translate_aws_errors("searching the image"):
            if not identifier and not name:
                arch = "x86_64" if "x86_64" in architectures else "arm64"
                identifier = self.ssm.get_parameter(Name=_IMAGE.format(arch=arch))["Parameter"]["Value"]
            query: dict[str, Any] = {"ImageIds": [identifier]} if identifier else {"Filters": [_filter("name", name)]}
            images = self.ec2.describe_images(**query)["Images"]
        if not images:
            image = identifier or name
            message = f"image {image} does not exist in {self.region}. Check --image-id or --image-name."
            raise UserError("ec2-unknown-image", message, image=image)
        newest: dict[str, Any] = max(images, key=lambda image: str(image.get("CreationDate", "")))
        return newest

    def subnet(self, identifier: str, zone: str) -> dict[str, Any]:
        """Return a subnet by its id, or one of the default VPC."""
        query = {"SubnetIds": [identifier]} if identifier else {}
        filters = [] if identifier else [_filter("default-for-az", "true")]
        filters += [_filter("availability-zone", zone)] if zone else []
        with translate_aws_errors("searching a subnet"):
            subnets = self.ec2.describe_subnets(Filters=filters, **query)["Subnets"]
        if not subnets:
            message = f"no subnet{f' in {zone}' if zone else ''} was found for the instances. Pass --subnet ID."
            raise UserError("ec2-no-subnet", message)
        return dict(sorted(subnets, key=lambda subnet: str(subnet["AvailabilityZone"]))[0])

    def spot_price(self, instance_type: str, zone: str = "") -> float | None:
        """Return the newest price of a spot instance in dollars per hour."""
        filters = [_filter("availability-zone", zone)] if zone else []
        with translate_aws_errors("querying prices"):
            history = self.ec2.describe_spot_price_history(
                InstanceTypes=[instance_type], ProductDescriptions=["Linux/UNIX"], Filters=filters, MaxResults=20
            )["SpotPriceHistory"]
        newest = sorted(history, key=lambda entry: entry["Timestamp"])
        return float(newest[-1]["SpotPrice"]) if newest else None

    def on_demand_price(self, instance_type: str) -> float | None:
        """Return the price of an on-demand instance in dollars per hour, or None if it is unknown."""
        wanted = {
            "instanceType": instance_type, "regionCode": self.region, "operatingSystem": "Linux", "tenancy": "Shared",
            "preInstalledSw": "NA", "capacitystatus": "Used",
        }  # fmt: skip
        filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()]
        try:
            with translate_aws_errors("querying prices"):
                pricing = self._session.client("pricing", region_name="us-east-1")  # one of the few with this service
                prices = pricing.get_products(ServiceCode="AmazonEC2", Filters=filters, MaxResults=10)["PriceList"]
            terms = [term for price in prices for term in json.loads(price)["terms"]["OnDemand"].values()]
            units = [unit for term in terms for unit in term["priceDimensions"].values()]
            return max((float(unit["pricePerUnit"]["USD"]) for unit in units), default=0.0) or None
        except (UserError, KeyError, ValueError):
            return None

    def instances(self, job: str = "*", states: Sequence[str] = _ALIVE) -> list[Any]:
        """Return the instances of a job, or of all jobs, sorted by name."""
        filters = [_filter(f"tag:{JOB}", job), _filter("instance-state-name", *states)]
        with translate_aws_errors("listing instances"):
            pages = self.ec2.get_paginator("describe_instances").paginate(Filters=filters)
            instances = [one for page in pages for group in page["Reservations"] for one in group["Instances"]]
        return sorted(instances, key=lambda instance: tag(instance, "Name"))

    def volumes(self, name: str = "", job: str | None = None) -> list[Any]:
        filters = [_filter("tag:Name", name)] if name else []
        filters += [_filter(f"tag:{JOB}", job)] if job is not None else []
        with translate_aws_errors("listing volumes"):
            return list(self.ec2.describe_volumes(Filters=filters)["Volumes"])

    # ---- create ----

    def create_key_pair(self, job: str, public: Path | None, private: Path) -> None:
        """Import the user's public key under the name of the job, or create a pair and save the private key."""
        tags = tag_specifications("key-pair", job, job)
        with translate_aws_errors("creating a key pair"):
            if public:
                self.ec2.import_key_pair(KeyName=job, PublicKeyMaterial=public.read_bytes(), TagSpecifications=tags)
                return
            pair = self.ec2.create_key_pair(KeyName=job, KeyType="ed25519", TagSpecifications=tags)
        make_folder(private.parent)
        write_text(private, pair["KeyMaterial"], 0o600)  # AWS does not keep it

    def create_security_group(self, job: str, vpc: str, ssh_from: str, efa: bool) -> str:
        """Create a group that allows traffic between its instances and ssh from `ssh_from`; return its id."""
        with translate_aws_errors("creating a security group"):
            created = self.ec2.create_security_group(
                GroupName=job, Description=f"instances of {job}", VpcId=vpc,
                TagSpecifications=tag_specifications("security-group", job, job),
            )  # fmt: skip
            group = str(created["GroupId"])
            ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": ssh_from}]}
            between = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
            self.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[ssh, between])
            if efa:  # its traffic bypasses IP, so that the default rule to all addresses does not allow it
                self.ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[between])
        return group

    def create_placement_group(self, job: str) -> str:
        """Create a cluster placement group; return its name, or "" where the account or region does not allow it."""
        try:
            with translate_aws_errors("creating a placement group"):
                tags = tag_specifications("placement-group", job, job)
                self.ec2.create_placement_group(GroupName=job, Strategy="cluster", TagSpecifications=tags)
        except UserError:
            return ""
        return job

    def run_instance(self, spec: dict[str, Any]) -> Any:
        with translate_aws_errors(f"launching a {spec['InstanceType']}"):
            return self.ec2.run_instances(MinCount=1, MaxCount=1, **spec)["Instances"][0]

    def wait_until_running(self, identifiers: Sequence[str]) -> None:
        with translate_aws_errors("waiting for the instances"):
            self.ec2.get_waiter("instance_running").wait(InstanceIds=[*identifiers], WaiterConfig={"Delay": 5})

    def associate_address(self, job: str, instance: Any) -> str:
        """Give an instance an Elastic IP address, if AWS assigns no public one to its several interfaces; return it."""
        primary = next(one for one in instance["NetworkInterfaces"] if _is_primary(one))["NetworkInterfaceId"]
        with translate_aws_errors("associating an Elastic IP address"):
            known = self.ec2.describe_addresses(Filters=[_filter(f"tag:{JOB}", job)])["Addresses"]
            unused = [one for one in known if not one.get("AssociationId")]  # of a preempted instance
            tags = tag_specifications("elastic-ip", job, job)
            address = unused[0] if unused else self.ec2.allocate_address(Domain="vpc", TagSpecifications=tags)
            self.ec2.associate_address(AllocationId=address["AllocationId"], NetworkInterfaceId=primary)
        return str(address["PublicIp"])

    def create_volume(self, job: str, name: str, **spec: Any) -> str:
        """Create a volume and return its id when it is available."""
        tags = tag_specifications("volume", job, name)
        with translate_aws_errors(f"creating volume {name}"):
            volume = str(self.ec2.create_volume(TagSpecifications=tags, **spec)["VolumeId"])
            self.ec2.get_waiter("volume_available").wait(VolumeIds=[volume], WaiterConfig={"Delay": 3})
        return volume

    def snapshots(self) -> list[Any]:
        with translate_aws_errors("listing snapshots"):
            return list(self.ec2.describe_snapshots(Filters=[_filter(f"tag:{JOB}", "*")])["Snapshots"])

    def attach_volume(self, volume: str, instance: str, delete_on_termination: bool) -> None:
        with translate_aws_errors(f"attaching {volume}"):
            self.ec2.get_waiter("volume_available").wait(VolumeIds=[volume], WaiterConfig={"Delay": 3})
            self.ec2.attach_volume(VolumeId=volume, InstanceId=instance, Device="/dev/sdf")
            if delete_on_termination:
                mapping = {"DeviceName": "/dev/sdf", "Ebs": {"DeleteOnTermination": True}}
                self.ec2.modify_instance_attribute(InstanceId=instance, BlockDeviceMappings=[mapping])

    # ---- release ----

    def terminate(self, instances: Sequence[str]) -> None:
        """Terminate instances, ignoring errors: they may be terminated already."""
        with suppress(UserError), translate_aws_errors("terminating instances"):
            self.ec2.terminate_instances(InstanceIds=[*instances])

    def _delete_volume(self, volume: str) -> None:
        # it may have been deleted with its instance
        if self.ec2.describe_volumes(Filters=[_filter("volume-id", volume)])["Volumes"]:
            self.ec2.delete_volume(VolumeId=volume)

    def start(self, instances: Sequence[str]) -> None:
        with translate_aws_errors("starting instances"):
            self.ec2.start_instances(InstanceIds=[*instances])

    def stop(self, instances: Sequence[str]) -> None:
        """Stop instances, so that only their volumes cost money; one-time spot instances cannot be stopped."""
        with translate_aws_errors("stopping instances"):
            self.ec2.stop_instances(InstanceIds=[*instances])

    def release(self, job: str) -> list[str]:
        """Terminate and delete all resources of the job; return a line for each failure."""
        failures: list[str] = []
        if not re.fullmatch(r"[A-Za-z0-9.-]+", job):  # AWS would treat other characters as a pattern
            raise UserError("unknown-job", f"{job!r} is not a job. `paceline ec2 ls` lists the jobs.", job=job)

        def attempt(action_name: str, action: Callable[[], object], seconds: float = 0.0) -> None:
            deadline = time.monotonic() + seconds
            while True:
                try:
                    with translate_aws_errors(action_name):
                        action()
                    return
                except UserError as error:
                    if time.monotonic() >= deadline:
                        failures.append(error.report)
                        return
                    time.sleep(3)

        instances = [instance["InstanceId"] for instance in self.instances(job)]
        if instances:
            attempt("terminating instances", lambda: self.ec2.terminate_instances(InstanceIds=instances))
            waiter = self.ec2.get_waiter("instance_terminated")
            attempt("waiting for termination", lambda: waiter.wait(InstanceIds=instances, WaiterConfig={"Delay": 5}))
        for volume in self.volumes(job=job):
            attempt("deleting a volume", partial(self._delete_volume, volume["VolumeId"]), 60)
        of_job = [_filter(f"tag:{JOB}", job)]
        with suppress(UserError), translate_aws_errors("listing resources"):
            for group in self.ec2.describe_security_groups(Filters=of_job)["SecurityGroups"]:
                delete = partial(self.ec2.delete_security_group, GroupId=group["GroupId"])
                attempt("deleting a security group", delete, 60)
            for address in self.ec2.describe_addresses(Filters=of_job)["Addresses"]:
                release = partial(self.ec2.release_address, AllocationId=address["AllocationId"])
                attempt("releasing an Elastic IP address", release, 60)
            for key in self.ec2.describe_key_pairs(Filters=of_job)["KeyPairs"]:
                attempt("deleting a key pair", partial(self.ec2.delete_key_pair, KeyName=key["KeyName"]))
        with suppress(Exception):  # it may not exist
            self.ec2.delete_placement_group(GroupName=job)
        return failures


def gpus_of(instance_type: dict[str, Any]) -> int:
    """Return the number of GPUs in the description of an instance type."""
    return sum(int(gpu["Count"]) for gpu in instance_type.get("GpuInfo", {}).get("Gpus", []))


def efa_interfaces_of(instance_type: dict[str, Any]) -> int:
    """Return the number of Elastic Fabric Adapters in the description of an instance type; 0: it has none."""
    network = instance_type.get("NetworkInfo", {})
    return int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1)) if network.get("EfaSupported") else 0


def _is_primary(interface: Any) -> bool:
    attachment = interface["Attachment"]
    return not attachment.get("DeviceIndex") and not attachment.get("NetworkCardIndex")


def _filter(name: str, *values: str) -> dict[str, Any]:
    """Return a filter of a describe call."""
    return {"Name": name, "Values": [*values]}


def tag(resource: Any, key: str) -> str:
    """Return the value of a tag, made printable: anyone in the account may have set it."""
    return next((printable(str(one["Value"])) for one in resource.get("Tags", []) if one["Key"] == key), "")


def tag_specifications(kind: str, job: str, name: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": [{"Key": JOB, "Value": job}, {"Key": "Name", "Value": name}]}]
