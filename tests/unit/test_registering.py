"""Names of extensions: which are taken, what may be registered again, and how failures name the function."""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import raises

import paceline as pl
from paceline import extensions
from paceline.config.data import FROM_FILES, IN_MEMORY
from paceline.config.io import load_recipe
from paceline.config.optim import SCHEDULES
from paceline.config.problems import LOSSES
from paceline.errors import ConfigError
from paceline.optim import factory


@pytest.fixture(autouse=True)
def empty(monkeypatch) -> None:
    """Tests start without extensions, and leave none."""
    monkeypatch.setattr(extensions, "_registered", {})


def test_built_in_names_are_those_of_the_recipe() -> None:
    assert set(extensions.BUILT_IN["dataset"]) == {*IN_MEMORY, *FROM_FILES}
    assert extensions.BUILT_IN["loss"] == LOSSES
    assert extensions.BUILT_IN["schedule"] == SCHEDULES
    assert set(extensions.BUILT_IN["optimizer"]) == set(factory.BUILT_IN)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in extensions.BUILT_IN for name in extensions.BUILT_IN[kind]]
)
def test_built_in_names_are_taken(kind: str, name: str) -> None:
    with raises("name-taken") as caught:
        getattr(pl, f"register_{kind}")(name)(len)
    assert f"{kind} {name!r} is built in" in str(caught.value)
    assert "builtins.len" in str(caught.value)
    assert not extensions.find(kind, name)


def test_another_function_does_not_replace_a_registered_one() -> None:
    pl.register_loss("mine")(len)
    with raises("name-taken") as caught:
        pl.register_loss("mine")(sum)
    assert "builtins.len" in str(caught.value)
    assert "builtins.sum" in str(caught.value)
    assert __file__ in str(caught.value)
    pl.register_schedule("mine")(sum)  # another kind


def test_a_notebook_cell_runs_again() -> None:
    cell = "import paceline as pl\n@pl.register_loss('mine')\ndef mine(): return {}\n"
    for edited in range(3):
        exec(compile("\n" * edited + cell.format(edited), f"cell {edited}", "exec"), {"__name__": "__main__"})
    assert extensions.find("loss", "mine")() == 2


def test_a_module_is_reloaded(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    file = tmp_path / "reloaded_code.py"
    file.write_text("import paceline as pl\n@pl.register_loss('mine')\ndef mine(): return 1\n")
    module = importlib.import_module("reloaded_code")
    file.write_text("import paceline as pl\n\n\n@pl.register_loss('mine')\ndef mine(): return 2\n")
    importlib.reload(module)
    assert extensions.find("loss", "mine")() == 2
    file.write_text(file.read_text() + "\n@pl.register_loss('mine')\ndef mine(): return 3\n")
    with raises("name-taken") as caught:
        importlib.reload(module)
    assert "reloaded_code.py:4" in str(caught.value)
    assert "reloaded_code.py:7" in str(caught.value)


def _exits() -> None:
    sys.exit(0)


class _Fails:
    def __call__(self) -> None:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("call", "named"), [(partial(partial(int), "x"), "builtins.int"), (_Fails(), "_Fails"), (_exits, "SystemExit: 0")]
)
def test_failures_name_the_function(call, named: str) -> None:
    pl.register_callback("failing")(call)
    with raises("extension-failed") as caught:
        extensions.find("callback", "failing")()
    assert named in str(caught.value)


def test_a_partial_belongs_to_the_module_of_its_function() -> None:
    pl.register_model("mine")(partial(_exits))
    assert extensions.modules() == [__name__]


def test_options_keep_the_dashes_of_names() -> None:
    pl.register_callback("early-stopping")(len)
    pl.register_augmentation("my-blur")(len)
    words = ["--callbacks.early-stopping.max-bad", "3", "--data.augment.custom.my-blur.kernel_size", "5"]
    recipe = load_recipe("digits", [*words, "--train.label-smoothing", "0.25"])
    assert recipe.callbacks == {"early-stopping": {"max_bad": 3}}
    assert recipe.data.augment.custom == {"my-blur": {"kernel_size": 5}}
    assert recipe.train.label_smoothing == 0.25


@pytest.mark.parametrize("field", ["callbacks", "data.augment.custom", "model.options"])
def test_a_list_instead_of_a_mapping_is_explained(field: str) -> None:
    with raises("invalid-recipe", ConfigError) as caught:
        load_recipe("digits", [f"--{field}", "[early-stopping]"])
    assert f"{field}=['early-stopping']: not a mapping ({{key: value}})" in str(caught.value)
