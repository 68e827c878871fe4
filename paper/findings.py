"""The paper's findings as differences between runs, and confidence intervals of these differences in our results."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from paper import studies

LEVEL = 0.95  # Level of the confidence intervals. The significance level is 1 - `LEVEL`.
_POWER = 0.8
_UNEQUAL_P = (
    0.01  # If Bartlett's test has a smaller p, the noise of the runs of a study is unequal.
)
REPLICATED, NOT_REPLICATED, INCONCLUSIVE = "replicated", "not replicated", "inconclusive"
VERDICTS = (REPLICATED, NOT_REPLICATED, INCONCLUSIVE)
RULE = (
    f'A finding is "{NOT_REPLICATED}" if the upper limit of the {100 * LEVEL:.0f} % confidence'
    " interval of the difference between our runs is below 0 or, where the paper's text states a"
    f' size, below half of it. Otherwise, it is "{REPLICATED}" if the difference has the sign of the'
    f" paper's and p < {1 - LEVEL:.2g} (t-test, corrected by the method of Holm for the findings of"
    " the same study). A finding that a setting does not matter (an equality) is"
    f' "{REPLICATED}" if the {100 * (2 * LEVEL - 1):.0f} % interval lies within ±1 point (or another'
    f' margin in paper/findings.csv), and "{NOT_REPLICATED}" if the {100 * LEVEL:.0f} % interval lies'
    f' outside. All other results are "{INCONCLUSIVE}". "Better than" several runs is judged by the'
    " smallest difference and the largest p. If the noise differs between the runs of a study"
    f" (Bartlett's test, p < {_UNEQUAL_P:g}), the differences per seed are tested. Findings for which"
    " the paper names a condition that our runs do not meet are not judged. The column *detectable*"
    " contains the difference that a single test finds with a probability of"
    f" {100 * _POWER:.0f} %. All differences are in percentage points."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding of the paper: the mean of a metric over some runs exceeds, or equals, the mean over other runs.

    The results of a run on g(h) instead of h are modeled as a separate run, whose name ends with ",
    g(h)". At the paper's scale, the study `heads` contains actual runs with such names.

    Attributes:
      text: the finding.
      higher: names of the runs with the higher mean.
      lower: names of the runs with the lower mean.
      metric: key of `_COLUMNS`.
      is_equality: whether the finding is that the means are equal.
      stated: size of the difference, if the paper's text states it.
      scale: number by which the difference between the two means is multiplied. It is 2 if the
        finding is that a - b > c - d, where `higher` is (a, d) and `lower` is (b, c).
      is_each: whether the mean over `higher` exceeds that of each run in `lower`.
      regime: condition that the paper names for the finding, if the runs at the small scale do not
        meet it. Their results then have no verdict.
      margin: means that differ by at most this number of percentage points count as equal.
    """

    text: str
    higher: tuple[str, ...]
    lower: tuple[str, ...]
    metric: str = "accuracy"
    is_equality: bool = False
    stated: str = ""
    scale: int = 1
    is_each: bool = False
    regime: str = ""
    margin: float = 1.0

    @property
    def smallest(self) -> float:
        """The smallest difference that agrees with the paper: half of a stated size, or 0."""
        size = re.search(r"[\d.]+", self.stated)
        return float(size[0]) / 2 if size else 0.0


_TABLE = pathlib.Path(__file__).with_suffix(".csv")
_ON_PROJECTION = ", g(h)"
# metric -> ending of the runs' names -> (column, the paper's metric)
_COLUMNS: dict[str, dict[str, tuple[str, str | None]]] = {
    "accuracy": {"": ("accuracy", "top-1"), _ON_PROJECTION: ("logistic regression on g(h)", None)},
    "contrastive accuracy": {"": ("contrastive accuracy", "contrastive accuracy")},
    "probe accuracy": {"": ("h", "h"), _ON_PROJECTION: ("g(h)", "g(h)")},
}


def _read_findings() -> dict[str, list[Finding]]:
    """Reads findings.csv. Returns a dict mapping studies to findings. Names of runs are separated by semicolons."""
    findings: dict[str, list[Finding]] = {}
    table = pd.read_csv(_TABLE, dtype=str, keep_default_na=False)
    for row in table.to_dict("records"):
        study = row.pop("study")
        for side in ("higher", "lower"):
            row[side] = tuple(row[side].split("; "))
        for name, kind in (
            ("is_equality", bool),
            ("is_each", bool),
            ("scale", int),
            ("margin", float),
        ):
            row[name] = kind(row[name] or getattr(Finding, name))
        findings.setdefault(study, []).append(Finding(**row))
    return findings


FINDINGS = _read_findings()


