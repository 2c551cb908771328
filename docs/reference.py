"""Write the reference from the docstrings, as pages of HTML: python docs/reference.py [FOLDER], or `make docs`."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pdoc

import muscale

PACKAGES = ("muscale", "scaling", "search_spaces", "proxy_models")


def main(folder: Path) -> Path:
    """Write the pages into a folder and return the first."""
    for name in muscale.__all__:
        setattr(muscale, name, getattr(muscale, name))  # pdoc looks no further than what is imported already
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"muscale {metadata.version('muscale')}")
    pdoc.pdoc(*PACKAGES, output_directory=folder)
    return folder / "index.html"


if __name__ == "__main__":
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist/reference")))
