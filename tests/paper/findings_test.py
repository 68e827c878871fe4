"""Tests of the comparison with the paper's findings: confidence intervals, verdicts, and the paper's differences."""

import numpy as np
import pandas as pd
import pytest
from pytest import approx
from scipy import stats

from paper import findings, studies

REPLICATED, NOT_REPLICATED, INCONCLUSIVE = "replicated", "not replicated", "inconclusive"


@pytest.mark.parametrize("higher, lower", [("0", "3"), ("01", "234"), ("4", "10")])
def test_intervals_equal_those_of_a_linear_model_with_dummy_variables(higher, lower):
    """Each character of `higher` and `lower` is the name of a run, which is also its index."""
    random = np.random.default_rng(5)
    noise = random.normal(size=[5, 3])
    accuracies = 40 + random.normal(size=[5, 1]) + random.normal(size=3) + noise
    values = pd.DataFrame(accuracies, [*"01234"], range(1, 4))
    # One row per run and seed; the effect of the first seed is 0.
    design = np.hstack([np.repeat(np.eye(5), 3, 0), np.tile(np.eye(3)[:, 1:], [5, 1])])
    solution, (squares,), *_ = np.linalg.lstsq(design, accuracies.ravel(), rcond=None)
    freedom = accuracies.size - len(solution)
    contrast = np.zeros(len(solution))
    contrast[[*map(int, higher)]] = 1 / len(higher)
    contrast[[*map(int, lower)]] = -1 / len(lower)
    variance = squares / freedom
    error = np.sqrt(variance * contrast @ np.linalg.inv(design.T @ design) @ contrast)
    fit = findings.fit(values, (*higher, *lower))
    assert fit.degrees_of_freedom == freedom and fit.deviation == approx(np.sqrt(variance))
    projections = values.set_axis(values.index + ", g(h)")  # with the same noise as h
    joint_fit = findings.fit(pd.concat([values, projections]), (*higher,))
    assert fit.deviation == approx(joint_fit.deviation)
    expected = contrast @ solution, stats.t.ppf(0.975, freedom) * error
    assert fit.compare((*higher,), (*lower,)) == approx(expected)


def test_verdicts_at_the_boundaries():
    for is_equality, low, high, expected in (
        (False, 0.1, 0.5, REPLICATED),
        (False, 0, 1, INCONCLUSIVE),
        (False, 0, 0.9, NOT_REPLICATED),
        (False, -1, 1, INCONCLUSIVE),
        (True, -2, 2, REPLICATED),
        (True, -2.1, 2, INCONCLUSIVE),
        (True, -2, 2.1, INCONCLUSIVE),
        (True, 2.1, 3, NOT_REPLICATED),
        (True, -3, -2.1, NOT_REPLICATED),
    ):
        assert findings.verdict(low, high, is_equality) == expected, (is_equality, low, high)


def test_findings_name_existing_and_distinct_runs():
    for name, listed in findings.FINDINGS.items():
        runs_at = studies.STUDIES[name].runs_at
        scales = [{run.name for run in runs_at(scale)} for scale in ("small", "paper")]
        for finding in listed:
            compared = [*finding.higher, *finding.lower]
            names = {run.removesuffix(", g(h)") for run in compared}
            assert any(names <= runs for runs in scales), finding
            assert finding.higher and finding.lower and len(compared) == len({*compared}), finding


# study: finding: difference, computed by hand from the paper
DIFFERENCES = """
color: strength 1 is better than 1/8: +3.6
color_supervised: AutoAugment is better than strength 1 with blur: +1.7
losses: NT-Xent is better than the other losses with semi-hard negatives: +6.2
temperature: contrastive accuracy is higher without normalization than with it (temperature 0.1): +4.1
probes: rotation is predicted better from h than from g(h): +42.0
batches: larger batches are better when training is short (linear scaling): +3.3
batches: longer training reduces the difference between batch sizes (linear scaling): +1.4
few_labels: fine-tuning on 1 % of the labels is better than training from scratch: +22.9
heads: a nonlinear head is better than a linear one: +3
pairs: crop combined with color is better than crop alone:
"""


