"""docs/input-format.md promises only what a test holds."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_on_the_page_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "input-format.md").read_text("utf-8")))
    written = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "plan").glob("test_*.py"))
    assert len(named) > 30
    assert sorted(name for name in named if f"def {name}(" not in written) == []
