"""The entry point: what a command returns or raises becomes an exit code."""

from __future__ import annotations

import signal
import sys

from muscale.cli.application import app


def _interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM is a Ctrl-C: `ray job stop` and batch systems send it."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the command `muscale`."""
    from muscale.errors import EXIT_PREEMPTED, MuscaleError, PreemptedError

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(result_action="return_value")
    except PreemptedError as error:
        print(error, file=sys.stderr)
        code = EXIT_PREEMPTED
    except MuscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        code = 130
    sys.exit(code)
