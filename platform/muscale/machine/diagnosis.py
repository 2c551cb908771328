"""Findings of `muscale doctor`, each with a remedy if something is wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        what: Name of the check.
        status: "fail" prevents a study from running here, "warning" does not.
        found: The result; never a secret.
        do: The remedy; empty if the status is "ok".
    """

    what: str
    status: Status
    found: str
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, in order."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether no finding fails."""
        return not any(finding.status == "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with `passed`."""
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
