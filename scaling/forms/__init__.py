"""Forms of the loss law: frozen values with formula, parameters, bounds and source."""

from scaling.forms.form import Form
from scaling.forms.powers import Chinchilla, Joint, Kaplan, TiedChinchilla

FORMS: dict[str, type[Form]] = {form.name: form for form in (Chinchilla, TiedChinchilla, Joint, Kaplan)}
"""Forms of a loss in N and D that come with the library, by name."""

__all__ = ["FORMS", "Chinchilla", "Form", "Joint", "Kaplan", "TiedChinchilla"]
