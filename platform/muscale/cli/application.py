"""The command-line application: groups in the order of the workflow, and an example for each command."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

from cyclopts import App, Argument, CycloptsError, Group, MissingArgumentError, UnusedCliTokensError

from muscale.errors import EXIT_BROKEN_PIPE, EXIT_FAULT, EXIT_PREEMPTED

Function = TypeVar("Function", bound=Callable[..., int])

SEARCH = Group.create_ordered("Search")
LAW = Group.create_ordered("Scaling law")
FULL_RUN = Group.create_ordered("Full run")
ARTIFACTS = Group.create_ordered("Artifacts")
INSPECT = Group.create_ordered("Inspect")
MACHINE = Group.create_ordered("Machine")
_OTHERS = Group.create_ordered("Other")

EXIT_CODES = {
    0: "success",
    1: "a check failed: coordinate check, transfer verdict, gate, bundle, machine, or a run outside its forecast or band",
    2: "an error in usage, configuration or data",
    EXIT_FAULT: "an internal error of muscale",
    EXIT_PREEMPTED: "a full run was preempted and has saved; run the same command to resume",
    130: "interrupted; run the same command to resume",
    EXIT_BROKEN_PIPE: "the output pipe was closed",
}


def _format_error(error: CycloptsError) -> str:
    """The message for a command line that can't be parsed."""
    command = " ".join(("muscale", *(error.command_chain or ())))
    message = " ".join(str(error).split())
    match error:
        case MissingArgumentError(argument=Argument(field_info=field, names=names)) if not error.tokens_so_far:
            named = names[0].lstrip("-").upper() if field.is_positional else names[0]
            message = f"{error.keyword} needs a value" if error.keyword else f"{named} is missing"
        case UnusedCliTokensError(unused_tokens=[*unused]):
            message = f"unexpected argument: {' '.join(unused)}"
    return f"error: {message}\nsee `{command} --help`"


app = App(
    name="muscale",
    version=metadata.version("muscale"),
    suppress_keyboard_interrupt=False,
    result_action="return_value",
    error_formatter=_format_error,
    group_commands=_OTHERS,
    help="Find hyperparameters, size and tokens for a large training run, forecast its loss, and check the forecast.",
    help_epilogue="\n\n".join(
        (
            "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
            "Add `--debug` to any command, or set MUSCALE_DEBUG=1, to print an error's stack trace. NO_COLOR=1 turns colours off.",
            "Example: muscale init my-study --source ~/texts",
        )
    ),
)
app.register_install_completion_command(help="Install shell completion of commands and options.")
_positions = itertools.count()


def command(
    group: Group, *, example: str, name: str | None = None, within: App = app
) -> Callable[[Function], Function]:
    """A decorator that registers a function as a command, after the earlier ones of its group.

    Args:
        group: One of the groups above.
        example: A complete command line at the end of the command's --help; the tests parse it.
        name: The command's name, by default the function's.
        within: The application or a group of commands, such as `data`.
    """

    def register(function: Function) -> Function:
        epilogue = f"Example: {example}"
        return within.command(function, name=name, group=group, sort_key=next(_positions), help_epilogue=epilogue)

    return register
