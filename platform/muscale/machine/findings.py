"""What `muscale doctor` finds: a line each, with what to do where something is amiss."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name, in a few letters.
        status: "fail" keeps a study from running here, "warning" does not.
        found: What is so; never a secret.
        do: What to do about it; empty where it is ok.
    """

    what: str
    status: Status
    found: str
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, in the order in which they were looked at."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing fails."""
        return not any(finding.status == "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, `passed` with them."""
        return {"passed": self.passed, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        wide = max(len(finding.what) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.status:<7}  {finding.what:<{wide}}  {finding.found}")
            if finding.do:
                lines.append(f"{'':7}  {'':{wide}}  → {finding.do}")
        count = {status: sum(f.status == status for f in self.findings) for status in ("ok", "warning", "fail")}
        lines.append(f"ok: {count['ok']}, warnings: {count['warning']}, failed: {count['fail']}")
        return "\n".join(lines)
