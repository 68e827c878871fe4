"""Generates reports (Markdown, CSV and one HTML page) that compare our results with the paper's."""

from __future__ import annotations

import base64
import csv
import html
import io
import os
import re
import shlex

import jinja2
import numpy as np

from paper import findings, results, runner, studies
from runtime import console, progress, storage

# Shown only if listed in the paper's table or in `Study.shown`.
_SHOWN_WITH_PAPER = {"top-5", "million parameters"}
# Other columns are displayed in %.
_FORMATS = {"entropy": "{:.2f}", "million parameters": "{:.1f}"}
# Includes line breaks and ESC.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Spreadsheets evaluate cells that start with one of these characters.
_FORMULA_STARTS = ("=", "+", "-", "@")


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
      rows: result of `results.rows_of` or `results.mean_rows`.
      shown: columns to show even if the paper's table does not have them.
    """
    column_order = (
        "run",
        "seeds",
        "changed flags",
        *_titles_with(rows, "paper, "),
        "million parameters",
        *results.COLUMNS,
        "majority baseline",
        *_titles_with(rows, " from "),
        *_titles_with(rows, "difference"),
        "baseline",
        "change",
        "change in the paper",
        "same direction",
        "status",
        "minutes",
    )
    in_paper = {title.removeprefix("paper, ") for title in _titles_with(rows, "paper, ")}
    titles = [
        title
        for title in dict.fromkeys(column_order)
        if any(row.get(title) is not None for row in rows)
        and (title not in _SHOWN_WITH_PAPER or title in in_paper or title in shown)
        and (title != "baseline" or len(_baselines(rows)) > 1)
    ]
    return titles, [[_displayed(title, row) for title in titles] for row in rows]


def _baselines(rows):
    """Returns the set of names of the baseline runs."""
    return {row["baseline"] for row in rows} - {None}


def _without_constant_columns(titles, texts):
    """Removes the columns that have the same text in all rows, unless there is only one row.

    Returns the remaining table and a sentence that lists the removed columns, or "" if no column
    was removed.
    """
    constant = {
        index
        for index, column in enumerate(zip(*texts))
        if len(texts) > 1 and len(set(column)) == 1
    }
    sentence = "; ".join(
        f"{titles[index]} = {_without_control(texts[0][index])}" for index in sorted(constant)
    )
    table = [
        [text for index, text in enumerate(row) if index not in constant]
        for row in (titles, *texts)
    ]
    sentence = (
        f"Columns with the same value in all rows are omitted: {sentence}." if sentence else ""
    )
    return (table[0], table[1:]), sentence


def _results(name, rows, base, scale):
    """Returns a study's table (None if there are no rows), the sentences above it, and the sentences below it.

    Args:
      name: name of the study.
      rows: result of `results.mean_rows`.
      base, scale: see `results.rows_of`.
    """
    study = studies.STUDIES[name]
    above = [_finding(study, rows, scale)]
    if not rows:
        how = (
            f"`python -m paper.tables run {name} --scale={scale} --dir={shlex.quote(base)}`"
            " executes the runs."
        )
        return None, above + [f"Not run. {how}"] * bool(study.runs_at(scale)), []
    table, constant = _without_constant_columns(*shown_table(rows, study.shown))
    above += ["Accuracies are given in %.", constant]
    if any(row["seeds"] for row in rows):
        above += [
            "Each value is a mean over seeds; ± is followed by the sample standard deviation.",
            _unfinished(study, rows, scale),
        ]
    if any(row["change"] for row in rows):
        above += [_meaning_of_change(rows)]
    return table, list(filter(None, above)), _correlation_texts(name, base, scale)


def _unfinished(study, rows, scale):
    """Returns a sentence that lists, for each run, the unfinished seeds that other runs have finished, or ""."""
    seeds = {row["run"]: row["_seeds"] for row in rows}
    missing = {
        run.name: sorted(set.union(*seeds.values()) - seeds.get(run.name, set()))
        for run in study.runs_at(scale)
    }
    texts = [
        f"{run} (seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))})"
        for run, numbers in missing.items()
        if numbers
    ]
    return f"Not finished: {'; '.join(texts)}." if texts else ""


def _meaning_of_change(rows):
    """Returns a sentence that explains the column `change`."""
    baselines = _baselines(rows)
    start = (
        "from g(h) to h"
        if not baselines
        else (
            "relative to each row's baseline"
            if len(baselines) > 1
            else (f'relative to the run "{min(baselines)}"')
        )
    )
    mean = ", averaged over the seeds that both runs have" if baselines and rows[0]["seeds"] else ""
    return f"Changes in accuracy are {start}{mean}, in percentage points."


def overview(
    rows_by_study: dict[str, list[dict]], scale: str
) -> tuple[list[str], list[list[str]]] | None:
    """Returns the titles and rows of a table with the findings of all studies that have results.

    Returns None if fewer than two studies have findings, since the report on a study already lists
    its findings.

    Args:
      rows_by_study: study name -> result of `results.rows_of`.
      scale: paper or small.
    """
    tables = {
        name: _findings_table(comparisons)
        for name, rows in rows_by_study.items()
        if rows and (comparisons := findings.compare(name, rows, scale))
    }
    if len(tables) < 2:
        return None
    rows = [
        [
            f"{studies.STUDIES[name].title} ({studies.STUDIES[name].source})" if index == 0 else "",
            *row,
        ]
        for name, (_, table_rows) in tables.items()
        for index, row in enumerate(table_rows)
    ]
    return ["study", *next(iter(tables.values()))[0]], rows


def markdown_overview(rows_by_study: dict[str, list[dict]], scale: str) -> list[str]:
    """Returns the result of `overview` as lines of Markdown."""
    table = overview(rows_by_study, scale)
    return ["### Findings", *_markdown_table(*table), ""] if table else []


def _findings_table(comparisons):
    """Returns the titles and rows of a table with the result of `findings.compare`."""

    def interval(low, high):
        return "" if low is None else f"{low:+.1f} to {high:+.1f}"

    level = f"{100 * findings.LEVEL:.0f} %"
    titles = ["finding", "difference in the paper", "our difference", f"{level} interval", "result"]
    return titles, [
        [
            entry["finding"].text,
            entry["paper"],
            results.signed(entry["difference"]) or "",
            interval(entry["low"], entry["high"]),
            entry["verdict"],
        ]
        for entry in comparisons
    ]


def _findings_text(comparisons):
    """Returns a sentence with the noise and the number of seeds for each fit, or "" if there are no intervals."""
    fits = [
        (entry["finding"].metric, entry["fit"]) for entry in comparisons if entry["low"] is not None
    ]
    noise = "; ".join(
        dict.fromkeys(
            f"{metric}, {fit.deviation:.1f} points ({fit.num_seeds} seeds, {fit.degrees_of_freedom}"
            " degrees of freedom)"
            for metric, fit in fits
        )
    )
    return f"Estimated standard deviation of the noise in one run: {noise}." if noise else ""


def _displayed(title, row):
    """Returns the text to display in a row's column `title`. Our accuracies are converted to %, as in the paper."""
    value = row.get(title)
    if isinstance(value, float) and "paper" not in title:
        text = _FORMATS.get(title, "{:.1%}").format(value).rstrip("%")
        if title in row.get("_deviations", ()):
            text += f" ± {100 * row['_deviations'][title]:.1f}"
        return _Bold(text) if title == "transfer" and row.get("best") else text
    return "" if value is None else str(value)


