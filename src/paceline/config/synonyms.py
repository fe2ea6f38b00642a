"""Option names of timm, torchvision's references, Lightning and others, and the recipe fields they correspond to."""

import re
import shlex
from typing import Any

# FIELD=VALUE, with {} for the given value, or FIELD=ON|OFF for a switch (ON|OFF|{}: other values as given); a note may
# follow in parentheses. Options of commands begin with dashes. Names with a dot apply to that group only.
_REPLACEMENTS = {
    "train.duration={}ep": "epochs num_epochs n_epochs nepochs max_epochs total_epochs train_epochs epoch",
    "train.duration={}ba": "steps max_steps num_steps total_steps train_steps iterations iters max_iters num_iters",
    "train.global_batch={} (the total over all ranks and accumulation steps; timm and torchvision count per GPU)": (
        "batch_size batch bs b global_batch_size total_batch_size train_batch_size batchsize effective_batch_size"
    ),
    "train.global_batch={} (your value is per rank: multiply it by ranks x accumulation steps)": (
        "per_rank_batch per_rank_batch_size per_gpu_batch_size per_device_batch_size per_device_train_batch_size "
        "micro_batch_size microbatch_size batch_size_per_gpu"
    ),
    "train.grad_accumulation={}": (
        "accumulate accumulation accumulate_grad_batches grad_accum grad_accum_steps grad_accumulation "
        "gradient_accumulation gradient_accumulation_steps accum_steps accumulation_steps accum_iter"
    ),
    "train.label_smoothing={}": "label_smoothing smoothing label_smooth ls",
    "train.class_weights={}": "class_weight loss_weights loss_weight train.weight train.weights weight_classes",
    "train.class_weights=balanced|none": "auto_class_weights balanced_loss",
    "train.mixup={}": "mixup_alpha",
    "train.cutmix={}": "cutmix_alpha",
    "train.loss=bce|cross-entropy": "bce_loss",
    "train.bce_target_threshold={}": "bce_target_thresh target_threshold",
    "train.loss={}": "criterion loss_fn",
    "optim.name={}": "optimizer opt optim optimizer_name optim_name",
    "optim.lr={}": "lr learning_rate base_lr max_lr lr_base initial_lr init_lr peak_lr blr",
    "optim.weight_decay={}": "weight_decay wd l2",
    "optim.momentum={}": "momentum mom",
    "optim.betas={}": "opt_betas adam_betas",
    "optim.eps={}": "opt_eps epsilon adam_eps",
    "optim.clip_grad_norm={}": (
        "clip_grad clip_grad_norm grad_clip grad_clip_norm gradient_clip gradient_clip_val gradient_clipping clip "
        "max_norm max_grad_norm grad_norm_clip"
    ),
    "optim.schedule.name={}": "scheduler sched schedule lr_scheduler lr_schedule lr_sched lr_policy scheduler_name",
    "optim.schedule.warmup={}ep": "warmup warmup_epochs lr_warmup_epochs num_warmup_epochs warm_up",
    "optim.schedule.warmup={}ba": "warmup_steps warmup_iters num_warmup_steps lr_warmup_steps",
    "optim.schedule.start_factor=0.01 (a multiple of optim.lr)": (
        "warmup_lr warmup_factor lr_warmup_decay warmup_start_lr"
    ),
    "optim.schedule.warmup_prefix={}": "warmup_prefix",
    "optim.schedule.end_factor=0.01 (a multiple of optim.lr)": "min_lr lr_min eta_min final_lr end_lr",
    "optim.schedule.step_size={}ep": "decay_epochs lr_step_size step_size lr_decay_epochs",
    "optim.schedule.gamma={}": "decay_rate lr_gamma gamma lr_decay lr_factor optim.schedule.factor",
    "optim.schedule.patience={}": "patience_epochs lr_patience",
    "optim.schedule.cooldown={}": "cooldown_epochs lr_cooldown",
    "optim.schedule.threshold={}": "optim.schedule.min_delta lr_threshold",
    "early_stop.patience={}": (
        "patience early_stop early_stopping early_stopping_patience early_stop_patience early_stopping_rounds "
        "early_stopping.patience"
    ),
    "early_stop.min_delta={}": "min_delta early_stopping_min_delta early_stopping_threshold early_stopping.min_delta",
    "early_stop.metric={}": "early_stopping_metric early_stopping.monitor early_stop.monitor",
    "model.name={}": "model model_name arch architecture network net backbone encoder a m",
    "model.weights=pretrained|random": "pretrained use_pretrained imagenet_pretrained",
    "model.weights={}": "weights initial_checkpoint init_checkpoint pretrained_path finetune checkpoint_path",
    "model.options={{drop_rate: {}}}": "dropout drop drop_rate dropout_rate",
    "model.drop_path={}": (
        "drop_path drop_path_rate stochastic_depth stochastic_depth_prob drop_connect drop_connect_rate"
    ),
    "model.freeze={}": "freeze frozen frozen_layers freeze_layers freeze_modules",
    "model.freeze=backbone|[]": "freeze_backbone linear_probe freeze_encoder",
    "model.sync_batchnorm=true|false": "sync_bn sync_batchnorm sync_batch_norm syncbn",
    "data.name={}": "data dataset dataset_name data_name data_set",
    "data.path={}": "data_dir data_path data_root root dataset_path dataset_dir train_dir imagenet",
    "data.decode_threads={}": (
        "workers num_workers j n_workers nworkers dataloader_workers num_data_workers loader_workers"
    ),
    "data.size={}": (
        "size image_size img_size imgsz input_size resolution res crop_size train_crop_size train_size im_size imsize"
    ),
    "data.interpolation={}": "interpolation train_interpolation val_interpolation test_interpolation resample",
    "data.aug_repeats={}": "aug_repeats ra_reps repeated_aug ra_sampler repeated_augmentation",
    "data.sampler=balanced|shuffle": (
        "balanced_sampler balanced_sampling class_balanced weighted_sampler use_weighted_sampler oversample "
        "oversampling"
    ),
    "data.augment.flip=random|none": "hflip horizontal_flip random_flip",
    "data.augment.policy={}": "auto_augment aa autoaugment augment aug policy augmentation",
    "data.augment.policy=randaugment|none": "randaugment rand_augment use_randaugment",
    "data.augment.policy=trivialaugment|none": "trivialaugment trivial_augment",
    "data.augment.magnitude={}": "ra_magnitude randaugment_magnitude",
    "data.augment.magnitude_std={}": "mstd ra_magnitude_std",
    "data.augment.color_jitter={}": "color_jitter colorjitter jitter",
    "data.augment.random_erasing={}": "reprob random_erase random_erasing random_erase_prob re_prob",
    "data.augment.random_erasing_mode={}": "remode re_mode random_erase_mode",
    "data.augment.crop_scale={}": "scale rrc_scale",
    "data.augment.crop_ratio={}": "ratio rrc_ratio",
    "ema.decay={}": "model_ema_decay ema_decay ema_momentum",
    "ema.decay=0.9999|0": "model_ema use_ema ema ema.enabled",
    "ema.every={}": "model_ema_steps ema_steps ema_every",
    "evaluate.every={}ep": (
        "eval_every val_every eval_interval val_interval eval_freq validation_interval check_val_every_n_epoch "
        "evaluate_every validate_every evaluate.interval"
    ),
    "evaluate.per_rank_batch={}": (
        "val_batch_size eval_batch_size validation_batch_size test_batch_size per_device_eval_batch_size vb "
        "evaluate.batch_size evaluate.batch evaluate.global_batch"
    ),
    "evaluate.size={}": "val_size eval_size val_crop_size test_size val_resize_size evaluate.image_size",
    "evaluate.crop_pct={}": "crop_pct eval_crop_ratio test_crop_pct evaluate.crop",
    "evaluate.tta=flip|none|{}": "tta test_time_augmentation",
    "checkpoint.every={}ep": (
        "checkpoint_every save_freq save_interval checkpoint_interval save_every_epochs ckpt_every "
        "save_every_n_epochs checkpoint.interval checkpoint.checkpoint_every"
    ),
    "checkpoint.every={}ba": "recovery_interval save_steps checkpoint_steps every_n_train_steps",
    "checkpoint.keep={}": "checkpoint_hist save_top_k keep_checkpoints save_total_limit max_checkpoints",
    "checkpoint.best={}": "eval_metric monitor best_metric metric_for_best_model",
    "log.every={}ba": (
        "log_interval print_freq log_every log_every_n_steps log_freq logging_steps print_interval display_interval "
        "log.interval"
    ),
    "log.wandb=true|false": "log_wandb use_wandb",
    "log.project={}": "wandb_project project_name",
    "strategy=fsdp|ddp": "fsdp use_fsdp",
    "strategy=ddp|single": "ddp distributed use_ddp",
    "device={}": "accelerator gpu_type",
    "device=cuda|cpu": "cuda use_cuda use_gpu gpu",
    "device=cpu|auto": "cpu no_cuda use_cpu",
    "precision=auto|fp32": "amp use_amp mixed_precision native_amp autocast half",
    "precision={}": "amp_dtype dtype",
    "precision=fp16|fp32": "fp16",
    "precision=bf16|fp32": "bf16",
    "compile=true|false": "torchcompile torch_compile use_compile",
    "seed={}": "random_seed manual_seed rng_seed",
    "--procs={}": (
        "gpus num_gpus ngpus n_gpus devices nproc_per_node nproc num_processes num_procs world_size processes "
        "gpus_per_node"
    ),
    "--nodes={}": "num_nodes nnodes n_nodes num_machines machines",
    "--rendezvous=HOST:PORT (an option of `paceline train`)": (
        "dist_url master_addr master_port init_method rdzv_endpoint"
    ),
    "--runs={}": (
        "output output_dir out out_dir outdir save_dir log_dir logdir checkpoint_dir work_dir workdir default_root_dir "
        "results_dir save_path"
    ),
    "--name={}": "experiment exp exp_name experiment_name run_name run",
    "--resume={} (a run folder; an interrupted run of the same name is resumed automatically)": (
        "resume resume_from resume_from_checkpoint ckpt_path"
    ),
}

