"""Forms of the loss law: frozen values with formula, parameters, bounds and source."""

from scaling.forms.expert_law import JointExperts, MixtureOfExperts
from scaling.forms.law import Form
from scaling.forms.one_size import OneSize
from scaling.forms.powers import Chinchilla, Joint, Kaplan, TiedChinchilla
from scaling.forms.repeated import RepeatedData
from scaling.serialization import converter

FORMS: dict[str, type[Form]] = {form.name: form for form in (Chinchilla, TiedChinchilla, Joint, Kaplan)}
"""The library's forms of a loss in N and D alone, by name."""
ALL_FORMS: dict[str, type[Form]] = FORMS | {form.name: form for form in (RepeatedData, MixtureOfExperts, OneSize)}
"""All forms of the library by name, including forms with other columns."""
FORECAST_FORMS: tuple[Form, ...] = (Joint(), JointExperts(), OneSize())
"""Forms that a forecast fits under its prior, one for each set of columns that forecasts were tested for."""

__all__ = [
    "ALL_FORMS",
    "FORECAST_FORMS",
    "FORMS",
    "Chinchilla",
    "Form",
    "Joint",
    "Kaplan",
    "MixtureOfExperts",
    "OneSize",
    "RepeatedData",
    "TiedChinchilla",
    "forecast_form",
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


def forecast_form(form: Form) -> Form | None:
    """Return the form that a forecast fits to the columns of this form; None if forecasts were not tested for them."""
    return next((each for each in FORECAST_FORMS if {*each.columns} == {*form.columns}), None)


converter.register_unstructure_hook(Form, lambda form: form.name)
converter.register_structure_hook(Form, lambda name, _: form_named(name))