# ------------------------------------------------------------------------------------------------- Markdown and CSV


def markdown(name: str, rows: list[dict], base: str, scale: str) -> list[str]:
    """Returns the report on a study as lines of Markdown.

    Args:
      name: name of the study.
      rows: result of `results.rows_of`.
      base, scale: see `results.rows_of`.
    """
    study, comparisons = studies.STUDIES[name], findings.compare(name, rows, scale)
    rows = results.mean_rows(name, rows, scale)
    table, above, below = _results(name, rows, base, scale)
    lines = [
        f"### {study.title} ({study.source})",
        " ".join(above),
        "",
        *(_markdown_table(*table) if table else []),
    ]
    return [
        *lines,
        *(line for text in below for line in ("", text)),
        "",
        *(_markdown_findings(comparisons) if rows else []),
        *_markdown_averages(results.averages(name, rows)),
        *_markdown_flags(rows),
        *_markdown_cited(study),
    ]


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
    return ["run", "flags"], [
        [row["run"], _Code(shlex.join(row["_done"]["arguments"]))] for row in rows
    ]


def _markdown_flags(rows):
    """Returns a collapsible Markdown table that lists the runs' flags."""
    return (
        [
            "<details><summary>flags</summary>",
            "",
            *_markdown_table(*_flags_table(rows)),
            "",
            "</details>",
            "",
        ]
        if rows
        else []
    )


