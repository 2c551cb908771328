"""Forms of the loss law: frozen values with formula, parameters, bounds and source."""

from scaling.forms.form import Form
from scaling.forms.powers import Chinchilla, Joint, Kaplan, TiedChinchilla
from scaling.forms.repeated import RepeatedData

FORMS: dict[str, type[Form]] = {form.name: form for form in (Chinchilla, TiedChinchilla, Joint, Kaplan)}
"""Forms of a loss in N and D that come with the library, by name."""
ALL_FORMS: dict[str, type[Form]] = FORMS | {RepeatedData.name: RepeatedData}
"""These and the forms that depend on more: what a saved law may name."""

__all__ = [
    "ALL_FORMS",
    "FORMS",
    "Chinchilla",
    "Form",
    "Joint",
    "Kaplan",
    "RepeatedData",
    "TiedChinchilla",
    "form_named",
]


def form_named(name: str) -> Form:
    """The library's form of this name.

    Raises:
        ValueError: it has none.
    """
    if name not in ALL_FORMS:
        raise ValueError(f"form must be given: {name!r} is none of {', '.join(ALL_FORMS)}")
    return ALL_FORMS[name]()
