"""The part of a model card that shows how to load each format. Tests run this code."""

from typing import Any

from paceline.models.factory import is_timm

_INTRO = """## How to load it

`images` is a float tensor of shape (batch, {channels}, {height}, {width}), preprocessed as above."""

_TIMM = """The folder of `paceline export RUN --format timm-hub --to FOLDER`, or a repository on the Hugging Face Hub:

```python
import timm
from timm.data import create_transform, resolve_model_data_config

model = timm.create_model("NAME", pretrained=True).eval()
transform = create_transform(**resolve_model_data_config(model))  # {image} to tensor
labels = model.pretrained_cfg["label_names"]
```

timm resizes before it crops and rounds sizes differently, so its pixels differ slightly from those of Paceline."""

_SAFETENSORS = """The file of `paceline export RUN --to model.safetensors`:

```python
import json
from safetensors import safe_open
{create}
with safe_open("model.safetensors", "pt") as file:
    metadata = json.loads(file.metadata()["paceline"])  # classes, preprocessing, recipe, metrics
```"""

_CREATE = """import timm

model = timm.create_model({name!r}, {arguments}checkpoint_path="model.safetensors").eval()
"""

_ONNX = """The file of `paceline export RUN --to model.onnx`:

```python
import json
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
labels = json.loads(session.get_modelmeta().custom_metadata_map["labels"])
[logits] = session.run(["logits"], {"images": images.numpy()})
```"""

_PT2 = """The file of `paceline export RUN --to model.pt2`. `torch.export.load` unpickles, so load only files you trust:

```python
import torch

model = torch.export.load("model.pt2").module()
logits = model(images)
```"""


def loading_code(metadata: dict[str, Any], name: str = "") -> str:
    """Return code that loads the exports of a model. `name`: that for timm.create_model, if it is known."""
    shape = metadata["model"]
    in_timm = is_timm(shape["name"])
    values = {"num_classes": shape["num_classes"], "in_chans": shape["in_chans"], **shape["options"]}
    arguments = "".join(f"{name}={value!r}, " for name, value in values.items())
    create = _CREATE.format(name=shape["name"], arguments=arguments) if in_timm else ""
    height, width = metadata["preprocessing"]["size"]
    # timm's transform leaves the color of an image as it is
    image = "PIL image" if shape["in_chans"] != 1 else 'gray PIL image, image.convert("L"),'
    intro = _INTRO.format(channels=shape["in_chans"], height=height, width=width)
    return "\n\n".join(
        [
            intro,
            *([_TIMM.replace("NAME", name or "local-dir:FOLDER").replace("{image}", image)] if in_timm else []),
            _SAFETENSORS.format(create=create),
            _ONNX,
            _PT2,
        ]
    )
