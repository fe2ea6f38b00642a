"""Manifests for other schedulers, checked with their own validators where these are small enough to install."""

import random
import re
from pathlib import Path

import pytest
import yaml
from conftest import complaint

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install 'paceline[dev]'"
)


def _manifest(here, engine: str, *words: object) -> list[dict]:
    shape = ("--nodes", 2, "--gpus-per-node", 4, "--image", "me/paceline:1")
    answer = here("launch", "manifest", "--for", engine, *shape, "imagenet-rn18-2ep", *words)
    assert answer.returncode == 0, answer.stderr
    return list(yaml.safe_load_all(answer.stdout))


def test_kubernetes_manifest_is_valid(here) -> None:
    documents = _manifest(here, "kubernetes")
    assert [document["kind"] for document in documents] == ["Secret", "ConfigMap", "Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.30", strict=True)
    secret, recipe, _, job = documents
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "--procs 4 --nodes 2 --node-rank" in container["command"][2]  # one per GPU
    assert "securityContext" not in container
    assert yaml.safe_load(recipe["data"]["recipe.yaml"])["name"] == "imagenet-rn18-2ep"
    assert _refers_to(secret, container["env"])
    assert secret["stringData"]["token"] not in str(documents[1:])


def test_kubeflow_manifest_is_valid(here) -> None:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    secret, document = _manifest(here, "kubeflow")
    kubernetes_validate.validate(secret, "1.30", strict=True)
    parsed = TrainerV1alpha1TrainJob.from_dict(document)
    assert (parsed.spec.trainer.num_nodes, parsed.spec.trainer.image) == (2, "me/paceline:1")
    assert parsed.to_dict()["spec"]["trainer"] == document["spec"]["trainer"]
    assert _refers_to(secret, document["spec"]["trainer"]["env"])
    assert '--rendezvous "$$PET_MASTER_ADDR:$$PET_MASTER_PORT"' in document["spec"]["trainer"]["command"][2]


def test_rdma_devices_come_with_locked_memory(here) -> None:
    efa = ("--rdma", "vpc.amazonaws.com/efa=4")
    job = _manifest(here, "kubernetes", *efa)[-1]
    kubernetes_validate.validate(job, "1.30", strict=True)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "4"}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    trainer = _manifest(here, "kubeflow", *efa)[-1]["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["vpc.amazonaws.com/efa"] == "4"
    assert trainer["numProcPerNode"] == 4


@pytest.mark.parametrize("engine", ["kubernetes", "kubeflow", "skypilot"])
def test_processes_default_to_the_gpus_of_a_node(here, engine: str) -> None:
    """The first lines say so; without GPUs, and on a CPU, it is one."""
    words = ("launch", "manifest", "--for", engine, "--image", "i", "imagenet-rn18-2ep")
    gpus = ("--gpus-per-node", 8, *(("--gpu-type", "A100") if engine == "skypilot" else ()))
    cases = (((), 1, "no --gpus-per-node"), (gpus, 8, "--gpus-per-node"), ((*gpus, "--device", "cpu"), 1, "device=cpu"))
    for more, count, source in cases:
        answer = here(*words, *more)
        assert f"# processes per node: {count} ({source})\n" in answer.stdout, answer.stderr
        assert f"--procs {count} --nodes 2" in answer.stdout


@pytest.mark.parametrize("engine", ["kubernetes", "kubeflow", "skypilot"])
def test_nodes_train_only_after_their_selftest(here, engine: str) -> None:
    gpus = ("--gpu-type", "A100") if engine == "skypilot" else ()
    text = str(_manifest(here, engine, *gpus, "--selftest"))
    assert re.search(r"&& paceline selftest &&[ \\n]*(exec )?paceline train", text), text
    assert "paceline selftest --device cpu &&" in str(_manifest(here, engine, *gpus, "--selftest", "--device", "cpu"))


@pytest.mark.parametrize("engine", ["kubernetes", "kubeflow", "skypilot"])
def test_imported_packages_have_to_fit_into_a_variable(here, monkeypatch, tmp_path: Path, engine: str) -> None:
    (package := tmp_path / "code" / f"packed_{engine}").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "id_rsa").write_text("canary")
    monkeypatch.syspath_prepend(package.parent)
    words = ("--image", "i", "--procs", 1, "digits", "--import", package.name)
    answer = here("launch", "manifest", "--for", engine, *words)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"# PACELINE_EXTENSIONS contains {package.name}/__init__.py\n")
    assert "id_rsa" not in answer.stdout
    list(yaml.safe_load_all(answer.stdout))
    numbers = random.Random(0)
    (package / "table.txt").write_text("".join(chr(numbers.randrange(33, 127)) for _ in range(130_000)))
    message = complaint(here("launch", "manifest", "--for", engine, *words))
    assert "[extensions-too-large]" in message
    assert "Install them in the image" in message


def _refers_to(secret: dict, env: list[dict]) -> bool:
    """Whether the nodes get the token by reference, not by value."""
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "token"}}
    return {"name": "PACELINE_TOKEN", "valueFrom": reference} in env and len(secret["stringData"]["token"]) == 32


def test_one_node_needs_no_token(here) -> None:
    assert "TOKEN" not in str(_manifest(here, "kubernetes", "--nodes", 1))


def test_skypilot_task_has_nodes_and_gpus(here) -> None:
    """Its validator runs in tests/cluster, because it takes half a gigabyte."""
    (task,) = _manifest(here, "skypilot", "--gpu-type", "A100")
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "A100:4"
    assert "$SKYPILOT_NODE_RANK" in task["run"]
    assert list(task["secrets"]) == ["PACELINE_TOKEN"]


def test_manifests_contain_no_secret_of_the_environment(here, monkeypatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "canary")
    for engine in ("kubernetes", "kubeflow", "skypilot"):
        gpus = ("--gpu-type", "A100") if engine == "skypilot" else ()
        assert "canary" not in str(_manifest(here, engine, *gpus, "--results", "s3://bucket/prefix"))


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("--for", "nomad"), "unknown-engine", "nomad"),
        (("--for", "kubernetes"), "missing-option", "--image"),
        (("--for", "skypilot", "--gpus-per-node", 1), "missing-option", "--gpu-type"),
        (("--for", "skypilot", "--gpu-type", "A100"), "conflicting-options", "--gpus-per-node"),
        (("--for", "kubeflow", "--gpu-type", "A100", "--gpus-per-node", 1), "conflicting-options", "skypilot"),
        (("--for", "kubernetes", "--image", "i", "--rdma", "efa=4"), "invalid-rdma", "efa=4"),
        (("--for", "skypilot", "--rdma", "vpc.amazonaws.com/efa=4"), "conflicting-options", "--rdma"),
    ],
)
def test_missing_options_are_named(here, words: tuple[object, ...], code: str, named: str) -> None:
    message = complaint(here("launch", "manifest", *words, "digits"))
    assert f"[{code}]" in message
    assert named in message