def test_paper_differences_match_manual_calculation():
    for line in DIFFERENCES.strip().splitlines():
        name, text, difference = map(str.strip, line.split(":"))
        (finding,) = (finding for finding in findings.FINDINGS[name] if finding.text == text)
        assert findings.paper_difference(name, finding) == difference, line


def rows(results, **columns):
    """Returns a table as `results.table` does, for a dict that maps runs to lists with one accuracy per seed.

    The accuracy is None if the seed diverged, and `...` if it is not finished. `columns` maps the
    titles of other columns to such dicts.
    """
    measures = ["accuracy", "logistic regression on g(h)", "contrastive accuracy", "h", "g(h)"]
    table = pd.DataFrame(
        [
            (run, seed, "diverged" if value is None else None, value)
            for run, values in results.items()
            for seed, value in enumerate(values, 1)
            if value is not ...
        ],
        columns=["run", "seed", "status", "accuracy"],
    ).reindex(columns=["run", "seed", "status", *measures])
    for title, values in columns.items():
        table[title] = [values[run][seed - 1] for run, seed in zip(table["run"], table["seed"])]
    return table.astype(dict.fromkeys(measures, float))


def test_findings_without_intervals_state_the_reason():
    for accuracies, expected, difference in (
        ({"with": [0.46, 0.45], "without": [None, None]}, "diverged", None),
        ({"without": [..., None]}, "diverged", None),
        ({"with": [0.46], "without": [0.44, 0.43]}, "one seed", 2),
        ({"with": [0.46, 0.45], "without": [None, 0.44]}, "one seed", 1),
        ({"with": [0.46, None], "without": [None, 0.44]}, "no common seed", None),
        ({"with": [0.46], "without": [..., 0.44]}, "no common seed", None),
        ({"with": [0.46, 0.45]}, "not run", None),
    ):
        (entry,) = findings.compare("flip", rows(accuracies), "small")
        assert (entry.verdict, entry.low) == (expected, None), accuracies
        assert entry.difference == (difference and approx(difference))


def entries_of(study, table, scale="small"):
    """Returns a dict that maps the texts of a study's findings to the results."""
    return {entry.finding.text: entry for entry in findings.compare(study, table, scale)}


def test_unfinished_seeds_of_other_runs_do_not_affect_a_finding():
    accuracies = {"1": [0.46, 0.45, 0.47], "1/8": [0.44, 0.43, 0.449]}
    others = {"1/2": [0.4], "1 + blur": [None, None, None], "AutoAugment": [0.42, 0.43, ...]}
    entries = entries_of("color", rows(accuracies | others))
    entry = entries["strength 1 is better than 1/8"]
    interval = stats.ttest_rel(*accuracies.values()).confidence_interval()
    assert (entry.low, entry.high) == approx((100 * interval.low, 100 * interval.high))
    assert entries["strength 1/2 is better than 1/8"].verdict == "one seed"
    assert entries["blur helps at strength 1"].verdict == "diverged"
    # The noise is estimated from all runs that have the seeds of the compared runs.
    fit = entries["color distortion of strength 1 is better than AutoAugment"].fit
    assert (fit.num_seeds, fit.degrees_of_freedom) == (2, 2)
    assert fit.means.to_dict() == approx({"1": 45.5, "1/8": 43.5, "AutoAugment": 42.5})


