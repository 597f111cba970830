"""Tables and pictures of `benchmarks.mixture_study`, from its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks._shared import RESULTS, Report
from benchmarks.learning import mean_and_half_width

Row = dict[str, Any]
MATCHED = {"kl": 0.4, "points_kl": 0.8}
"""KL at which algorithms are compared, of trajectories and of points; runs between which it lies
are interpolated."""
BAR = "flowgrpo"
FEWEST = 4
RATES = {"stale": "2e-3", "stale_fast": "1e-2"}
"""Study -> learning rate."""
LEAST_KL = 0.02
"""Below it a share is mostly noise and not shown."""
WANTED_SHARE, WANTED_LOSS = 0.9, 0.02
"""Least share of the optimum's reward at matched KL, on-policy. Largest loss of score by one
version of staleness (upper end of 95 %)."""


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Mean and half of its 95 % interval."""
    mean, half = mean_and_half_width(values)
    return f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} +- {half:.{digits}f}"


def of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows with these values, by seed."""
    return sorted(
        (row for row in rows if wanted.items() <= row.items()), key=lambda row: int(row["seed"])
    )


def names(rows: Sequence[Row], key: str = "name") -> list[Any]:
    """Different values, in the order in which they come."""
    return list(dict.fromkeys(row[key] for row in rows))


def share(row: Row, measure: str = "") -> float:
    """Gain over the optimum's at the same KL; measure: nothing, `trained_` or `points_`."""
    return float(row[f"{measure}gain"] / row[f"{measure}best"])


def by_seed(rows: Sequence[Row], key: Callable[[Row], float]) -> list[float]:
    """Means over each seed's runs, which are not independent of each other."""
    return [statistics.fmean(map(key, of(rows, seed=seed))) for seed in sorted(names(rows, "seed"))]


def matched(rows: Sequence[Row], measure: str = "") -> dict[int, float]:
    """Seed -> share at `MATCHED`, between the runs of a frontier; seeds whose runs lie on one side
    are left out."""
    found = {}
    for seed in names(rows, "seed"):
        runs = sorted(of(rows, seed=seed), key=lambda row: float(row[f"{measure}kl"]))
        kls = np.log([row[f"{measure}kl"] for row in runs])
        at = math.log(MATCHED[f"{measure}kl"])
        if len(runs) > 1 and kls[0] <= at <= kls[-1]:
            found[seed] = float(np.interp(at, kls, [share(row, measure) for row in runs]))
    return found


def begun(title: str, rows: Sequence[Row], wanted: int, columns: Sequence[str]) -> Report:
    """A report that says how many of the wanted runs it has, and what they cost."""
    hours = sum(row["cpu_s"] for row in rows) / 3600
    settled = [row["score"] for row in rows if abs(row["score"]) < 2]
    noise = statistics.median(row["evaluation_sd"] for row in rows)
    notes = (
        f"{len(rows)} of {wanted} runs of {rows[0]['steps']} RL steps, {hours:.2f} CPU hours, "
        f"seeds {', '.join(map(str, sorted(names(rows, 'seed'))))}. The columns are explained in "
        "benchmarks/mixture_study.py; the command\nprints every value of a knob. Intervals are of "
        "95 %, by Student's t over seeds. The evaluation's standard error of the score is "
        f"{noise:.4f}\n(median over runs; {len(settled)} of them have a score within +-2); its noise "
        "is the same for every run and cancels in differences."
    )
    return Report(title, notes, columns)


COLUMNS = (
    "KL",
    "share",
    "to optimum",
    "score",
    "KL of points",
    "share of points",
    "diversity",
    "clipped",
)


def measures(rows: Sequence[Row]) -> list[str]:
    """The cells of `COLUMNS`."""
    plain = [row["clip_fraction"] for row in rows if not math.isnan(row["clip_fraction"])]
    return [
        shown([row["kl"] for row in rows]),
        shown([share(row) for row in rows]) if min(row["kl"] for row in rows) > LEAST_KL else "-",
        shown([row["to_optimum"] for row in rows]),
        shown([row["score"] for row in rows]),
        shown([row["points_kl"] for row in rows]),
        shown([share(row, "points_") for row in rows])
        if min(row["kl"] for row in rows) > LEAST_KL
        else "-",
        shown([row["diversity"] for row in rows], 2),
        shown(plain, 3) if plain else "-",
    ]


