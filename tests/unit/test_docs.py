"""README and documentation: links, commands, error codes and variables agree with the code."""

import os
import re
from itertools import combinations
from pathlib import Path

import pytest
from command_parsers import parser_of, public_commands, subparsers
from documents import ROOT, Command, all_commands, anchors, documents, links
from error_codes import CHOOSING, SOURCE, error_codes

from paceline.cli.launch_parser import parse_launch
from paceline.cli.main import _COMMANDS
from paceline.cli.options import split_source
from paceline.config.io import fields, load_recipe, shipped, split_overrides

DOCUMENTS = documents()
_WITH_FIELDS = ("train", "evaluate", "plan", "find-batch", "find-lr", "selftest", "sweep")
_COMMON = {"and", "are", "but", "does", "for", "from", "has", "have", "its", "not", "that", "the", "this", "with"}
_GENERAL = {"aws-value-rejected", "conflicting-options", "host-command-failed"}
"""Codes of failures that only their message describes."""
_PLACEHOLDER = re.compile(r"(.*[/:,@])?[A-Z]+([/:,].*)?")


@pytest.mark.parametrize("page", DOCUMENTS)
def test_links_and_anchors_resolve(page: str) -> None:
    broken = [link for link in links(DOCUMENTS[page]) if "://" not in link and not _resolves(page, link)]
    assert not broken


def _resolves(page: str, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = os.path.normpath(Path(page).parent / path) if path else page
    if anchor:
        return target in DOCUMENTS and anchor in anchors(DOCUMENTS[target])
    return target in DOCUMENTS or (ROOT / target).exists()


def test_the_readme_is_short() -> None:
    assert len(DOCUMENTS["README.md"].splitlines()) < 150


def test_the_tests_that_the_page_about_gpus_names_exist() -> None:
    named = set(re.findall(r"`((?:unit|dist|gpu)/\w+\.py)(?:::(\w+))?`", (ROOT / "docs" / "gpu.md").read_text()))
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_pages_that_messages_name_exist() -> None:
    named = {
        name
        for path in (ROOT / "src" / "paceline").rglob("*")
        if path.suffix in (".py", ".c", ".h")
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_variable_is_documented() -> None:
    used = {
        name
        for path in (ROOT / "src" / "paceline").rglob("*.py")
        for name in re.findall(r"PACELINE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    documented = re.findall(r"^\| `(PACELINE_[A-Z_]+)`", DOCUMENTS["docs/reference/environment.md"], re.MULTILINE)
    assert sorted(documented) == sorted(used)


def test_every_code_that_tests_expect_is_documented() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    expected = {code for text in texts for code in re.findall(r'\braises\(\s*"([a-z0-9-]+)"', text)}
    own = {code for text in texts for code in re.findall(r'\bUserError\("([a-z0-9-]+)"', text)}
    assert len(expected) > 50
    assert not expected - own - error_codes().keys()


def test_every_code_has_a_message() -> None:
    without = [code for code, templates in error_codes().items() if not any(map(_words_of, templates))]
    assert not without, "let the call that has the code also have the message, as a text or an f-string"


def test_modules_that_choose_codes_exist() -> None:
    assert not [name for name in CHOOSING if not (SOURCE / name).is_file()]


def test_every_printed_code_in_documents_exists() -> None:
    printed = {code for text in DOCUMENTS.values() for code in re.findall(r"\[([a-z]+-[a-z-]+)\](?!\()", text)}
    assert printed
    assert not printed - error_codes().keys()


@pytest.mark.parametrize(("code", "templates"), [item for item in error_codes().items() if item[0] not in _GENERAL])
def test_a_code_has_one_meaning(code: str, templates: list[str]) -> None:
    """All messages of a code are connected by words that they share with each other or with the code."""
    groups = [_stems(template) for template in templates if _words_of(template)]
    merged = True
    while merged:
        merged = False
        for one, other in combinations(groups, 2):
            if one & other or (one & _stems(code) and other & _stems(code)):
                groups = [group for group in groups if group is not one and group is not other] + [one | other]
                merged = True
                break
    assert len(groups) <= 1, templates


def _words_of(template: str) -> set[str]:
    """Return the words of a message without the names of its values."""
    return _stems(re.sub(r"{.*?}", "", template))


def _stems(text: str) -> set[str]:
    return {word[:4] for word in re.findall(r"[a-z0-9]{3,}", text.lower())} - _COMMON


@pytest.mark.parametrize("command", all_commands(), ids=lambda command: f"{command.page}: {' '.join(command.words)}")
def test_commands_are_valid(command: Command) -> None:
    name, *words = command.words
    if name.startswith("-"):
        assert name in ("--help", "--version")
        return
    if name == "COMMAND":
        return
    assert name in _COMMANDS
    parser = parser_of(name)
    below = dict(subparsers(parser))
    if below and words and not words[0].startswith("-"):
        assert words[0] in below
        parser = below[words[0]]
    known = set(parser._option_string_actions)
    unknown = [word for word in words if word.startswith("-") and word != "-" and word.partition("=")[0] not in known]
    if name in (*_WITH_FIELDS, "launch"):
        unknown = [word for word in unknown if not _is_field(word.lstrip("-").partition("=")[0])]
    if "unknown-field" not in DOCUMENTS[command.page] or "--optim.lrr" not in words:
        assert not unknown
        if not any(map(_PLACEHOLDER.fullmatch, words)):
            _parse(name, words)


def _is_field(key: str) -> bool:
    """Whether a key is a field, a group, or a value inside a list or an object."""
    paths = {row.path: row.kind for row in fields()}
    inside = any(key.startswith(f"{path}.") and kind in ("object", "array") for path, kind in paths.items())
    return key == "import" or inside or any(f"{path}.".startswith(f"{key.replace('-', '_')}.") for path in paths)


def _parse(name: str, words: list[str]) -> None:
    """Parse a command without placeholders; also its recipe, if that is a shipped one."""
    if {"-h", "--help"} & set(words) or not words:
        return
    if name == "launch":
        _, source, overrides = parse_launch(words)
    elif name in _WITH_FIELDS:
        source = split_source(words)[0]
        overrides = parser_of(name).parse_known_args(words)[1]
    elif name == "ec2" and words[0] == "ssh":
        return
    else:
        parser_of(name).parse_args(words)
        return
    if source in shipped() and "--import" not in words:
        load_recipe(source, overrides)
    else:
        assert all(_is_field(key) for key, _ in split_overrides(overrides))


def test_every_command_is_in_the_reference() -> None:
    page = DOCUMENTS["docs/reference/cli.md"]
    assert all(f"\n## paceline {name}\n" in page for name in public_commands())


def test_every_field_is_in_the_reference() -> None:
    page = DOCUMENTS["docs/reference/recipe.md"]
    assert all(f"| `{row.path}` |" in page for row in fields())
