"""The paper's findings as differences between runs, and confidence intervals of these differences in our results."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Iterable

import numpy as np
import pandas as pd
from scipy import stats

from paper import studies

LEVEL = 0.95  # Level of the confidence intervals.
# In points. For `not replicated`, the interval must exclude improvements of this size or more.
LARGEST_NEGLIGIBLE = 1.0
EQUAL_WITHIN = 2.0  # Means that differ by at most this number of percentage points count as equal.
REPLICATED, NOT_REPLICATED, INCONCLUSIVE = "replicated", "not replicated", "inconclusive"
RULE = (
    f"Findings are compared with {100 * LEVEL:.0f} % confidence intervals of the differences between"
    f' our runs, in percentage points. The result is "{REPLICATED}" if the interval lies above 0, and'
    f' "{NOT_REPLICATED}" if its lower limit is at most 0 and its upper limit is below'
    f" {LARGEST_NEGLIGIBLE:g} point, which excludes improvements of {LARGEST_NEGLIGIBLE:g} point or"
    f' more. Otherwise, the result is "{INCONCLUSIVE}". If the finding is that a setting does not'
    f' matter, the result is "{REPLICATED}" if the interval lies within ±{EQUAL_WITHIN:g} points, and'
    f' "{NOT_REPLICATED}" if it lies entirely outside. The intervals are not adjusted for the number'
    " of findings."
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
      stated: difference stated in the paper's text, if the paper has no table with these runs.
      scale: number by which the difference between the two means is multiplied. It is 2 if the
        finding is that a - b > c - d, where `higher` is (a, d) and `lower` is (b, c).
    """

    text: str
    higher: tuple[str, ...]
    lower: tuple[str, ...]
    metric: str = "accuracy"
    is_equality: bool = False
    stated: str = ""
    scale: int = 1


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
    for study, text, higher, lower, metric, is_equality, stated, scale in table.itertuples(False):
        runs = tuple(higher.split("; ")), tuple(lower.split("; "))
        finding = Finding(text, *runs, metric, bool(is_equality), stated, int(scale or 1))
        findings.setdefault(study, []).append(finding)
    return findings


FINDINGS = _read_findings()


# ------------------------------------------------------------------------------------------------------- statistics


@dataclasses.dataclass(frozen=True)
class Fit:
    """The model `result = run + seed + noise`, fitted by least squares to the results of all runs with the same seeds.

    At the small scale, runs with the same seed share initial weights and the order of the examples,
    so the model compares them in pairs. At the paper's scale, seed 1 is a random seed that differs
    between runs.

    Attributes:
      means: mean results of the runs, in percent, indexed by the names of the runs.
      num_seeds: number of seeds.
      degrees_of_freedom: (number of networks - 1) x (number of seeds - 1). The results on h and on
        g(h) are of the same network, unless they are those of separate runs.
      deviation: standard deviation s of the noise in percentage points, with s^2 = (mean squared
        residual) x (number of networks) x (number of seeds) / degrees_of_freedom, or NaN if there
        are no degrees of freedom.
    """

    means: pd.Series
    num_seeds: int
    degrees_of_freedom: int
    deviation: float

    @property
    def quantile(self) -> float:
        """Quantile of Student's t distribution: half the width of an interval, in standard errors."""
        return stats.t.ppf((1 + LEVEL) / 2, self.degrees_of_freedom)

    def compare(
        self, higher: tuple[str, ...], lower: tuple[str, ...], scale: int = 1
    ) -> tuple[float, float]:
        """Returns the difference between two means over runs, and half the width of its confidence interval, in points.

        The difference is sum(w_r mean_r), where w_r is `scale` / len(higher) for the runs in `higher`
        and -`scale` / len(lower) for those in `lower`. Half the width is t s sqrt(sum(w_r^2) /
        num_seeds), where t is the quantile of Student's t distribution. Half the width is NaN if
        there are no degrees of freedom.
        """
        difference = scale * (self.means[list(higher)].mean() - self.means[list(lower)].mean())
        # The runs in `higher` and `lower` are distinct.
        variance = (1 / len(higher) + 1 / len(lower)) / self.num_seeds
        return difference, scale * self.quantile * self.deviation * np.sqrt(variance)


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
    residuals = values.sub(means, axis=0) - values.mean() + means.mean()
    squares = (residuals**2).to_numpy().mean() * num_networks * num_seeds
    return Fit(means, num_seeds, freedom, np.sqrt(squares / (freedom or np.nan)))


