"""What the pages name as shown by a test is a test that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(?P<file>[\w/]*\btest_\w+\.py)?(?:::(?P<test>test_\w+))?`")


@pytest.mark.parametrize("page", ["README.md", "docs/promises.md", "docs/security.md"])
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    source, named = "", 0
    for found in NAMED.finditer((ROOT / page).read_text()):
        if file := found["file"]:
            (path, *_) = (ROOT / "tests").rglob(file.removeprefix("tests/"))
            source = path.read_text()
        if found["test"]:
            assert f"def {found['test']}(" in source, found[0]
        named += bool(found["file"] or found["test"])
    assert named
