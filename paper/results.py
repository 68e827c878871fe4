"""Finished runs as tables: our accuracies, the paper's, differences and means."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from checkpoints.records import Record
from config import Config
from paper import runner as runner_lib
from paper import studies
from paper.runner import Runner
from runtime import storage
from runtime.errors import UserError
from transfer import output, significance

MEASURES = {  # maps column titles to keys in the results of a finished run
    "million parameters": "million_parameters",
    "logistic regression": runner_lib.LBFGS,
    "logistic regression on g(h)": f"{runner_lib.LBFGS}/projections",
    "untrained encoder": f"{runner_lib.LBFGS}/untrained_encoder",
    "raw pixels": f"{runner_lib.LBFGS}/raw_pixels",
    "nearest neighbors": "eval/knn_top_1_accuracy",
    "linear head": runner_lib.TOP_1,
    "top-5": "eval/label_top_5_accuracy",
    "transfer": "test",
    "contrastive accuracy": "eval/contrast_acc",
    "entropy": "eval/contrast_entropy",
    "majority baseline": "probe/majority_baseline",
    "h": "probe/h",
    "g(h)": "probe/z",
}
# in the order of `runner.accuracy`
ACCURACY_COLUMNS = ["logistic regression", "linear head", "transfer"]
_ROWS = "rows.jsonl"
ALPHA = 0.05  # Significance level of the permutation test, as in the paper's tables.


# ----------------------------------------------------------------------------------------------------- finished runs


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run of a study.

    Attributes:
      run: the run, with its seed.
      name: name of the run's directory.
      record: the run's results.
      start: the results of the run that it starts from, or None.
    """

    run: studies.Run
    name: str
    record: Record
    start: Record | None = None


def read_records(runner: Runner) -> dict[str, Record]:
    """Returns the records of all finished runs at a scale, keyed by directory name.

    Runs without a directory are read from the file that `write_records` wrote. The folder of the
    scale must exist.

    Raises:
      UserError: a record is corrupt.
    """
    path = os.path.join(runner.folder, _ROWS)
    lines = pathlib.Path(path).read_text().splitlines() if storage.is_file(path) else []
    rows = {line.pop("directory"): Record(**line) for line in map(json.loads, lines)}
    return rows | {
        entry.name: record
        for entry in os.scandir(runner.folder)
        if (record := Record.read(entry.path))
    }


def write_records(runner: Runner, records: dict[str, Record]) -> None:
    """Writes the result of `read_records` to rows.jsonl: one JSON object per run.

    Predictions for the permutation test are not included.
    """
    text = "".join(
        f"{json.dumps({'directory': name, **dataclasses.asdict(record)})}\n"
        for name, record in sorted(records.items())
    )
    storage.write_bytes(os.path.join(runner.folder, _ROWS), text.encode())


def find_results(name: str, runner: Runner, records: dict[str, Record]) -> list[Result]:
    """Returns a study's finished runs, with all seeds.

    Args:
      name: name of the study.
      runner: the runner with which the runs were executed.
      records: result of `read_records`.
    """
    runs = studies.STUDIES[name].runs_at(runner.scale)
    seeds = sorted({1, *(record.settings.get("seed", 1) for record in records.values())})
    results = {}
    for any_seed, seed in itertools.product(runs, seeds):
        run = any_seed.with_seed(seed)
        directory = runner.directory_name(run)
        # If `runner.extra` sets the seed, the directory is the same for all values of `seed`.
        if directory in records:
            start = records.get(runner.directory_name(run.start)) if run.start else None
            results.setdefault(directory, Result(run, directory, records[directory], start))
    return list(results.values())


# ------------------------------------------------------------------------------------------------------------ tables


def table(name: str, results: list[Result], runner: Runner) -> pd.DataFrame:
    """Returns a table with one row per run and seed. Missing values are NaN or None.

    Our accuracies are in [0, 1]. The paper's accuracies, differences and changes are in %.

    Raises:
      UserError: predictions for the permutation test are missing or belong to different examples.
    """
    study = studies.STUDIES[name]
    rows = pd.DataFrame([_row(study, result, runner) for result in results])
    if rows.empty:
        return rows
    rows = rows.astype(dict.fromkeys((*MEASURES, "accuracy before", "_ours", "_paper"), float))
    by_run = rows.set_index(["run", "seed"])[["_ours", "_paper"]]
    baselines = pd.MultiIndex.from_arrays([rows["run"].map(study.baseline_of), rows["seed"]])
    rows["baseline"] = baselines.get_level_values(0).where(baselines.isin(by_run.index), None)
    changes = by_run.to_numpy() - by_run.reindex(baselines).to_numpy()
    rows["change"], rows["change in the paper"] = 100 * changes[:, 0], changes[:, 1]
    if "paper, h" in rows:  # For Table 3, the change is from g(h) to h in the same run.
        rows["change"] = 100 * (rows["h"] - rows["g(h)"])
        rows["change in the paper"] = rows["paper, h"] - rows["paper, g(h)"]
    rows["best"] = rows["directory"].isin(_find_best(results, runner))
    rows["same direction"] = _same_direction(rows)
    return rows


