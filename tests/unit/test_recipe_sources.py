"""Where recipes come from: shown in reports and logbooks, and listed on the page of recipes."""

from pathlib import Path

import yaml
from made_runs import make_run
from recipe_table import PAGE, page

import paceline as pl
from paceline.analysis.page import report
from paceline.analysis.read import read
from paceline.config.io import load_recipe, shipped
from paceline.config.tracking import github_link


def test_report_and_logbook_name_the_source_and_the_differences(tmp_path: Path) -> None:
    words = ("--about.deviations", "[no <flip>, one less]", "--about.published", "12%")
    code = "owner/repo/a/b.py@" + 40 * "0"
    runs = [
        make_run(tmp_path, "one", *words, "--about.code", f"[{code}]", "--about.source", "a & b"),
        make_run(tmp_path, "two"),
        make_run(tmp_path, "three", "--about", "null"),
    ]
    (runs[2] / "recipe.yaml").write_text((runs[2] / "recipe.yaml").read_text().replace("source: ''", "source: [1]"))
    text = pl.report(runs, tmp_path / "report.html").read_text()
    for part in (
        "<h3>one</h3>",
        "a &amp; b",
        "no &lt;flip&gt;",
        "<li>one less</li>",
        f'href="{github_link(code)}"',
        "12%",
    ):
        assert part in text
    assert (
        "<h3>three</h3>"
        not in report(pl.compare([runs[0], runs[2]]), "").partition('id="origin"')[2].split("</section>")[0]
    )
    assert 'id="origin"' not in report(pl.compare([runs[2]]), "")
    pl.logbook([runs[0]], tmp_path / "book")
    entry = (tmp_path / "book" / "one" / "README.md").read_text()
    for part in ("| source | a & b |", "- no \\<flip\\>", f"({github_link(code)})", "| published | 12% |"):
        assert part in entry
    tree = yaml.safe_load((runs[0] / "recipe.yaml").read_text())
    tree["about"]["measured"] = {"seeds": [1]}  # without results
    (runs[0] / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert 'id="origin"' not in report(pl.compare([runs[0]]), "")
    assert read(runs[2]).recipe


def test_the_page_of_recipes_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/recipe_table.py"


def test_figures_come_with_code_or_say_that_there_is_none() -> None:
    """Public code is named with file and commit; of logbooks and scripts that are not public, the source says so."""
    not_public = ("notebooks for", "the logbook", "a script")
    for name in shipped():
        about = load_recipe(name).about
        if about.published and not about.published.startswith("none"):
            assert about.code or about.source.startswith(not_public), name
