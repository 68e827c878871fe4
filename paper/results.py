"""Finished runs as rows of tables: our accuracies, the paper's, differences, averages and correlations."""

from __future__ import annotations

import math
import os

import numpy as np

from paper import runner, studies
from runtime.errors import UserError
from transfer import output, significance

COLUMNS = {  # maps column titles to keys in the results of a finished run
    "logistic regression": runner.LBFGS, "logistic regression on g(h)": f"{runner.LBFGS}/projections",
    "linear head": runner.TOP_1, "top-5": "eval/label_top_5_accuracy", "transfer": "test",
    "contrastive accuracy": "eval/contrast_acc", "entropy": "eval/contrast_entropy",
}
_MAIN_MEASURES = ("top-1", "mean per class", "mAP")  # The paper's metrics that correspond to `runner.accuracy`.
_SHARED_MEASURES = ("top-5", "contrastive accuracy", "entropy")  # Metrics that have the same name in the paper.
ALPHA = 0.05  # Significance level of the permutation test, as in the paper's tables.


# -------------------------------------------------------------------------------------------------------------- rows


def rows_of(name: str, base: str, scale: str) -> list[dict]:
    """Returns a study's finished runs as dicts that map column titles to values.

    Our accuracies are in [0, 1]; the paper's are in %. Keys that start with "_" are not displayed.

    Args:
      name: name of the study.
      base: directory for all results.
      scale: paper or small.

    Raises:
      UserError: predictions for the permutation test are missing or belong to different examples.
    """
    rows = []
    for run in studies.STUDIES[name].runs_at(scale):
        done = _finished(name, run, base, scale)
        if done is not None:
            directory = runner.directory_of(base, scale, name, run)
            source = directory if done["same_as"] is None else os.path.join(base, done["same_as"])
            rows.append(_row(run, done, scale, source))
    _add_changes(studies.STUDIES[name], rows)
    _mark_best(rows)
    return rows


def _finished(name, run, base, scale):
    """Returns the content of a run's done.json, or None if the file is missing or has outdated settings."""
    done = runner.read_done(runner.directory_of(base, scale, name, run))
    return done if done is not None and runner.is_current(run, scale, done) else None


def _row(run, done, scale, directory):
    """Returns the row for a finished run whose files are in `directory`."""
    results = {title: _finite_or_none(done["results"].get(key)) for title, key in COLUMNS.items()}
    probes = {probe: {"h": _finite_or_none(values.get("h")), "g(h)": _finite_or_none(values.get("z")),
                      # Earlier versions stored the baseline as "guess".
                      "majority baseline": _finite_or_none(values.get("majority_baseline", values.get("guess")))}
              for probe, values in done["probes"].items() if isinstance(values, dict)}
    for probe, values in probes.items():
        results |= {"majority baseline": values["majority baseline"],
                    **{f"{probe} from {measure}": values[measure] for measure in ("h", "g(h)")}}
    paper = {f"paper, {measure}": number for measure, number in run.paper.items()}
    changed = run.small_flags.items() if scale == "small" else ()
    # Additional evaluations are omitted here, since they are shown as additional columns.
    changed_flags = ", ".join(f"{flag} {value}" for flag, value in changed
                              if flag not in ("eval_protocol", "eval_projections"))
    accuracy = runner.accuracy(done)
    ours = {**dict.fromkeys(_MAIN_MEASURES, accuracy), **{measure: results[measure] for measure in _SHARED_MEASURES},
            **{measure: values[measure] for values in probes.values() for measure in ("h", "g(h)")}}
    parameters = _finite_or_none(done.get("million_parameters"))  # Transfer runs do not record this number.
    plotted = next((measure for measure in (*_MAIN_MEASURES, "h") if measure in run.paper), None)
    return {"run": run.name, "changed flags": changed_flags or None, **paper, **results,
            **(_differences(run.paper, ours) if scale == "paper" else {}),
            "status": "diverged" if done["diverged"] else None,
            "minutes": f"{done['seconds'] / 60:.1f}", **run.plot_columns,
            **(run.small_plot_columns if scale == "small" else {}), "accuracy": accuracy,
            "million parameters": None if parameters is None else round(parameters, 3),
            "_plotted": ours.get(plotted, accuracy), "_paper": run.paper.get(plotted), "_done": done,
            "_directory": directory, "_probe_changes": probes and (
                _change(ours["h"], ours["g(h)"], 100), _change(run.paper.get("h"), run.paper.get("g(h)"), 1))}


