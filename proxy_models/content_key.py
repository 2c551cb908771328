"""The hash of plain values that names what they describe."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def content_key(values: Any) -> str:
    """Hash of plain values by their canonical JSON, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
