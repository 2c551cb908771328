"""Makes the pictures of the report that docs/ shows: python -m tests.pictures runs/quickstart/report.html docs."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.muscale.browsers import NARROW, chromium, opened

PICTURES = {"report-wide.png": ((1280, 1020), False), "report-narrow.png": ((NARROW[0], 1180), True)}
"""Name: size in pixels, and whether it is dark."""


def make_pictures(report: Path, folder: Path) -> list[Path]:
    """The top of a report at two widths, as PNGs of 256 colours."""
    made = []
    with chromium() as browser:
        for name, (size, dark) in PICTURES.items():
            with opened(browser, report.resolve().as_uri(), size=size, dark=dark) as shown:
                path = folder / name
                shown.page.screenshot(path=str(path))
                _shrink(path)
                made.append(path)
    return made


def _shrink(path: Path) -> None:
    """To a palette, which text and lines hardly need more than."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    for made in make_pictures(Path(sys.argv[1]), Path(sys.argv[2])):
        sys.stdout.write(f"{made}\n")
