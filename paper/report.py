"""Generates reports (Markdown, CSV and one HTML page) that compare our results with the paper's."""

from __future__ import annotations

import base64
import csv
import html
import io
import math
import os
import re
import shlex

import jinja2
import numpy as np

from paper import runner, studies
from runtime import console, progress, storage
from runtime.errors import UserError
from transfer import output, significance

_COLUMNS = {  # maps column titles to keys in the results of a finished run
    "logistic regression": runner.LBFGS, "logistic regression on g(h)": f"{runner.LBFGS}/projections",
    "linear head": runner.TOP_1, "top-5": "eval/label_top_5_accuracy", "transfer": "test",
    "contrastive accuracy": "eval/contrast_acc", "entropy": "eval/contrast_entropy",
}
_SHOWN_WITH_PAPER = {"top-5", "million parameters"}  # Shown only if listed in the paper's table or in `Study.shown`.
_FORMATS = {"entropy": "{:.2f}", "million parameters": "{:.1f}"}  # Other columns are displayed in %.
_MAIN_MEASURES = ("top-1", "mean per class", "mAP")  # The paper's metrics that correspond to `runner.accuracy`.
_SHARED_MEASURES = ("top-5", "contrastive accuracy", "entropy")  # Metrics that have the same name in the paper.
ALPHA = 0.05  # Significance level of the permutation test, as in the paper's tables.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # Includes line breaks and ESC.
_FORMULA_STARTS = ("=", "+", "-", "@")  # Spreadsheets evaluate cells that start with one of these characters.


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
    results = {title: _finite_or_none(done["results"].get(key)) for title, key in _COLUMNS.items()}
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


def _titles_with(rows, substring):
    """Returns the column titles that contain `substring`, in order."""
    return dict.fromkeys(title for row in rows for title in row if substring in title)


class _Bold(str):
    """Text displayed in bold."""


class _Code(str):
    """Text displayed as code."""


def shown_table(rows: list[dict], shown: tuple[str, ...] = ()) -> tuple[list[str], list[list[str]]]:
    """Returns the titles of the displayed columns and, for each row, the text in these columns.

    Args:
      rows: result of `rows_of`.
      shown: columns to show even if the paper's table does not have them.
    """
    column_order = ("run", "changed flags", *_titles_with(rows, "paper, "), "million parameters", *_COLUMNS,
                    "majority baseline", *_titles_with(rows, " from "), *_titles_with(rows, "difference"), "baseline",
                    "change", "change in the paper", "same direction", "status", "minutes")
    in_paper = {title.removeprefix("paper, ") for title in _titles_with(rows, "paper, ")}
    titles = [title for title in dict.fromkeys(column_order) if any(row.get(title) is not None for row in rows)
              and (title not in _SHOWN_WITH_PAPER or title in in_paper or title in shown)
              and (title != "baseline" or len(_baselines(rows)) > 1)]
    return titles, [[_displayed(title, row) for title in titles] for row in rows]


def _baselines(rows):
    """Returns the set of names of the baseline runs."""
    return {row["baseline"] for row in rows} - {None}


def _without_constant_columns(titles, texts):
    """Removes the columns that have the same text in all rows, unless there is only one row.

    Returns the remaining table and a sentence that lists the removed columns, or "" if no column was removed.
    """
    constant = {index for index, column in enumerate(zip(*texts)) if len(texts) > 1 and len(set(column)) == 1}
    sentence = "; ".join(f"{titles[index]} = {_without_control(texts[0][index])}" for index in sorted(constant))
    table = [[text for index, text in enumerate(row) if index not in constant] for row in (titles, *texts)]
    sentence = f"Columns with the same value in all rows are omitted: {sentence}." if sentence else ""
    return (table[0], table[1:]), sentence


def _results(name, rows, base, scale):
    """Returns a study's table (None if there are no rows), the sentences above it, and the sentences below it."""
    study = studies.STUDIES[name]
    above = [_finding(study, rows, scale)]
    if not rows:
        how = f"`python -m paper.tables run {name} --scale={scale} --dir={shlex.quote(base)}` executes the runs."
        return None, above + [f"Not run. {how}"] * bool(study.runs_at(scale)), []
    table, constant = _without_constant_columns(*shown_table(rows, study.shown))
    above += ["Accuracies are given in %.", constant]
    if any(row["change"] for row in rows):
        above += [_meaning_of_change(rows)]
    recipes = {None if run.transfer or run.probes else run.small_recipe for run in study.runs_at(scale)}
    seeds_apply = scale == "small" and "change" in table[0] and recipes == {"study_small.cfg"}
    below = [_seeds_text(base, scale)] if seeds_apply else []
    return table, list(filter(None, above)), [*filter(None, below), *_correlation_texts(name, base, scale)]


def _meaning_of_change(rows):
    """Returns a sentence that explains the column `change`."""
    baselines = _baselines(rows)
    start = "from g(h) to h" if not baselines else "relative to each row's baseline" if len(baselines) > 1 else (
        f'relative to the run "{baselines.pop()}"')
    return f"Changes in accuracy are {start}, in percentage points."