def _markdown_findings(comparisons):
    """Returns a Markdown table with the result of `findings.compare`."""
    if not comparisons:
        return []
    return [
        " ".join(["Findings:", _findings_text(comparisons)]).strip(),
        "",
        *_markdown_table(*_findings_table(comparisons)),
        "",
    ]


def _markdown_averages(groups):
    return (
        [
            "Mean and standard deviation over runs:",
            "",
            *_markdown_table(*_averages_table(groups)),
            "",
        ]
        if groups
        else []
    )


def _markdown_cited(study):
    return (
        ["From the paper:", "", *_markdown_table(*_cited_table(study)), ""] if study.cited else []
    )


def _cited_table(study):
    """Returns the titles and rows of a table with the results that the paper cites."""
    titles = list(dict.fromkeys(measure for _, values in study.cited for measure in values))
    return ["", *titles], [
        [name, *(str(values.get(title, "")) for title in titles)] for name, values in study.cited
    ]


def _markdown_table(titles, texts):
    return [
        f"| {' | '.join(map(_markdown_text, row))} |"
        for row in (titles, ["---"] * len(titles), *texts)
    ]


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
    # Shorter runs of backticks do not close the code span.
    ticks = "`" * (1 + max(map(len, re.findall("`+", line))))
    return f"{ticks} {line} {ticks}"


def write_csv(path: str, rows: list[dict]) -> None:
    """Writes all values in the rows to a CSV file. Strings that look like formulas are prefixed with an apostrophe."""
    public = [
        {
            _csv_value(title): _csv_value(value)
            for title, value in row.items()
            if not title.startswith("_")
        }
        for row in rows
    ]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(
        file, list(dict.fromkeys(key for row in public for key in row)), lineterminator="\n"
    )
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


def _averages_table(groups):
    """Returns the titles and rows of a table with the result of `results.averages`."""
    texts = [
        {
            title: (
                ""
                if value is None
                else f"{100 * value:.1f}"
                if title in ("mean", "standard deviation")
                else str(value)
            )
            for title, value in group.items()
        }
        for group in groups
    ]
    return [title.replace("_", " ") for title in texts[0]], [list(text.values()) for text in texts]


def _correlation_texts(name, base, scale):
    """Returns the result of `results.correlations` as one sentence per label fraction."""
    if name not in results.CORRELATED:
        return []
    return [
        f"Correlation of linear evaluation with fine-tuning on {result['labels']} of the labels"
        f" (Appendix B.7): Pearson {result['pearson']:.2f}, Spearman {result['spearman']:.2f},"
        f" {len(result['points'])} points."
        for result in results.correlations(name, base, scale)
        if result["pearson"] is not None
    ]


# -------------------------------------------------------------------------------------------------------------- HTML


def introduction(rows_by_study: dict[str, list[dict]]) -> list[str]:
    """Returns the paragraphs at the start of a report.

    The first paragraph contains the number of runs, their total time, the machines and the program
    versions. If any study has findings to compare, a second paragraph explains how their results
    are determined.

    Args:
      rows_by_study: study name -> result of `results.rows_of`.
    """
    done = {row["_directory"]: row["_done"] for rows in rows_by_study.values() for row in rows}
    machines = sorted({_without_control(content["hardware"]) for content in done.values()})
    versions = sorted(
        {
            _without_control(version)
            for content in done.values()
            for version in content["commits"]
            if version
        }
    )
    if not done:
        return [
            "No finished runs. For example, `python -m paper.tables run 1 --scale=small` executes"
            " the runs of Table 1."
        ]
    duration = console.format_duration(sum(content["seconds"] for content in done.values()))
    sentences = [f"This report includes {len(done)} runs, which took {duration} in total"]
    sentences += [f"Hardware: {'; '.join(machines)}"] * bool(machines)
    sentences += [f"Version: {', '.join(versions)}"] * bool(versions)
    has_findings = any(rows and name in findings.FINDINGS for name, rows in rows_by_study.items())
    return [". ".join(sentences) + ".", *[findings.RULE] * has_findings]


