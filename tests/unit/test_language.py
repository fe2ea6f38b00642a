"""The words of the field: no private dialect in help texts, messages, documents or the report."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = {
    r"\bgo(es|ing)? on\b": "continue, resume",
    r"\bsaves\b(?! (memory|time|disk|page))|\b(a|the|last|newest|best|each) save\b": "checkpoint",
    r"\bleader\b": "rank 0",
    r"\bmeeting\b|\bmeets? (at|anew)\b|--meet": "rendezvous",
    r"\bexchange(s|d)?\b|\bexchanging\b": "gradient synchronization, all-reduce",
    r"\bpowersgd_after\b": "powersgd_start_step",
    r"\btaken away\b|\btold to leave\b|\brent(s|ed|ing)?\b|\bgiven back\b": "preempted, launched, released",
    r"--patience\b": "rank timeout",
    r"\bphotographs?\b": "images",
    r"\bdamaged?\b": "corrupt",
    r"\bmiddle crop\b|\bcrop_share\b": "center crop, crop_pct",
    r"\blimited by computing\b|\bwaiting for data\b": "compute-bound, input-bound",
    r"\bmost memory of a rank\b|\buse of devices\b": "peak memory per rank, device utilization",
    r"\bchance alone\b": "2 standard errors",
    r"\bagainst the first\b|\bacross epochs\b": "difference to the first run; epoch",
    r"\bis no (number|timm model|run|folder|verb|file|host|name)\b": "is not a ...",
    r"\bwish(es)?\b": "vote, spec",
    r"\bto mend\b|\bmend\b|\bput right\b|\bcures?\b": "fix",
    r"\bstrangers?\b": "untrusted",
    r"\b(colour|neighbour|behaviour|normalis|optimis(?!tic)|recognis|initialis|licence)": "American spelling",
}
OTHER_NAMES = {"synonyms.py"}  # lists the option names of other programs


def _texts() -> Iterator[tuple[str, int, str]]:
    for path in sorted((ROOT / "src" / "paceline").rglob("*.py")):
        if path.name not in OTHER_NAMES:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield str(path.relative_to(ROOT)), node.lineno, node.value
    documents = [
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ]
    assets = [*ROOT.glob("src/paceline/*/assets/*")]
    for path in sorted([*documents, *assets, *(ROOT / "src" / "paceline" / "recipes").glob("*.yaml")]):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            yield str(path.relative_to(ROOT)), number, line


@pytest.mark.parametrize("pattern", BANNED)
def test_private_words_are_not_used(pattern: str) -> None:
    found = [
        f"{path}:{number}: {match[0]!r}"
        for path, number, text in _texts()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert not found, f"use: {BANNED[pattern]}\n" + "\n".join(found)