def verdict(low: float, high: float, is_equality: bool) -> str:
    """Returns the result for a finding whose difference has the confidence interval [low, high]. See `RULE`."""
    if is_equality:
        is_replicated = max(-low, high) <= EQUAL_WITHIN
        is_refuted = max(low, -high) > EQUAL_WITHIN
    else:
        is_replicated = low > 0
        is_refuted = high < LARGEST_NEGLIGIBLE
    if is_replicated:
        return REPLICATED
    return NOT_REPLICATED if is_refuted else INCONCLUSIVE


def count_after_holm(comparisons: Iterable[Comparison]) -> int:
    """Returns how many replicated differences remain significant after the correction of Holm (1979).

    The correction bounds the probability of at least one false result among all comparisons by
    1 - `LEVEL`. Findings of equality are not included.
    """
    values = []
    for entry in comparisons:
        if entry.low is not None and not entry.finding.is_equality:
            with np.errstate(divide="ignore"):  # Without noise, the statistic is infinite.
                statistic = entry.fit.quantile * entry.difference / (entry.high - entry.difference)
            p_value = 2 * stats.t.sf(abs(statistic), entry.fit.degrees_of_freedom)
            values.append((p_value, statistic > 0))
    count = 0
    for index, (value, is_positive) in enumerate(sorted(values)):
        if value > (1 - LEVEL) / (len(values) - index):
            break
        count += is_positive
    return count


# ------------------------------------------------------------------------------------------------------ comparisons


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A finding, compared with our results.

    Attributes:
      finding: the finding.
      paper: the paper's difference in percentage points as text, or "" if it is unknown.
      verdict: result of the comparison, or the reason why there is no interval.
      difference: our difference in percentage points, or None.
      low: lower limit of the confidence interval, or None.
      high: upper limit of the confidence interval, or None.
      fit: the fitted model, or None if the compared runs have no common seed.
    """

    finding: Finding
    paper: str
    verdict: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    fit: Fit | None = None


def compare(name: str, rows: pd.DataFrame, scale: str) -> list[Comparison]:
    """Compares a study's findings whose runs exist at a scale with our results.

    Args:
      name: name of the study.
      rows: result of `results.table` with at least one row.
      scale: paper or small.
    """
    names = {run.name for run in studies.STUDIES[name].runs_at(scale)}
    return [
        Comparison(finding, paper_difference(name, finding), *_compare(finding, rows, names))
        for finding in FINDINGS.get(name, ())
        if {run.removesuffix(_ON_PROJECTION) for run in (*finding.higher, *finding.lower)} <= names
    ]


def _compare(
    finding: Finding, rows: pd.DataFrame, names: Collection[str]
) -> tuple[str] | tuple[str, float, float | None, float | None, Fit]:
    """Returns the values of a `Comparison` that depend on our results. `names` are those of all runs."""
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
        if any(len(status) and status.notna().all() for status in statuses):
            return ("diverged",)
        if not all(map(len, statuses)):
            return ("not run",)
        return ("no common seed" if set(compared) <= set(values.index) else "no result",)
    difference, half_width = model.compare(finding.higher, finding.lower, finding.scale)
    if not model.degrees_of_freedom:
        reason = "one seed" if model.num_seeds == 1 else "one network"
        return reason, difference, None, None, model
    low, high = difference - half_width, difference + half_width
    return verdict(low, high, finding.is_equality), difference, low, high, model


def paper_difference(name: str, finding: Finding) -> str:
    """Returns the paper's difference for a finding in percentage points, such as "+1.3", or "" if it is unknown."""
    values = []
    for run in (*finding.higher, *finding.lower):
        ending = _ON_PROJECTION if run.endswith(_ON_PROJECTION) else ""
        _, measure = _COLUMNS[finding.metric][ending]
        values.append(studies.find_run((name, run.removesuffix(ending))).paper.get(measure))
    if None in values:
        return finding.stated
    count = len(finding.higher)
    difference = np.mean(values[:count]) - np.mean(values[count:])
    return f"{finding.scale * difference:+.1f}"
