"""The manifest backend: files for engines that the user already runs (SkyPilot, Kubeflow Trainer, Kubernetes)."""

import base64
import io
import re
import shlex
import tarfile
from dataclasses import replace
from typing import Any

import yaml

from paceline.config.seeds import seed_words
from paceline.distributed.channel import TOKEN, new_token
from paceline.errors import UserError
from paceline.launch.job import new_id
from paceline.launch.planning import extras_of, selftest_words
from paceline.launch.procs import described, words_for
from paceline.launch.specs import ManifestSpec
from paceline.launch.values import operand, plain

_PORT = 29400
_MAX_VARIABLE = 131_072  # bytes of NAME=VALUE and a null byte that Linux takes: MAX_ARG_STRLEN
# in a new folder, since /tmp may be shared with other users
_WRITE = 'folder=$(mktemp -d) && printf "%s" "$PACELINE_RECIPE" > "$folder/recipe.yaml"'
_UNPACK = 'printf "%s" "$PACELINE_EXTENSIONS" | base64 -d | tar -xzf - -C "$folder" && export PYTHONPATH="$folder"'


def plan(spec: ManifestSpec) -> list[str]:
    """Return the YAML documents for the engine, as one text. There is no launch: the engine runs them."""
    engines = {"skypilot": _skypilot, "kubeflow": _kubeflow, "kubernetes": _kubernetes}
    if spec.engine not in engines:
        message = f"--for {spec.engine!r} is not supported. Use {', '.join(engines)}."
        raise UserError("unknown-engine", message, engine=spec.engine)
    if spec.gpu_type and (spec.engine != "skypilot" or not spec.gpus_per_node):
        message = "--gpu-type applies to --for skypilot with --gpus-per-node only. Omit it, or add them."
        raise UserError("conflicting-options", message, option="--gpu-type")
    if spec.rdma and spec.engine == "skypilot":
        message = "--rdma applies to --for kubernetes and kubeflow. SkyPilot chooses the network itself. Omit it."
        raise UserError("conflicting-options", message, option="--rdma")
    job_id = new_id(spec, reserve=False)
    documents = engines[spec.engine](job_id, replace(spec, name=spec.name or job_id))
    comments = [f"# PACELINE_EXTENSIONS contains {plain('imports', path)}\n" for path in spec.extensions]
    comments.append(f"# {described(spec)}\n")
    return ["".join([*comments, yaml.safe_dump_all(documents, sort_keys=False, width=1000).rstrip("\n")])]


def _train_command(spec: ManifestSpec, join: str) -> str:
    """Return the command of one node; `join` holds variables that its shell expands."""
    words = ["--name", spec.name, *seed_words(spec.seeds), *(["--results", spec.results] if spec.results else [])]
    shape = f"{shlex.join(words_for(spec, spec.hosts[0]))} --nodes {len(spec.hosts)}"
    return f'paceline train "$folder/recipe.yaml" {shlex.join(words)} {shape} {join}'


def _write(spec: ManifestSpec) -> str:
    """Return the commands that run before training."""
    steps = [_WRITE, *([_UNPACK] if spec.extensions else [])]
    return " && ".join([*steps, *([shlex.join(["paceline", *selftest_words(spec)])] if spec.selftest else [])])


def _variables(spec: ManifestSpec) -> dict[str, str]:
    """Return the variables of every node."""
    variables = {"PACELINE_RANK_TIMEOUT": str(spec.rank_timeout)}
    if spec.extensions:
        variables["PACELINE_EXTENSIONS"] = _packed(spec)
        if (size := len(f"PACELINE_EXTENSIONS={variables['PACELINE_EXTENSIONS']}") + 1) > _MAX_VARIABLE:
            message = (
                f"the packages that the recipe imports take {size:,} bytes in the manifest, and a variable holds at "
                f"most {_MAX_VARIABLE:,}. Install them in the image, and name a small module that imports them."
            )
            raise UserError("extensions-too-large", message, size=size)
    return variables


