"""Results that are kept in a file as they are found, so that a killed evaluation continues where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy_models.files import named


class RequestLog:
    """Results by the keys of their requests, one in each line of a file.

    A kill may leave a torn last line; it is removed, and its request is computed again.

    Attributes:
        found: Plain values by key.
    """

    def __init__(self, file: Path | None) -> None:
        """Read what an interrupted evaluation left; without a file, results are kept in memory only."""
        self.found: dict[str, Any] = {}
        self._file = file
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            return
        content = file.read_bytes()
        os.truncate(file, content.rfind(b"\n") + 1)
        for line in content.split(b"\n"):
            with suppress(ValueError):
                self.found |= json.loads(line)

    def keep(self, results: Mapping[str, Any]) -> None:
        """Add results."""
        self.found |= results
        if self._file is not None:
            with named(self._file), self._file.open("a") as file:
                file.write("".join(json.dumps({key: result}) + "\n" for key, result in results.items()))
