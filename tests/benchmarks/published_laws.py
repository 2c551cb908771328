"""Our fits of public tables against what their papers publish, and how often profile intervals cover what was planted.

python tests/benchmarks/published_laws.py              repeated data, schedules, approaches 1 to 3
python tests/benchmarks/published_laws.py --coverage 60    profile intervals on so many planted ladders a setting (minutes)
"""

import argparse

import numpy as np
import pandas as pd

from scaling import (
    Chinchilla,
    RepeatedData,
    fit,
    fit_envelope,
    fit_isoflops,
    fit_schedule_law,
)
from tests.benchmarks.ladders import table

PLANTED = Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37)
TARGET = {"n_params": 1e9, "n_tokens": 2e10}


def ends(row: pd.Series) -> str:
    return f"{row['estimate']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"


def repeated_data() -> None:
    """Published (2305.16264): R*_D 15.4, R*_N 5.3."""
    runs = table("datablations_notebook")
    runs = runs[runs["name"] != "4b284b12b2"]
    large = runs["unique_tokens"] >= 4e8
    choices = {
        "unique >= .4 B, epochs <= 30": large & (runs["epochs"] <= 30),
        "unique >= .4 B, epochs <= 60": large & (runs["epochs"] <= 60),
        "unique >= .4 B, epochs <= 100": large & (runs["epochs"] <= 100),
        "unique >= .4 B, epochs <= 200": large & (runs["epochs"] <= 200),
        "epochs <= 60": runs["epochs"] <= 60,
        "all": runs["epochs"] > 0,
    }
    for name, chosen in choices.items():
        result = fit(runs[chosen], n_params_convention="total", form=RepeatedData(), n_bootstrap=60)
        intervals = result.intervals()
        print(
            f"repeated, {name}: {result.n_rows} rows, R*_D {ends(intervals.loc['rd_star'])}, R*_N {ends(intervals.loc['rn_star'])}, "
            f"median |residual| {result.residuals()['log_residual'].abs().median():.2%}; {result.status}"
        )


def schedules() -> None:
    """Published with 2503.12811: mean relative error .11, .14, .17 %, R² .9988, .9983, .9978."""
    curves = table("mpl_loss_curves")
    for model, part in curves.groupby("model"):
        trained = part["run"].isin(["cosine_24000", "constant_24000", "wsdcon_9"])
        law = fit_schedule_law(part[trained], warmup_steps=2160)
        for name, rows in (("fitted", part[trained]), ("held out", part[~trained])):
            score = law.score(rows).mean()
            print(
                f"schedules, {model}, {name}: mean relative error {score['mean_relative_error']:.3%}, "
                f"worst {score['worst_relative_error']:.2%}, R² {score['r_squared']:.4f}"
            )


def approaches() -> None:
    """Exponent a of N* by parabolas, with their own estimated bias, and by the law."""
    for name in ("llama3_isoflop_exp_loss", "ml_scalefit_massivetext", "marin_dclm"):
        runs = table(name).rename(columns={"flops": "compute_flops"})
        runs = runs[runs["outlier"] == 0]
        two = fit_isoflops(runs, n_params_convention="as given")
        three = fit(runs, n_params_convention="as given").intervals().loc["params_exponent"]
        print(
            f"approach 2, {name}: a {ends(two.intervals().loc['params_exponent'])}, bias of a {two.bias['params_exponent']:+.3f}, "
            f"of N* at ten times the largest budget {two.bias['n_params_beyond']:+.1%}; approach 3: a {ends(three)}"
        )
    runs = table("gemstones_cool_end").assign(run=lambda rows: rows["run_name"], stem=lambda rows: rows["run_name"])
    one = fit_envelope(runs, n_params_convention="as given")
    three = fit(runs, n_params_convention="as given").intervals().loc["params_exponent"]
    print(
        f"approach 1, gemstones: a {ends(one.intervals().loc['params_exponent'])}; approach 3: a {ends(three)}; {one.status}"
    )


def coverage(ladders: int) -> None:
    """Of nominal 90 % intervals of alpha, the exponent a, E, and the loss at a decade more compute."""
    truths = {"alpha": 0.34, "params_exponent": 0.37 / 0.71, "E": 1.8, "loss": float(PLANTED.loss(**TARGET))}
    for delta, repeats, heavy in ((1e-3, 1, False), (np.inf, 1, False), (1e-3, 4, False), (1e-2, 1, True)):
        by_profile, by_bootstrap = [], []
        for seed in range(ladders):
            result = fit(planted(seed, repeats, heavy), n_params_convention="planted", delta=delta, n_bootstrap=200)
            values = dict(zip(PLANTED.parameters, result.draws.T, strict=True))
            draws = values | {
                "params_exponent": values["beta"] / (values["alpha"] + values["beta"]),
                "loss": Chinchilla().loss(values, TARGET),
            }
            profiles = {name: result.profile(name, at=TARGET if name == "loss" else None) for name in truths}
            by_profile.append([profiles[name].low < truth < profiles[name].high for name, truth in truths.items()])
            quantiles = {name: np.quantile(draws[name], [0.05, 0.95]) for name in truths}
            by_bootstrap.append([quantiles[name][0] < truth < quantiles[name][1] for name, truth in truths.items()])
        shares = (
            " ".join(f"{share:.2f}" for share in np.mean(inside, axis=0)) for inside in (by_profile, by_bootstrap)
        )
        noise = "Student's t of 3" if heavy else "normal"
        print(
            "coverage, delta {:g}, {} rows a run, {}: profile {}, bootstrap {}".format(delta, repeats, noise, *shares)
        )


def planted(seed: int, repeats: int, heavy: bool) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    sizes, ratios = np.meshgrid(np.geomspace(1e7, 2e8, 5), [10.0, 20.0, 40.0, 80.0])
    n_params, n_tokens = sizes.ravel(), (sizes * ratios).ravel()
    error = 0.003 * (rng.standard_t(3, 20) if heavy else rng.standard_normal(20))
    runs = pd.DataFrame(
        {"n_params": n_params, "n_tokens": n_tokens, "loss": PLANTED.loss(n_params, n_tokens) * np.exp(error)}
    )
    runs = pd.concat([runs.assign(stem=np.arange(20))] * repeats, ignore_index=True)
    if repeats > 1:
        runs["loss"] *= np.exp(0.00075 * rng.standard_normal(len(runs)))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coverage", type=int, metavar="LADDERS", help="profile intervals instead")
    ladders = parser.parse_args().coverage
    if ladders:
        coverage(ladders)
        return
    for section in (repeated_data, schedules, approaches):
        print(f"\n{(section.__doc__ or '').strip()}")
        section()


if __name__ == "__main__":
    main()