def _finite_or_none(value):
    """Returns the value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and abs(value) < math.inf else None


def _differences(paper, ours):
    """Returns the differences (our result minus the paper's) as text, for metrics for which both results exist.

    Differences are meaningful only at the paper's scale, since other data sets and batch sizes change all metrics.
    """
    pairs = {measure: (ours[measure], number) for measure, number in paper.items() if ours.get(measure) is not None}
    return {"difference" if measure in _MAIN_MEASURES else f"difference, {measure}":
            f"{value - number:+.2f}" if measure == "entropy" else f"{100 * value - number:+.1f}"
            for measure, (value, number) in pairs.items()}


def _add_changes(study, rows):
    """Adds the change in accuracy relative to the baseline run to each row, for our results and for the paper's.

    Changes are in percentage points. For Table 3, the change is the accuracy on h minus that on g(h) in the same run.
    """
    rows_by_name = {row["run"]: row for row in rows}
    for row in rows:
        baseline = rows_by_name.get(study.baseline_of(row["run"]))
        ours, paper = row.pop("_probe_changes") or (
            (_change(row["_plotted"], baseline["_plotted"], 100), _change(row["_paper"], baseline["_paper"], 1))
            if baseline else (None, None))
        agrees = None if ours is None or not paper else "yes" if ours * paper > 0 else "no"
        row |= {"_change": ours, "_paper_change": paper, "baseline": None if baseline is None else baseline["run"],
                "change": _signed(ours), "change in the paper": _signed(paper), "same direction": agrees}


def _change(value, baseline, scale):
    """Returns the difference between two values, multiplied by `scale`, or None if one of them is missing."""
    return None if value is None or baseline is None else scale * (value - baseline)


def _signed(change):
    return None if change is None else f"{change:+.1f}"


def _mark_best(rows):
    """Sets `best` to True for transfer runs whose results do not differ significantly from those of the best run.

    Significance is determined by the permutation test. As in the paper, runs on the same data set are compared in two
    groups: linear evaluation, and training of the whole network.
    """
    groups = {}
    for row in rows:
        if "protocol" in row and row["accuracy"] is not None:
            groups.setdefault((row["task"], row["protocol"] == "linear"), []).append(row)
    for group in groups.values():
        predictions = {row["run"]: _predictions_of(row) for row in group}
        best = predictions[max(group, key=lambda row: row["accuracy"])["run"]]
        for row in group:
            labels, scores, metric = predictions[row["run"]]
            if labels.shape != best[0].shape or (labels != best[0]).any():
                raise UserError(f"{row['_directory']}/predictions.npz: the labels differ from those in other runs on "
                                f"{row['task']}. Remove the directory, and repeat the run.")
            row["best"] = significance.compare(labels, best[1], scores, metric)["p"] > ALPHA


def _predictions_of(row):
    """Returns a transfer run's labels, scores and metric name. Raises `UserError` if its predictions are unusable."""
    path = os.path.join(row["_directory"], "predictions.npz")
    return *output.read_predictions(path), row["_done"]["results"].get("metric")


# ---------------------------------------------------------------------------------------------------------- averages


def averages(name: str, rows: list[dict]) -> list[dict]:
    """Averages the accuracies of the runs that differ only in the study's `averaged_over` plot columns.

    Args:
      name: name of the study.
      rows: result of `rows_of`.

    Returns:
      A list with one dict per group of finished runs. Each dict contains the group's values in the other plot columns,
      the number of `runs`, their `mean` accuracy, and the sample `standard deviation` (None for one run). The list is
      empty if the study has no `averaged_over` columns.
    """
    study = studies.STUDIES[name]
    if not study.averaged_over:
        return []
    columns = dict.fromkeys(column for run in (*study.runs, *study.small_only) for column in run.plot_columns
                            if column not in study.averaged_over)
    groups = {}
    for row in rows:
        if row["accuracy"] is not None:
            groups.setdefault(tuple(row[column] for column in columns), []).append(row["accuracy"])
    return [{**dict(zip(columns, key)), "runs": len(values), "mean": float(np.mean(values)),
             "standard deviation": float(np.std(values, ddof=1)) if len(values) > 1 else None}
            for key, values in groups.items()]


# ------------------------------------------------------------------------------------------------------ correlations


CORRELATED = ("few_labels_lengths", "few_labels_networks")


def correlations(name: str, base: str, scale: str) -> list[dict]:
    """Correlates linear-evaluation accuracy with fine-tuning accuracy for each label fraction (Appendix B.7).

    Args:
      name: study in `CORRELATED`.
      base, scale: see `rows_of`.

    Returns:
      A list with one dict per label fraction. `labels` is the label fraction, and `points` is a list of (name,
      linear-evaluation accuracy, fine-tuning accuracy). `pearson` and `spearman` are the correlation coefficients, or
      None if there are fewer than three points.
    """
    from scipy import stats

    points = {}
    for run in studies.STUDIES[name].runs_at(scale):
        start_study, start_run = run.starts_from[0], studies.find_run(run.starts_from)
        done = _finished(name, run, base, scale), _finished(start_study, start_run, base, scale)
        if all(content is not None and runner.accuracy(content) is not None for content in done):
            tuned, linear = map(runner.accuracy, done)
            points.setdefault(run.plot_columns["labels"], []).append((run.plot_columns["start"], linear, tuned))
    return [dict(labels=labels, points=group, **{
        title: float(function(*list(zip(*group))[1:]).statistic) if len(group) > 2 else None
        for title, function in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr))})
        for labels, group in points.items()]
