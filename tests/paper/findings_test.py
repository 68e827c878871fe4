"""Tests of the comparison with the paper's findings: confidence intervals, verdicts, and the paper's differences."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from paper import findings, studies

SHOWS, DOES_NOT_SHOW, TOO_SMALL = "shows", "does not show", "too small to tell"


def table(num_runs, num_seeds):
    """Returns random results of runs `0`, `1` and so on, in the format that `findings.fit` requires."""
    random = np.random.default_rng(num_runs)
    values = (
        40
        + random.normal(size=[num_runs, 1])
        + random.normal(size=num_seeds)
        + random.normal(size=[num_runs, num_seeds])
    )
    names = [str(run) for run in range(num_runs)]
    return pd.DataFrame(values, names, range(1, num_seeds + 1))


def test_the_interval_for_two_runs_equals_the_paired_t_interval_of_scipy():
    values = table(2, 5)
    difference, half_width = findings.fit(values, ("0", "1")).compare(("0",), ("1",))
    test = stats.ttest_rel(values.loc["0"], values.loc["1"]).confidence_interval(0.95)
    assert (difference - half_width, difference + half_width) == pytest.approx(
        (test.low, test.high)
    )


@pytest.mark.parametrize(
    "higher, lower", [(("0",), ("3",)), (("0", "1"), ("2", "3", "4")), (("4",), ("1", "0"))]
)
def test_intervals_equal_those_of_a_linear_model_with_dummy_variables(higher, lower):
    values, num_runs, num_seeds = table(5, 3), 5, 3
    pairs = [(run, seed) for run in range(num_runs) for seed in range(1, num_seeds + 1)]
    design = np.array(
        [
            [
                *(run == other for other in range(num_runs)),
                *(seed == other for other in range(2, num_seeds + 1)),
            ]
            for run, seed in pairs
        ],
        float,
    )
    results = [values.loc[str(run), seed] for run, seed in pairs]
    solution, (squares,), *_ = np.linalg.lstsq(design, results, rcond=None)
    freedom = len(results) - design.shape[1]
    contrast = np.zeros(design.shape[1])
    contrast[[int(run) for run in higher]] = 1 / len(higher)
    contrast[[int(run) for run in lower]] = -1 / len(lower)
    error = np.sqrt(squares / freedom * contrast @ np.linalg.inv(design.T @ design) @ contrast)
    fit = findings.fit(values, (*higher, *lower))
    assert (fit.degrees_of_freedom, fit.deviation) == (
        freedom,
        pytest.approx(np.sqrt(squares / freedom)),
    )
    assert fit.compare(higher, lower) == pytest.approx(
        (contrast @ solution, stats.t.ppf(0.975, freedom) * error)
    )


def test_the_seeds_common_to_the_compared_runs_and_the_runs_with_these_seeds_are_used():
    values = pd.DataFrame(
        {
            "a": {1: 40.0, 2: 41.0, 3: 45.0},
            "b": {1: 42.0, 2: 44.0},
            "one seed": {1: 40.0},
            "seed 3": {3: 40.0},
            "c": {1: 30.0, 2: 31.0, 4: 32.0},
        }
    ).T
    fit = findings.fit(values, ("a", "b"))
    assert fit.means.to_dict() == {"a": 40.5, "b": 43.0, "c": 30.5}
    assert (fit.num_seeds, fit.degrees_of_freedom) == (2, 2)
    assert findings.fit(values, ("a", "one seed")).num_seeds == 1
    assert findings.fit(values, ("b", "seed 3")) is None
    assert findings.fit(values, ("a", "missing")) is None
    fit = findings.fit(values.loc[["a", "seed 3"]], ("a", "seed 3"))
    assert fit.num_seeds == 1 and fit.compare(("a",), ("seed 3",)) == (5.0, None)


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (0.1, 5, SHOWS),
        (0.1, 0.5, SHOWS),
        (0, 5, TOO_SMALL),
        (0, 1, TOO_SMALL),
        (0, 0.9, DOES_NOT_SHOW),
        (-3, -2, DOES_NOT_SHOW),
        (-1, 1, TOO_SMALL),
        (-1, 0.9, DOES_NOT_SHOW),
        (-5, 5, TOO_SMALL),
    ],
)
def test_verdicts_at_the_boundaries(low, high, expected):
    assert findings.verdict(low, high) == expected


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (-2, 2, SHOWS),
        (-0.5, 0.5, SHOWS),
        (1, 2, SHOWS),
        (-2.1, 2, TOO_SMALL),
        (-2, 2.1, TOO_SMALL),
        (2, 3, TOO_SMALL),
        (-3, -2, TOO_SMALL),
        (2.1, 3, DOES_NOT_SHOW),
        (-3, -2.1, DOES_NOT_SHOW),
        (-3, 3, TOO_SMALL),
    ],
)
def test_verdicts_on_equality_at_the_boundaries(low, high, expected):
    assert findings.verdict(low, high, is_equality=True) == expected


def test_findings_name_existing_and_distinct_runs():
    for name, listed in findings.FINDINGS.items():
        runs = {run.name for run in studies.STUDIES[name].runs_at("small")}
        for finding in listed:
            compared = [*finding.higher, *finding.lower]
            assert {run.removesuffix(", g(h)") for run in compared} <= runs, finding
            assert finding.higher and finding.lower and len(compared) == len(set(compared)), finding


# The differences are computed by hand from the paper.
@pytest.mark.parametrize(
    "name, text, difference",
    [
        ("color", "strength 1 is better than 1/8", "+3.6"),
        ("color_supervised", "AutoAugment is better than strength 1 with blur", "+1.7"),
        ("losses", "NT-Xent is better than the other losses with semi-hard negatives", "+6.2"),
        (
            "temperature",
            "contrastive accuracy is higher without normalization than with it (temperature 0.1)",
            "+4.1",
        ),
        ("probes", "rotation is predicted better from h than from g(h)", "+42.0"),
        ("batches", "larger batches are better when training is short", "+2.1"),
        ("heads", "a nonlinear head is better than a linear one", "+3"),
        ("pairs", "crop combined with color is better than crop alone", ""),
    ],
)
def test_paper_differences_match_manual_calculation(name, text, difference):
    (finding,) = (finding for finding in findings.FINDINGS[name] if finding.text == text)
    assert findings.paper_difference(name, finding) == difference


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


def test_findings_are_compared_with_our_results():
    accuracies = {"with": [0.46, 0.45, 0.47], "without": [0.44, 0.43, 0.449]}
    (entry,) = findings.compare("flip", rows(accuracies), "small")
    interval = stats.ttest_rel(accuracies["with"], accuracies["without"]).confidence_interval()
    assert (entry.low, entry.high) == pytest.approx((100 * interval.low, 100 * interval.high))
    assert (entry.paper, entry.verdict) == ("+1.1", SHOWS)
    assert entry.difference == pytest.approx(2.033, abs=1e-3)
    (entry,) = findings.compare("flip", rows({"with": [0.46], "without": [0.44, 0.43]}), "small")
    assert (entry.verdict, entry.low) == ("one seed", None) and entry.difference == pytest.approx(2)
    (entry,) = findings.compare("flip", rows({"with": [0.46]}), "small")
    assert (entry.verdict, entry.difference) == ("not run", None)


@pytest.mark.parametrize(
    "accuracies, expected",
    [
        ({"with": [0.46, 0.45], "without": [None, None]}, "diverged"),
        ({"without": [..., None]}, "diverged"),
        ({"with": [0.46, 0.45], "without": [None, 0.44]}, "one seed"),
        ({"with": [0.46, None], "without": [None, 0.44]}, "no common seed"),
        ({"with": [0.46], "without": [..., 0.44]}, "no common seed"),
        ({"with": [0.46, 0.45]}, "not run"),
    ],
)
def test_findings_without_intervals_state_the_reason(accuracies, expected):
    (entry,) = findings.compare("flip", rows(accuracies), "small")
    assert (entry.verdict, entry.low) == (expected, None)


def test_unfinished_seeds_of_other_runs_do_not_affect_a_finding():
    accuracies = {"1": [0.46, 0.45, 0.47], "1/8": [0.44, 0.43, 0.449]}
    others = {"1/2": [0.4], "1 + blur": [None, None, None], "AutoAugment": [0.42, 0.43, ...]}
    entries = {
        entry.finding.text: entry
        for entry in findings.compare("color", rows(accuracies | others), "small")
    }
    entry = entries["strength 1 is better than 1/8"]
    interval = stats.ttest_rel(accuracies["1"], accuracies["1/8"]).confidence_interval()
    assert (entry.low, entry.high) == pytest.approx((100 * interval.low, 100 * interval.high))
    assert entries["strength 1/2 is better than 1/8"].verdict == "one seed"
    assert entries["blur helps at strength 1"].verdict == "diverged"
    model = entries["color distortion of strength 1 is better than AutoAugment"].fit
    assert model.num_seeds == 2 and set(model.means.index) == {"1", "1/8", "AutoAugment"}


def test_results_on_g_of_h_are_compared_with_those_on_h_of_the_same_runs():
    measures = {
        f"nonlinear {size}": {
            seed: (0.45 + 0.001 * seed, 0.40 + 0.001 * seed + 0.0001 * size * (seed == 2))
            for seed in (1, 2, 3)
        }
        for size in (32, 128)
    }
    first, second = (
        {run: [pair[index] for pair in by_seed.values()] for run, by_seed in measures.items()}
        for index in (0, 1)
    )
    heads = rows(first, **{"logistic regression on g(h)": second})
    entry = next(
        entry
        for entry in findings.compare("heads", heads, "small")
        if "h is better" in entry.finding.text
    )
    expected = 100 * np.mean(
        [first - second for by_seed in measures.values() for first, second in by_seed.values()]
    )
    assert entry.difference == pytest.approx(expected) and entry.fit.degrees_of_freedom == 3 * 2
    probes = rows({"rotation": [0.4]}, h={"rotation": [0.7]}, **{"g(h)": {"rotation": [0.3]}})
    entry = next(
        entry
        for entry in findings.compare("probes", probes, "small")
        if entry.difference is not None
    )
    assert entry.difference == pytest.approx(40) and "rotation" in entry.finding.text


def test_findings_without_runs_at_a_scale_are_omitted():
    table = rows({"ResNet-10 (1x)": [0.4]})
    assert "doubling the width helps" in {
        entry.finding.text for entry in findings.compare("networks", table, "small")
    }
    assert not findings.compare("networks", table, "paper")
    assert not findings.compare("designs", table, "small")


def test_metrics_are_modeled_separately():
    finding = next(
        finding
        for finding in findings.FINDINGS["temperature"]
        if finding.metric == "contrastive accuracy"
    )
    runs = [*finding.higher, *finding.lower]
    given = rows(
        {run: [0.4 + 0.01 * index, 0.4 + 0.02 * index] for index, run in enumerate(runs)},
        **{
            "contrastive accuracy": {
                run: [0.2 + 0.05 * (run in finding.higher)] * 2 for run in runs
            }
        },
    )
    entry = findings.compare("temperature", given, "small")[-1]
    assert (entry.low, entry.high) == pytest.approx((5, 5))
