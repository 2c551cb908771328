"""How far a long work has come that reads several sources, perhaps several times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from proxy_models.data.sources import SourceFile

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are done, and all of them."""


class PassProgress:
    """Bytes that are done over all sources and passes."""

    def __init__(self, tell: OnProgress | None, prints: Mapping[str, Sequence[SourceFile]], *, passes: int) -> None:
        self._tell = tell
        self._sizes = {name: sum(file.bytes for file in files) for name, files in prints.items()}
        self._passes, self._ended = passes, 0

    def of(self, name: str) -> OnProgress | None:
        """What a pass over this source tells."""
        if self._tell is None:
            return None
        tell, whole = self._tell, sum(self._sizes.values())
        names = list(self._sizes)
        before = sum(self._sizes[other] for other in names[: names.index(name)]) + self._ended * whole
        return lambda done, _total: tell(before + done, whole * self._passes)

    def start_last_pass(self) -> None:
        """What is told from now on comes after every other pass."""
        self._ended = self._passes - 1