def frontier(
    rows: Sequence[Row], wanted: int, best_of: Sequence[tuple[int, float, float, float]]
) -> None:
    """Algorithms and controls; best_of: (N, KL, gain, best gain at that KL) of the base."""
    report = begun(
        "Algorithms on the tilted mixture",
        rows,
        wanted,
        (
            "algorithm",
            "knob",
            "KL",
            "share",
            "best score",
            f"share at {MATCHED['kl']:g}",
            "difference",
            f"of points at {MATCHED['points_kl']:g}",
            "difference",
            "verdict",
        ),
    )
    reference = {measure: matched(of(rows, name=BAR), measure) for measure in ("", "points_")}
    for name in names(rows):
        runs = of(rows, name=name)
        report.row(name, *ranges(runs), *against(runs, reference))
    for count, kl, gain, best in best_of:
        report.row(f"best of {count}", "at sampling", f"{kl:.3f}", f"{gain / best:.3f}", *["-"] * 6)
    if chance := of(rows, reward="random"):
        mean, half = mean_and_half_width(by_seed(chance, lambda row: row["gain"]))
        said = "cannot be told from none" if abs(mean) <= half else "is not none"
        report.say(
            f"Random reward: the gain {said}, {mean:+.4f} +- {half:.4f} over "
            f"{len(names(chance, 'seed'))} seeds."
        )
    report.say(
        "KL and share: between which the means over seeds lie, for the values of the knob. At matched "
        f"KL ({MATCHED['kl']:g} of trajectories, {MATCHED['points_kl']:g} of points), seed by seed "
        f"between the runs of a frontier; differences are against {BAR}, paired by seed."
    )
    report.say(
        "`equal`: the interval of the difference holds 0; such algorithms cannot be told apart "
        "here. Intervals are not "
        f"widened for the number of comparisons; {FEWEST} seeds are the fewest for a verdict."
    )
    on_policy = [row for row in of(rows, name=BAR) if 0.1 <= row["trained_kl"] <= 1.5]
    if on_policy:
        mean, half = mean_and_half_width(by_seed(on_policy, lambda row: share(row, "trained_")))
        report.verdict(
            mean >= WANTED_SHARE,
            f"{BAR} reaches {mean:.3f} +- {half:.3f} of the optimum's reward at its KL on the "
            "prompts that it trains "
            f"on, over {len(on_policy)} runs with a KL of 0.1 to 1.5 ({WANTED_SHARE} wanted).",
        )
    report.say("![Share of the best reward against KL](mixture_frontier.png)")
    report.write(RESULTS / "mixture_frontier.md")
    draw_frontier(rows, best_of)
    print_values(report, rows)


def ranges(runs: Sequence[Row]) -> list[str]:
    """The knob of one algorithm with its least and largest value, and between which means over
    seeds the KL and the share lie."""
    values = names(runs, "value")
    each = [of(runs, value=value) for value in values]
    knob = runs[0]["knob"].removeprefix("algorithm.")
    told = min(row["kl"] for row in runs) > LEAST_KL
    return [
        f"{knob} {min(values):g} .. {max(values):g}",
        between([statistics.fmean(row["kl"] for row in own) for own in each]),
        between([statistics.fmean(map(share, own)) for own in each]) if told else "-",
    ]


def between(values: Sequence[float]) -> str:
    """The least and the largest of the values."""
    return f"{min(values):.3f} .. {max(values):.3f}"


def against(runs: Sequence[Row], reference: dict[str, dict[int, float]]) -> list[str]:
    """The best score of one algorithm, its shares at matched KL, their differences from `BAR`, and
    the verdict; dashes for a random reward."""
    if runs[0]["reward"] != "coordinate":
        return ["-"] * 6
    cells, verdicts = list[str](), list[str]()
    for measure in ("", "points_"):
        found = matched(runs, measure)
        gaps = [
            found[seed] - reference[measure][seed] for seed in found if seed in reference[measure]
        ]
        cells += [
            shown(list(found.values())) if found else "not reached",
            shown(gaps) if gaps else "-",
        ]
        mean, half = mean_and_half_width(gaps) if gaps else (math.nan, math.nan)
        told = "lower" if mean < -half else "higher" if mean > half else "equal"
        verdicts.append(told if len(gaps) >= FEWEST else f"{len(gaps)} seeds are too few")
    (best, _), at = max(
        (mean_and_half_width([row["score"] for row in of(runs, value=value)]), value)
        for value in names(runs, "value")
    )
    verdict = "-" if runs[0]["name"] == BAR else "; points ".join(dict.fromkeys(verdicts))
    return [f"{best:.3f} at {at:g}", *cells, verdict]


