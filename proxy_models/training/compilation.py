"""Use of torch.compile if there is a compiler, and eager execution otherwise."""

from __future__ import annotations

import logging
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Compile = bool | Literal["auto"]
"""Whether to compile; "auto" compiles if that pays."""
_PAYS_FROM_TOKENS = 4_000_000


@cache
def missing_compiler(device_type: str) -> str | None:
    """Return the reason why torch.compile cannot work for this machine's "cpu" or "cuda" devices, or None.

    torch.compile needs Python's headers; for a CPU also a C++ compiler, for a GPU Triton and the C compiler that Triton calls.
    The reason is logged once per process.
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
    """Let one process compile many shapes, and make recompilation beyond that an error instead of a silent eager fallback.

    What hooks hold of a forward pass, its recomputation does not repeat; torch otherwise leaves such a block out of the graph.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 4096
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def pays(n_tokens: int) -> bool:
    """Return True if compiling a shape saves more time than it costs, for this number of tokens on a CPU.

    Measured here at depth 2, widths 32 to 256, batches of 8 × 128 tokens, one thread: compiling took 7 to 21 s and then saved
    3 to 5.5 microseconds per token at any width, since it removes the overhead of single operations. Cost and saving grow
    alike with depth. For a GPU nothing is measured yet; the same number is assumed.
    """
    return n_tokens >= _PAYS_FROM_TOKENS


def decide(compile: Compile, n_tokens: int, device_type: str) -> bool:
    """Decide whether to compile a shape that will train for this number of tokens on a "cpu" or "cuda" device."""
    wanted = pays(n_tokens) if compile == "auto" else compile
    return wanted and missing_compiler(device_type) is None