# ------------------------------------------------------------------------------------------------------- statistics


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A difference between means over runs, in percentage points. Without degrees of freedom, its error is NaN.

    Attributes:
      difference: the estimate.
      error: standard error of the difference.
      degrees_of_freedom: those of the error.
    """

    difference: float
    error: float
    degrees_of_freedom: int

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Returns the confidence interval of the difference."""
        half_width = stats.t.ppf((1 + level) / 2, self.degrees_of_freedom) * self.error
        return self.difference - half_width, self.difference + half_width

    @property
    def p_value(self) -> float:
        """The two-sided p-value of the t-test."""
        with np.errstate(all="ignore"):  # Without noise, the statistic is infinite.
            statistic = np.abs(np.divide(self.difference, self.error))
        return 2 * stats.t.sf(statistic, self.degrees_of_freedom)

    @property
    def detectable(self) -> float:
        """The difference that the t-test at level 1 - `LEVEL` finds with a probability of about 80 %."""
        quantiles = stats.t.ppf([(1 + LEVEL) / 2, _POWER], self.degrees_of_freedom)
        return quantiles.sum() * self.error


@dataclasses.dataclass(frozen=True)
class Fit:
    """The model `result = run + seed + noise`, fitted by least squares to the results of all runs with the same seeds.

    At the small scale, runs with the same seed share initial weights and the order of the examples,
    so the model compares them in pairs. At the paper's scale, seed 1 is a random seed that differs
    between runs.

    Attributes:
      values: results in percent, with one row per run and one column per seed.
      degrees_of_freedom: (number of networks - 1) x (number of seeds - 1). The results on h and on
        g(h) are of the same network, unless they are those of separate runs.
      deviation: standard deviation s of the noise in percentage points, with s^2 = (mean squared
        residual) x (number of networks) x (number of seeds) / degrees_of_freedom, or NaN if there
        are no degrees of freedom.
      is_unequal: whether the noise differs between the runs (Bartlett's test of the residuals).
    """

    values: pd.DataFrame
    degrees_of_freedom: int
    deviation: float
    is_unequal: bool = False

    @property
    def num_seeds(self) -> int:
        """Number of seeds."""
        return len(self.values.columns)

    def estimate(
        self, higher: tuple[str, ...], lower: tuple[str, ...], scale: float = 1
    ) -> Estimate:
        """Returns the difference sum(w_r mean_r) between two means over runs.

        w_r is `scale` / len(higher) for the runs in `higher`, and -`scale` / len(lower) for those in
        `lower`, which are distinct. The standard error is s sqrt(sum(w_r^2) / num_seeds) or, if the
        noise is unequal, that of the mean of the differences per seed.
        """
        means = (self.values.loc[list(runs)].mean() for runs in (higher, lower))
        per_seed = scale * np.subtract(*means)
        if self.is_unequal:
            return Estimate(per_seed.mean(), per_seed.sem(), self.num_seeds - 1)
        variance = (1 / len(higher) + 1 / len(lower)) / self.num_seeds
        error = scale * self.deviation * np.sqrt(variance)
        return Estimate(per_seed.mean(), error, self.degrees_of_freedom)


def fit(values: pd.DataFrame, compared: tuple[str, ...], names: Collection[str] = ()) -> Fit | None:
    """Fits the model of `Fit` to the seeds that all compared runs have. Returns None if there are none.

    Other runs contribute to the estimate of the noise if they have all of these seeds.

    Args:
      values: results in percent, with one row per run and one column per seed. Missing results are
        NaN.
      compared: names of the compared runs.
      names: names of all runs. Other names are those of results on g(h).
    """
    values = values[values.reindex(compared).dropna(axis=1).columns].dropna()
    num_networks = len(
        {run if run in names else run.removesuffix(_ON_PROJECTION) for run in values.index}
    )
    num_seeds = len(values.columns)
    if not num_seeds:
        return None
    freedom = (num_networks - 1) * (num_seeds - 1)
    means = values.mean(axis=1)
    residuals = (values.sub(means, axis=0) - values.mean() + means.mean()).to_numpy()
    squares = (residuals**2).mean() * num_networks * num_seeds
    with np.errstate(all="ignore"):  # The noise of a run may be 0.
        is_unequal = bool(freedom and stats.bartlett(*residuals).pvalue < _UNEQUAL_P)
    return Fit(values, freedom, np.sqrt(squares / (freedom or np.nan)), is_unequal)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Returns p-values that are corrected for the number of tests by the method of Holm (1979)."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.take(p_values, order) * factors).clip(max=1)
    return corrected


def verdict(finding: Finding, estimate: Estimate, p_value: float) -> str:
    """Returns the result for a finding; see `RULE`. `p_value` is corrected."""
    low, high = estimate.interval()
    if finding.is_equality:
        is_replicated = np.abs(estimate.interval(2 * LEVEL - 1)).max() <= finding.margin
        is_refuted = max(low, -high) > finding.margin
    else:
        is_replicated = estimate.difference > 0 and p_value < 1 - LEVEL
        is_refuted = high < finding.smallest
    if is_refuted:
        return NOT_REPLICATED
    return REPLICATED if is_replicated else INCONCLUSIVE


