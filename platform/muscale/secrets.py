"""Redaction of secrets in the environment from messages of libraries."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

NAMES = (
    "WANDB_API_KEY",
    "MUSCALE_LEDGER_URL",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "RAY_AUTH_TOKEN",
)
_LEAST = 4  # characters of a password in a URL; shorter ones occur in many words


def redacted(text: str) -> str:
    """Return the text with the variable's name in place of each secret and of each URL's password."""
    for name in NAMES:
        if value := os.environ.get(name):
            for secret in (value, *_passwords(value)):
                text = text.replace(secret, f"${name}")
    return text


def _passwords(url: str) -> list[str]:
    """Return the password in a URL, quoted and unquoted."""
    try:
        found = urlsplit(url).password or ""
    except ValueError:  # not a URL
        return []
    return [secret for secret in (found, unquote(found)) if len(secret) >= _LEAST]
