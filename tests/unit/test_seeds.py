"""Several seeds of a recipe: parsing, devices, names, and commands that are refused."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from conftest import raises
from fake_backend import saved_job
from made_runs import make_run

import paceline as pl
from paceline.cli import seeds as command
from paceline.cli.seeds import slots
from paceline.config.io import load_recipe
from paceline.config.seeds import parse_seeds, run_names, seed_words
from paceline.engine.resume import choose_folder, folder_of_seed
from paceline.launch import job as jobs
from paceline.launch.backends import local
from paceline.launch.backends.slurm import _with_seed
from paceline.launch.job_states import known_here, runs_of
from paceline.launch.states import NodeState, parse_squeue
from paceline.system.gpus import Gpu

GPUS = [Gpu("nvidia", "a GPU", f"GPU-{number}") for number in range(8)]


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ("3", (0, 1, 2)),
        ("1", (0,)),
        ("0,3,7", (0, 3, 7)),
        ("3,", (3,)),
        (2, (0, 1)),
        ([5, 1], (5, 1)),
        (" 4, 2 ", (4, 2)),
    ],
)
def test_seeds(given: object, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(given) == seeds
    assert parse_seeds(seed_words(seeds)[1]) == seeds  # as a launch passes them on


@pytest.mark.parametrize(
    "given",
    ["", "0", "a", "1,1", "1,,2", ",", "-1", "1.5", "٣", 0, -2, [], [1, "2"], [1, 1], 1001, str(2**31) + ",", None],
)
def test_invalid_seeds(given: object) -> None:
    with raises("invalid-seeds"):
        parse_seeds(given)


def test_names() -> None:
    assert run_names("a", (0, 7)) == ["a-seed0", "a-seed7"]
    assert run_names("a", ()) == ["a"]
    assert seed_words(()) == []


@pytest.mark.parametrize(
    ("procs", "parallel", "seeds", "devices"),
    [
        (1, None, 5, ["0", "1", "2", "3", "4"]),
        (4, None, 5, ["0,1,2,3", "4,5,6,7"]),
        (2, 3, 5, ["0,1", "2,3", "4,5"]),
        (3, None, 5, ["0,1,2", "3,4,5"]),
        (2, 4, 2, ["0,1", "2,3"]),
    ],
)
def test_each_seed_has_its_own_gpus(procs: int, parallel: int | None, seeds: int, devices: list[str]) -> None:
    wanted = [",".join(f"GPU-{number}" for number in each.split(",")) for each in devices]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in slots(GPUS, procs, parallel, seeds)] == wanted


def test_seeds_that_use_all_devices_are_trained_one_by_one() -> None:
    assert slots(GPUS, 8, None, 5) == slots(GPUS, 2, 1, 5) == slots([], 2, None, 5) == [{}]
    assert slots([], 1, 3, 5) == [{}] * 3  # on CPUs only if asked
    amd = slots([Gpu("amd", "a GPU", str(number)) for number in range(4)], 2, None, 2)
    assert amd[1] == {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,1"}
    with raises("too-few-gpus"):
        slots(GPUS, 4, 3, 5)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--seeds", "x"), "invalid-seeds"),
        (("--seeds", ""), "invalid-seeds"),
        (("--seeds", 3, "--seed", 1), "conflicting-options"),
        (("--parallel", 2), "missing-option"),
        (("--seeds", 2, "--parallel", 2, "--nodes", 2, "--rendezvous", "127.0.0.1:1"), "conflicting-options"),
        (("--seeds", 2, "--optim.lrr", 1), "unknown-field"),
    ],
)
def test_refused(here, words: tuple[object, ...], code: str) -> None:
    answer = here("train", "digits", "--device", "cpu", *words)
    assert answer.returncode
    assert f"[{code}]" in answer.stderr
    assert not Path("runs").exists()


def test_resume_takes_no_seeds(here, tmp_path: Path) -> None:
    assert "[conflicting-options]" in here("train", "--resume", make_run(tmp_path, "a"), "--seeds", 2).stderr
    with raises("missing-option"):
        pl.train("digits", parallel=2)
    for more in ({"overrides": {"seed": 1}}, {"parallel": 2, "in_process": True}):
        with raises("conflicting-options"):
            pl.train("digits", seeds=2, **more)


def test_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "a-seed1", "--seed", "1")
    recipe = load_recipe("digits", ["--seed", "1"])
    assert folder_of_seed(recipe, folder) == folder
    assert folder_of_seed(recipe, tmp_path / "free") == tmp_path / "free"
    for words in (["--seed", "2"], ["--seed", "1", "--optim.lr", "0.3"]):
        with raises("run-of-another-recipe"):
            folder_of_seed(load_recipe("digits", words), folder)


def test_runs_do_not_go_into_the_folder_of_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sweep.json").write_text("{}")
    assert choose_folder(load_recipe("digits"), tmp_path, "a", again=False) == tmp_path / "a-2"
    with raises("is-a-sweep"):
        folder_of_seed(load_recipe("digits"), tmp_path / "a")


def _options(tmp_path: Path, **more: object) -> Namespace:
    given = {"procs": 1, "parallel": None, "threads": None, "runs": tmp_path, "results": "", "profile": ""}
    return Namespace(**given | more)


@pytest.fixture
def fake_training(tmp_path: Path, monkeypatch) -> Path:
    """Replace `paceline train` by a shell script, which fails for seed 1; its words are in the file `log`."""
    script = tmp_path / "train.sh"
    script.write_text(
        f"""echo "$*" >> {tmp_path}/log
