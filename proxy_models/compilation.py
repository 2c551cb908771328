"""torch.compile where there is a compiler, eager where there is none."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from functools import cache
from pathlib import Path


@cache
def missing_compiler() -> str | None:
    """Why torch.compile can't work on this machine's CPU, or None: it needs a C++ compiler and Python's headers.

    What is missing is logged, once in a process.
    """
    reason = None
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        reason = "no C++ compiler (g++ or clang++) was found"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        reason = "Python's header files (Python.h) were not found"
    if reason:
        logging.getLogger(__name__).warning("training without torch.compile: %s", reason)
    return reason


def configure() -> None:
    """Let one process compile many shapes, and make a recompilation beyond that an error instead of a silent eager."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.fail_on_recompile_limit_hit = True