def print_values(report: Report, rows: Sequence[Row]) -> None:
    """Print, without keeping it, a row for each value of each algorithm's knob."""
    report.table(("base", "algorithm", "value", "runs", *COLUMNS))
    for base in names(rows, "base"):
        for name in names(of(rows, base=base)):
            for value in names(of(rows, base=base, name=name), "value"):
                runs = of(rows, base=base, name=name, value=value)
                report.row(base, name, f"{value:g}", len(runs), *measures(runs))


def draw_frontier(rows: Sequence[Row], best_of: Sequence[tuple[int, float, float, float]]) -> None:
    """Share of the optimum's gain against KL, of trajectories and of points, and score against
    diversity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 4.6), layout="constrained")
    noisy, drawn, diverse = figure.subplots(1, 3)
    for index, name in enumerate(names(rows)):
        style = {
            "color": f"C{index % 10}",
            "marker": "osD^v"[index // 10 + index % 2],
            "markersize": 4,
            "label": name,
        }
        runs = [of(rows, name=name, value=value) for value in names(of(rows, name=name), "value")]

        def line(
            axes: Any, x: str, y: Callable[[Row], float], runs: Any = runs, style: Any = style
        ) -> None:
            points = [
                (statistics.fmean(row[x] for row in own), statistics.fmean(map(y, own)))
                for own in runs
            ]
            axes.plot(*zip(*points, strict=True), **style)

        if name != "random reward":
            line(noisy, "kl", share)
            line(drawn, "points_kl", lambda row: share(row, "points_"))
        line(diverse, "diversity", lambda row: float(row["score"]))
    noisy.plot(
        [kl for _, kl, _, _ in best_of],
        [gain / best for _, _, gain, best in best_of],
        "k*",
        label="best of N",
    )
    for axes, said in ((noisy, "trajectories"), (drawn, "points that the ODE draws")):
        axes.set(
            xscale="log",
            xlabel=f"KL to the base, {said}",
            ylabel="share of the optimum's gain",
            ylim=(0.75, 1.0),
        )
        axes.set_xlim(0.07, 7)
    noisy.legend(fontsize="x-small", ncols=2)
    diverse.set(
        xlabel="variance around each direction's mean / the base's", ylabel="score (1: the optimum)"
    )
    diverse.set(ylim=(-0.5, 1), xlim=(0.88, 1.02))
    figure.savefig(RESULTS / "mixture_frontier.png", dpi=120)


def staleness(rows: Sequence[Row], wanted: int) -> None:
    """Surrogates, on-policy and stale, at the usual and at a larger learning rate."""
    columns = (
        "rate",
        "surrogate",
        "score on-policy",
        "score stale",
        "loss",
        "95 % interval",
        "KL",
        "clipped",
    )
    report = begun("One version of staleness on the tilted mixture", rows, wanted, columns)
    met, losses = True, dict[tuple[str, str], list[float]]()
    same = dict[tuple[str, tuple[str, ...]], list[str]]()
    for study, said in RATES.items():
        for name in names(of(rows, study=study)):
            fresh = {row["seed"]: row for row in of(rows, study=study, name=name, stale=False)}
            stale = {row["seed"]: row for row in of(rows, study=study, name=name, stale=True)}
            pairs = sorted(set(fresh) & set(stale))
            if not pairs:
                continue
            loss = losses[study, name] = [
                fresh[seed]["score"] - stale[seed]["score"] for seed in pairs
            ]
            mean, half = mean_and_half_width(loss)
            small, corrected = mean + half <= WANTED_LOSS, name != "uncorrected"
            met = met and (small or not corrected or study != "stale")
            cells = (
                shown([row["score"] for row in fresh.values()]),
                shown([row["score"] for row in stale.values()]),
                f"{mean:+.4f}",
                f"{mean - half:+.4f} .. {mean + half:+.4f}",
                *(
                    f"{statistics.fmean(row[key] for row in stale.values()):.3f}"
                    for key in ("kl", "clip_fraction")
                ),
            )
            same.setdefault((said, cells), []).append(name)
    for (said, cells), members in same.items():
        report.row(said, ", ".join(members), *cells)
    for study, said in RATES.items():
        report.say(f"At {said}: {alike(rows, study)}")
    report.verdict(
        met,
        f"at the usual learning rate every corrected stale run loses at most {WANTED_LOSS} of the "
        "score against its "
        "own on-policy run (upper end of the 95 % interval).",
    )
    report.say("![Score lost by staleness](mixture_stale.png)")
    report.write(RESULTS / "mixture_stale.md")
    draw_losses(losses)


def alike(rows: Sequence[Row], study: str) -> str:
    """Name the stale surrogates that cannot be told from the uncorrected one."""
    stale = {
        name: of(rows, study=study, name=name, stale=True) for name in names(of(rows, study=study))
    }
    base = {row["seed"]: row["score"] for row in stale.get("uncorrected", [])}
    same, other = list[str](), list[str]()
    for name, runs in stale.items():
        gaps = [row["score"] - base[row["seed"]] for row in runs if row["seed"] in base]
        if name == "uncorrected" or len(gaps) < 2:
            continue
        mean, half = mean_and_half_width(gaps)
        most = max(map(abs, gaps))
        (same if abs(mean) <= half or most < 1e-3 else other).append(
            f"{name} ({mean:+.4f} +- {half:.4f})"
        )
    return (
        "stale, against uncorrected, paired by seed: not to be told apart (the interval holds 0, "
        "or no seed differs by "
        f".001): {', '.join(same) or 'none'}; different: {', '.join(other) or 'none'}."
    )


def draw_losses(losses: dict[tuple[str, str], list[float]]) -> None:
    """A line per surrogate and learning rate: its pairs as dots, the mean and its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for line, ((study, _), values) in enumerate(losses.items()):
        mean, half = mean_and_half_width(values)
        axes.plot(values, [line] * len(values), "o", color="0.7", markersize=4)
        axes.errorbar(
            mean, line, xerr=half, fmt="D", color="C0" if study == "stale" else "C1", capsize=4
        )
    axes.axvline(0.0, color="0.6", linewidth=1)
    axes.axvline(WANTED_LOSS, color="C3", linewidth=1, linestyle="--")
    labels = [name + (", fast" if study == "stale_fast" else "") for study, name in losses]
    axes.set_yticks(range(len(losses)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("score lost against on-policy, 95 % interval (dashed: wanted)")
    figure.savefig(RESULTS / "mixture_stale.png", dpi=120)


def bases(rows: Sequence[Row], wanted: int) -> None:
    """Algorithms on other base models."""
    columns = ("base", "algorithm", "knob", "KL", "share", f"share at {MATCHED['kl']:g}")
    report = begun("Other base models of the tilted mixture", rows, wanted, columns)
    for base in names(rows, "base"):
        for name in names(of(rows, base=base)):
            runs = of(rows, base=base, name=name)
            found = list(matched(runs).values())
            report.row(base, name, *ranges(runs), shown(found) if found else "not reached")
    report.say(
        "KL and share: between which the means over seeds lie, for the values of the knob; then at "
        "matched KL of trajectories. The KL of points is left out: between modes that lie apart the "
        "base's Euler steps stretch space too much to be inverted."
    )
    report.say("![Gain against KL](mixture_bases.png)")
    report.write(RESULTS / "mixture_bases.md")
    draw_bases(rows)
    print_values(report, rows)


def draw_bases(rows: Sequence[Row]) -> None:
    """Gain against KL of trajectories, a panel for each base."""
    from matplotlib.figure import Figure

    found = names(rows, "base")
    figure = Figure(figsize=(5.0 * len(found), 4.2), layout="constrained")
    for axes, base in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        own = of(rows, base=base)
        curve = sorted((row["kl"], row["best"]) for row in own if 0.02 < row["kl"] < 3)
        axes.plot(*zip(*curve, strict=True), color="black", linewidth=1, label="optimum")
        for name in names(own):
            dots = [(row["kl"], row["gain"]) for row in of(own, name=name)]
            axes.plot(*zip(*dots, strict=True), "o", markersize=4, label=name)
        axes.set(
            xscale="log",
            xlim=(0.02, 3),
            xlabel="KL to the base, trajectories",
            ylabel="gain in reward",
            title=base,
        )
        axes.set_ylim(0, max(gain for _, gain in curve) * 1.1)
        axes.legend(fontsize="x-small")
    figure.savefig(RESULTS / "mixture_bases.png", dpi=120)
