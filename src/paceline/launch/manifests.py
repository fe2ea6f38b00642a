"""Manifests for existing schedulers: SkyPilot, Kubeflow Trainer and plain Kubernetes."""

import shlex
from typing import Any

import yaml

from paceline.distributed.channel import TOKEN, new_token
from paceline.errors import UserError
from paceline.launch.job import Job
from paceline.launch.nodes import extras_of
from paceline.launch.values import operand

_PORT = 29400
# in a new folder, since /tmp may be shared with other users
_WRITE = 'folder=$(mktemp -d) && printf "%s" "$PACELINE_RECIPE" > "$folder/recipe.yaml"'


def manifest(job: Job, engine: str, image: str, gpus: int) -> str:
    """Return YAML documents for an engine; `gpus` is per node, 0 for CPU only."""
    engines = {"skypilot": _skypilot, "kubeflow": _kubeflow, "kubernetes": _kubernetes}
    if engine not in engines:
        message = f"--for {engine!r} is not supported. Use {', '.join(engines)}."
        raise UserError("unknown-engine", message, engine=engine)
    return yaml.safe_dump_all(engines[engine](job, image, gpus), sort_keys=False, width=1000)


def _train_command(job: Job, join: str) -> str:
    """Return the command of one node; `join` holds variables that its shell expands."""
    words = ["--name", job.name, *(["--results", job.results] if job.results else [])]
    shape = f"--procs {job.procs} --nodes {len(job.hosts)}"
    return f'paceline train "$folder/recipe.yaml" {shlex.join(words)} {shape} {join}'


def _escaped(text: str) -> str:
    """Escape $: Kubernetes expands $(NAME) in commands and variables, and turns $$ into $."""
    return text.replace("$", "$$")


def _skypilot(job: Job, image: str, gpus: int) -> list[dict[str, Any]]:
    first = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    join = f'--node-rank "$SKYPILOT_NODE_RANK" --rendezvous {first}:{_PORT}"'
    resources: dict[str, Any] = {"use_spot": True, "job_recovery": "failover"}
    if image:
        resources["image_id"] = f"docker:{operand('--image', image)}"
    if gpus:
        if not job.extra.get("gpu_type"):
            message = "--gpus-per-node needs --gpu-type, with a name of SkyPilot: A100, L4 ..."
            raise UserError("missing-option", message, option="--gpu-type")
        resources["accelerators"] = f"{job.extra['gpu_type']}:{gpus}"
    task: dict[str, Any] = {"name": job.id, "num_nodes": len(job.hosts), "resources": resources}
    if not image:
        extras = extras_of(job)
        task |= (
            {"workdir": job.code, "setup": f"pip install -c constraints.txt '.{extras}'"}
            if job.code
            else {"setup": f"pip install 'paceline{extras}'"}
        )
    task["envs"] = {"PACELINE_RECIPE": job.recipe}
    if len(job.hosts) > 1:
        task["secrets"] = {TOKEN: new_token()}
    task["run"] = f"{_WRITE} &&\n{_train_command(job, join)}\n"
    return [task]


def _kubeflow(job: Job, image: str, gpus: int) -> list[dict[str, Any]]:
    """Return a TrainJob; the runtime sets the rank and the rendezvous of a node as for torchrun."""
    join = '--node-rank "$PET_NODE_RANK" --rendezvous "$PET_MASTER_ADDR:$PET_MASTER_PORT"'
    command = f"{_WRITE} && exec {_train_command(job, join)}"
    name = _name(job)
    trainer: dict[str, Any] = {
        "numNodes": len(job.hosts),
        "numProcPerNode": job.procs,
        "image": _image(image),
        "command": ["sh", "-c", _escaped(command)],
        "env": [{"name": "PACELINE_RECIPE", "value": _escaped(job.recipe)}, *_token_variable(job)],
    }
    if gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}}
    return [*_token_secret(job), head | {"spec": spec}]


def _kubernetes(job: Job, image: str, gpus: int) -> list[dict[str, Any]]:
    """Return an indexed Job: each node knows its index, and finds the first one through a headless service."""
    name = _name(job)
    join = f'--node-rank "$JOB_COMPLETION_INDEX" --rendezvous {name}-0.{name}:{_PORT}'
    container: dict[str, Any] = {
        "name": "train",
        "image": _image(image),
        "command": ["sh", "-c", _escaped(f"{_WRITE} && exec {_train_command(job, join)}")],
        "env": [
            {"name": "PACELINE_RECIPE", "valueFrom": {"configMapKeyRef": {"name": name, "key": "recipe.yaml"}}},
            *_token_variable(job),
        ],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [container],
        # the default of 64 MB is too small for NCCL and the shared-memory all-reduce
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    count = len(job.hosts)
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    spec = {"completions": count, "parallelism": count, "completionMode": "Indexed", "backoffLimit": 3 * count}
    return [
        *_token_secret(job),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"recipe.yaml": job.recipe}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"clusterIP": "None", "selector": {"app": name}, "ports": [{"port": _PORT}]},
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec | {"template": template}},
    ]


def _token_secret(job: Job) -> list[dict[str, Any]]:
    """Return the Secret with the token by which nodes authenticate each other, if there are several."""
    if len(job.hosts) == 1:
        return []
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{_name(job)}-token"}}
    return [secret | {"stringData": {"token": new_token()}}]


def _token_variable(job: Job) -> list[dict[str, Any]]:
    if len(job.hosts) == 1:
        return []
    return [{"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": f"{_name(job)}-token", "key": "token"}}}]


def _name(job: Job) -> str:
    """Return the id of the job as a valid name of a Kubernetes object."""
    return "".join(letter if letter.isalnum() else "-" for letter in job.id.lower())[:50].strip("-")


def _image(image: str) -> str:
    if not image:
        message = "a manifest needs --image IMAGE: a container image with paceline, e.g. built from the Dockerfile."
        raise UserError("missing-option", message, option="--image")
    return operand("--image", image)
