"""The application that the commands belong to: its groups, in the order of the loop, and the example that each command shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

from cyclopts import App, Argument, CycloptsError, Group, MissingArgumentError, UnusedCliTokensError

from muscale.errors import EXIT_BROKEN_PIPE, EXIT_FAULT, EXIT_PREEMPTED

Function = TypeVar("Function", bound=Callable[..., int])

SEARCH = Group.create_ordered("Search")
LAW = Group.create_ordered("Law")
FULL_RUN = Group.create_ordered("Full run")
KEEP = Group.create_ordered("Keep")
LOOK = Group.create_ordered("Look")
MACHINE = Group.create_ordered("Machine")
_OTHERS = Group.create_ordered("And")

EXIT_CODES = {
    0: "done",
    1: "a check failed: coordinate check, transfer verdict, gate, bundle, machine, or a run outside its forecast or band",
    2: "an error that you can mend",
    EXIT_FAULT: "a fault of muscale's own",
    EXIT_PREEMPTED: "a full run was preempted and has saved; the same command continues it",
    130: "interrupted; the same command goes on",
    EXIT_BROKEN_PIPE: "whoever read the output went away",
}


def _told(error: CycloptsError) -> str:
    """What is said of a command line that can't be parsed, with where to read more."""
    command = " ".join(("muscale", *(error.command_chain or ())))
    told = " ".join(str(error).split())
    match error:
        case MissingArgumentError(argument=Argument(field_info=field, names=names)) if not error.tokens_so_far:
            named = names[0].lstrip("-").upper() if field.is_positional else names[0]
            told = f"{error.keyword} needs a value" if error.keyword else f"{named} is missing"
        case UnusedCliTokensError(unused_tokens=[*unused]):
            told = f"nothing takes {' '.join(unused)}"
    return f"error: {told}\n`{command} --help` tells what it takes"


app = App(
    name="muscale",
    version=metadata.version("muscale"),
    suppress_keyboard_interrupt=False,
    result_action="return_value",
    error_formatter=_told,
    group_commands=_OTHERS,
    help="Find the hyperparameters, the size, the tokens and the loss of a large training run, then prove it.",
    help_epilogue="\n\n".join(
        (
            "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
            "`--debug` in any command, or MUSCALE_DEBUG=1, shows the stack trace of an error. NO_COLOR=1 takes the colours away.",
            "Example: muscale init my-study --source ~/texts",
        )
    ),
)
app.register_install_completion_command(help="Let Tab complete commands and options in your shell.")
_positions = itertools.count()


def command(group: Group, *, example: str, name: str | None = None) -> Callable[[Function], Function]:
    """Registers a function as a command, below those of its group that came before it.

    Args:
        group: One of those above.
        example: A whole command line, which the command's --help ends with; the tests parse it.
        name: The command's, if it isn't the function's.
    """

    def register(function: Function) -> Function:
        epilogue = f"Example: {example}"
        return app.command(function, name=name, group=group, sort_key=next(_positions), help_epilogue=epilogue)

    return register
