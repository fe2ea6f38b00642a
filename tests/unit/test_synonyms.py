"""Option names of other programs lead to the fields of a recipe."""

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config.io import fields, load_recipe
from paceline.config.synonyms import targets
from paceline.errors import ConfigError, Problem


def _problem(*words: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits", words)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--epochs 10", "--train.duration 10ep"),
        ("--max_epochs 10", "--train.duration 10ep"),
        ("--max_steps 500", "--train.duration 500ba"),
        ("--batch_size 128", "--train.global_batch 128` (the total over all ranks"),
        ("--batch 128", "--train.global_batch 128"),
        ("-b 128", "--train.global_batch 128"),
        ("--lr 0.1", "--optim.lr 0.1"),
        ("--learning_rate 0.1", "--optim.lr 0.1"),
        ("--workers 4", "--data.decode_threads 4"),
        ("--num-workers 4", "--data.decode_threads 4"),
        ("-j 4", "--data.decode_threads 4"),
        ("--model resnet18", "--model.name resnet18"),
        ("--arch resnet18", "--model.name resnet18"),
        ("--data imagenet", "--data.name imagenet"),
        ("--dataset CIFAR10", "--data.name cifar10"),
        ("--data-dir /data", "--data.path /data"),
        ("--weight-decay 0.05", "--optim.weight_decay 0.05"),
        ("--wd 0.05", "--optim.weight_decay 0.05"),
        ("--image_size 224", "--data.size 224"),
        ("--img-size 224", "--data.size 224"),
        ("--size 224", "--data.size 224"),
        ("--input-size 3 224 224", "--data.size 224"),
        ("--aa rand-m9-n3-mstd0.5-inc1", "--data.augment '{policy: timm-randaugment, magnitude: 9, num_ops: 3, "),
        ("--aa rand-m6-p1-inc1", "--data.augment '{policy: timm-randaugment, magnitude: 6, op_probability: 1, increas"),
        ("--bce-target-thresh 0.2", "--train.bce_target_threshold 0.2"),
        ("--remode pixel", "--data.augment.random_erasing_mode pixel"),
        ("--train-interpolation random", "--data.augment.random_interpolation true"),
        ("--pretrained", "--model.weights pretrained"),
        ("--pretrained true", "--model.weights pretrained"),
        ("--pretrained false", "--model.weights random"),
        ("--momentum 0.8", "--optim.momentum 0.8"),
        ("--dropout 0.1", "--model.options '{drop_rate: 0.1}'"),
        ("--drop-path 0.1", "--model.drop_path 0.1"),
        ("--warmup 5", "--optim.schedule.warmup 5ep"),
        ("--warmup_epochs 5", "--optim.schedule.warmup 5ep"),
        ("--warmup_steps 500", "--optim.schedule.warmup 500ba"),
        ("--label_smoothing 0.1", "--train.label_smoothing 0.1"),
        ("--smoothing 0.1", "--train.label_smoothing 0.1"),
        ("--amp", "--precision auto"),
        ("--amp-dtype bfloat16", "--precision bf16"),
        ("--optimizer Adam", "--optim.name adam"),
        ("--opt SGD", "--optim.name sgd"),
        ("--scheduler cosine", "--optim.schedule.name cosine"),
        ("--sched onecycle", "--optim.schedule.name one-cycle"),
        ("--optim.schedule cosine", "--optim.schedule.name cosine"),
        ("--sched ReduceLROnPlateau", "--optim.schedule.name plateau"),
        ("--patience-epochs 3", "--optim.schedule.patience 3"),
        ("--decay-rate 0.5", "--optim.schedule.gamma 0.5"),
        ("--optim.schedule.factor 0.5", "--optim.schedule.gamma 0.5"),
        ("--optim.schedule.min_delta 0.5", "--optim.schedule.threshold 0.5"),
        ("--patience 3", "--early_stop.patience 3"),
        ("--early_stop 3", "--early_stop.patience 3"),
        ("--early_stopping.monitor val_loss", "--early_stop.metric loss"),
        ("--gpus 4", "--procs 4"),
        ("--devices 4", "--procs 4"),
        ("--output out", "--runs out"),
        ("--checkpoint_every 5", "--checkpoint.every 5ep"),
        ("--log_interval 50", "--log.every 50ba"),
        ("--clip_grad 1.0", "--optim.clip_grad_norm 1.0"),
        ("--model_ema", "--ema.decay 0.9999"),
        ("--ema true", "--ema.decay 0.9999"),
        ("--accumulate 4", "--train.grad_accumulation 4"),
        ("--grad_accum_steps 4", "--train.grad_accumulation 4"),
        ("--random_seed 4", "--seed 4"),
        ("--betas 0.9 0.99", "--optim.betas 0.9 0.99"),
        ("--trainer.max_epochs 10", "--train.duration 10ep"),
        ("--grad_accumulation 4", "--train.grad_accumulation 4"),
        ("--crop_pct 0.95", "--evaluate.crop_pct 0.95"),
        ("--crop-pct 0.95", "--evaluate.crop_pct 0.95"),
        ("--tta", "--evaluate.tta flip"),
        ("--tta true", "--evaluate.tta flip"),
        ("--tta flip-translate", "--evaluate.tta flip-translate"),
        ("--transport shm", "--grad_sync.transport shm"),
        ("--max_corrupt 0.1", "--data.max_corrupt 0.1"),
        ("--clip_grad_norm 1.0", "--optim.clip_grad_norm 1.0"),
        ("--optimizer.lr 0.1", "--optim.lr 0.1"),
    ],
)
def test_other_names_lead_to_the_field_and_its_value(typed: str, fix: str) -> None:
    problem = _problem(*typed.split())
    assert problem.code in ("unknown-field", "field-is-group")
    assert problem.message.startswith(f"{typed}: ")
    assert f"`{fix}" in problem.message


