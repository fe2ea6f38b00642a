"""The command export."""

from pathlib import Path

from paceline.cli.options import add_checkpoint_option, make_parser
from paceline.system.files import say

_EXPORT = """Export a trained model, with its classes, preprocessing, recipe and metrics.

  safetensors   the weights, which timm.create_model(NAME, checkpoint_path=FILE) reads
  timm-hub      a folder that timm.create_model("local-dir:FOLDER", pretrained=True) loads; --to hf:USER/NAME uploads it
  onnx          a graph for ONNX Runtime and others, with any batch size; compared with the model on real images
  torch-export  a graph for PyTorch without the Python code of the model (.pt2); compared as well
  card          a model card in Markdown

By default the suffix of --to decides: .safetensors, .onnx, .pt2, .md, or a folder."""

_FORMATS = ("safetensors", "timm-hub", "onnx", "torch-export", "card")


def export(arguments: list[str]) -> int:
    """Run `paceline export`; returns the exit status."""
    parser = make_parser("export", "RUN|CHECKPOINT --to FILE|FOLDER|hf:USER/NAME [--format FORMAT]", _EXPORT)
    parser.add_argument("source", type=Path, metavar="RUN|CHECKPOINT", help="a run folder or a checkpoint folder")
    parser.add_argument(
        "--to", required=True, metavar="PATH", help="file or folder to write, or hf:USER/NAME to upload"
    )
    parser.add_argument(
        "--format", default="", choices=_FORMATS, help="format of the export (default: by the suffix of --to)"
    )
    parser.add_argument("--raw", action="store_true", help="the trained weights instead of their moving average (EMA)")
    add_checkpoint_option(parser)
    parser.add_argument("--force", action="store_true", help="replace an existing export")
    parser.add_argument(
        "--images",
        type=Path,
        metavar="PATH",
        help="onnx, torch-export: compare on these images (default: validation images of the run's data)",
    )
    parser.add_argument(
        "--license", default="", metavar="ID", help="license of the weights in the model card, e.g. mit"
    )
    parser.add_argument("--public", action="store_true", help="hf: create a public repository instead of a private one")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    from paceline.api.exporting import export as write

    summary = write(
        options.source,
        options.to,
        format=options.format,
        checkpoint=options.checkpoint,
        raw=options.raw,
        force=options.force,
        images=options.images,
        license=options.license,
        public=options.public,
    )
    say(summary)
    return 0
