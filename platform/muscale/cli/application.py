"""The application that the commands belong to."""

from __future__ import annotations

from importlib import metadata

from cyclopts import App

app = App(
    name="muscale",
    version=metadata.version("muscale"),
    suppress_keyboard_interrupt=False,
    help="Find the hyperparameters, the size, the tokens and the loss of a large training run, then prove it.",
)