def test_every_field_is_found_by_its_bare_name() -> None:
    """The hint for a name without its group contains the full path."""
    paths = [row.path for row in fields()]
    other_meaning = {"dtype", "epochs", "per_rank_batch"}  # usually precision, train.duration and train.global_batch
    for name in sorted({path.rpartition(".")[2] for path in paths} - set(paths) - other_meaning):
        with pytest.raises(ConfigError) as caught:
            load_recipe("digits", [f"--{name}", "VALUE"])
        candidates = [path for path in paths if path.rpartition(".")[2] == name]
        assert any(path in caught.value.problems[0].message for path in candidates), caught.value


def test_the_number_of_classes_is_not_an_option() -> None:
    problem = _problem("--num_classes", "10")
    assert problem.code == "unknown-field"
    assert "data.synthetic.classes" in problem.message


def test_in_a_file_the_fix_is_yaml(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("name: a\nepochs: 10\nmodel: {name: resnet18, pretrained: true}\noptimizer: {lr: 0.1}\ngpus: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    expected = [
        ("model.pretrained=True", "`model: {weights: pretrained}`"),
        ("epochs=10", "`train: {duration: 10ep}`"),
        ("optimizer.lr=0.1", "optim.lr?"),
        ("gpus=4", "`--procs 4` on the command line"),
    ]
    for problem, (given, fix) in zip(caught.value.problems, expected, strict=True):
        assert problem.code == "unknown-field"
        assert problem.message.startswith(f"{given}: ")
        assert fix in problem.message


def test_a_plain_value_for_a_group_is_reported_once() -> None:
    problem = _problem("--model", "resnet18", "--model.weights", "pretrained")
    assert problem.code == "field-is-group"
    assert "--model.name resnet18" in problem.message


def test_a_field_below_a_plain_field_is_unknown() -> None:
    problem = _problem("--seed", "1", "--seed.more", "2")
    assert problem.code == "unknown-field"
    assert "--seed.more" in problem.message


def test_equals_without_dashes_is_explained() -> None:
    problem = _problem("optim.lr=0.1")
    assert problem.code == "value-without-field"
    assert "`--optim.lr 0.1`" in problem.message


def test_hints_within_a_phase_name_fields_of_a_phase() -> None:
    assert "phases.0.global_batch?" in _problem("--phases", "[{epochs: [0, 1], batch_size: 3}]").message
    assert "epochs, size, global_batch" in _problem("--phases", "[{epochs: [0, 1], nonsense: 3}]").message


def test_an_ambiguous_name_gets_all_candidates() -> None:
    assert "ema.every, evaluate.every, checkpoint.every or log.every" in _problem("--every", "1ep").message


def test_every_hint_names_a_field_that_exists() -> None:
    known = {row.path for row in fields()} | {"--procs", "--nodes", "--rendezvous", "--runs", "--name", "--resume"}
    assert set(targets()) <= known


def test_launch_gives_the_same_hints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "local", "--epochs", "10", "digits"]) == 2
    assert "--train.duration" in capsys.readouterr().err
