"""The request for an EC2 instance of a job: network interfaces, disks, role, and what it runs at first boot."""

import base64
from pathlib import Path
from typing import Any

from paceline.launch.ec2_client import tag_specifications
from paceline.launch.job import Ec2Resources
from paceline.launch.specs import Ec2Spec

# shutting down terminates an instance, whatever happened to the launching machine
_USER_DATA = """(
    busy=$(date +%s)
    while sleep 30; do
        now=$(date +%s)
        if pgrep -f 'paceline (train|data|rendezvous|selftest)' > /dev/null; then busy=$now; fi
        for file in /home/*/.paceline/jobs/{job}/*/node.exit /root/.paceline/jobs/{job}/*/node.exit; do
            if [ -f "$file" ] && [ $((now - $(stat -c %Y "$file"))) -gt {linger} ]; then shutdown -h now; fi
        done
        if [ $((now - busy)) -gt {idle} ]; then shutdown -h now; fi
    done
) > /dev/null 2>&1 &
"""


def request_of(job: str, spec: Ec2Spec, resources: Ec2Resources, number: int, address: str) -> dict[str, Any]:
    """Return the request for one instance of a job; `address` is its private address, or empty."""
    networks = _interfaces(spec, resources)
    if address:
        networks[0]["PrivateIpAddress"] = address
    root = {"VolumeSize": spec.root_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
    placement = {"GroupName": resources.placement_group} if resources.placement_group else {}
    request: dict[str, Any] = {
        "ImageId": resources.image,
        "InstanceType": spec.instance_type,
        "KeyName": job,
        "NetworkInterfaces": networks,
        "BlockDeviceMappings": [{"DeviceName": resources.root_device, "Ebs": root}],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": tag_specifications("instance", job, f"{job}-{number}"),
        "Placement": {"AvailabilityZone": resources.zone} | placement,
    }
    if profile := spec.instance_profile:
        request["IamInstanceProfile"] = {"Arn" if profile.startswith("arn:") else "Name": profile}
    watchdog = "" if spec.keep else _USER_DATA.format(job=job, linger=spec.linger, idle=spec.idle)
    request["UserData"] = f"#!/bin/sh\n{watchdog}{_user_script(spec.user_data)}"
    if spec.spot:
        limit = {"MaxPrice": str(spec.max_price)} if spec.max_price else {}
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"} | limit
        request["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    return request


def _interfaces(spec: Ec2Spec, resources: Ec2Resources) -> list[dict[str, Any]]:
    """Return the network interfaces of an instance: an ordinary one, or an EFA on each of its network cards."""
    groups = [resources.security_group, *spec.security_groups]
    common = {"SubnetId": resources.subnet, "Groups": groups}
    if resources.efa_interfaces < 2:  # AWS assigns a public address to single interfaces only
        efa = {"InterfaceType": "efa"} if resources.efa_interfaces else {}
        return [{"DeviceIndex": 0, "AssociatePublicIpAddress": not spec.private} | common | efa]
    return [
        {"NetworkCardIndex": card, "DeviceIndex": min(card, 1), "InterfaceType": "efa", "DeleteOnTermination": True}
        | common
        for card in range(resources.efa_interfaces)
    ]


def _user_script(path: str) -> str:
    """Return a command that runs the user's script at first boot, whatever language it is written in."""
    if not path:
        return ""
    packed = base64.b64encode(Path(path).read_bytes()).decode()
    return f"echo {packed} | base64 -d > /root/user-data && chmod 700 /root/user-data && /root/user-data\n"
