"""Finished runs as rows of tables: our accuracies, the paper's, differences, averages and correlations."""

from __future__ import annotations

import json
import math
import os
import re

import numpy as np

from paper import runner, studies
from runtime import storage
from runtime.errors import UserError
from transfer import output, significance

COLUMNS = {  # maps column titles to keys in the results of a finished run
    "logistic regression": runner.LBFGS,
    "logistic regression on g(h)": f"{runner.LBFGS}/projections",
    "linear head": runner.TOP_1,
    "top-5": "eval/label_top_5_accuracy",
    "transfer": "test",
    "contrastive accuracy": "eval/contrast_acc",
    "entropy": "eval/contrast_entropy",
}
# The paper's metrics that correspond to `runner.accuracy`.
_MAIN_MEASURES = ("top-1", "mean per class", "mAP")
# in the order of `runner.accuracy`
_ACCURACY_COLUMNS = ("logistic regression", "linear head", "transfer")
# Metrics that have the same name in the paper.
_SHARED_MEASURES = ("top-5", "contrastive accuracy", "entropy")
ALPHA = 0.05  # Significance level of the permutation test, as in the paper's tables.


# ----------------------------------------------------------------------------------------------------- finished runs


def finished_runs(name: str, base: str, scale: str) -> list[tuple[studies.Run, dict]]:
    """Returns a study's finished runs, with all seeds, and the contents of their done.json files.

    Results of runs without a current done.json are read from the file that `write_records` wrote.
    Runs with outdated settings are omitted.

    Args:
      name: name of the study.
      base: directory for all results.
      scale: paper or small.

    Raises:
      UserError: the file with recorded results is corrupt.
    """
    directory, records = (
        os.path.join(base, scale, name),
        _read_records(records_path(name, base, scale)),
    )
    entries = os.listdir(directory) if os.path.isdir(directory) else []
    matches = [re.search("_seed_([0-9]{1,9})$", entry) for entry in entries]
    seeds = sorted(
        {1, *(int(match[1]) for match in matches if match), *(seed for _, seed in records)}
    )
    runs = [run.with_seed(seed) for run in studies.STUDIES[name].runs_at(scale) for seed in seeds]
    finished = []
    for run in runs:
        stored = runner.read_done(runner.directory_of(base, scale, name, run))
        for done in (stored, records.get((run.name, run.seed))):
            if done is not None and runner.is_current(run, scale, done):
                finished.append((run, done))
                break
    return finished


def records_path(name: str, base: str, scale: str) -> str:
    """Returns the path of the file with the recorded results of a study."""
    return os.path.join(base, scale, f"{name}.jsonl")


_RECORDED = (
    "arguments",
    "settings",
    "probes",
    "seconds",
    "commits",
    "hardware",
    "million_parameters",
    "diverged",
    "same_as",
)


def write_records(path: str, rows: list[dict]) -> None:
    """Writes the results of finished runs as one JSON object per line. `rows_of` can restore the rows from this file.

    The objects contain the parts of done.json that reports use. Predictions for the permutation
    test are not included. Lines of the existing file are kept if `rows` does not contain their run
    and seed.

    Args:
      path: path of the file.
      rows: result of `rows_of`.
    """
    records = _read_records(path)
    for row in rows:
        done = row["_done"]
        records[row["run"], row["seed"]] = {
            "run": row["run"],
            "seed": row["seed"],
            "results": {
                key: done["results"][key] for key in COLUMNS.values() if key in done["results"]
            },
            **{key: done[key] for key in _RECORDED if key in done},
        }
    storage.write_bytes(
        path, "".join(f"{json.dumps(record)}\n" for record in records.values()).encode()
    )


def _read_records(path):
    """Reads a file written by `write_records`. Returns a dict that maps (run, seed) to records.

    The dict is empty if the file does not exist.
    """
    if not storage.is_file(path):
        return {}
    with open(path, "rb") as file:
        lines = file.read().splitlines()
    records = [_parse_record(path, *numbered) for numbered in enumerate(lines, 1)]
    return {(record["run"], record["seed"]): record for record in records}