_NOT_NEEDED = {
    "omit it: the dataset determines the number of classes (synthetic data: data.synthetic.classes)": (
        "num_classes classes n_classes nb_classes nclasses"
    ),
    "omit it: an interrupted run of the same name is resumed automatically": "auto_resume start_epoch",
    "use `paceline evaluate RUN` to evaluate a run": "test_only eval_only evaluate_only validate_only test",
    "omit it: the metric determines whether higher or lower is better": "optim.schedule.mode early_stop.mode",
    "omit it: the launcher sets it": "local_rank rank node_rank dist_backend",
    "omit it: the data loader does not need it": (
        "pin_mem pin_memory prefetch_factor persistent_workers no_prefetcher prefetcher drop_last shuffle"
    ),
}

_VALUES = {
    "optim.name": {},  # the given name in lower case
    "optim.schedule.name": {
        "onecycle": "one-cycle", "onecyclelr": "one-cycle", "cosineannealing": "cosine", "cosineannealinglr": "cosine",
        "cosine_annealing": "cosine", "steplr": "step", "multistep": "piecewise", "multisteplr": "piecewise",
        "linearlr": "linear", "plateaulr": "plateau", "reducelronplateau": "plateau", "reduce_on_plateau": "plateau",
        "reduce_lr_on_plateau": "plateau", "none": "constant", "constantlr": "constant", "poly": "polynomial",
        "polynomiallr": "polynomial",
    },
    "data.augment.policy": {"ra": "randaugment", "ta_wide": "trivialaugment", "rand": "timm-randaugment"},
    "precision": {
        "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "bf16-mixed": "bf16",
        "16-mixed": "fp16", "16": "fp16", "32": "fp32",
    },
    "device": {"gpu": "cuda"},
    "early_stop.metric": {"acc1": "top1", "accuracy": "top1", "val_acc": "top1", "val_loss": "loss", "acc": "top1"},
    "checkpoint.best": {"acc1": "top1", "accuracy": "top1", "val_acc": "top1", "val_loss": "loss", "acc": "top1"},
    "train.loss": {"ce": "cross-entropy", "cross_entropy": "cross-entropy", "crossentropy": "cross-entropy"},
}  # fmt: skip
_DATA_NAMES = ("digits", "cifar10", "cifar100", "synthetic", "imagenet", "shards", "folder")
_TIMM_SECTIONS = {"m": "magnitude", "n": "num_ops", "p": "op_probability", "mstd": "magnitude_std"}
_DURATION = re.compile(r"[0-9.]+(ep|ba|s)")
_ON = (True, "true", "yes", "on", 1)
_OFF = (False, "false", "no", "off", "none", 0)
_INSTEAD = {word: target for target, words in (_REPLACEMENTS | _NOT_NEEDED).items() for word in words.split()}