def _packed(spec: ManifestSpec) -> str:
    """Return the packages that the recipe imports: a tar file in base64."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path, text in spec.extensions.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return base64.b64encode(packed.getvalue()).decode()


def _named_variables(spec: ManifestSpec) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in _variables(spec).items()]


def _escaped(text: str) -> str:
    """Escape $: Kubernetes expands $(NAME) in commands and variables, and turns $$ into $."""
    return text.replace("$", "$$")


def _skypilot(job_id: str, spec: ManifestSpec) -> list[dict[str, Any]]:
    first = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    join = f'--node-rank "$SKYPILOT_NODE_RANK" --rendezvous {first}:{_PORT}"'
    resources: dict[str, Any] = {"use_spot": True, "job_recovery": "failover"}
    if spec.image:
        resources["image_id"] = f"docker:{operand('--image', spec.image)}"
    if spec.gpus_per_node:
        if not spec.gpu_type:
            message = "--gpus-per-node needs --gpu-type, with a name of SkyPilot: A100, L4 ..."
            raise UserError("missing-option", message, option="--gpu-type")
        resources["accelerators"] = f"{spec.gpu_type}:{spec.gpus_per_node}"
    task: dict[str, Any] = {"name": job_id, "num_nodes": len(spec.hosts), "resources": resources}
    if not spec.image:
        extras = extras_of(spec)
        task |= (
            {"workdir": spec.code, "setup": f"pip install -c constraints.txt '.{extras}'"}
            if spec.code
            else {"setup": f"pip install 'paceline{extras}'"}
        )
    task["envs"] = {"PACELINE_RECIPE": spec.recipe} | _variables(spec)
    if len(spec.hosts) > 1:
        task["secrets"] = {TOKEN: new_token()}
    task["run"] = f"{_write(spec)} &&\n{_train_command(spec, join)}\n"
    return [task]


def _kubeflow(job_id: str, spec: ManifestSpec) -> list[dict[str, Any]]:
    """Return a TrainJob; the runtime sets the rank and the rendezvous of a node as for torchrun."""
    join = '--node-rank "$PET_NODE_RANK" --rendezvous "$PET_MASTER_ADDR:$PET_MASTER_PORT"'
    command = f"{_write(spec)} && exec {_train_command(spec, join)}"
    name = _name(job_id)
    trainer: dict[str, Any] = {
        "numNodes": len(spec.hosts),
        "numProcPerNode": spec.procs_by_host[spec.hosts[0]],
        "image": _image(spec),
        "command": ["sh", "-c", _escaped(command)],
        "env": [
            {"name": "PACELINE_RECIPE", "value": _escaped(spec.recipe)},
            *_named_variables(spec),
            *_token_variable(job_id, spec),
        ],
    }
    if limits := _limits(spec):
        trainer["resourcesPerNode"] = {"limits": limits}
    content = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}}
    return [*_token_secret(job_id, spec), head | {"spec": content}]


def _kubernetes(job_id: str, spec: ManifestSpec) -> list[dict[str, Any]]:
    """Return an indexed Job: each node knows its index, and finds the first one through a headless service."""
    name = _name(job_id)
    join = f'--node-rank "$JOB_COMPLETION_INDEX" --rendezvous {name}-0.{name}:{_PORT}'
    container: dict[str, Any] = {
        "name": "train",
        "image": _image(spec),
        "command": ["sh", "-c", _escaped(f"{_write(spec)} && exec {_train_command(spec, join)}")],
        "env": [
            {"name": "PACELINE_RECIPE", "valueFrom": {"configMapKeyRef": {"name": name, "key": "recipe.yaml"}}},
            *_named_variables(spec),
            *_token_variable(job_id, spec),
        ],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if limits := _limits(spec):
        container["resources"] = {"limits": limits}
    if spec.rdma:  # a pod has no ulimit; this capability lifts the limit of locked memory
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [container],
        # the default of 64 MB is too small for NCCL and the shared-memory all-reduce
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    count = len(spec.hosts)
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    content = {"completions": count, "parallelism": count, "completionMode": "Indexed", "backoffLimit": 3 * count}
    return [
        *_token_secret(job_id, spec),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"recipe.yaml": spec.recipe}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"clusterIP": "None", "selector": {"app": name}, "ports": [{"port": _PORT}]},
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": content | {"template": template}},
    ]


def _limits(spec: ManifestSpec) -> dict[str, str]:
    """Return the GPUs and RDMA devices of a node."""
    gpus = {"nvidia.com/gpu": str(spec.gpus_per_node)} if spec.gpus_per_node else {}
    if not spec.rdma:
        return gpus
    name, equals, number = plain("--rdma", spec.rdma).rpartition("=")
    if not equals or not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", name) or not number.isdecimal():
        message = f"--rdma {spec.rdma!r} is not RESOURCE=N. Write e.g. vpc.amazonaws.com/efa=4."
        raise UserError("invalid-rdma", message, rdma=spec.rdma)
    return gpus | {name: number}


def _token_secret(job_id: str, spec: ManifestSpec) -> list[dict[str, Any]]:
    """Return the Secret with the token by which nodes authenticate each other, if there are several."""
    if len(spec.hosts) == 1:
        return []
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{_name(job_id)}-token"}}
    return [secret | {"stringData": {"token": new_token()}}]


def _token_variable(job_id: str, spec: ManifestSpec) -> list[dict[str, Any]]:
    if len(spec.hosts) == 1:
        return []
    return [{"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": f"{_name(job_id)}-token", "key": "token"}}}]


def _name(job_id: str) -> str:
    """Return the id of the job as a valid name of a Kubernetes object."""
    return "".join(letter if letter.isalnum() else "-" for letter in job_id.lower())[:50].strip("-")


def _image(spec: ManifestSpec) -> str:
    if not spec.image:
        message = "a manifest needs --image IMAGE: a container image with paceline, e.g. built from the Dockerfile."
        raise UserError("missing-option", message, option="--image")
    return operand("--image", spec.image)
