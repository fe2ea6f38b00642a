"""Draw the imports between the folders of src/paceline into docs/design.md: python docs/draw_imports.py [--check]."""

import re
import sys
from pathlib import Path

import grimp

PAGE = Path(__file__).with_name("design.md")
_BLOCK = re.compile(r"```mermaid\n.*?```", re.DOTALL)


def folder_imports() -> dict[str, set[str]]:
    """Return which folders and top-level modules of the package each of them imports."""
    graph = grimp.build_graph("paceline", cache_dir=None)
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if module != "paceline" and imported != "paceline":  # the package itself only has the version and the API
                importer, target = module.split(".")[1], imported.split(".")[1]
                imports.setdefault(importer, set()).add(target)
                imports.setdefault(target, set())
    return {name: targets - {name} for name, targets in imports.items() if name != "__main__"}


def without_implied(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports without those that others imply: a -> c if there are a -> b and b -> c."""

    def below(name: str) -> set[str]:
        return imports[name].union(*map(below, imports[name]))

    return {name: targets - set().union(*map(below, targets)) for name, targets in imports.items()}


def drawing() -> str:
    """Return the drawing as Mermaid text."""
    imports = without_implied(folder_imports())
    arrows = [f"    {name} --> {target}" for name in sorted(imports) for target in sorted(imports[name])]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```"])


def main() -> int:
    """Update the page; with --check, only return whether it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    new = _BLOCK.sub(lambda _: drawing(), old, count=1)
    if "--check" in sys.argv[1:]:
        if new != old:
            print(f"{PAGE.name} is out of date. Run: python docs/{Path(__file__).name}")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
