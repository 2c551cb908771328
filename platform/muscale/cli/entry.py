"""The entry point: what a command returns or raises becomes an exit code, and an error a sentence."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from muscale.cli.application import app
from muscale.errors import EXIT_BROKEN_PIPE, EXIT_FAULT, EXIT_PREEMPTED, MuscaleError, PreemptedError, of_storage
from muscale.secrets import redacted

DEBUG = "--debug"
_OURS = {"proxy_models", "scaling", "search_spaces"}  # their own exceptions are about what they were given


def main() -> None:
    """Entry point of the command `muscale`."""
    signal.signal(signal.SIGTERM, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a file's name may be no text
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _unread()
    except OSError as error:  # the output goes into a file whose disk is full
        code = _unwritten(error)
    sys.exit(code)


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code; help, and a line that can't be parsed, exit by themselves.

    Args:
        tokens: What follows `muscale`.
    """
    debug = _is_on(os.environ.get("MUSCALE_DEBUG", "")) or DEBUG in _options(tokens)
    left = [token for token in _options(tokens) if token != DEBUG] + list(tokens[len(_options(tokens)) :])
    try:
        return int(app(left) or 0)
    except KeyboardInterrupt:
        _say("interrupted; run the same command again to go on", debug=debug)
        return 130
    except BrokenPipeError as error:
        if _is_unread():
            return _unread()
        return _fault(error, tokens, debug=debug)
    except Exception as error:
        if isinstance(error, PreemptedError):
            _say(str(error), debug=debug)
            return EXIT_PREEMPTED
        if told := _mendable(error):
            _say(f"error: {told}", debug=debug)
            return 2
        return _fault(error, tokens, debug=debug)


def _options(tokens: Sequence[str]) -> list[str]:
    """The tokens before a `--`, after which nothing is an option."""
    return list(tokens[: tokens.index("--")] if "--" in tokens else tokens)


def _is_on(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "no")


def _mendable(error: Exception) -> str:
    """What to tell of an error that the user can mend, or nothing."""
    if isinstance(error, MuscaleError) or type(error).__module__.partition(".")[0] in _OURS:
        return str(error)
    if told := of_storage(error):
        return told
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]} (--debug shows where)"
    return ""


def _say(text: str, *, debug: bool) -> None:
    if debug:
        print(redacted(traceback.format_exc()), file=sys.stderr, end="")
    print(redacted(text), file=sys.stderr)


def _fault(error: Exception, tokens: Sequence[str], *, debug: bool) -> int:
    """Tell of an error that nobody foresaw; its trace goes into a file, or into the log where there is no terminal."""
    told = redacted(f"error: a fault of muscale's own, not of yours: {type(error).__name__}: {error}")
    stack = redacted("".join(traceback.format_exception(error)))
    if debug or not sys.stderr.isatty():
        print(stack, file=sys.stderr, end="")
        print(f"{told}\nplease report it with the lines above", file=sys.stderr)
        return EXIT_FAULT
    handle, name = tempfile.mkstemp(prefix="muscale-fault-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        print(f"muscale {metadata.version('muscale')}, Python {sys.version}", file=file)
        print(redacted(" ".join(("muscale", *tokens))), file=file)
        print(stack, file=file, end="")
    print(f"{told}\nplease report it with {Path(name)}, which has the stack trace (--debug shows it)", file=sys.stderr)
    return EXIT_FAULT


def _is_unread() -> bool:
    """Whether it is our own output that nobody reads any more, and no socket to elsewhere."""
    ready = select.poll()
    ready.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in ready.poll(0))


def _unread() -> int:
    """Leave quietly when `| head` has read enough; what is still to be written goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def _unwritten(error: OSError) -> int:
    """Tell that the output was not written; what is left of it goes nowhere."""
    error.filename = error.filename or "the output"
    print(f"error: {_mendable(error)}", file=sys.stderr)
    _unread()
    return 2


def _interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM is a Ctrl-C: `ray job stop` and batch systems send it."""
    raise KeyboardInterrupt
