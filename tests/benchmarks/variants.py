"""How often does `compare_variants` promote or reject wrongly, and how often does it decide?

    python tests/benchmarks/variants.py [--sets 100]

Public tables, each variant decided from its smaller sizes and held against its largest; and planted variants of known multipliers
with the seeds' noise, judged once and after each size. Then planted tables whose rows are easily pooled wrongly. Public tables
are read from $MUSCALE_REFERENCE_DATA or ../shared/data.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import pandas as pd

from scaling import compare_variants

FOLDER = Path(os.environ.get("MUSCALE_REFERENCE_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
WORTH = 0.02


def judged(verdict: str, truth: float) -> str:
    """Of one verdict, beside the true multiplier."""
    wrong = (verdict == "promote" and truth <= 1) or (verdict == "reject" and truth > 1 + WORTH)
    return "WRONG" if wrong else verdict


def held_out(name: str, runs: pd.DataFrame, baseline: str, size: str, cuts: list[tuple[str, list[object]]]) -> None:
    """Decide a table's variants at their largest run from the sizes of each cut."""
    measured = compare_variants(runs, baseline).measured
    largest = measured.sort_values("compute_flops").groupby("variant").last()
    print(f"\n{name}, against {baseline}")
    for label, sizes in cuts:
        seen = runs[runs[size].isin(sizes)]
        print(f"  from {label}")
        for variant, row in largest.iterrows():
            of_it = seen[seen["variant"] == variant]
            if len(of_it) < 2 or of_it["compute_flops"].max() >= 0.999 * row["compute_flops"]:
                continue
            found = compare_variants(seen, baseline, target_flops=float(row["compute_flops"]))
            (own,) = found.table[found.table["variant"] == variant].to_dict("records")
            inside = "inside" if own["low"] <= row["multiplier"] <= own["high"] else "OUTSIDE"
            print(
                f"    {variant:26} largest {row['multiplier']:.3f}  said {own['multiplier']:.3f} "
                f"[{own['low']:.3f}, {own['high']:.3f}] {inside:8} {judged(own['verdict'], row['multiplier'])}"
            )


def public() -> None:
    runs = pd.read_csv(FOLDER / "qlabs_variants.csv").rename(columns={"arm": "variant", "flops": "compute_flops"})
    cuts: list[tuple[str, list[object]]] = [
        ("depths 6 to 8", [6, 8]),
        ("depths 6 to 10", [6, 8, 10]),
        ("depths 6 to 12", [6, 8, 10, 12]),
    ]
    for baseline in ("van", "deep_van"):
        of_it = [baseline, *runs.loc[runs["baseline_arm"] == baseline, "variant"].unique()]
        held_out("qlabs", runs[runs["variant"].isin(of_it)], baseline, "depth", cuts)
    nanochat = pd.read_csv(FOLDER / "marin_nanochat_variants.csv").rename(columns={"flops": "compute_flops"})
    for family in ("v16_adamh", "may_arch"):
        part = nanochat[nanochat["family"] == family]
        small: list[tuple[str, list[object]]] = [
            ("d512 and d768", ["d512", "d768"]),
            ("d512 to d1024", ["d512", "d768", "d1024"]),
        ]
        held_out(family, part, "baseline", "model_size", small)
    optimizers = pd.read_csv(FOLDER / "marin_optimizers_130m_best.csv")
    optimizers = optimizers.rename(columns={"optimizer": "variant", "flops_6nd": "compute_flops"})
    short: list[tuple[str, list[object]]] = [("two lengths", [1, 2]), ("three lengths", [1, 2, 4])]
    held_out("optimizers at 130M", optimizers, "cautious", "chinchilla_multiple", short)


SIZES = np.geomspace(3e17, 1e19, 5)
TARGET = 3e20
NOISE = 1e-3
PLANTED = {"m = .9": (0.9, 0.0), "m = 1": (1.0, 0.0), "m = 1.02": (1.02, 0.0), "m = 1.1": (1.1, 0.0)} | {
    "1.1, then .95": (1.1, -1.0),
    ".95, then 1.1": (0.95, 1.0),
}
"""Multiplier at the smallest size; and whether it falls or rises to the second one at the target."""


def truth(name: str, flops: np.ndarray) -> np.ndarray:
    """The planted multiplier at each compute."""
    first, turn = PLANTED[name]
    end = {-1.0: 0.95, 0.0: first, 1.0: 1.1}[turn]
    share = np.log(flops / SIZES[0]) / np.log(TARGET / SIZES[0])
    return np.asarray(np.exp((1 - share) * np.log(first) + share * np.log(end)))


def loss(flops: np.ndarray) -> np.ndarray:
    """The planted baseline's."""
    return np.asarray(1.7 + 1.3 * (flops / 1e18) ** -0.12)


