"""The command of data mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.application import LAW, command
from muscale.cli.options import AsJson, Columns, Whole, Words
from muscale.cli.running import result_alone, show
from muscale.errors import StudyFileError, refusing

if TYPE_CHECKING:
    from scaling import MixtureFit
    from scaling.mixtures.mixture_bounds import MixtureLimits


@command(LAW, example="muscale mixture runs.csv --objective pile_cc=1 --at-most github=0.3 --next 4")
def mixture(
    runs: Path,
    *,
    objective: Words = (),
    at_least: Words = (),
    at_most: Words = (),
    available_tokens: Words = (),
    n_tokens: float | None = None,
    max_epochs: float | None = None,
    n_params: float | None = None,
    next: Whole = 4,
    predict: Path | None = None,
    weight_prefix: str = "weight_",
    loss_prefix: str = "loss_",
    html: Path | None = None,
    columns: Columns = Columns(),
    json: AsJson = False,
) -> int:
    """Fit each domain's loss as a function of the mixture weights; print the best mixture within limits, and mixtures to train next.

    Args:
        runs: A CSV, TSV, Parquet or JSON Lines file of finished runs, with the columns weight_DOMAIN (summing to 1), loss_DOMAIN,
            and n_params and n_tokens if the runs differ in them.
        objective: A domain whose loss to minimise, with its weight in the sum, `DOMAIN=WEIGHT`; may be repeated. By default the
            mean of all losses.
        at_least: Lower bound of a domain's weight, `DOMAIN=WEIGHT`; may be repeated.
        at_most: Upper bound of a domain's weight, `DOMAIN=WEIGHT`; may be repeated.
        available_tokens: Number of tokens that a domain has, `DOMAIN=TOKENS`; may be repeated. Needs --n-tokens.
        n_tokens: Number of tokens of the planned run.
        max_epochs: Maximum number of epochs over any domain, 4 by default. Needs --available-tokens.
        n_params: Size of the planned run, if the runs differ in size.
        next: Number of mixtures to suggest; 0 for none.
        predict: Only print the losses predicted for this table of mixtures (weight_DOMAIN, and n_params and n_tokens if they
            differ).
        weight_prefix: Prefix of the columns with weights.
        loss_prefix: Prefix of the columns with losses.
        html: Also write the result as a page to this file: the best mixture and its interval, the effect of each domain's data on
            each loss, and runs to train next.
    """
    from scaling import ScalingError, fit_mixture

    if html and predict:
        raise StudyFileError(
            "mixture: --html shows the best mixture, and --predict does not look for it; leave one of them out"
        )
    if html and not html.absolute().parent.is_dir():
        raise StudyFileError(f"mixture: --html {html}: there is no folder {html.absolute().parent}")
    if max_epochs is not None and not available_tokens:
        raise StudyFileError(f"mixture: --max-epochs {max_epochs:g} needs --available-tokens")
    low, high = _numbers("at-least", at_least), _numbers("at-most", at_most)
    limits: MixtureLimits = {
        "bounds": {name: (low.get(name, 0.0), high.get(name, 1.0)) for name in {**low, **high}},
        "available_tokens": _numbers("available-tokens", available_tokens),
        "n_tokens": n_tokens,
        "n_params": n_params,
    }
    if max_epochs is not None:
        limits["max_epochs"] = max_epochs
    wanted = _numbers("objective", objective) or None
    with result_alone(json):
        with refusing("mixture", ScalingError, ValueError):
            fit = fit_mixture(runs, weight_prefix=weight_prefix, loss_prefix=loss_prefix, columns=columns.to_dict())
            found: dict[str, Any] = {"fit": fit}
            if predict:
                found["predictions"] = _predictions(fit, predict, columns, n_params, n_tokens)
            else:
                found["best"] = fit.best(wanted, **limits)
                if next:
                    found["next_mixtures"] = fit.next_mixtures(next, wanted, **limits)
        if html:
            from muscale.pages.table_pages import write_mixture_page

            write_mixture_page(html, runs.stem, fit, found["best"], found.get("next_mixtures"))
    if json:
        show(found, as_json=True)
    else:
        for number, each in enumerate(found.values()):
            print(end="\n" if number else "")
            show(each, as_json=False)
    return 0


def _predictions(fit: MixtureFit, path: Path, columns: Columns, n_params: float | None, n_tokens: float | None) -> Any:
    from scaling.fits.runs import naming, read_runs

    table = read_runs(path).rename(columns={name: ours for ours, name in columns.to_dict().items()})
    with naming(path):
        return fit.predict(table, n_params, n_tokens)


def _numbers(option: str, words: tuple[str, ...]) -> dict[str, float]:
    """Return the numbers of `NAME=NUMBER` words, by name."""
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name in found:
            raise StudyFileError(f"mixture: --{option} must name {name} once, got {word!r} and {found[name]:g}")
        try:
            found[name] = float(number)
        except ValueError:
            raise StudyFileError(f"mixture: --{option} must be NAME=NUMBER, got {word!r}") from None
    return found
