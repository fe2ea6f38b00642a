"""Jobs for engines that people already run: files for SkyPilot, Kubeflow's Trainer and plain Kubernetes."""

import shlex
from typing import Any

import yaml

from paceline.distributed.channel import TOKEN, new_token
from paceline.errors import UserError
from paceline.launch.job import Job
from paceline.launch.nodes import extras_of
from paceline.launch.values import operand

_PORT = 29400
# a folder of its own: /tmp may be shared with others
_WRITE = 'folder=$(mktemp -d) && printf "%s" "$PACELINE_RECIPE" > "$folder/recipe.yaml"'


def manifest(job: Job, engine: str, image: str, gpus: int) -> str:
    """Documents in YAML; `gpus` of each machine, 0 for processors only."""
    made = {"skypilot": _skypilot, "kubeflow": _kubeflow, "kubernetes": _kubernetes}
    if engine not in made:
        raise UserError(f"--for {engine}: known are {', '.join(made)}")
    return yaml.safe_dump_all(made[engine](job, image, gpus), sort_keys=False, width=1000)


def _train(job: Job, *place: str) -> str:
    """The command of one machine; `place` is for its shell to fill in."""
    words = ["--procs", str(job.procs), "--nodes", str(len(job.hosts))]
    return " ".join(["paceline", _what(job), *words, *place])


def _what(job: Job) -> str:
    words = ["--name", job.name, *(["--results", job.results] if job.results else [])]
    return f'train "$folder/recipe.yaml" {shlex.join(words)}'


def _kept(text: str) -> str:
    """In commands and variables Kubernetes fills in $(NAME), and takes $$ for one $."""
    return text.replace("$", "$$")


def _skypilot(job: Job, image: str, gpus: int) -> list[dict[str, Any]]:
    first = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    place = f'--node-rank "$SKYPILOT_NODE_RANK" --rendezvous {first}:{_PORT}"'
    resources: dict[str, Any] = {"use_spot": True, "job_recovery": "failover"}
    if image:
        resources["image_id"] = f"docker:{operand('--image', image)}"
    if gpus:
        if not job.extra.get("gpu_type"):
            raise UserError("--gpu-type is needed with --gpus-per-node, as SkyPilot names it: A100, L4 ...")
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
    task["run"] = f"{_WRITE} &&\n{_train(job, place)}\n"
    return [task]


def _kubeflow(job: Job, image: str, gpus: int) -> list[dict[str, Any]]:
    """A node's place comes from the runtime, in the variables that it has for torchrun."""
    place = '--node-rank "$PET_NODE_RANK" --rendezvous "$PET_MASTER_ADDR:$PET_MASTER_PORT"'
    command = f"{_WRITE} && exec {_train(job, place)}"
    name = _name(job)
    trainer: dict[str, Any] = {
        "numNodes": len(job.hosts),
        "numProcPerNode": job.procs,
        "image": _image(image),
        "command": ["sh", "-c", _kept(command)],
        "env": [{"name": "PACELINE_RECIPE", "value": _kept(job.recipe)}, *_token_variable(job)],
    }
    if gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}}
    return [*_token_secret(job), head | {"spec": spec}]


def _kubernetes(job: Job, image: str, gpus: int) -> list[dict[str, Any]]:
    """An indexed Job: each machine knows its number, and finds the first one through a headless service."""
    name = _name(job)
    place = f'--node-rank "$JOB_COMPLETION_INDEX" --rendezvous {name}-0.{name}:{_PORT}'
    container: dict[str, Any] = {
        "name": "train",
        "image": _image(image),
        "command": ["sh", "-c", _kept(f"{_WRITE} && exec {_train(job, place)}")],
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
        # containers have 64 MB otherwise, too little to exchange through
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    count = len(job.hosts)
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    spec = {"completions": count, "parallelizm": count, "completionMode": "Indexed", "backoffLimit": 3 * count}
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
    """By which the nodes recognize each other."""
    if len(job.hosts) == 1:
        return []
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{_name(job)}-token"}}
    return [secret | {"stringData": {"token": new_token()}}]


def _token_variable(job: Job) -> list[dict[str, Any]]:
    if len(job.hosts) == 1:
        return []
    return [{"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": f"{_name(job)}-token", "key": "token"}}}]


def _name(job: Job) -> str:
    """As Kubernetes allows it."""
    return "".join(letter if letter.isalnum() else "-" for letter in job.id.lower())[:50].strip("-")


def _image(image: str) -> str:
    if not image:
        raise UserError("--image IMAGE is needed: one with paceline in it, e.g. built from the Dockerfile")
    return operand("--image", image)
