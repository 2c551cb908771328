"""The entry point: turns results and errors of commands into exit codes and messages."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from muscale.cli.application import app
from muscale.errors import EXIT_BROKEN_PIPE, EXIT_FAULT, EXIT_PREEMPTED, MuscaleError, PreemptedError, of_storage
from muscale.interrupts import once
from muscale.secrets import redacted

DEBUG = "--debug"
_OURS = {"proxy_models", "scaling", "search_spaces"}  # their exceptions describe a fault in the input
_PROTOCOL = "proxy_models.architecture.family"  # not imported here, because it would delay --help


def main() -> None:
    """Entry point of the command `muscale`."""
    signal.signal(signal.SIGTERM, once(_interrupt))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does: a file name may not be valid text
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _unread()
    except OSError as error:  # the output goes to a file and the disk is full
        code = _unwritten(error)
    if "train" in sys.argv and os.environ.get("WORLD_SIZE", "1") != "1":
        # In one of several ranks a gloo thread may still release a tensor, for which it needs Python. If Python is finalizing, torch
        # 2.13 ends by SIGABRT whatever the code: seen on a busy machine, with a bare script of two gloo ranks too.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code; --help and unparsable lines raise SystemExit.

    Args:
        tokens: The command line after `muscale`.
    """
    is_set = os.environ.get("MUSCALE_DEBUG", "").lower() not in ("", "0", "false", "no")
    debug = is_set or DEBUG in _options(tokens)
    left = [token for token in _options(tokens) if token != DEBUG] + list(tokens[len(_options(tokens)) :])
    try:
        return int(app(left) or 0)
    except KeyboardInterrupt:
        return _interrupted(debug=debug)
    except BrokenPipeError as error:
        if _is_unread():
            return _unread()
        return _fault(error, tokens, debug=debug)
    except Exception as error:
        if isinstance(error, PreemptedError):
            _say(str(error), debug=debug)
            return EXIT_PREEMPTED
        if message := _user_message(error):
            _say(f"error: {message}", debug=debug)
            return 2
        if _follows_interruption(error):
            return _interrupted(debug=debug)
        return _fault(error, tokens, debug=debug)


def _interrupted(*, debug: bool) -> int:
    _say("interrupted; run the same command again to resume", debug=debug)
    _end_wandb()
    return 130


def _follows_interruption(error: BaseException | None) -> bool:
    """Return whether an interruption led to the error: a library translated it, or failed to clean up behind it."""
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _end_wandb() -> None:
    """Stop the service of Weights & Biases, if any; if `ray job stop` stopped it first, its exit hook prints a stack trace."""
    if wandb := sys.modules.get("wandb"):
        with suppress(ConnectionError, wandb.Error, KeyboardInterrupt):
            wandb.teardown(130)


def _options(tokens: Sequence[str]) -> list[str]:
    """Return the tokens before a `--`; nothing after it is an option."""
    return list(tokens[: tokens.index("--")] if "--" in tokens else tokens)


def _user_message(error: Exception) -> str:
    """Return the message of an error that the user can fix; "" for any other error."""
    if isinstance(error, MuscaleError) or type(error).__module__.partition(".")[0] in _OURS:
        return str(error)
    if message := of_storage(error):
        return message
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]} (--debug shows where)"
    return _of_own_model(error)


def _of_own_model(error: Exception) -> str:
    """Return the message of an error raised in, or called from, the file of a custom family; "" for any other error."""
    families = sys.modules[_PROTOCOL].Family.__subclasses__() if _PROTOCOL in sys.modules else []
    own = {family.__module__ for family in families}
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in {"muscale", *_OURS}:
            return ""
        if module in own:
            place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
            return f"{place}: {type(error).__name__}: {error} (--debug shows the stack)"
    return ""


def _say(text: str, *, debug: bool) -> None:
    if debug:
        print(redacted(traceback.format_exc()), file=sys.stderr, end="")
    print(redacted(text), file=sys.stderr)


def _fault(error: Exception, tokens: Sequence[str], *, debug: bool) -> int:
    """Report an internal error. Its stack trace goes to a file, or to standard error if that is not a terminal."""
    message = redacted(f"error: internal error of muscale: {type(error).__name__}: {error}")
    stack = redacted("".join(traceback.format_exception(error)))
    if debug or not sys.stderr.isatty():
        print(stack, file=sys.stderr, end="")
        print(f"{message}\nplease report it with the lines above", file=sys.stderr)
        return EXIT_FAULT
    handle, name = tempfile.mkstemp(prefix="muscale-fault-", suffix=".txt")
    with os.fdopen(handle, "w") as file:
        print(f"muscale {metadata.version('muscale')}, Python {sys.version}", file=file)
        print(redacted(" ".join(("muscale", *tokens))), file=file)
        print(stack, file=file, end="")
    print(
        f"{message}\nplease report it and attach {Path(name)}, which has the stack trace (--debug prints it)",
        file=sys.stderr,
    )
    return EXIT_FAULT


def _is_unread() -> bool:
    """Return whether standard output is the closed pipe, rather than a socket."""
    ready = select.poll()
    ready.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in ready.poll(0))


def _unread() -> int:
    """End quietly after `| head` has closed the pipe; the remaining output is discarded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def _unwritten(error: OSError) -> int:
    """Report that the output could not be written, and discard the rest."""
    error.filename = error.filename or "the output"
    print(f"error: {_user_message(error)}", file=sys.stderr)
    _unread()
    return 2


def _interrupt() -> None:
    """Treat SIGTERM, which `ray job stop` and batch systems send, as Ctrl-C."""
    raise KeyboardInterrupt
