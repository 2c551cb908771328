"""The product's prose is plain English: docstrings begin with a verb or a noun, and dialect words stay out."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("platform", "proxy_models", "scaling", "search_spaces")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONFIGURATION = [ROOT / "Makefile", ROOT / "pyproject.toml", *sorted((ROOT / "platform/muscale").glob("*.toml"))]
FRAGMENT = re.compile(r"(Of|What|Those|That which|Where|As(?! a result))\b")
DIALECT = re.compile(
    r"\b(beside(?! the point)|heed\w*|owed|furthest|whereabouts|whence|thereof|befall\w*|lest|anew|told"
    r"|whoever|in vain|without a word|is no news|(is|are) at (work|hand)|goes on (from|until|with)"
    r"|of (a user's|one's|its|their|his) own)\b",
    re.IGNORECASE,
)
COMMENT = re.compile(r"(?:^|\s)#\s(.*)")


def docstrings_and_prose(source: str) -> tuple[list[str], list[str]]:
    """Return the strings that are statements (docstrings of all kinds), and every comment and string of several words."""
    docstrings, strings = [], []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                docstrings.append(text)
            case ast.Constant(value=str(text)) if " " in text:
                strings.append(text)
    return docstrings, [*strings, *COMMENT.findall(source)]


def test_the_prose_of_the_product_is_plain_english() -> None:
    found = []
    for path in SOURCES:
        docstrings, prose = docstrings_and_prose(path.read_text())
        found += [f"{path}: begins with {text[:40]!r}" for text in docstrings if FRAGMENT.match(text)]
        found += [f"{path}: {word[0]!r} in {text!r}" for text in prose for word in DIALECT.finditer(text)]
    for page in PAGES:
        found += [f"{page}: {word[0]!r}" for word in DIALECT.finditer(page.read_text())]
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
        found += [f"{path}: {word[0]!r}" for cell in cells for word in DIALECT.finditer("".join(cell["source"]))]
    for path in CONFIGURATION:
        comments = "\n".join(COMMENT.findall(path.read_text()))
        found += [f"{path}: {word[0]!r}" for word in DIALECT.finditer(comments)]
    assert "\n".join(found) == ""


@pytest.mark.parametrize(
    ("opening", "is_fragment"),
    [("Of every draw.", True), ("Where it lies.", True), ("Often restarts.", False), ("As a result, it stops.", False)],
)
def test_a_fragment_is_known_by_its_first_words(opening: str, is_fragment: bool) -> None:
    assert bool(FRAGMENT.match(opening)) == is_fragment
