"""README is short, and its links lead to something."""

import re

from markdown_pages import broken_links, links, python_blocks
from paths import ROOT

README = ROOT / "README.md"
TEXT = README.read_text()


def test_at_most_1000_words():
    """Everything between spaces counts: prose, tables, code and the targets of links."""
    assert len(TEXT.split()) <= 1000


def test_links_lead_to_files_and_to_tests_that_exist():
    assert broken_links(README) == []
    assert [link for link in links(TEXT) if link.startswith("http")] == []


def test_a_broken_link_is_found():
    for link in (
        "nowhere.md",
        "docs/evidence.md#no-such-heading",
        "tests/test_window.py#test_that_does_not_exist",
    ):
        assert broken_links(README, f"{TEXT}\n[x]({link})") == [link]


def test_every_row_of_the_comparison_links_to_a_test_of_gradlab():
    [table] = re.findall(r"^\| \| gradlab \|.*?\n\n", TEXT, flags=re.S | re.M)
    rows = table.splitlines()[2:-1]
    assert rows
    assert all(
        re.match(r"\| [^|]+ \| \[yes\]\(tests/[\w/]+\.py#test_\w+\) \|", row) for row in rows
    )


def test_it_has_one_block_of_python():
    """test_docs.py runs it, together with the Python of the pages in docs/."""
    [block] = python_blocks(TEXT)
    assert (
        len([line for line in block.splitlines() if line and not line.startswith("import ")]) <= 10
    )
