"""Tests of the comparison with the paper's findings: confidence intervals, verdicts, and the paper's differences."""

import re

import numpy as np
import pandas as pd
import pytest
from pytest import approx
from scipy import stats

from paper import findings, studies
from support import ROOT

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
    estimate = fit.estimate((*higher,), (*lower,))
    assert (estimate.difference, estimate.error) == approx((contrast @ solution, error))
    expected = stats.t.interval(0.9, freedom, estimate.difference, error)
    assert estimate.interval(0.9) == approx(expected)
    # The power of the t-test at the detectable difference, with the noncentral t distribution.
    limit = stats.t.ppf(0.975, freedom)
    assert stats.nct.sf(limit, freedom, estimate.detectable / error) == approx(0.8, abs=0.01)


def test_differences_per_seed_are_tested_if_the_noise_differs_between_runs():
    random = np.random.default_rng(6)
    noise = random.normal(size=[4, 8]) * [[1], [1], [1], [30]]
    values = pd.DataFrame(40 + noise, [*"abcd"])
    residuals = noise - noise.mean(0) - noise.mean(1, keepdims=True)
    assert stats.bartlett(*residuals).pvalue < 0.01
    estimate = findings.fit(values, ("a", "b", "c")).estimate(("a",), ("b", "c"), 2)
    test = stats.ttest_1samp(2 * noise[0] - noise[1] - noise[2], 0)
    assert estimate.p_value == approx(test.pvalue)
    assert estimate.interval() == approx(test.confidence_interval())


def test_verdicts_at_the_boundaries():
    for settings, low, high, p_value, expected in (
        ({}, 0.1, 0.5, 0.049, REPLICATED),
        ({}, 0.1, 0.5, 0.051, INCONCLUSIVE),
        ({}, -0.1, 0.1, 1, INCONCLUSIVE),
        ({}, -2, -0.1, 0.01, NOT_REPLICATED),
        (dict(stated="> 10"), 2, 4.9, 0.01, NOT_REPLICATED),
        (dict(stated="+3"), 1, 1.6, 0.01, REPLICATED),
        (dict(is_equality=True), -1.2, 1.2, None, REPLICATED),
        (dict(is_equality=True), -1.25, 1.2, None, INCONCLUSIVE),
        (dict(is_equality=True), 1.1, 3, None, NOT_REPLICATED),
        (dict(is_equality=True), -3, -1.1, None, NOT_REPLICATED),
    ):
        finding = findings.Finding("", ("a",), ("b",), **settings)
        # With 30 degrees of freedom, the 90 % interval is 0.83 times as wide as that of 95 %.
        error = (high - low) / 2 / stats.t.ppf(0.975, 30)
        estimate = findings.Estimate((low + high) / 2, error, 30)
        assert findings.verdict(finding, estimate, p_value) == expected, (settings, low, high)


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
color_supervised: AutoAugment is better than strength 1/8, 1/2 and 1 with blur (only in the table): +0.1
losses: NT-Xent is better than the other losses with semi-hard negatives: +6.0
temperature: contrastive accuracy is higher without normalization than with it (temperature 0.1): +4.1
probes: rotation is predicted better from h than from g(h): +42.0
batches: larger batches are better when training is short (linear scaling): +3.3
batches: longer training reduces the difference between batch sizes (linear scaling): +1.4
few_labels: fine-tuning on 1 % of the labels is better than training from scratch: +22.9
heads: a nonlinear head is better than a linear one: +3
transfer: fine-tuning a supervised network is better than fine-tuning SimCLR, pets: +1.1
transfer: fine-tuning SimCLR is better than fine-tuning a supervised network, voc2007: +0.1
pairs: crop combined with color is better than crop, color or Sobel filtering alone:
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
        assert (entry.verdict, entry.p_value) == (expected, None), accuracies
        assert (entry.estimate and entry.estimate.difference) == (difference and approx(difference))


def entries_of(study, table, scale="small"):
    """Returns a dict that maps the texts of a study's findings to the results."""
    return {entry.finding.text: entry for entry in findings.compare(study, table, scale)}


def test_unfinished_seeds_of_other_runs_do_not_affect_a_finding():
    accuracies = {"1": [0.46, 0.45, 0.47], "1/8": [0.44, 0.43, 0.449]}
    others = {"1/2": [0.4], "1 + blur": [None, None, None], "AutoAugment": [0.42, 0.43, ...]}
    entries = entries_of("color", rows(accuracies | others))
    entry = entries["strength 1 is better than 1/8"]
    interval = stats.ttest_rel(*accuracies.values()).confidence_interval()
    assert entry.estimate.interval() == approx((100 * interval.low, 100 * interval.high))
    assert entries["strength 1/2 is better than 1/8"].verdict == "one seed"
    assert entries["blur helps at strength 1"].verdict == "diverged"
    # The noise is estimated from all runs that have the seeds of the compared runs.
    fit = entries["color distortion of strength 1 is better than AutoAugment"].fit
    assert (fit.num_seeds, fit.degrees_of_freedom) == (2, 2)
    means = fit.values.mean(axis=1).to_dict()
    assert means == approx({"1": 45.5, "1/8": 43.5, "AutoAugment": 42.5})


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
    assert other.estimate.difference == entry.estimate.difference
    assert other.fit.degrees_of_freedom == 3 * 2
    difference = 100 * (np.mean([*on_h.values()]) - np.mean([*on_g.values()]))
    # Two networks with three seeds; h and g(h) are of the same network.
    assert entry.estimate.difference == approx(difference)
    assert entry.fit.degrees_of_freedom == 1 * 2
    probes = rows(
        {"rotation": [0.4] * 2}, h={"rotation": [0.7] * 2}, **{"g(h)": {"rotation": [0.3] * 2}}
    )
    entry = entries_of("probes", probes)["rotation is predicted better from h than from g(h)"]
    assert entry.estimate.difference == approx(40) and entry.verdict == "one network"


