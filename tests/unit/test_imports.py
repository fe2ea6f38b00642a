"""Which modules a recipe may import, what fails, and which of their files are hashed and copied to nodes."""

import sys
import zipfile
from pathlib import Path

import pytest
from conftest import raises

from paceline import extensions
from paceline.api import processes
from paceline.config import imports
from paceline.config.import_files import file_hashes, files_of
from paceline.config.io import load_recipe

MARK = "from pathlib import Path\nPath('ran').touch()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The current folder, which Python searches as it does for `python -m`; what tests import is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extensions, "_registered", {})
    monkeypatch.setattr(imports, "_named", imports._NamedModules())
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def _write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _load(*modules: str, given: tuple[str, ...] = ()) -> None:
    """Load what the recipe imports; the command line names `given`."""
    imports.allow_given([word for module in given for word in ("--import", module)])
    words = [word for module in (*modules, *given) for word in ("--import", module)]
    imports.load_imports(load_recipe("digits", words))


@pytest.mark.parametrize("module", ["evil", "evil.sub", "evil.sub.deeper", "evil.missing"])
def test_a_recipe_runs_no_code_of_the_current_folder(folder: Path, module: str) -> None:
    for path in ("evil/__init__.py", "evil/sub/__init__.py", "evil/sub/deeper.py"):
        _write(folder / path, MARK)
    with raises("import-not-trusted"):
        _load(module)
    with raises("import-not-trusted"):
        files_of([module])
    assert not (folder / "ran").exists()


def test_only_modules_that_the_command_line_names_come_from_the_current_folder(folder: Path) -> None:
    _write(folder / "mine" / "__init__.py")
    _write(folder / "mine" / "nets.py")
    _write(folder / "other.py", MARK)
    with raises("import-not-trusted"):
        _load("other", given=("mine.nets",))
    _write(folder / "uses_other.py", "import other\n")
    with raises("import-failed") as caught:
        _load(given=("uses_other",))
    assert "No module named 'other'" in str(caught.value)
    assert "--import other" in str(caught.value)
    assert not (folder / "ran").exists()
    _load(given=("uses_other", "other", "mine.nets"))
    assert (folder / "ran").exists()


def test_an_installed_module_is_not_hidden_by_the_current_folder(folder: Path, monkeypatch) -> None:
    """SLURM jobs find the copies of modules in PYTHONPATH, although the current folder still contains the modules."""
    _write(folder / "nets.py", MARK)
    _write(folder / "site" / "nets.py", "import paceline as pl\npl.register_loss('theirs')(len)\n")
    sys.path.append(str(folder / "site"))
    _load("nets")
    assert extensions.find("loss", "theirs")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("entry", ["", "."])
def test_pythonpath_may_name_the_current_folder(folder: Path, monkeypatch, entry: str) -> None:
    _write(folder / "nets.py", MARK)
    monkeypatch.setenv("PYTHONPATH", entry or str(folder))
    _load("nets")
    assert (folder / "ran").exists()


def test_the_trials_of_find_batch_trust_the_same_modules(folder: Path, paceline) -> None:
    _write(folder / "mine.py")
    _write(folder / "other.py", MARK)
    words = ("find-batch", "digits", "--max-batch", 1, "--steps", 1, "--memory-limit", "64GB", "--import", "mine")
    answer = paceline(*words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    _write(folder / "recipe.yaml", "base: digits\nname: theirs\nimports: [other]\n")
    refused = paceline("find-batch", "recipe.yaml", *words[2:])
    assert "other is in the current folder" in refused.stderr
    assert not (folder / "ran").exists()


def test_processes_of_the_api_do_not_trust_the_whole_current_folder(folder: Path) -> None:
    text = "import paceline as pl\npl.register_loss({0!r})(lambda: {0!r})\n"
    _write(folder / "mine.py", text.format("mine"))
    _write(folder / "site" / "installed.py", text.format("installed"))
    sys.path.append(str(folder / "site"))
    _load("installed", given=("mine",))
    assert extensions.modules() == ["installed", "mine"]
    assert processes.python_path({}) == {"PYTHONPATH": str(folder / "site")}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("import a_dependency", "No module named 'a_dependency'"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("failing", ["__init__", "nets"])
def test_a_module_that_fails_is_named_with_the_reason(folder: Path, text: str, named: str, failing: str) -> None:
    _write(folder / "mine" / "__init__.py")
    _write(folder / "mine" / "nets.py")
    _write(folder / "mine" / f"{failing}.py", text)
    with raises("import-failed") as caught:
        _load(given=("mine.nets",))
    assert "mine.nets" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("module", ["nothing", "mine.nothing", "mine.nets.nothing", "no-module", ".mine", ""])
def test_a_module_that_does_not_exist(folder: Path, module: str) -> None:
    _write(folder / "mine" / "__init__.py")
    _write(folder / "mine" / "nets.py")
    with raises("import-not-found"):
        _load(given=(module,))


def test_packages_without_init_and_in_zip_files(folder: Path) -> None:
    _write(folder / "ns" / "mod.py", "import paceline as pl\npl.register_loss('a')(len)\n")
    _load(given=("ns.mod",))
    assert extensions.find("loss", "a")
    assert list(files_of(["ns.mod"])) == list(file_hashes(["ns.mod"])) == ["ns/mod.py"]
    with zipfile.ZipFile(folder / "packed.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/mod.py", "import paceline as pl\npl.register_loss('b')(len)\n")
    sys.path.append(str(folder / "packed.zip"))
    _load("zipped.mod")
    assert extensions.find("loss", "b")
    assert list(file_hashes(["zipped.mod"])) == ["packed.zip"]
    with raises("extension-not-text"):
        files_of(["zipped.mod"])


def test_code_and_plain_data_are_copied_and_hashed_and_nothing_else(folder: Path) -> None:
    package = folder / "pkg"
    wanted = ["__init__.py", "labels.json", "net.pyi", "py.typed", "real/deep.py", "secrets.py"]
    refused = ["id_rsa", "id_rsa.txt", "secrets.env", "api_key.json", "keys/a.yaml", "credentials.toml", "tokens.txt"]
    refused += [".env", ".hidden/a.py", "__pycache__/net.py", "weights.bin", "notes.md"]
    for path in (*wanted, *refused):
        _write(package / path, path)
    (package / "alias").symlink_to("real")
    (package / "real" / "loop").symlink_to("..")
    (package / "env.txt").symlink_to(".env")
    (package / "link.txt").symlink_to(_write(folder / "outside" / "passwd.txt"))
    (package / "linked").symlink_to(folder / "outside")
    imports.trust(["pkg"])
    expected = sorted(f"pkg/{path}" for path in (*wanted, "alias/deep.py"))
    assert sorted(files_of(["pkg"])) == sorted(file_hashes(["pkg"])) == expected
