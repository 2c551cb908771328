"""torch.compile where there is a compiler, eager where there is none."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Compile = bool | Literal["auto"]
"""Compile or not; "auto" where it pays."""
_PAYS_FROM_TOKENS = 4_000_000


@cache
def missing_compiler(device_type: str) -> str | None:
    """Return the reason why torch.compile cannot work for this machine's "cpu" or "cuda" devices, or None.

    It needs Python's headers, and for a CPU a C++ compiler, for a GPU Triton and the C compiler that Triton calls. The reason
    is logged, once in a process.
    """
    reason = None
    language, compilers = ("C++", ("g++", "clang++")) if device_type == "cpu" else ("C", ("gcc", "clang"))
    if not any(shutil.which(name) for name in compilers):
        reason = f"no {language} compiler ({' or '.join(compilers)}) was found"
    elif device_type == "cuda" and find_spec("triton") is None:
        reason = "Triton was not found"
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


def pays(n_tokens: int) -> bool:
    """Return True if compiling a shape saves more time than it costs, for so many tokens on a CPU.

    Measured here at depth 2, widths 32 to 256, batches of 8 × 128 tokens, one thread: compiling took 7 to 21 s and then saved
    3 to 5.5 microseconds a token at any width, as it is the overhead of single operations that it saves. Both grow with depth
    alike. On a GPU it is not measured yet, and the same number holds.
    """
    return n_tokens >= _PAYS_FROM_TOKENS


def decide(compile: Compile, n_tokens: int, device_type: str) -> bool:
    """Decide whether to compile a shape that will be trained for so many tokens on a "cpu" or "cuda" device."""
    wanted = pays(n_tokens) if compile == "auto" else compile
    return wanted and missing_compiler(device_type) is None