def replacement_hint(path: str, value: Any, on_command_line: bool) -> str:
    """Return what to use instead of an unknown field, with the given value (None: no value), or ""."""
    path = path.lower()
    if not (target := _INSTEAD.get(path) or _INSTEAD.get(path.rpartition(".")[2], "")):
        return ""
    if target in _NOT_NEEDED:
        return target
    what, parenthesis, note = target.partition(" (")
    field, _, form = what.partition("=")
    if field == "data.name" and isinstance(value, str):
        field, value = data_field(value)
    elif field == "data.augment.policy" and str(value).startswith("rand-"):
        return _written("data.augment", _timm_policy(str(value)), on_command_line)
    elif field == "data.interpolation" and value == "random":
        field, value = "data.augment.random_interpolation", "true"
    return _written(field, _filled(field, form, value), on_command_line) + parenthesis + note


def _timm_policy(text: str) -> str:
    """The fields for a text such as rand-m9-mstd0.5-inc1; sections that have none are left out."""
    fields = {"policy": "timm-randaugment"}
    for section in text.split("-")[1:]:
        found = re.fullmatch(r"(m|n|p|mstd|inc)(\d[\d.]*)", section)
        if found and found[1] == "inc":
            fields["increasing"] = str(found[2] != "0").lower()
        elif found:
            fields[_TIMM_SECTIONS[found[1]]] = found[2]
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"


