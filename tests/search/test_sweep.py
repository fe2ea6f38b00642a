"""Sweeps in real processes: workers that are killed, stopped and joined, pruning on two ranks, trials that fail."""

import json
import signal
import subprocess
from pathlib import Path

import optuna
import psutil
from conftest import HANG, command, complaint, environment
from sweeps import SPACE, TINY, check_complete, first_steps, start, wait_until, words_of

import paceline as pl
from paceline.analysis.sweeps.record import read_sweep
from paceline.config.io import load_recipe
from paceline.search.spec import make_spec
from paceline.search.study import SharedStudy
from paceline.track.records import RunFolder


def _suspended_training(worker: psutil.Process, folder: Path) -> Path | None:
    """Suspend the training of a worker between a checkpoint and its end; return its run folder."""
    for process in worker.children():
        words = process.cmdline()
        if "--name" not in words:
            continue
        run = folder / words[words.index("--name") + 1]
        if any(run.glob("checkpoints/*/COMMIT")):
            process.suspend()
            if not RunFolder(run).finished:
                return run
            process.resume()
    return None


def _kill_in_a_trial(worker: "subprocess.Popen[bytes]", folder: Path) -> Path:
    """Kill a worker with SIGKILL while it trains; return the run folder of the trial."""
    found: list[Path] = []

    def suspended() -> bool:
        try:
            run = _suspended_training(psutil.Process(worker.pid), folder)
        except psutil.NoSuchProcess:  # the training ended meanwhile
            run = None
        found.extend([run] if run else [])
        return bool(found)

    wait_until(suspended, worker)
    worker.kill()
    worker.wait()
    return found[0]


def test_twenty_trials_of_two_workers_one_of_which_is_killed(tmp_path: Path) -> None:
    words, folder = words_of("--trials", 20, "--name", "both", epochs=8), tmp_path / "runs" / "both"
    first = start(tmp_path, tmp_path / "first.txt", words)
    second = start(tmp_path, tmp_path / "second.txt", words)
    wait_until(lambda: len(list(folder.glob("trial-*"))) >= 6, first, second)
    killed = _kill_in_a_trial(first, folder)
    assert second.wait(HANG) == 0, (tmp_path / "second.txt").read_text()
    record = check_complete(folder, 20)
    starts = {trial.run: first_steps(folder / trial.run) for trial in record.trials}
    assert starts.pop(killed.name)[0] == 0
    assert first_steps(killed)[1] > 0, "resumed from its checkpoint"
    assert set(map(tuple, starts.values())) == {(0,)}, "no other trial was trained twice"
    assert f"trial {int(killed.name[-4:])} resumes" in (tmp_path / "second.txt").read_text()
    assert record.importance is not None
    assert load_recipe(str(folder / "best.yaml")).optim.lr == float(record.best.values["optim.lr"])


