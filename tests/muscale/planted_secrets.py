"""Secrets where a user has them, and the search for them in files and in what every user of the machine may see."""

from __future__ import annotations

from pathlib import Path

import psutil

SECRET = "s3cr3t-of-the-environment"
PLANTED = {
    "WANDB_API_KEY": SECRET,
    "RAY_AUTH_TOKEN": SECRET,
    "MUSCALE_LEDGER_URL": f"postgresql://me:{SECRET}@127.0.0.1:9/muscale",
    "MLFLOW_TRACKING_PASSWORD": SECRET,
    "MY_WEBHOOK": f"http://127.0.0.1:9/{SECRET}",
}


def holding(folder: Path) -> list[Path]:
    """Files with a secret in them, or in their name."""
    found = [path for path in folder.rglob("*") if SECRET in path.name]
    return found + [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def leaking_processes() -> list[str]:
    """Command lines with a secret in them, of all processes, as `ps` shows them to everybody."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert len(lines) > 1, "there is something to see"
    return [line for line in lines if SECRET in line]