def test_findings_without_runs_at_a_scale_are_omitted():
    table = rows({"ResNet-10 (1x)": [0.4]})
    assert "doubling the width helps" in entries_of("networks", table)
    (entry,) = entries_of("networks", table, "paper").values()
    assert "ResNet-50 (4x)" in entry.finding.higher and entry.verdict == "not run"
    assert not entries_of("designs", table)


def test_a_difference_between_gaps_matches_the_paired_t_test():
    """The gap between two networks is 8, 9 and 9.5 points with one seed each, and 5, 5.5 and 7 for larger ones."""
    small = {"supervised ResNet-10 (1x)": [0.5, 0.52, 0.505], "ResNet-10 (1x)": [0.42, 0.43, 0.41]}
    large = {"supervised ResNet-10 (2x)": [0.55, 0.56, 0.57], "ResNet-10 (2x)": [0.5, 0.505, 0.5]}
    entries = findings.compare("networks", rows(small | large), "small")
    (entry,) = (entry for entry in entries if entry.finding.scale == 2)
    assert entry.estimate.difference == approx(np.mean([8, 9, 9.5]) - np.mean([5, 5.5, 7]))
    # Of the three contrasts that the model of four runs leaves, the noise is estimated from all.
    values = 100 * np.array([*small.values(), *large.values()])
    residuals = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    assert entry.estimate.error == approx(np.sqrt((residuals**2).sum() / 6 * 4 / 3))


def test_p_values_are_corrected_for_the_differences_of_a_study():
    corrected = findings.holm([0.04, 0.012, 0.016, 0.026])
    assert corrected == approx([0.052, 0.048, 0.048, 0.052])
    random = np.random.default_rng(7)
    finding_runs = ("l2 norm, 0.05", "l2 norm, 0.1", "l2 norm, 0.5", "l2 norm, 1", "no norm, 10")
    accuracies = {run: list(0.4 + 0.01 * random.normal(size=3)) for run in finding_runs}
    accuracies["no norm, 100"] = [0.4, None, ...]
    compared = findings.compare("temperature", rows(accuracies), "small")
    estimates = [entry.estimate for entry in compared[:3]]
    expected = findings.holm([estimate.p_value for estimate in estimates])
    assert [entry.p_value for entry in compared[:3]] == approx(expected.tolist())
    assert [entry.p_value for entry in compared[3:]] == [None, None]


def test_better_than_any_is_judged_by_the_smallest_difference_and_the_largest_p():
    accuracies = {"margin": [0.3, 0.31, 0.32], "NT-Logistic": [0.35, 0.352, 0.36]}
    accuracies["NT-Xent"] = [0.361, 0.36, 0.37]
    (entry, *_) = findings.compare("losses", rows(accuracies), "small")
    pairs = [entry.fit.estimate(("NT-Xent",), (run,)) for run in ("margin", "NT-Logistic")]
    assert entry.estimate == pairs[1] and entry.p_value == pairs[1].p_value > pairs[0].p_value
    accuracies["NT-Logistic"] = [0.4, 0.41, 0.42]
    (entry, *_) = findings.compare("losses", rows(accuracies), "small")
    assert entry.estimate.difference < 0 and entry.p_value == 1


def test_a_finding_outside_the_range_of_the_paper_has_no_verdict():
    (finding,) = findings.FINDINGS["cifar_temperature"]
    table = rows(
        {run: [0.5 + 0.1 * (run in finding.higher)] * 3 for run in finding.higher + finding.lower}
    )
    (entry,) = findings.compare("cifar_temperature", table, "small")
    assert entry.verdict == "not comparable (the paper: more than 300 epochs)"
    (entry,) = findings.compare("cifar_temperature", table, "paper")
    assert entry.verdict == REPLICATED and entry.estimate.difference == approx(10)


def test_the_recorded_intervals_are_those_of_scipy():
    """Recomputes intervals from the recorded accuracies, with a linear model or with the differences per seed."""
    report = (ROOT / "docs/tables/small/report.md").read_text()
    texts = dict(re.findall(r"\| ([^|]+) \| [^|]* \| \S+ (\[.*?\]) \|", report))
    checked = 0
    for name, listed in findings.FINDINGS.items():
        for finding in listed if name != "heads" else ():  # Its noise is also that of g(h).
            if finding.text not in texts or finding.is_each or finding.metric == "probe accuracy":
                continue
            table = pd.read_csv(ROOT / f"docs/tables/small/{name}.csv")
            values = 100 * table.pivot(index="run", columns="seed", values=finding.metric)
            compared = [*finding.higher, *finding.lower]
            if not set(compared) <= set(values.index):
                continue  # The finding has other runs at the small scale.
            values = values[values.loc[compared].dropna(axis=1).columns].dropna()
            weights = pd.Series(0.0, values.index)
            weights[[*finding.higher]] = finding.scale / len(finding.higher)
            weights[[*finding.lower]] = -finding.scale / len(finding.lower)
            residuals = values.sub(values.mean(axis=1), axis=0)
            residuals -= residuals.mean()
            low, high = stats.ttest_1samp(weights @ values, 0).confidence_interval()
            if stats.bartlett(*residuals.to_numpy()).pvalue > 0.01:
                freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
                variance = np.sum(residuals.to_numpy() ** 2) / freedom * np.sum(weights**2)
                center, error = np.mean(weights @ values), np.sqrt(variance / values.shape[1])
                low, high = stats.t.interval(0.95, freedom, center, error)
            assert f"[{low:+.1f}, {high:+.1f}]" == texts[finding.text], finding.text
            checked += 1
    assert checked >= 10