def test_results_on_g_of_h_are_compared_with_those_on_h_of_the_same_runs():
    on_h = dict.fromkeys(("nonlinear 32", "nonlinear 128"), [0.451, 0.452, 0.453])
    on_g = {"nonlinear 32": [0.401, 0.4052, 0.403], "nonlinear 128": [0.401, 0.4148, 0.403]}
    heads = rows(on_h, **{"logistic regression on g(h)": on_g})
    # At the paper's scale, g(h) is evaluated in separate runs.
    separate = rows(on_h | {f"{run}, g(h)": values for run, values in on_g.items()})
    entry, other = (
        entry
        for table, scale in ((heads, "small"), (separate, "paper"))
        for entry in findings.compare("heads", table, scale)
        if "h is better" in entry.finding.text
    )
    assert other.difference == entry.difference and other.fit.degrees_of_freedom == 3 * 2
    difference = 100 * (np.mean([*on_h.values()]) - np.mean([*on_g.values()]))
    # Two networks with three seeds; h and g(h) are of the same network.
    assert entry.difference == approx(difference) and entry.fit.degrees_of_freedom == 1 * 2
    probes = rows(
        {"rotation": [0.4] * 2}, h={"rotation": [0.7] * 2}, **{"g(h)": {"rotation": [0.3] * 2}}
    )
    entry = entries_of("probes", probes)["rotation is predicted better from h than from g(h)"]
    assert entry.difference == approx(40) and entry.verdict == "one network"


def test_findings_without_runs_at_a_scale_are_omitted():
    table = rows({"ResNet-10 (1x)": [0.4]})
    assert "doubling the width helps" in entries_of("networks", table)
    ((text, entry),) = entries_of("networks", table, "paper").items()
    assert "ResNet-50" in text and entry.verdict == "not run"
    assert not entries_of("designs", table)


def test_a_difference_between_gaps_matches_the_paired_t_test():
    """The gap between two networks is 8, 9 and 9.5 points with one seed each, and 5, 5.5 and 7 for larger ones."""
    small = {"supervised ResNet-10 (1x)": [0.5, 0.52, 0.505], "ResNet-10 (1x)": [0.42, 0.43, 0.41]}
    large = {"supervised ResNet-10 (2x)": [0.55, 0.56, 0.57], "ResNet-10 (2x)": [0.5, 0.505, 0.5]}
    entries = findings.compare("networks", rows(small | large), "small")
    (entry,) = (entry for entry in entries if entry.finding.scale == 2)
    assert entry.difference == approx(np.mean([8, 9, 9.5]) - np.mean([5, 5.5, 7]))
    # Of the three contrasts that the model of four runs leaves, the noise is estimated from all.
    values = 100 * np.array([*small.values(), *large.values()])
    residuals = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    error = np.sqrt((residuals**2).sum() / 6 * 4 / 3)
    half_width = stats.t(6).interval(0.95)[1] * error
    assert entry.high - entry.difference == approx(half_width)


def test_holm_correction_stops_at_the_first_difference_that_is_not_significant():
    def comparison(p, sign=1, **settings):
        # With ten degrees of freedom, the statistic of a difference of 1 point with this p-value.
        half_width = stats.t(10).isf(0.025) / stats.t(10).isf(p / 2)
        fit = findings.Fit(pd.Series(), 3, 10, 1.0)
        finding = findings.Finding("", ("a",), ("b",), **settings)
        return findings.Comparison(finding, "", "", sign, sign - half_width, sign + half_width, fit)

    # The limits for four comparisons are 0.0125, 0.0167, 0.025 and 0.05.
    compared = [comparison(0.012), comparison(0.016, -1), comparison(0.026), comparison(0.04)]
    equal = comparison(1e-9, is_equality=True)
    assert findings.count_after_holm([*compared[::-1], equal]) == 1
    compared[2] = comparison(0.024)
    assert findings.count_after_holm(compared) == 3


def test_metrics_are_modeled_separately():
    *_, finding = findings.FINDINGS["temperature"]
    assert finding.metric == "contrastive accuracy"
    accuracies = dict.fromkeys((*finding.higher, *finding.lower), [0.41, 0.4])
    contrastive = {run: [0.2 + 0.05 * (run in finding.higher)] * 2 for run in accuracies}
    given = rows(accuracies, **{"contrastive accuracy": contrastive})
    entry = findings.compare("temperature", given, "small")[-1]
    assert (entry.low, entry.high) == approx((5, 5))
