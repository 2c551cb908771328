"""The public API is one sorted list, and importing it is cheap."""

import subprocess
import sys

import scaling


def test_the_list_is_sorted_and_complete() -> None:
    assert scaling.__all__ == sorted(scaling.__all__)
    assert all(hasattr(scaling, name) for name in scaling.__all__)


def test_every_public_name_is_documented() -> None:
    assert [name for name in scaling.__all__ if not getattr(scaling, name).__doc__] == []


def test_import_pulls_in_neither_scipy_nor_plotly() -> None:
    code = "import scaling, sys; print({'scipy', 'plotly', 'torch', 'ray'} & {m.split('.')[0] for m in sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
