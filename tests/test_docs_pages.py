"""The documents: short where they are read first, and true to the files that they name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_readme_is_read_in_four_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_pages_can_all_be_reached_from_the_readme() -> None:
    reached, new = set[Path](), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        links = LINK.findall(page.read_text(encoding="utf-8"))
        files = {(page.parent / target).resolve() for target, _ in links if target.endswith(".md")}
        new |= files - reached
    assert {*PAGES} <= reached


def test_the_loop_by_hand_is_shown_as_it_runs() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    loop = (ROOT / "benchmarks" / "peers" / "bare_loop.py").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(snippets) >= 5
    for snippet in snippets:
        assert snippet in loop