def _parse_record(path, number, line):
    """Parses a line of a file with recorded results. Raises `UserError` if it is corrupt."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    types = dict(run=str, seed=int)
    if not (
        isinstance(record, dict)
        and all(isinstance(record.get(key), kind) for key, kind in types.items())
        and record["seed"] > 0
        and runner.is_valid(record)
    ):
        raise UserError(f"{path}: line {number} is corrupt. Restore or remove the file.")
    return record


# -------------------------------------------------------------------------------------------------------------- rows


def rows_of(name: str, base: str, scale: str) -> list[dict]:
    """Returns a study's finished runs, with all seeds, as dicts that map column titles to values.

    Our accuracies are in [0, 1]; the paper's are in %. Keys that start with "_" are not displayed.

    Args:
      name, base, scale: see `finished_runs`.

    Raises:
      UserError: predictions for the permutation test are missing or belong to different examples,
        or the file with recorded results is corrupt.
    """
    rows = []
    for run, done in finished_runs(name, base, scale):
        measures, source = _measures(done), done["same_as"]
        rows.append(
            {
                **_row(run, measures, scale),
                "status": "diverged" if done["diverged"] else None,
                "_done": done,
                "_directory": (
                    runner.directory_of(base, scale, name, run)
                    if source is None
                    else os.path.join(base, source)
                ),
                "_measures": measures,
            }
        )
    _add_changes(studies.STUDIES[name], rows)
    _mark_best(rows)
    return rows


def mean_rows(name: str, rows: list[dict], scale: str) -> list[dict]:
    """Averages over seeds. Returns one row per run, with the additional columns `seeds` and `_deviations`.

    `seeds` is the number of seeds, or None if no run has several. `_deviations` maps the title of
    the accuracy column to the sample standard deviation. It is empty if the run has fewer than two
    accuracies. Changes relative to the baseline run are averaged over the seeds that both runs
    have.

    Args:
      name: name of the study.
      rows: result of `rows_of`.
      scale: paper or small.
    """
    groups, means = {}, []
    for row in rows:
        groups.setdefault(row["run"], []).append(row)
    for run, group in groups.items():
        measures = [row["_measures"] for row in group]
        titles = dict.fromkeys(title for values in measures for title in values)
        row = _row(
            studies.find_run((name, run)),
            {title: _mean([values.get(title) for values in measures]) for title in titles},
            scale,
        )
        accuracies = [other["accuracy"] for other in group if other["accuracy"] is not None]
        title = next((title for title in _ACCURACY_COLUMNS if row[title] is not None), None)
        diverged = [str(other["seed"]) for other in group if other["status"]]
        status = (
            f"diverged with seed {', '.join(diverged)}"
            if len(diverged) < len(group)
            else "diverged"
        )
        means.append(
            {
                **row,
                "seed": None,
                "seeds": len(group) if any(len(other) > 1 for other in groups.values()) else None,
                "status": status if diverged else None,
                "best": all(other.get("best") for other in group),
                "_seeds": {other["seed"] for other in group},
                "_deviations": (
                    {title: float(np.std(accuracies, ddof=1))} if len(accuracies) > 1 else {}
                ),
                "_done": group[0]["_done"],
                **_changes(
                    _mean([other["_change"] for other in group]),
                    *(
                        next((other[title] for other in group if other[title] is not None), None)
                        for title in ("_paper_change", "baseline")
                    ),
                ),
            }
        )
    return means


def _mean(values):
    """Returns the mean of the values that are not None, or None if there are no such values."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def _measures(done):
    """Returns the results of a finished run as a dict that maps column titles to finite numbers or None."""
    measures = {title: _finite_or_none(done["results"].get(key)) for title, key in COLUMNS.items()}
    for probe, values in done["probes"].items():
        if isinstance(values, dict):
            first, second = _finite_or_none(values.get("h")), _finite_or_none(values.get("z"))
            # Earlier versions stored the baseline as "guess".
            baseline = _finite_or_none(values.get("majority_baseline", values.get("guess")))
            measures |= {
                "majority baseline": baseline,
                f"{probe} from h": first,
                f"{probe} from g(h)": second,
                "_h": first,
                "_g(h)": second,
            }
    # Transfer runs do not record this number.
    parameters = _finite_or_none(done.get("million_parameters"))
    return {
        **measures,
        "accuracy": runner.accuracy(done),
        "_minutes": done["seconds"] / 60,
        "million parameters": None if parameters is None else round(parameters, 3),
    }


