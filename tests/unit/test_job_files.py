"""The file of a job: what is stored is read back, and anything else is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import complaint, raises

from paceline.launch import job as jobs
from paceline.launch.job import Ec2Resources, Instance, Job
from paceline.launch.specs import Ec2Spec, LocalSpec, SlurmSpec, SshSpec
from paceline.system.files import private_folder

COMMON = {"recipe": "name: a\ndata: {name: digits}\n", "hosts": ("n1", "n2"), "name": "j"}
RESOURCES = Ec2Resources(
    region="r",
    zone="z",
    subnet="s",
    image="i",
    root_device="d",
    security_group="g",
    placement_group="",
    used_addresses=("10.0.0.1",),
    instances={"n1": Instance("i-1", "10.0.0.1")},
)
JOBS = [
    Job("j", LocalSpec(**COMMON, pass_env=("A",)), rendezvous="127.0.0.1:1", variables={"PACELINE_SPOT": "1"}),
    Job("j", SshSpec(**COMMON, ssh_config="/c", rendezvous_host="n1"), rendezvous_host="n1", join_timeout=15),
    Job("j", SlurmSpec(**COMMON, sbatch_options={"mem": "1G", "exclusive": None}, seeds=(0, 1)), slurm_id="7"),
    Job("j", Ec2Spec(**COMMON, instance_type="x", max_price=0.5, addresses=("10.0.0.1",)), ec2=RESOURCES),
]


@pytest.fixture(autouse=True)
def own_home(here, tmp_path: Path, monkeypatch) -> None:
    """Runs after `here`, which clears such variables."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("job", JOBS, ids=[job.spec.backend for job in JOBS])
def test_job_is_read_back(job: Job) -> None:
    jobs.save(job)
    assert jobs.load("j") == job
    assert (jobs.folder_of("j") / "recipe.yaml").read_text() == job.spec.recipe


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.pop("spec"),
        lambda job: job["spec"].update(backend="moon"),
        lambda job: job["spec"].pop("instance_type"),
        lambda job: job["spec"].update(unknown=1),
        lambda job: job["spec"].update(root_gb="100"),
        lambda job: job["spec"].update(spot=1),
        lambda job: job["spec"].update(hosts="n1"),
        lambda job: job["spec"].update(hosts=["-oProxyCommand=x"]),
        lambda job: job["spec"].update(name="../.."),
        lambda job: job["spec"].update(pass_env=["A B"]),
        lambda job: job.update(id="../.."),
        lambda job: job.update(variables={"A B": "1"}),
        lambda job: job.update(variables=["A"]),
        lambda job: job["ec2"].update(instances={"n1": "i-1"}),
        lambda job: job["ec2"]["instances"]["n1"].pop("address"),
    ],
)
def test_changed_job_file_is_refused(change: Change) -> None:
    jobs.save(JOBS[-1])
    path = jobs.folder_of("j") / "job.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with raises("job-corrupt") as caught:
        jobs.load("j")
    assert caught.value.fields == {"path": path}
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 10**5, '{"spec": 1}', '{"spec": null}', "\x00"])
def test_file_that_is_not_a_job_is_refused(here, text: str) -> None:
    folder = jobs.folder_of("broken")
    for parent in (folder.parents[1], folder.parent, folder):
        private_folder(parent)
    (folder / "job.json").write_text(text)
    (folder / "recipe.yaml").write_text("name: a\n")
    message = complaint(here("status", "broken"))
    assert "[job-corrupt]" in message
    assert str(folder / "job.json") in message


def test_jobs_are_found_by_the_start_of_their_id() -> None:
    for name in ("one-1", "one-2"):
        jobs.save(Job(name, LocalSpec(recipe="data: {}\n", hosts=("n1",), name=name)))
    assert jobs.load("one-1").id == "one-1"
    with raises("ambiguous-job"):
        jobs.load("one")
    with raises("unknown-job") as caught:
        jobs.load("two")
    assert caught.value.fields == {"job": "two"}


def _fail(spec: LocalSpec, made: list[Job]) -> None:
    with jobs.new_job(spec) as job:
        assert jobs.folder_of(job.id).is_dir()
        made.append(job)
        raise KeyError


def test_job_that_fails_before_it_is_saved_leaves_nothing() -> None:
    made: list[Job] = []
    with pytest.raises(KeyError):
        _fail(LocalSpec(recipe="name: a b\n", hosts=("n1",)), made)
    assert made[0].id.startswith("a-b-")
    assert made[0].spec.name == made[0].id
    assert not jobs.folder_of(made[0].id).exists()