def _seeds_text(base, scale):
    """Returns a sentence about the standard deviation across seeds, or "" if it has not been measured."""
    group = next((group for group in averages("seeds", rows_of("seeds", base, scale))
                  if group["standard deviation"] is not None), None)
    return "" if group is None else (
        f"For comparison, the standard deviation of the accuracy over {group['runs']} seeds of the default run is "
        f"{100 * group['standard deviation']:.1f} points (study \"seeds\").")


def _displayed(title, row):
    """Returns the text to display in a row's column `title`. Our accuracies are converted to %, as in the paper."""
    value = row.get(title)
    if isinstance(value, float) and "paper" not in title:
        text = _FORMATS.get(title, "{:.1%}").format(value).rstrip("%")
        return _Bold(text) if title == "transfer" and row.get("best") else text
    return "" if value is None else str(value)


# ------------------------------------------------------------------------------------------------- Markdown and CSV


def markdown(name: str, rows: list[dict], base: str, scale: str) -> list[str]:
    """Returns the report on a study as lines of Markdown. For the arguments, see `rows_of`."""
    study = studies.STUDIES[name]
    table, above, below = _results(name, rows, base, scale)
    lines = [f"### {study.title} ({study.source})", " ".join(above), "", *(_markdown_table(*table) if table else [])]
    return [*lines, *(line for text in below for line in ("", text)), "", *_markdown_averages(averages(name, rows)),
            *_markdown_flags(rows), *_markdown_cited(study)]


def _finding(study, rows, scale):
    """Describes the paper's finding and the settings for our runs."""
    finding = study.finding[:1].upper() + study.finding[1:]
    finding = f"The paper's finding: {study.finding}" if study.runs else finding
    recipes = dict.fromkeys(run.small_recipe for run in study.runs_at(scale) if not run.transfer)
    if scale != "small" or not rows or not recipes:
        return f"{finding}."
    settings = " or ".join(map(runner.describe_recipe, recipes))
    return f"{finding}. Except for the flags below, our runs use the settings of {settings}."


def _flags_table(rows):
    """Returns the titles and rows of a table that lists the runs' flags."""
    return ["run", "flags"], [[row["run"], _Code(shlex.join(row["_done"]["arguments"]))] for row in rows]


def _markdown_flags(rows):
    """Returns a collapsible Markdown table that lists the runs' flags."""
    return (["<details><summary>flags</summary>", "", *_markdown_table(*_flags_table(rows)), "", "</details>", ""]
            if rows else [])


def _markdown_averages(groups):
    return ["Mean and standard deviation over runs:", "", *_markdown_table(*_averages_table(groups)), ""
            ] if groups else []


def _markdown_cited(study):
    return ["From the paper:", "", *_markdown_table(*_cited_table(study)), ""] if study.cited else []


def _cited_table(study):
    """Returns the titles and rows of a table with the results that the paper cites."""
    titles = list(dict.fromkeys(measure for _, values in study.cited for measure in values))
    return ["", *titles], [[name, *(str(values.get(title, "")) for title in titles)] for name, values in study.cited]


def _markdown_table(titles, texts):
    return [f"| {' | '.join(map(_markdown_text, row))} |" for row in (titles, ["---"] * len(titles), *texts)]


def _without_control(text):
    """Replaces control characters in a string with spaces."""
    return _CONTROL.sub(" ", text)


def _markdown_text(text):
    """Formats text as a Markdown table cell: one line, HTML-escaped, without the column separator |."""
    line = _without_control(text).replace("|", "/")
    if not isinstance(text, _Code):
        escaped = html.escape(line, quote=False)
        return f"**{escaped}**" if isinstance(text, _Bold) else escaped
    if "`" not in line:
        return f"`{line}`"
    ticks = "`" * (1 + max(map(len, re.findall("`+", line))))  # Shorter runs of backticks do not close the code span.
    return f"{ticks} {line} {ticks}"


def write_csv(path: str, rows: list[dict]) -> None:
    """Writes all values in the rows to a CSV file. Strings that look like formulas are prefixed with an apostrophe."""
    public = [{_csv_value(title): _csv_value(value) for title, value in row.items() if not title.startswith("_")}
              for row in rows]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in public for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(public)
    storage.write_bytes(path, file.getvalue().encode())


