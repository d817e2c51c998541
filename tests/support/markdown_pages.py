"""Reads Markdown pages as text: their links, their Python, and which links lead nowhere."""

import pathlib
import re

LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """A page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def links(text: str) -> list[str]:
    """The targets of a page's links and images, in order."""
    return LINK.findall(without_code(text))


def python_blocks(text: str) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), flags=re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: pathlib.Path, text: str | None = None) -> list[str]:
    """The relative links of a page that name no file, no heading of a page, or no test of a
    module."""
    targets = links(page.read_text() if text is None else text)
    return [
        link
        for link in targets
        if not re.match(r"https?://", link) and not _leads_somewhere(page, link)
    ]


def _leads_somewhere(page: pathlib.Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not anchor:
        return target.exists()
    if target.suffix == ".py":
        return re.search(rf"^\s*def {anchor}\(", target.read_text(), flags=re.M) is not None
    return anchor in headings(target.read_text())
