"""Writes a model as a graph that runs without its Python code: ONNX, and torch.export."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.errors import UserError
from paceline.exports.comparison import RealImages, compare
from paceline.exports.metadata import KEY, PT2_FILE, import_onnx
from paceline.system.files import size_text

OPSET = 18
MAX_ONNX_BYTES = (1 << 31) - (1 << 24)
"""Protobuf's limit of 2 GB, without what the graph and the metadata need."""

Metadata = dict[str, Any]


def onnx_bytes(model: nn.Module, metadata: Metadata, images: Callable[[], RealImages]) -> tuple[bytes, Metadata]:
    """Return an ONNX file with a dynamic batch size and its metadata, after a comparison in ONNX Runtime."""
    onnx, runtime, _ = map(import_onnx, ("onnx", "onnxruntime", "onnxscript"))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > MAX_ONNX_BYTES:
        message = (
            f"the model has {size_text(size)} of weights, and an ONNX file at most 2 GB. Use --to FILE.pt2 instead."
        )
        raise UserError("onnx-too-large", message, bytes=size)
    real = images()
    with _named_failures("ONNX", metadata["model"]["name"]), _quiet():
        program = torch.onnx.export(
            model,
            (_example(real),),
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},),
            opset_version=OPSET,
            verbose=False,
        )
        assert program is not None
        proto = program.model_proto
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(batch: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": batch.numpy()})[0])

    done = metadata | {"comparison": compare(model, run, real, "ONNX Runtime")}
    onnx.helper.set_model_props(proto, _properties(done))
    content: bytes = proto.SerializeToString()
    return content, done


def _properties(metadata: Metadata) -> dict[str, str]:
    """Return metadata_props: everything as JSON, and what every user of the file needs under readable keys."""
    preprocessing = {f"preprocessing.{name}": json.dumps(value) for name, value in metadata["preprocessing"].items()}
    labels = json.dumps([name for _, name in metadata["classes"]], ensure_ascii=False)
    return {KEY: json.dumps(metadata), "labels": labels, "model": metadata["model"]["name"], **preprocessing}


def torch_export_bytes(
    model: nn.Module, metadata: Metadata, images: Callable[[], RealImages]
) -> tuple[bytes, Metadata]:
    """Return a .pt2 file with a dynamic batch size and its metadata, after a comparison of the loaded file."""
    real = images()
    with _named_failures("torch.export", metadata["model"]["name"]), _quiet():
        batch = torch.export.Dim("batch", min=1)
        program = torch.export.export(model, (_example(real),), dynamic_shapes=({0: batch},))
        loaded = torch.export.load(io.BytesIO(_saved(program, metadata))).module()
    done = metadata | {"comparison": compare(model, loaded, real, "torch.export")}
    with _quiet():
        return _saved(program, done), done


def _saved(program: torch.export.ExportedProgram, metadata: Metadata) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={PT2_FILE: json.dumps(metadata)})
    return file.getvalue()


def _example(images: RealImages) -> torch.Tensor:
    """Two images: a batch of one would be compiled in as a constant."""
    return images.pixels[[0, -1]]


@contextlib.contextmanager
def _named_failures(format: str, name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # any operator of the model may fail in its own way
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)[:240]
        message = f"model.name={name} cannot be expressed in {format} ({reason}). Use --to FILE.safetensors instead."
        raise UserError("model-not-exportable", message, model=name, format=format) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notes of exporters out of the terminal; what matters is in the comparison or in the exception."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    sink = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