def field_of(word: str) -> str:
    """The field or option that a name corresponds to; empty if there is none."""
    return _INSTEAD.get(word.lower(), "").partition("=")[0]


def targets() -> list[str]:
    """Every field and option that a hint can name."""
    return [target.partition("=")[0] for target in _REPLACEMENTS]


def _filled(field: str, form: str, value: Any) -> str:
    """The given value in the form that the field takes."""
    if "|" in form:
        on, off, *other = form.split("|")
        if other and isinstance(value, str) and value.lower() not in (*_ON, *_OFF):
            return other[0].format(value)
        return off if value in _OFF else on
    if isinstance(value, list) and field.endswith("size"):
        value = value[-1] if value else None  # channels, height, width
    if isinstance(value, (bool, dict)) or value is None:
        return form.format("VALUE" if form == "{}" else "N")
    if isinstance(value, list):
        return form.format(f"[{', '.join(map(str, value))}]")
    text = str(value)
    if field in _VALUES:
        text = _VALUES[field].get(text.lower(), text.lower())
    if form.endswith(("}ep", "}ba")) and not text.replace(".", "", 1).isdecimal():
        return text if _DURATION.fullmatch(text) else form.format("N")
    return form.format(text)


def data_field(value: str) -> tuple[str, str]:
    """The field for a value of `data`, and its value there: the name of a dataset, or else a path."""
    name = value.lower().replace("-", "").removeprefix("torch/")
    if name in _DATA_NAMES:
        return "data.name", name
    return "data.path", value


def _written(field: str, value: str, on_command_line: bool) -> str:
    if field.startswith("--"):
        return f"use `{field} {shlex.quote(value)}`" + ("" if on_command_line else " on the command line")
    if on_command_line:
        return f"use `--{field} {shlex.quote(value)}`"
    *groups, last = field.split(".")
    opened = "".join(f"{group}: {{" for group in groups)
    return f"use `{opened}{last}: {value}{'}' * len(groups)}`"
