"""The import layers and their drawing, which heavy modules a command imports, and the names of classes."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]


def test_imports_follow_the_layers() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    answer = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


def test_modules_do_not_import_each_other_in_cycles() -> None:
    graph = grimp.build_graph("paceline", exclude_type_checking_imports=True, cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_the_drawing_of_the_imports_is_up_to_date() -> None:
    script = [sys.executable, ROOT / "docs" / "draw_imports.py", "--check"]
    answer = subprocess.run(script, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_files_and_functions_are_short() -> None:
    paths = [path for folder in ("src", "tests", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    long = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        long += [path] * (text.count("\n") > 300)
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        long += [(path, node.name) for node in functions if (node.end_lineno or 0) - node.lineno >= 60]
    assert len(paths) > 300
    assert not long


def test_every_class_has_its_own_name() -> None:
    """Type aliases count; a leading underscore does not make another name."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "paceline").rglob("*.py")):
        for name in _class_names(ast.parse(path.read_text(encoding="utf-8"))):
            places.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: found for name, found in places.items() if len(found) > 1}


def _class_names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            is_alias = target.id[0].isupper() and not target.id.isupper() and len(target.id) > 1
            if is_alias:
                yield target.id


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from paceline.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"argcomplete", "torch", "pydantic", "numpy", "rich", "timm"} & set(loaded)


def test_a_recipe_is_validated_without_torch() -> None:
    script = (
        "import sys; from paceline.cli.main import main; main(['train', 'digits', '--seed', 'x']); print(*sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "seed='x'" in answer.stderr, answer.stderr
    assert "torch" not in answer.stdout.split()
