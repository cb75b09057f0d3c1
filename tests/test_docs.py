"""The documents say what is: the configuration page, the links between pages.

`python -m tests.test_docs` rewrites the table of docs/configuration.md.
"""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from state.settings import MIB, Settings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])


def configuration_table() -> str:
    rows = ["| setting | variable | default | what it is |", "| --- | --- | --- | --- |"]
    for item in fields(Settings):
        shown = {"data": "`$XDG_DATA_HOME/overnight`"}.get(item.name) or _shown(item.default)
        rows.append(f"| `{item.name}` | `OVERNIGHT_{item.name.upper()}` | {shown} | {item.metadata['help']} |")
    return "\n".join(rows) + "\n"


def _shown(value: object) -> str:
    if value in ("", (), None) or value is MISSING:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value} ({value // MIB} MiB)"
    return str(value)


def test_the_configuration_page_lists_every_setting_as_it_is() -> None:
    assert configuration_table() in PAGE.read_text("utf-8"), "run python -m tests.test_docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not t.startswith(("http", "#"))]
    missing = [t for t in targets if t and not (page.parent / t).exists()]
    assert missing == []


def test_every_test_named_in_the_architecture_exists() -> None:
    named = re.findall(r"\((tests/[\w/.]+\.py)\)", (ROOT / "ARCHITECTURE.md").read_text("utf-8"))
    assert named, "the invariants are linked to their tests"
    for path in named:
        assert (ROOT / path).exists(), path


def _rewrite() -> None:
    text = PAGE.read_text("utf-8")
    start, end = text.index("| setting |"), text.rindex("|\n") + 2
    PAGE.write_text(text[:start] + configuration_table() + text[end:], "utf-8")


if __name__ == "__main__":
    _rewrite()