# ------------------------------------------------------------------------------------------------------ comparisons


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A finding, compared with our results.

    Attributes:
      finding: the finding.
      paper: the paper's difference in percentage points as text, or "" if it is unknown.
      verdict: one of `VERDICTS`, or the reason why there is none.
      estimate: our difference, or None.
      p_value: p-value of the difference, corrected for the differences of the study, or None for an
        equality, and if there is no interval.
      fit: the fitted model, or None if the compared runs have no common seed.
    """

    finding: Finding
    paper: str
    verdict: str = ""
    estimate: Estimate | None = None
    p_value: float | None = None
    fit: Fit | None = None

    @property
    def has_interval(self) -> bool:
        """Whether the difference has a standard error."""
        return self.fit is not None and self.fit.degrees_of_freedom > 0


def compare(name: str, rows: pd.DataFrame, scale: str) -> list[Comparison]:
    """Compares a study's findings whose runs exist at a scale with our results.

    Args:
      name: name of the study.
      rows: result of `results.table` with at least one row.
      scale: paper or small.
    """
    names = {run.name for run in studies.STUDIES[name].runs_at(scale)}
    compared = [
        _compare(Comparison(finding, paper_difference(name, finding)), rows, names)
        for finding in FINDINGS.get(name, ())
        if {run.removesuffix(_ON_PROJECTION) for run in (*finding.higher, *finding.lower)} <= names
    ]
    tested = [index for index, entry in enumerate(compared) if entry.p_value is not None]
    for index, p_value in zip(tested, holm([compared[index].p_value for index in tested])):
        compared[index] = dataclasses.replace(compared[index], p_value=p_value)
    for index, entry in enumerate(compared):
        text = entry.verdict or verdict(entry.finding, entry.estimate, entry.p_value)
        if entry.has_interval and entry.finding.regime and scale == "small":
            text = f"not comparable (the paper: {entry.finding.regime})"
        compared[index] = dataclasses.replace(entry, verdict=text)
    return compared


def _compare(entry: Comparison, rows: pd.DataFrame, names: Collection[str]) -> Comparison:
    """Adds our results, with a p-value that is not corrected, or the reason why there are none, to a comparison.

    `names` are those of all runs.
    """
    finding = entry.finding
    compared = (*finding.higher, *finding.lower)
    tables = [
        rows.pivot(index="run", columns="seed", values=column).add_suffix(ending, axis="index")
        for ending, (column, _) in _COLUMNS[finding.metric].items()
    ]
    values = 100 * pd.concat(tables).dropna(how="all")
    model = fit(values, compared, names)
    if model is None:
        executed = [run if run in names else run.removesuffix(_ON_PROJECTION) for run in compared]
        statuses = [rows["status"][rows["run"] == run] for run in executed]
        reason = "no common seed" if set(compared) <= set(values.index) else "no result"
        if any(len(status) and status.notna().all() for status in statuses):
            reason = "diverged"
        elif not all(map(len, statuses)):
            reason = "not run"
        return dataclasses.replace(entry, verdict=reason)
    groups = [(run,) for run in finding.lower] if finding.is_each else [finding.lower]
    estimates = [model.estimate(finding.higher, group, finding.scale) for group in groups]
    smallest = min(estimates, key=lambda estimate: estimate.difference)
    entry = dataclasses.replace(entry, estimate=smallest, fit=model)
    if not model.degrees_of_freedom:
        reason = "one seed" if model.num_seeds == 1 else "one network"
        return dataclasses.replace(entry, verdict=reason)
    if finding.is_equality:  # It is tested with an interval.
        return entry
    # A difference with the other sign cannot support the finding.
    p_values = [estimate.p_value if estimate.difference > 0 else 1.0 for estimate in estimates]
    return dataclasses.replace(
        entry, p_value=max(p_values) if finding.is_each else estimates[0].p_value
    )


def paper_difference(name: str, finding: Finding) -> str:
    """Returns the paper's difference for a finding in percentage points, such as "+1.3", or "" if it is unknown."""
    values = []
    for run in (*finding.higher, *finding.lower):
        ending = _ON_PROJECTION if run.endswith(_ON_PROJECTION) else ""
        _, measure = _COLUMNS[finding.metric][ending]
        numbers = studies.find_run((name, run.removesuffix(ending))).paper
        measures = studies.MAIN_MEASURES if measure == "top-1" else (measure,)
        values.append(next((numbers[each] for each in measures if each in numbers), None))
    if None in values:
        return finding.stated
    count = len(finding.higher)
    lower = max(values[count:]) if finding.is_each else np.mean(values[count:])
    difference = np.mean(values[:count]) - lower
    return f"{finding.scale * difference:+.1f}"
