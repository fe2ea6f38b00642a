"""Names that other programs use lead to the fields of a recipe."""

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.config.io import fields, load_recipe
from paceline.config.synonyms import targets
from paceline.errors import ConfigError


def _told(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits", words)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("typed", "cure"),
    [
        ("--epochs 10", "--train.duration 10ep"),
        ("--max_epochs 10", "--train.duration 10ep"),
        ("--max_steps 500", "--train.duration 500ba"),
        ("--batch_size 128", "--train.global_batch 128 (the total over all ranks and accumulation steps"),
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
        ("--data /data/photos", "--data.path /data/photos"),
        ("--dataset CIFAR10", "--data.name cifar10"),
        ("--data-dir /data", "--data.path /data"),
        ("--weight-decay 0.05", "--optim.weight_decay 0.05"),
        ("--wd 0.05", "--optim.weight_decay 0.05"),
        ("--image_size 224", "--data.size 224"),
        ("--img-size 224", "--data.size 224"),
        ("--size 224", "--data.size 224"),
        ("--input-size 3 224 224", "--data.size 224"),
        ("--pretrained", "--model.weights pretrained"),
        ("--pretrained true", "--model.weights pretrained"),
        ("--pretrained false", "--model.weights random"),
        ("--momentum 0.8", "--optim.momentum 0.8"),
        ("--dropout 0.1", "--model.options '{drop_rate: 0.1}'"),
        ("--drop-path 0.1", "--model.options '{drop_path_rate: 0.1}'"),
        ("--warmup 5", "--optim.schedule.warmup 5ep"),
        ("--warmup_epochs 5", "--optim.schedule.warmup 5ep"),
        ("--warmup_steps 500", "--optim.schedule.warmup 500ba"),
        ("--label_smoothing 0.1", "--train.label_smoothing 0.1"),
        ("--smoothing 0.1", "--train.label_smoothing 0.1"),
        ("--amp", "--precision auto"),
        ("--amp-dtype bfloat16", "--precision bf16"),
        ("--optimizer adam", "--optim.name adamw"),
        ("--opt SGD", "--optim.name sgd"),
        ("--scheduler cosine", "--optim.schedule.name cosine"),
        ("--sched onecycle", "--optim.schedule.name one-cycle"),
        ("--optim.schedule cosine", "--optim.schedule.name cosine"),
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
        ("--optimizer.lr 0.1", "--optim.lr 0.1"),
    ],
)
def test_the_words_of_other_programs_lead_to_the_field_and_its_value(typed: str, cure: str) -> None:
    told = _told(*typed.split())
    assert told.startswith(f"{typed}: ")
    assert f"; write {cure}" in told


def test_a_number_of_classes_is_not_wanted() -> None:
    assert "the data set determines the number of classes: leave it out" in _told("--num_classes", "10")


def test_in_a_file_the_cure_is_yaml(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("name: a\nepochs: 10\nmodel: {name: resnet18, pretrained: true}\noptimizer: {lr: 0.1}\ngpus: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert caught.value.problems == (
        "model.pretrained=True: no such field; write model: {weights: pretrained}",
        "epochs=10: no such field; write train: {duration: 10ep}",
        "optimizer.lr=0.1: no such field; did you mean optim.lr?",
        "gpus=4: no such field; write --procs 4 on the command line (of `paceline train`; --procs-per-node of "
        "`paceline launch`)",
    )


def test_a_group_that_got_a_plain_value_is_the_only_complaint() -> None:
    assert "--model.name resnet18" in _told("--model", "resnet18", "--model.weights", "pretrained")


def test_below_a_plain_field_there_is_nothing() -> None:
    assert "--seed.more: there is no such field" in _told("--seed", "1", "--seed.more", "2")


def test_equals_without_dashes_is_explained() -> None:
    assert _told("optim.lr=0.1").endswith("write --optim.lr 0.1")


def test_inside_a_phase_its_own_fields_are_named() -> None:
    assert "did you mean phases.0.global_batch?" in _told("--phases", "[{epochs: [0, 1], batch_size: 3}]")
    assert "valid fields: epochs, size, global_batch" in _told("--phases", "[{epochs: [0, 1], nonsense: 3}]")


def test_a_name_in_several_groups_is_not_guessed() -> None:
    assert "did you mean optim.schedule.step_size, ema.every, evaluate.every" in _told("--every", "1ep")


def test_every_hint_names_a_field_that_exists() -> None:
    known = {row.path for row in fields()} | {"--procs", "--nodes", "--rendezvous", "--runs", "--name", "--resume"}
    assert set(targets()) <= known


def test_launch_knows_the_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "local", "--epochs", "10", "digits"]) == 1
    assert "write --train.duration" in capsys.readouterr().err
