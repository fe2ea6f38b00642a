"""Export models."""

from pathlib import Path

from paceline.api.arguments import check_path, invalid
from paceline.api.runs import Run, check_best_or_last, path_of
from paceline.errors import UserError

_HUB = "hf:"


def export(
    run: str | Path | Run,
    to: str | Path,
    *,
    format: str = "",
    checkpoint: str = "best",
    raw: bool = False,
    force: bool = False,
    images: str | Path | None = None,
    license: str = "",
    public: bool = False,
) -> str:
    """Export the model of a run or checkpoint, with its classes, preprocessing and metrics; return a summary.

    `format`: safetensors, timm-hub, onnx, torch-export or card; by default that of the suffix of `to`, a file, a
    folder, or hf:USER/NAME to upload a timm-hub folder, private unless `public`. onnx and torch-export are compared
    with the model on `images`, by default validation images of the run. `raw`: the trained weights instead of their
    moving average (EMA). `license`: of the weights, for the model card. `force` replaces an existing export.
    """
    check_best_or_last(checkpoint)
    if not isinstance(format, str):
        raise invalid("format", format, "a name")
    from paceline.engine.evaluation.saved import find_checkpoint
    from paceline.exports.write import Exporter, choose_format

    shown = check_path("images", images) if images is not None else None
    is_hub = isinstance(to, str) and to.startswith(_HUB)
    if is_hub and format not in ("", "timm-hub"):
        message = f"--to {to} uploads a timm-hub folder, not {format}. Leave --format out, or give a local path."
        raise UserError("conflicting-options", message, option="--format")
    if public and not is_hub:
        message = f"--public applies to uploads (--to hf:USER/NAME), not to --to {to}. Omit it."
        raise UserError("conflicting-options", message, option="--public")
    target = Path() if is_hub else check_path("to", to)
    chosen = "timm-hub" if is_hub else choose_format(target, format)
    _check_effect("--images", shown, chosen, ("onnx", "torch-export"))
    _check_effect("--license", license, chosen, ("card", "timm-hub"))
    exporter = Exporter(find_checkpoint(path_of(run), checkpoint), raw, shown, license)
    if is_hub:
        from paceline.exports.hub import push

        return push(exporter, str(to).removeprefix(_HUB), public, force)
    return exporter.write(target, chosen, force)


def _check_effect(option: str, value: object, format: str, formats: tuple[str, ...]) -> None:
    """Refuse an option that the format would ignore."""
    if value and format not in formats:
        message = f"{option} {value} applies to {' and '.join(formats)}, not to {format}. Omit it."
        raise UserError("conflicting-options", message, option=option)
