"""Forms of the loss law: frozen values with formula, parameters, bounds and source."""

from scaling.forms.law import Form
from scaling.forms.powers import Chinchilla, Joint, Kaplan, TiedChinchilla
from scaling.forms.repeated import RepeatedData
from scaling.serialization import converter

FORMS: dict[str, type[Form]] = {form.name: form for form in (Chinchilla, TiedChinchilla, Joint, Kaplan)}
"""The library's forms of a loss in N and D alone, by name."""
ALL_FORMS: dict[str, type[Form]] = FORMS | {RepeatedData.name: RepeatedData}
"""All forms of the library by name, including forms with further columns."""

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
    """Return the library's form of this name, or a custom form that was defined before; raise ValueError if there is none."""
    known = Form.own | ALL_FORMS
    if name not in known:
        raise ValueError(
            f"form must be one of {', '.join(known)}, got {name!r}; define a custom form before reading its law"
        )
    return known[name]()


converter.register_unstructure_hook(Form, lambda form: form.name)
converter.register_structure_hook(Form, lambda name, _: form_named(name))