error='{{"error": {{"code": "c", "message": "m", "fields": {{}}}}}}'
case "$*" in *--seeds=1,*) echo "$error" > "$PACELINE_OUTCOME"; exit 1 ;; esac
case "$*" in *--seeds=9,*) touch {tmp_path}/waits; trap 'exit 130' INT; while :; do sleep 0.1; done ;; esac
"""
    )
    monkeypatch.setattr(command, "own_command", lambda *words: ["sh", str(script), *words])
    return tmp_path / "log"


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_seed_that_fails_does_not_affect_the_others(tmp_path: Path, fake_training: Path, parallel: int) -> None:
    recipe = load_recipe("digits", ["--device", "cpu"])
    with raises("seeds-failed") as caught:
        command.train_seeds(recipe, (0, 1, 2), _options(tmp_path, parallel=parallel), "a")
    assert caught.value.fields["seeds"] == [1]
    assert "m [c]" in str(caught.value)
    lines = fake_training.read_text().splitlines()
    assert sorted(line.rpartition("--seeds=")[2] for line in lines) == ["0,", "1,", "2,"]
    assert all("--name=a" in line for line in lines)
    assert all(("--threads" in line) == (parallel > 1) for line in lines)


def test_all_seeds_train_the_recipe_as_it_was_at_the_start(tmp_path: Path, fake_training: Path) -> None:
    assert command.train_seeds(load_recipe("digits", ["--device", "cpu"]), (0, 2), _options(tmp_path), "a") == 0
    paths = {line.split()[1] for line in fake_training.read_text().splitlines()}
    assert len(paths) == 1
    assert not Path(paths.pop()).exists()  # the copy of the recipe is removed


def test_a_signal_ends_all_seeds(tmp_path: Path, fake_training: Path) -> None:
    script = f"""
import signal, threading, os, time
from pathlib import Path
from argparse import Namespace
from paceline.cli import seeds
from paceline.config.io import load_recipe
seeds.own_command = lambda *words: ["sh", {str(tmp_path / "train.sh")!r}, *words]
def interrupt():
    while not Path({str(tmp_path / "waits")!r}).exists(): time.sleep(0.05)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
options = Namespace(procs=1, parallel=None, threads=None, runs=Path("r"), results="", profile="")
print(seeds.train_seeds(load_recipe("digits", ["--device", "cpu"]), (9, 3), options, "a"))
"""
    import sys

    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert answer.stdout == "130\n", answer.stderr
    assert "--seeds=3," not in fake_training.read_text()  # it was not started


def test_jobs_with_seeds(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    job = saved_job(tmp_path, backend="local", seeds=(0, 4))
    for seed, host in ((0, "n1"), (4, "n2")):
        folder = jobs.folder_of(job.id) / host / "runs" / f"j-seed{seed}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({"status": "finished", "step": seed}))
        (folder / "metrics.jsonl").touch()
    assert [now.name for now in runs_of(job, job.spec.hosts)] == ["j-seed0", "j-seed4"]
    assert known_here(job) is NodeState.UNKNOWN
    assert [path.name for path in local.fetch(job)] == ["j-seed0", "j-seed4"]
    assert known_here(job) is NodeState.FINISHED
    assert pl.launch.LaunchedJob("j").paths == [tmp_path / "runs" / name for name in ("j-seed0", "j-seed4")]


def test_slurm_says_which_seed_a_task_trains() -> None:
    assert str(_with_seed(parse_squeue("7_1 RUNNING n1"), (3, 5))) == "seed 5: RUNNING n1"
    assert str(_with_seed(parse_squeue("7_[0-1] PENDING (Resources)"), (3, 5))) == "PENDING (Resources)"


def test_manifests_pass_the_seeds_on() -> None:
    manifest = pl.launch.manifest("digits", "kubernetes", nodes=1, seeds=2, image="i", name="many")
    job = next(one for one in yaml.safe_load_all(manifest) if one["kind"] == "Job")
    assert "--name many --seeds 0,1," in job["spec"]["template"]["spec"]["containers"][0]["command"][2]
