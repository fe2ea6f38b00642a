"""The documents of the project: their links, anchors and commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown.extensions.toc import slugify
from reference_pages import pages

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SNIPPET = re.compile(r'^--8<-- "(.*)"$', re.MULTILINE)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_ID = re.compile(r'id="([^"]+)"')
_ENDS = {"&&", "||", "|", ";", ">", "2>", "&"}


class Command(NamedTuple):
    """A command of paceline in a document."""

    page: str
    words: tuple[str, ...]


def documents() -> dict[str, str]:
    """Return the text of every document by its path in the repository, with those that are generated."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
    texts.pop("CHANGELOG.md")  # it names what was true once
    texts |= {f"docs/{path}": text for path, text in pages().items()}
    return {path: _SNIPPET.sub(lambda match: texts[match[1]], text) for path, text in texts.items()}


def links(text: str) -> list[str]:
    """Return the targets of the links of a document, without those in code."""
    return _LINK.findall(_without_code(text))


def anchors(text: str) -> set[str]:
    """Return the anchors that the site gives a document."""
    headings = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading) for heading in _HEADING.findall(_FENCE.sub("", text)))
    return {slugify(heading, "-") for heading in headings} | set(_ID.findall(text))


def blocks(text: str, kind: str) -> list[str]:
    """Return the fenced blocks of a kind, e.g. "bash"."""
    return [body for info, body in _FENCE.findall(text) if info.strip() == kind]


def commands(page: str, text: str) -> Iterator[Command]:
    """Yield the commands of paceline in code blocks and code spans."""
    indented = "\n".join(line[4:] for line in _FENCE.sub("", text).splitlines() if line.startswith("    "))
    console = [line[2:] for body in blocks(text, "text") for line in body.splitlines() if line.startswith("$ ")]
    spans = [" ".join(span.split()) for span in re.findall(r"`(paceline [^`]+)`", _without_code(text, spans=False))]
    lines = [line for block in (*blocks(text, "bash"), indented) for line in _expanded(block)]
    for line in (*lines, *console, *spans):
        yield from (Command(page, words) for words in _of_paceline(line.removeprefix("$ ")))


def all_commands() -> list[Command]:
    """Return the commands of all documents but those that are generated from the parsers and messages."""
    generated = ("reference/cli.md", "reference/errors.md")
    texts = documents().items()
    return sorted({found for page, text in texts if not page.endswith(generated) for found in commands(page, text)})


def _without_code(text: str, *, spans: bool = True) -> str:
    text = re.sub(r"^    .*$", "", _FENCE.sub("", text), flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text) if spans else text


def _expanded(block: str) -> Iterator[str]:
    """Yield the lines of a shell block, with continued lines joined and its own variables expanded."""
    variables: dict[str, str] = {}
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$(\w+)", lambda match: variables.get(match[1], match[0]), line)
        if match := re.fullmatch(r'(\w+)="?(.*?)"?', line.strip()):
            variables[match[1]] = match[2]
        yield line


def _of_paceline(line: str) -> Iterator[tuple[str, ...]]:
    if not re.search(r"(^|[=\s(&])paceline ", line):
        return
    try:
        line = line.replace('"$(', "$( ").replace(')"', ")").replace("$(", "$( ")
        words = shlex.split(re.sub(r"\[(-.*?|JOB)\]", r"\1", line), comments=True)
    except ValueError:  # prose or output, not a command
        return
    begin = 0
    for position in range(len(words) + 1):
        if position == len(words) or words[position] in _ENDS:
            segment = words[begin:position]
            while segment and ("=" in segment[0] or segment[0] in ("eval", "$(")):
                segment = segment[1:]
            if segment and segment[0] in ("srun", "torchrun") and "paceline" in segment:
                segment = segment[segment.index("paceline") :]
            if segment and segment[0] == "paceline":
                yield tuple(word.rstrip(")") for word in segment[1:] if word != "...")
            begin = position + 1
