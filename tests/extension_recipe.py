"""Options that train with everything that the package in tests/extension registers."""

IMPORTS = ("--import", "shapes.data", "--import", "shapes.training")
USED = (
    *("--data.name", "shapes", "--data.options", "{samples: 96}", "--data.size", "32", "--data.augment.flip", "random"),
    *("--data.augment.translate", "0"),
    *("--data.augment.custom", "{brightness: {strength: 0.3}}", "--model.name", "shapes-net", "--model.options", "{}"),
    *("--train.loss", "focal", "--train.loss_options", "{gamma: 1.5}", "--train.label_smoothing", "0"),
    *("--callbacks", "{watcher: {}}", "--train.global_batch", "16", "--train.duration", "30ba", "--optim.lr", "0.05"),
    *("--checkpoint.every", "5ba", "--evaluate.every", "10ba", "--log.every", "1ba", "--precision", "fp32"),
)