def test_everything_is_killed_and_started_again(tmp_path: Path) -> None:
    words, folder = words_of("--trials", 3, "--name", "all", epochs=8), tmp_path / "runs" / "all"
    killed = _kill_in_a_trial(start(tmp_path, tmp_path / "out.txt", words), folder)
    with (folder / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 8, "trial')  # as if it was killed while it wrote
    again = start(tmp_path, tmp_path / "out.txt", words)
    assert again.wait(HANG) == 0, (tmp_path / "out.txt").read_text()
    check_complete(folder, 3)
    assert first_steps(killed)[1] > 0


def test_a_signal_stops_after_checkpoints(tmp_path: Path, paceline) -> None:
    words, folder = words_of("--trials", 2, "--parallel", 2, "--name", "two", epochs=60), tmp_path / "runs" / "two"
    worker = start(tmp_path, tmp_path / "out.txt", words)
    wait_until(lambda: len({path.parents[2] for path in folder.glob("trial-*/checkpoints/*/COMMIT")}) == 2, worker)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(HANG) == 128 + signal.SIGTERM, (tmp_path / "out.txt").read_text()
    assert {trial.state for trial in read_sweep(folder).trials} <= {"running", "complete"}
    interrupted = [path for path in folder.glob("trial-*") if not RunFolder(path).finished]
    assert all(RunFolder(path).read_summary()["status"] == "interrupted" for path in interrupted)
    answer = paceline(*words)
    assert answer.returncode == 0, answer.stderr
    assert "Warning" not in answer.stderr
    check_complete(folder, 2)
    assert all(first_steps(path)[1] > 0 for path in interrupted)


def test_two_ranks_agree_on_the_step_at_which_a_trial_is_pruned(tmp_path: Path, paceline) -> None:
    folder, words = tmp_path / "runs" / "pruned", [*TINY, "--train.duration", "2000ep"]
    spec = make_spec(load_recipe("digits", words), SPACE[1::2], folder, procs=2, trials=5)
    SharedStudy(spec)
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    study = optuna.load_study(study_name="pruned", storage=optuna.storages.JournalStorage(backend))
    perfect = dict.fromkeys(range(1, 2001), 1.0)
    for _ in range(5):  # the pruner compares with five trials
        study.add_trial(optuna.create_trial(value=1.0, intermediate_values=perfect))
    options = ("--procs", 2, "--pruner", "median", "--trials", 6, "--name", "pruned")
    answer = paceline("sweep", "digits", *SPACE, *words, *options)
    assert answer.returncode == 1, answer.stderr  # no trial is complete
    run = RunFolder(folder / "trial-0005")
    summary, environment = run.read_summary(), run.read_starts()[0]
    assert (environment["ranks"], summary["status"], summary["stopped_by"]) == (2, "finished", "sweep")
    assert 0 < summary["step"] == summary["total_steps"] < 2000 * 14
    assert not run.stop_request.exists()
    trial = read_sweep(folder).trials[5]
    assert (trial.state, bool(trial.reason), bool(trial.curve)) == ("pruned", True, True)


def test_trials_that_all_fail_stop_the_sweep(tmp_path: Path, paceline) -> None:
    space = ("--set", "model.options.width=1,2")
    answer = paceline(*words_of("--trials", 20, "--name", "bad", space=space))
    assert "[trials-failed]" in complaint(answer)
    assert "[invalid-model-options]" in answer.stderr
    assert [trial.state for trial in read_sweep(tmp_path / "runs" / "bad").trials] == ["failed"] * 3


def test_a_trial_that_diverges_has_no_result(tmp_path: Path, paceline) -> None:
    space = ("--set", "optim.lr=0.05,1e30")
    answer = paceline(
        *words_of("--sampler", "grid", "--name", "wild", "--optim.schedule.name", "constant", space=space)
    )
    assert answer.returncode == 0, answer.stderr
    record = read_sweep(tmp_path / "runs" / "wild")
    assert [trial.state for trial in record.trials] == ["complete", "diverged"]
    assert record.best == record.trials[0]


def test_no_trial_starts_after_the_budget(tmp_path: Path, paceline) -> None:
    answer = paceline(*words_of("--trials", 50, "--budget", "0.1s", "--name", "short"))
    assert answer.returncode == 0, answer.stderr
    check_complete(tmp_path / "runs" / "short", 1)
    assert "49 of 50 trials have not started" in answer.stdout


def test_a_full_disk_loses_no_trial(tmp_path: Path, paceline) -> None:
    words = words_of("--trials", 2, "--name", "full", "--model.options", "{widths: [64, 128]}")
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "limited", *command(*words)]
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": HANG}
    answer = subprocess.run(limited, check=False, **options)
    assert "[checkpoint-not-written]" in complaint(answer), answer.stderr
    assert [trial.state for trial in read_sweep(tmp_path / "runs" / "full").trials] == ["running"]
    assert paceline(*words).returncode == 0
    check_complete(tmp_path / "runs" / "full", 2)


def test_srun_starts_a_worker_per_task(tmp_path: Path) -> None:
    slurm = {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_TASKS": "2", "PROCID": "1", "LOCALID": "0", "NODEID": "0"}
    slurm |= {"STEP_TASKS_PER_NODE": "2", "STEP_NODELIST": "node1"}
    variables = environment() | {f"SLURM_{name}": value for name, value in slurm.items()}
    options = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True, "timeout": HANG}
    answer = subprocess.run(command(*words_of("--trials", 1, "--name", "srun")), check=False, **options)
    assert answer.returncode == 0, answer.stderr
    check_complete(tmp_path / "runs" / "srun", 1)


def test_python_and_the_other_commands(tmp_path: Path, monkeypatch, here) -> None:
    monkeypatch.setenv("PACELINE_THREADS", "1")
    overrides = {key.removeprefix("--"): value for key, value in zip(TINY[::2], TINY[1::2], strict=True)}
    overrides |= {"model.options": {"widths": [4, 8], "norm": "batch"}, "train.global_batch": 96}
    overrides |= {"log.tensorboard": False, "train.duration": "2ep"}
    seen: list[tuple[int, bool]] = []
    sweep = pl.sweep(
        pl.load_recipe("digits"),
        {"optim.lr": [0.05, 0.5], "seed": "0..1"},
        overrides,
        sampler="grid",
        metric="loss",
        on_trial=lambda number, _, end: seen.append((number, end is None)),
    )
    assert seen == [(number, starts) for number in range(4) for starts in (True, False)]
    assert len({tuple(trial.values.values()) for trial in sweep.trials}) == 4
    assert sweep.best.value == min(trial.value for trial in sweep.trials)
    assert sweep.best_recipe.is_file()
    assert "trial" in sweep._repr_html_()
    assert sweep.report(tmp_path / "page.html").stat().st_size > 10_000
    assert sweep.best.run in here("runs", sweep.path).stdout
    assert "digits-sweep: 4 of 4 trials" in here("runs").stdout
    assert "4 complete" in here("sweep", "--show", "digits-sweep").stdout
    assert here("report", sweep.path).returncode == 0
    data = (tmp_path / "report.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert len(json.loads(data)["trials"]) == 4
    assert "[is-a-sweep]" not in here("compare", sweep.path, *sweep.path.glob("trial-*")).stderr