def planted(n_sets: int) -> None:
    """Coverage and verdicts from all sizes, two seeds each; and of a comparison that looks after each size from the second."""
    records = []
    n_looks = len(SIZES) - 1
    for number in range(n_sets):
        rng = np.random.default_rng(number)
        rows = []
        for name in ("baseline", *PLANTED):
            equal = SIZES if name == "baseline" else SIZES * truth(name, SIZES)
            for seed in range(2):
                values = loss(equal) * np.exp(NOISE * rng.standard_normal(len(SIZES)))
                rows += [
                    {"variant": name, "seed": seed, "compute_flops": c, "loss": y}
                    for c, y in zip(SIZES, values, strict=True)
                ]
        runs = pd.DataFrame(rows)
        for looks in (None, n_looks):
            found = compare_variants(runs, "baseline", target_flops=TARGET, n_looks=looks)
            for row in found.table.to_dict("records"):
                m = float(truth(row["variant"], np.array([TARGET]))[0])
                seen = SIZES[: row["look"] + 1] if looks else SIZES
                records.append(
                    {
                        "set": number,
                        "variant": row["variant"],
                        "looks": looks or 1,
                        "verdict": judged(row["verdict"], m),
                    }
                    | {"held": row["low"] <= m <= row["high"], "spent": seen.sum() / SIZES.sum()}
                )
    table = pd.DataFrame(records)
    print(
        f"\nplanted, {n_sets} sets, noise {NOISE:.1%}, two seeds, {SIZES[0]:.0e} to {SIZES[-1]:.0e} FLOPs, target {TARGET:.0e}"
    )
    for looks, of_it in table.groupby("looks"):
        print(f"  {looks} {'look' if looks == 1 else 'looks'}")
        for variant, part in of_it.groupby("variant", sort=False):
            counts = part["verdict"].value_counts(normalize=True)
            said = ", ".join(f"{verdict} {share:.0%}" for verdict, share in counts.items())
            print(
                f"    {variant:14} interval holds {part['held'].mean():.0%}; FLOPs {part['spent'].mean():.0%}; {said}"
            )
        wrong = of_it.assign(wrong=of_it["verdict"] == "WRONG").groupby("set")["wrong"].any()
        print(f"    any of the {len(PLANTED)} variants wrong: {wrong.mean():.1%} of the sets")


def tables(n_sets: int) -> None:
    """Counts of verdicts, wrong ones and refusals on tables whose rows are easily pooled wrongly."""
    counts: dict[str, dict[str, int]] = {}
    for number in range(n_sets):
        rng = np.random.default_rng(number)
        n_params, ratio = np.repeat([1e8, 2.25e8, 4e8], 3), np.tile([1.0, 4.0, 16.0], 3)
        base = pd.DataFrame({"n_params": n_params, "n_tokens": 20 * n_params * ratio})

        def measured(shift: float, rows: pd.DataFrame, rng: np.random.Generator = rng) -> pd.DataFrame:
            law = 1.8 + 480 / rows["n_params"] ** 0.34 + 2000 / rows["n_tokens"] ** 0.366
            return rows.assign(loss=law * np.exp(shift + NOISE * rng.standard_normal(len(rows))))

        for shift in (-0.01, 0.0, 0.001, 0.01):
            both = [
                measured(0.0, base).assign(variant="baseline"),
                measured(shift, base[ratio == 1]).assign(variant="v"),
            ]
            runs = pd.concat(both, ignore_index=True)
            sets = pd.concat(
                [runs.assign(corpus=name, loss=runs["loss"] * f) for name, f in (("web", 1.0), ("code", 0.7))]
            )
            batches = pd.concat([runs.assign(batch=b, loss=runs["loss"] * f) for b, f in ((256, 1.0), (512, 1.03))])
            for name, table in {
                "equal 6ND, other (N, D)": runs,
                "two corpora": sets,
                "two corpora, unnamed": sets.drop(columns="corpus"),
                "two batches": batches,
                "rising metric": runs.assign(loss=5 / runs["loss"]),
            }.items():
                try:
                    verdict = compare_variants(table.reset_index(drop=True), "baseline").table["verdict"].iloc[0]
                    said = "WRONG" if verdict == ("promote" if shift >= 0 else "reject") else verdict
                except ValueError:
                    said = "refused"
                counts.setdefault(name, {}).setdefault(said, 0)
                counts[name][said] += 1
    print(f"\nplanted tables, {n_sets} sets of four variants")
    for name, found in counts.items():
        print(f"  {name:26} " + ", ".join(f"{said} {n}" for said, n in sorted(found.items())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=100)
    arguments = parser.parse_args()
    public()
    planted(arguments.sets)
    tables(arguments.sets)