def write_html(path: str, rows_by_study: dict[str, list[dict]], base: str, scale: str) -> None:
    """Writes one self-contained HTML page with all studies: results (ours and the paper's), plots, flags and versions.

    Args:
      path: path of the page.
      rows_by_study: study name -> result of `results.rows_of`.
      base, scale: see `results.rows_of`.
    """
    sections = [
        _section(name, rows, base, scale)
        for name, rows in progress.track(rows_by_study.items(), len(rows_by_study), "report")
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(os.path.abspath(__file__))),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
    )
    environment.tests["bold"] = lambda text: isinstance(text, _Bold)
    page = environment.get_template("report.html.jinja").render(
        scale=scale,
        introduction=introduction(rows_by_study),
        overview=overview(rows_by_study, scale),
        sections=sections,
    )
    storage.write_bytes(path, page.encode())


def _finalize(value):
    """Removes control characters from a template value. Leaves the output of macros, which is HTML, unchanged."""
    return (
        _without_control(value)
        if isinstance(value, str) and not hasattr(value, "__html__")
        else value
    )


def _section(name, rows, base, scale):
    """Returns a dict with the text, tables and plot of a study, for use in the HTML template. See `markdown`."""
    study, comparisons = studies.STUDIES[name], findings.compare(name, rows, scale)
    rows = results.mean_rows(name, rows, scale)
    groups = results.averages(name, rows)
    table, above, below = _results(name, rows, base, scale)
    return dict(
        name=name,
        title=study.title,
        source=study.source,
        above=" ".join(above).replace("`", ""),
        table=table,
        plot=_plot(rows, scale),
        findings=_findings_table(comparisons) if comparisons else None,
        findings_text=_findings_text(comparisons),
        averages=_averages_table(groups) if groups else None,
        below=below,
        flags=_flags_table(rows) if rows else None,
        cited=_cited_table(study) if study.cited else None,
    )


def _plot(rows, scale):
    """Returns a base64-encoded SVG plot of our results (dots) and the paper's (diamonds), or "" if there are none.

    At the paper's scale, the plot shows accuracies (for Table 3, those of predictions from h).
    Accuracies at the small scale are not comparable with the paper's. Therefore, the plot shows the
    changes in accuracy relative to a baseline run (see `paper.results`), or only our accuracies if
    no changes can be computed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots_changes = scale == "small" and any(row["_change"] is not None for row in rows)
    if plots_changes:
        points = [
            (row["run"], row["_change"], row["_paper_change"])
            for row in rows
            if row["_change"] is not None
        ]
    else:
        points = [
            (row["run"], 100 * row["_plotted"], row["_paper"] if scale == "paper" else None)
            for row in rows
            if row["_plotted"] is not None
        ]
    if not points:
        return ""
    names, ours, paper = zip(*points)
    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.26 * len(points)))
    heights = np.arange(len(points))[::-1]
    axis.scatter(ours, heights, color="black", label="ours", zorder=3)
    paper_points = [(value, height) for height, value in zip(heights, paper) if value is not None]
    if paper_points:
        axis.scatter(
            *zip(*paper_points),
            marker="D",
            color="black",
            facecolors="none",
            label="paper",
            zorder=3,
        )
    if plots_changes:
        axis.axvline(0, color="0.6", linewidth=1)
    axis.set_yticks(heights, names, fontsize=8)
    axis.set_xlabel("change in accuracy, percentage points" if plots_changes else "accuracy, %")
    axis.grid(axis="y", color="0.85")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "paper"}):
        # Without this setting, element IDs are random.
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()