def _csv_value(value):
    """Makes a value safe for spreadsheets: one line, prefixed with an apostrophe if it looks like a formula."""
    if not isinstance(value, str):
        return value
    text = _without_control(value)
    if not text.lstrip().startswith(_FORMULA_STARTS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


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


def _averages_table(groups):
    """Returns the titles and rows of a table with the result of `averages`."""
    texts = [{title: "" if value is None else f"{100 * value:.1f}" if title in ("mean", "standard deviation")
              else str(value) for title, value in group.items()} for group in groups]
    return [title.replace("_", " ") for title in texts[0]], [list(text.values()) for text in texts]


# ------------------------------------------------------------------------------------------------------ correlations


_CORRELATED = ("few_labels_lengths", "few_labels_networks")


def correlations(name: str, base: str, scale: str) -> list[dict]:
    """Correlates linear-evaluation accuracy with fine-tuning accuracy for each label fraction (Appendix B.7).

    Args:
      name: study in `_CORRELATED`.
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


def _correlation_texts(name, base, scale):
    """Returns the result of `correlations` as one sentence per label fraction."""
    if name not in _CORRELATED:
        return []
    return [f"Correlation of linear evaluation with fine-tuning on {result['labels']} of the labels (Appendix B.7): "
            f"Pearson {result['pearson']:.2f}, Spearman {result['spearman']:.2f}, {len(result['points'])} points."
            for result in correlations(name, base, scale) if result["pearson"] is not None]


# -------------------------------------------------------------------------------------------------------------- HTML


def summary(rows_by_study: dict[str, list[dict]]) -> str:
    """Returns a summary of the number of runs, their total time, the machines and the program versions.

    Args:
      rows_by_study: study name -> result of `rows_of`.
    """
    done = {row["_directory"]: row["_done"] for rows in rows_by_study.values() for row in rows}
    machines = sorted({_without_control(content["hardware"]) for content in done.values()})
    versions = sorted({_without_control(version) for content in done.values() for version in content["commits"]
                       if version})
    if not done:
        return ("No finished runs. For example, `python -m paper.tables run 1 --scale=small` executes the runs of "
                "Table 1.")
    duration = console.format_duration(sum(content["seconds"] for content in done.values()))
    sentences = [f"This report includes {len(done)} runs, which took {duration} in total"]
    sentences += [f"Hardware: {'; '.join(machines)}"] * bool(machines)
    sentences += [f"Version: {', '.join(versions)}"] * bool(versions)
    return ". ".join(sentences) + "."


def write_html(path: str, rows_by_study: dict[str, list[dict]], base: str, scale: str) -> None:
    """Writes one self-contained HTML page with all studies: results (ours and the paper's), plots, flags and versions.

    Args:
      path: path of the page.
      rows_by_study: study name -> result of `rows_of`.
      base, scale: see `rows_of`.
    """
    sections = [_section(name, rows, base, scale)
                for name, rows in progress.track(rows_by_study.items(), len(rows_by_study), "report")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(os.path.abspath(__file__))), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
        finalize=_finalize)
    environment.tests["bold"] = lambda text: isinstance(text, _Bold)
    page = environment.get_template("report.html.jinja").render(
        scale=scale, summary=summary(rows_by_study), sections=sections)
    storage.write_bytes(path, page.encode())


def _finalize(value):
    """Removes control characters from a template value. Leaves the output of macros, which is HTML, unchanged."""
    return _without_control(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _section(name, rows, base, scale):
    """Returns a dict with the text, tables and plot of a study, for use in the HTML template."""
    study, groups = studies.STUDIES[name], averages(name, rows)
    table, above, below = _results(name, rows, base, scale)
    return dict(
        name=name, title=study.title, source=study.source, above=" ".join(above).replace("`", ""), table=table,
        plot=_plot(rows, scale), averages=_averages_table(groups) if groups else None, below=below,
        flags=_flags_table(rows) if rows else None, cited=_cited_table(study) if study.cited else None)


def _plot(rows, scale):
    """Returns a base64-encoded SVG plot of our results (dots) and the paper's (diamonds), or "" if there are none.

    At the paper's scale, the plot shows accuracies (for Table 3, those of predictions from h). Accuracies at the small
    scale are not comparable with the paper's. Therefore, the plot shows the changes in accuracy relative to a
    baseline run (see `_add_changes`), or only our accuracies if no changes can be computed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots_changes = scale == "small" and any(row["_change"] is not None for row in rows)
    if plots_changes:
        points = [(row["run"], row["_change"], row["_paper_change"]) for row in rows if row["_change"] is not None]
    else:
        points = [(row["run"], 100 * row["_plotted"], row["_paper"] if scale == "paper" else None)
                  for row in rows if row["_plotted"] is not None]
    if not points:
        return ""
    names, ours, paper = zip(*points)
    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.26 * len(points)))
    heights = np.arange(len(points))[::-1]
    axis.scatter(ours, heights, color="black", label="ours", zorder=3)
    paper_points = [(value, height) for height, value in zip(heights, paper) if value is not None]
    if paper_points:
        axis.scatter(*zip(*paper_points), marker="D", color="black", facecolors="none", label="paper", zorder=3)
    if plots_changes:
        axis.axvline(0, color="0.6", linewidth=1)
    axis.set_yticks(heights, names, fontsize=8)
    axis.set_xlabel("change in accuracy, percentage points" if plots_changes else "accuracy, %")
    axis.grid(axis="y", color="0.85")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()