def _plotted(config: Config) -> dict[str, Any]:
    """Returns the values of the columns that `paper.figures` plots."""
    training = "supervised, " if config.train_mode == "supervised" else ""
    return {
        "network": f"ResNet-{config.resnet_depth} ({config.width_multiplier}x)",
        "group": f"{training}{config.train_epochs:g} epochs",
        "scaling": config.learning_rate_scaling,
        "temperature": config.temperature,
        "batch_size": config.train_batch_size,
        "learning_rate": config.learning_rate,
        "epochs": config.train_epochs,
        "training": f"{'up to' if config.train_epochs <= 300 else 'more than'} 300 epochs",
    }


def _row(study: studies.Study, result: Result, runner: Runner) -> dict[str, Any]:
    """Returns the row for a run, without the columns that depend on other runs."""
    run, record = result.run, result.record
    measures = {title: record.results.get(key) for title, key in MEASURES.items()}
    measures["accuracy"] = runner_lib.accuracy(record.results)
    ours = dict.fromkeys(studies.MAIN_MEASURES, measures["accuracy"]) | measures
    # Differences are meaningful only at the paper's scale, since other data sets and batch sizes
    # change all metrics.
    differences = {
        "difference" if measure in studies.MAIN_MEASURES else f"difference, {measure}": (
            (1 if measure == "entropy" else 100) * ours[measure] - number
        )
        for measure, number in run.paper.items()
        if runner.scale == "paper"
        and ours[measure] is not None
        and measure not in ("million parameters", "majority baseline")
    }
    main = next(
        (measure for measure in (*studies.MAIN_MEASURES, "h") if measure in run.paper), "accuracy"
    )
    return {
        "run": run.name,
        "seed": run.seed,
        "selected": record.results.get("selected"),
        # Additional evaluations are omitted here, since they are shown as additional columns.
        "changed flags": ", ".join(
            f"{flag} {value}"
            for flag, value in run.small_flags.items()
            if runner.scale == "small" and flag not in ("eval_protocol", "eval_projections")
        ),
        **{f"paper, {measure}": number for measure, number in run.paper.items()},
        **measures,
        **differences,
        "status": "diverged" if record.diverged else None,
        "minutes": record.seconds / 60,
        **run.plot_columns,
        "accuracy before": result.start and runner_lib.accuracy(result.start.results),
        **{title: _plotted(runner.config(run))[title] for title in study.plotted},
        "directory": result.name,
        "_ours": ours[main],
        "_paper": run.paper.get(main),
    }


def _same_direction(rows: pd.DataFrame) -> pd.Series:
    """Returns a column that states whether our change has the same sign as the paper's. Unknown values are NaN."""
    paper = rows["change in the paper"].replace(0, np.nan)
    return np.sign(rows["change"] * paper).map({1: "yes", 0: "no", -1: "no"})


def means(rows: pd.DataFrame) -> pd.DataFrame:
    """Averages the result of `table` over seeds. Returns one row per run.

    The column `seeds` contains the number of seeds, and `deviation` the sample standard deviation
    of the accuracy. Changes are averaged over the seeds that both runs have.
    """
    groups = rows.groupby("run", sort=False)
    result = groups.first().assign(**groups[list(rows.select_dtypes(float))].mean())
    result["seeds"], result["deviation"] = groups.size(), groups["accuracy"].std()
    result["best"] = groups["best"].all()
    for run, group in groups:
        diverged = group["seed"][group["status"].notna()].astype(str)
        if 0 < len(diverged) < len(group):
            result.loc[run, "status"] = f"diverged with seed {', '.join(diverged)}"
    result["same direction"] = _same_direction(result)
    return result.reset_index()


def _find_best(results: list[Result], runner: Runner) -> set[str]:
    """Returns the directories of the transfer runs whose results do not differ significantly from the best result.

    Significance is determined by the permutation test. As in the paper, runs on the same data set
    are compared in two groups: linear evaluation, and training of the whole network. Runs with
    different seeds are not compared. Recorded results do not include predictions, so groups that
    contain them are not compared either.
    """
    groups, best = {}, set()
    for result in results:
        if "test" in result.record.results:
            columns = result.run.plot_columns
            key = columns["task"], columns["protocol"] == "linear", result.run.seed
            groups.setdefault(key, []).append(result)
    for group in groups.values():
        paths = [os.path.join(runner.folder, result.name, "predictions.npz") for result in group]
        if not all(map(os.path.exists, paths)):
            continue
        predictions = [output.read_predictions(path) for path in paths]
        first = np.argmax([result.record.results["test"] for result in group])
        labels, best_scores = predictions[first]
        for result, path, (other_labels, scores) in zip(group, paths, predictions):
            if not np.array_equal(labels, other_labels):
                raise UserError(
                    f"{path}: the labels differ from those in other runs on the same data set."
                    " Remove the directory, and repeat the run."
                )
            metric = result.record.results.get("metric")
            if significance.compare(labels, best_scores, scores, metric)["p"] > ALPHA:
                best.add(result.name)
    return best
