"""The report of `muscale doctor --gpu`: checks with their numbers and bounds, for a terminal and as a file to send."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from muscale.formatting import finite
from proxy_models.files import write_text


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison.

    Attributes:
        what: Subject and place of the comparison.
        status: "skipped" is neither passed nor failed.
        found: The number with its unit; the reason if skipped.
        bound: The required value.
        value: The number alone; None if there is none.
    """

    what: str
    status: Literal["pass", "fail", "skipped"]
    found: str
    bound: str = ""
    value: float | None = None

    @classmethod
    def judged(cls, what: str, passes: bool, found: str, bound: str, value: float | None = None) -> Self:
        """Make a check that passed or failed."""
        return cls(what=what, status="pass" if passes else "fail", found=found, bound=bound, value=value)


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """All checks, and the measurements behind them.

    Attributes:
        trainings: Each training as plain values.
        packing: Report of each worker that shared a device.
    """

    machine: dict[str, Any]
    checks: tuple[Check, ...]
    trainings: tuple[dict[str, Any], ...]
    packing: tuple[dict[str, Any], ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(check.status == "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with `passed`."""
        return {"passed": self.passed, **asdict(self)}

    def write(self, file: Path) -> None:
        """Write the report as JSON."""
        write_text(file, json.dumps(finite(self.to_dict()), indent=1))

    def __str__(self) -> str:
        wide = max(len(check.what) for check in self.checks)
        found = max((len(check.found) for check in self.checks if check.value is not None), default=0)  # no reasons
        lines = [f"{c.status:<7}  {c.what:<{wide}}  {c.found:<{found}}  {c.bound}".rstrip() for c in self.checks]
        count = {status: sum(c.status == status for c in self.checks) for status in ("pass", "fail", "skipped")}
        return "\n".join([*lines, ", ".join(f"{status}: {number}" for status, number in count.items())])