def _row(run, measures, scale):
    """Returns the row for a run with the given measures (see `_measures`), without changes and status."""
    changed = run.small_flags.items() if scale == "small" else ()
    # Additional evaluations are omitted here, since they are shown as additional columns.
    changed_flags = ", ".join(
        f"{flag} {value}"
        for flag, value in changed
        if flag not in ("eval_protocol", "eval_projections")
    )
    accuracy, projections = measures["accuracy"], (measures.get("_h"), measures.get("_g(h)"))
    ours = {
        **dict.fromkeys(_MAIN_MEASURES, accuracy),
        **{measure: measures[measure] for measure in _SHARED_MEASURES},
        **dict(zip(("h", "g(h)"), projections)),
    }
    plotted = next((measure for measure in (*_MAIN_MEASURES, "h") if measure in run.paper), None)
    return {
        "run": run.name,
        "seed": run.seed,
        "changed flags": changed_flags or None,
        **{f"paper, {measure}": number for measure, number in run.paper.items()},
        **{title: value for title, value in measures.items() if not title.startswith("_")},
        **(_differences(run.paper, ours) if scale == "paper" else {}),
        "minutes": f"{measures['_minutes']:.1f}",
        **run.plot_columns,
        **(run.small_plot_columns if scale == "small" else {}),
        "_plotted": ours[plotted] if plotted else accuracy,
        "_paper": run.paper.get(plotted),
        "_probe_changes": (
            "_h" in measures
            and (_change(*projections, 100), _change(run.paper.get("h"), run.paper.get("g(h)"), 1))
        ),
    }


