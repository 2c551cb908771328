"""Secrets of the environment, kept out of whatever a library says about them."""

from __future__ import annotations

import os

NAMES = (
    "WANDB_API_KEY",
    "MUSCALE_LEDGER_URL",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)


def redacted(text: str) -> str:
    """The text with the name of its variable in place of each secret."""
    for name in NAMES:
        if value := os.environ.get(name):
            text = text.replace(value, f"${name}")
    return text