def _finite_or_none(value):
    """Returns the value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and abs(value) < math.inf else None


def _differences(paper, ours):
    """Returns the differences (our result minus the paper's) as text, for metrics for which both results exist.

    Differences are meaningful only at the paper's scale, since other data sets and batch sizes
    change all metrics.
    """
    pairs = {
        measure: (ours[measure], number)
        for measure, number in paper.items()
        if ours.get(measure) is not None
    }
    return {
        "difference" if measure in _MAIN_MEASURES else f"difference, {measure}": (
            f"{value - number:+.2f}" if measure == "entropy" else f"{100 * value - number:+.1f}"
        )
        for measure, (value, number) in pairs.items()
    }


def _add_changes(study, rows):
    """Adds the change in accuracy relative to the baseline run to each row, for our results and for the paper's.

    Our changes are relative to the baseline run with the same seed. Changes are in percentage
    points. For Table 3, the change is the accuracy on h minus that on g(h) in the same run.
    """
    rows_by_key = {(row["run"], row["seed"]): row for row in rows}
    for row in rows:
        baseline = rows_by_key.get((study.baseline_of(row["run"]), row["seed"]))
        ours, paper = row["_probe_changes"] or (
            (
                _change(row["_plotted"], baseline["_plotted"], 100),
                _change(row["_paper"], baseline["_paper"], 1),
            )
            if baseline
            else (None, None)
        )
        row |= _changes(ours, paper, None if baseline is None else baseline["run"])


def _changes(ours, paper, baseline):
    """Returns the columns of a row for our change, the paper's change and the name of the baseline run, or None."""
    agrees = None if ours is None or not paper else "yes" if ours * paper > 0 else "no"
    return {
        "_change": ours,
        "_paper_change": paper,
        "baseline": baseline,
        "change": signed(ours),
        "change in the paper": signed(paper),
        "same direction": agrees,
    }


def _change(value, baseline, scale):
    """Returns the difference between two values, multiplied by `scale`, or None if one of them is missing."""
    return None if value is None or baseline is None else scale * (value - baseline)


def signed(change: float | None) -> str | None:
    """Returns a change in percentage points as text, or None if there is none."""
    return None if change is None else f"{change:+.1f}"


def _mark_best(rows):
    """Sets `best` to True for transfer runs whose results do not differ significantly from those of the best run.

    Significance is determined by the permutation test. As in the paper, runs on the same data set
    are compared in two groups: linear evaluation, and training of the whole network. Runs with
    different seeds are not compared. Recorded results do not include predictions, so groups that
    contain them are not compared either.
    """
    groups = {}
    for row in rows:
        if "protocol" in row and row["accuracy"] is not None:
            groups.setdefault((row["task"], row["protocol"] == "linear", row["seed"]), []).append(
                row
            )
    for group in groups.values():
        if not all(storage.is_file(os.path.join(row["_directory"], "done.json")) for row in group):
            continue
        predictions = {row["run"]: _predictions_of(row) for row in group}
        best = predictions[max(group, key=lambda row: row["accuracy"])["run"]]
        for row in group:
            labels, scores, metric = predictions[row["run"]]
            if labels.shape != best[0].shape or (labels != best[0]).any():
                raise UserError(
                    f"{row['_directory']}/predictions.npz: the labels differ from those in other"
                    f" runs on {row['task']}. Remove the directory, and repeat the run."
                )
            row["best"] = significance.compare(labels, best[1], scores, metric)["p"] > ALPHA


def _predictions_of(row):
    """Returns a transfer run's labels, scores and metric name. Raises `UserError` if its predictions are unusable."""
    path = os.path.join(row["_directory"], "predictions.npz")
    return *output.read_predictions(path), row["_done"]["results"].get("metric")


# ---------------------------------------------------------------------------------------------------------- averages


def averages(name: str, rows: list[dict]) -> list[dict]:
    """Averages the accuracies of the runs that differ only in the study's `averaged_over` plot columns, or in the seed.

    Args:
      name: name of the study.
      rows: result of `rows_of`.

    Returns:
      A list with one dict per group of finished runs. Each dict contains the group's values in the
      other plot columns, the number of `runs` with an accuracy (a run with several seeds counts
      once per seed), their `mean` accuracy, and the sample `standard deviation` (None for one run).
      Groups without accuracies are omitted. The list is empty if the study has no `averaged_over`
      columns.
    """
    study = studies.STUDIES[name]
    if not study.averaged_over:
        return []
    columns = dict.fromkeys(
        column
        for run in (*study.runs, *study.small_only)
        for column in run.plot_columns
        if column not in study.averaged_over
    )
    groups = {}
    for row in rows:
        if row["accuracy"] is not None:
            groups.setdefault(tuple(row[column] for column in columns), []).append(row["accuracy"])
    return [
        {
            **dict(zip(columns, key)),
            "runs": len(values),
            "mean": float(np.mean(values)),
            "standard deviation": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        }
        for key, values in groups.items()
    ]


# ------------------------------------------------------------------------------------------------------ correlations


CORRELATED = ("few_labels_lengths", "few_labels_networks")


def correlations(name: str, base: str, scale: str) -> list[dict]:
    """Correlates linear-evaluation accuracy with fine-tuning accuracy for each label fraction (Appendix B.7).

    Args:
      name: study in `CORRELATED`.
      base, scale: see `rows_of`.

    Returns:
      A list with one dict per label fraction. `labels` is the label fraction, and `points` is a
      list of (name, linear-evaluation accuracy, fine-tuning accuracy), where accuracies are
      averaged over seeds. `pearson` and `spearman` are the correlation coefficients, or None if
      there are fewer than three points.
    """
    from scipy import stats

    runs, points = studies.STUDIES[name].runs_at(scale), {}
    tuned = _mean_accuracies(name, base, scale)
    linear = {
        study: _mean_accuracies(study, base, scale)
        for study in {run.starts_from[0] for run in runs}
    }
    for run in runs:
        study, start = run.starts_from
        if run.name in tuned and start in linear[study]:
            points.setdefault(run.plot_columns["labels"], []).append(
                (run.plot_columns["start"], linear[study][start], tuned[run.name])
            )
    return [
        dict(
            labels=labels,
            points=group,
            **{
                title: float(function(*list(zip(*group))[1:]).statistic) if len(group) > 2 else None
                for title, function in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr))
            },
        )
        for labels, group in points.items()
    ]


def _mean_accuracies(name, base, scale):
    """Returns a dict that maps the names of a study's finished runs to their mean accuracies over seeds."""
    accuracies = {}
    for run, done in finished_runs(name, base, scale):
        if runner.accuracy(done) is not None:
            accuracies.setdefault(run.name, []).append(runner.accuracy(done))
    return {run: _mean(values) for run, values in accuracies.items()}
