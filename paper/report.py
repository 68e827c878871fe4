"""Generates reports (Markdown, HTML, CSV and plots) that compare our results with the paper's."""

from __future__ import annotations

import collections
import html
import os
import pathlib
import shlex
from collections.abc import Iterable, Sequence

import markdown
import pandas as pd

from checkpoints.records import Record
from config import as_flags
from paper import drawing, findings, results, runner, studies
from paper.runner import Runner
from runtime import console, progress, storage

# Other results are displayed in %.
_FORMATS = {
    "entropy": "{:.2f}",
    "difference, entropy": "{:+.2f}",
    "million parameters": "{:.1f}",
    "minutes": "{:.1f}",
}
_DECIMALS = {"million parameters": 3, "minutes": 1, "difference, entropy": 2}  # in CSV files
_STYLE = pathlib.Path(__file__).with_name("report.css")


def write_report(names: list[str], runner: Runner) -> str:
    """Writes the reports on studies to the folder DIR/SCALE. Returns the Markdown text.

    For each study with results, STUDY.csv has one row per run and seed, STUDY.jsonl has the same
    results in the form that `results.find_results` reads, and STUDY.svg is a plot.

    Raises:
      UserError: recorded results or predictions are corrupt, or a file cannot be written.
    """
    os.makedirs(runner.folder, exist_ok=True)
    records, tables, done, sections = results.read_records(runner), {}, [], []
    for name in progress.track(names, "report"):
        found = results.find_results(name, runner, records)
        done += [result.record for result in found if result.record not in done]
        rows = results.table(name, found, runner)
        if found:
            tables[name], path = rows, os.path.join(runner.folder, name)
            storage.write_bytes(f"{path}.csv", _csv(rows).encode())
            results.write_records(f"{path}.jsonl", found)
        sections += section(name, rows, runner)
    blocks = [
        f"# The paper's tables, {runner.scale} scale",
        *introduction(done, runner),
        *[findings.RULE] * bool(findings.FINDINGS.keys() & tables),
        *overview(tables, runner.scale),
        *sections,
    ]
    text = "\n\n".join(filter(None, blocks)) + "\n"
    for name, content in (("report.md", text), ("report.html", _html(text))):
        storage.write_bytes(os.path.join(runner.folder, name), content.encode())
    return text


def _html(text: str) -> str:
    """Returns an HTML page with the contents of a Markdown document, preceded by links to its headings."""
    converter = markdown.Markdown(extensions=["tables", "md_in_html", "toc"])
    body = converter.convert(text)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>SimCLR: the paper's tables</title><style>\n{_STYLE.read_text()}</style></head><body>"
        f"\n{converter.toc}{body}</body></html>\n"
    )


def _csv(rows: pd.DataFrame) -> str:
    """Returns the CSV file for the result of `results.table`."""
    public = rows.drop(columns=["_ours", "_paper"]).assign(
        **{"same direction": _same_direction(rows)}
    )
    changes = dict.fromkeys(rows.filter(regex="^(change|difference)"), 1)
    return public.round(changes | _DECIMALS).convert_dtypes().to_csv(index=False)


def _same_direction(rows: pd.DataFrame) -> pd.Series:
    """Returns a column that states whether our change has the same sign as the paper's, or None if it is unknown."""
    products = rows["change"] * rows["change in the paper"]
    is_known = products.notna() & (rows["change in the paper"] != 0)
    return (products > 0).map({True: "yes", False: "no"}).where(is_known, None)


# --------------------------------------------------------------------------------------------------------- Markdown


def _markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. The texts are HTML-escaped."""
    lines = [
        [html.escape(text, quote=False).replace("|", "\\|") for text in row]
        for row in (titles, *rows)
    ]
    lines.insert(1, ["---"] * len(titles))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(title: str, value: object) -> str:
    """Returns the text for a value in the column `title`. Our accuracies are converted to %, as in the paper."""
    if pd.isna(value):
        return ""
    if not isinstance(value, float):
        return str(value)
    default = "{:g}"
    if title in results.MEASURES or title in ("mean", "standard deviation"):
        default = "{:.1%}"
    elif title.startswith(("change", "difference")):
        default = "{:+.1f}"
    elif title.startswith("paper"):
        default = "{:.1f}"
    return _FORMATS.get(title, default).format(value).removesuffix("%")


def introduction(done: list[Record], runner: Runner) -> list[str]:
    """Returns a paragraph with the number of runs, their total time, the machines and the program versions.

    Args:
      done: records of the finished runs.
      runner: the runner with which the runs were executed.
    """
    if not done:
        return [
            "No finished runs. For example, `python -m paper.tables run 1 --scale=small` executes"
            " the runs of Table 1."
        ]
    duration = console.format_duration(sum(record.seconds for record in done))
    machines = sorted({record.machine for record in done})
    versions = sorted({version for record in done for version in record.version.split()})
    sentences = [
        f"This report includes {len(done)} runs, which took {duration} in total",
        f"Hardware: {'; '.join(machines)}",
        f"Version: {', '.join(versions)}",
    ]
    if runner.extra:
        sentences.append(f"Additional flags: {shlex.join(as_flags(runner.extra))}")
    return [html.escape(". ".join(sentences), quote=False) + "."]


def overview(tables: dict[str, pd.DataFrame], scale: str) -> list[str]:
    """Returns a heading and a Markdown table with the findings of all studies that have results.

    Returns nothing if fewer than two studies have findings, since the report on a study already
    lists its findings.

    Args:
      tables: study name -> result of `results.table` with at least one row.
      scale: paper or small.
    """
    lines, compared = [], []
    for name, rows in tables.items():
        study = studies.STUDIES[name]
        title = f"{study.title} ({study.source})"
        for comparison in findings.compare(name, rows, scale):
            compared.append(comparison)
            lines.append([title, *_finding_row(comparison)])
            title = ""
    if sum(bool(title) for title, *_ in lines) < 2:
        return []
    counts = collections.Counter(entry.verdict for entry in compared if entry.low is not None)
    total = sum(map(len, findings.FINDINGS.values()))
    return [
        "### Findings",
        _markdown_table(["study", *_FINDING_TITLES], lines),
        f"This report contains intervals for {counts.total()} of the {total} findings in"
        f" paper/findings.py: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}."
        f" After Holm's correction for multiple comparisons, {findings.count_after_holm(compared)}"
        " of the replicated differences remain significant.",
    ]


_FINDING_TITLES = [
    "finding",
    "difference in the paper",
    "our difference",
    f"{100 * findings.LEVEL:.0f} % interval",
    "result",
]


def _finding_row(comparison: findings.Comparison) -> list[str]:
    return [
        comparison.finding.text,
        comparison.paper,
        "" if comparison.difference is None else f"{comparison.difference:+.1f}",
        "" if comparison.low is None else f"{comparison.low:+.1f} to {comparison.high:+.1f}",
        comparison.verdict,
    ]


def section(name: str, rows: pd.DataFrame, runner: Runner) -> list[str]:
    """Returns the report on a study as blocks of Markdown, and plots its results.

    Args:
      name: name of the study.
      rows: result of `results.table`.
      runner: the runner with which the runs were executed.
    """
    study = studies.STUDIES[name]
    blocks = [f"### {study.title}"]
    above = [f"{study.source}: {study.finding}."]
    if rows.empty:
        if study.runs_at(runner.scale):
            command = f"run {name} --scale={runner.scale} --dir={shlex.quote(runner.base)}"
            above.append(f"Not run. `python -m paper.tables {command}` executes the runs.")
        blocks.append(" ".join(above))
    else:
        averaged = results.means(rows)
        table, sentences = shown_table(study, averaged)
        above += [
            _settings(study, runner),
            "Accuracies are given in %.",
            *sentences,
            _meaning_of_change(averaged),
        ]
        averages = results.averages(name, rows)
        blocks += [
            " ".join(filter(None, above)),
            _markdown_table(*table),
            drawing.accuracies(averaged, name, runner),
            *_findings(findings.compare(name, rows, runner.scale)),
            *_correlations(name, rows),
        ]
        if not averages.empty:
            blocks += ["Mean and standard deviation over runs:", _data_markdown(averages)]
        blocks += _flags(study, averaged, runner)
    if study.cited:
        cited = pd.DataFrame({"": label, **values} for label, values in study.cited.items())
        blocks += ["From the paper:", _data_markdown(cited.astype(object))]
    return blocks


def _data_markdown(data: pd.DataFrame) -> str:
    """Returns a table of data as a Markdown table."""
    titles = [title.replace("_", " ") for title in data]
    return _markdown_table(
        titles, [[*map(_text, data, row)] for row in data.itertuples(index=False)]
    )


def shown_table(
    study: studies.Study, rows: pd.DataFrame
) -> tuple[tuple[list[str], list[list[str]]], list[str]]:
    """Returns the titles and rows of a table to display, and sentences that explain it.

    Columns with the same text in all rows are omitted if there are several rows.

    Args:
      study: the study.
      rows: result of `results.means`.
    """
    several = int(rows["seeds"].max() > 1)
    rows = rows.assign(**{"same direction": _same_direction(rows)})
    measures = [
        title
        for title in results.MEASURES
        # Shown only if listed in the paper's table or in `Study.shown`.
        if title not in ("top-5", "million parameters")
        or title in study.shown
        or f"paper, {title}" in rows
    ]
    order = [
        *("run", *["seeds"] * several, "selected", "changed flags"),
        *rows.filter(like="paper, "),
        *measures,
        *rows.filter(like="difference"),
        *["baseline"] * (rows["baseline"].nunique() > 1),
        *("change", "change in the paper", "same direction", "status", "minutes"),
    ]
    texts = pd.DataFrame({title: [_text(title, value) for value in rows[title]] for title in order})
    for index, row in rows.iterrows():
        title = row[results.ACCURACY_COLUMNS].first_valid_index()
        if pd.notna(row["deviation"]):
            texts.loc[index, title] += f" ± {100 * row['deviation']:.1f}"
        if row["best"]:
            texts.loc[index, title] = f"**{texts.loc[index, title]}**"
    texts = texts.loc[:, (texts != "").any()]
    constant = [title for title in texts if len(texts) > 1 and texts[title].nunique() == 1]
    listed = "; ".join(f"{title} = {texts[title].iloc[0]}" for title in constant)
    texts = texts.drop(columns=constant)
    sentences = [f"Columns with the same value in all rows are omitted: {listed}."] * bool(listed)
    sentences += [
        "Each value is a mean over seeds; ± is followed by the sample standard deviation."
    ] * several
    return (list(texts), texts.to_numpy().tolist()), sentences


def _settings(study: studies.Study, runner_: Runner) -> str:
    """Describes the settings for our runs."""
    recipes = dict.fromkeys(
        run.small_recipe for run in study.runs_at(runner_.scale) if not run.transfer
    )
    if runner_.scale != "small" or not recipes:
        return ""
    settings = " or ".join(runner.describe_recipe(name, runner_.extra) for name in recipes)
    return f"Except for the flags below, our runs use the settings of {settings}."


def _meaning_of_change(rows: pd.DataFrame) -> str:
    """Returns a sentence that explains the column `change`, or ""."""
    if rows["change"].isna().all():
        return ""
    baselines = rows["baseline"].dropna().unique()
    if not len(baselines):
        start = "from g(h) to h"
    elif len(baselines) > 1:
        start = "relative to each row's baseline"
    else:
        start = f'relative to the run "{baselines[0]}"'
    if len(baselines) and rows["seeds"].max() > 1:
        start += ", averaged over the seeds that both runs have"
    return f"Changes in accuracy are {start}, in percentage points."


def _findings(comparisons: Sequence[findings.Comparison]) -> list[str]:
    """Returns a sentence with the noise and the number of seeds of each fit, and a table."""
    if not comparisons:
        return []
    noise = [
        f"{entry.finding.metric}, {entry.fit.deviation:.1f} points ({entry.fit.num_seeds} seeds,"
        f" {entry.fit.degrees_of_freedom} degrees of freedom)"
        for entry in comparisons
        if entry.low is not None
    ]
    text = "; ".join(dict.fromkeys(noise))
    text = f" Estimated standard deviation of the noise in one run: {text}." if noise else ""
    return [f"Findings:{text}", _markdown_table(_FINDING_TITLES, map(_finding_row, comparisons))]


def _correlations(name: str, rows: pd.DataFrame) -> list[str]:
    """Returns the result of `results.correlations` as one sentence per label fraction."""
    if name not in ("few_labels_lengths", "few_labels_networks"):
        return []
    return [
        f"Correlation of linear evaluation with fine-tuning on {row.labels} of the labels"
        f" (Appendix B.7): Pearson {row.pearson:.2f}, Spearman {row.spearman:.2f},"
        f" {row.points} points."
        for row in results.correlations(rows).itertuples()
    ]


def _flags(study: studies.Study, rows: pd.DataFrame, runner: Runner) -> list[str]:
    """Returns a collapsible table with the flags of the runs, and the directories of their first seeds."""
    arguments = {run.name: shlex.join(runner.arguments(run)) for run in study.runs_at(runner.scale)}
    texts = [
        [run, directory, f"`{arguments[run]}`"]
        for run, directory in zip(rows["run"], rows["directory"])
    ]
    return [
        '<details markdown="1"><summary>flags</summary>',
        _markdown_table(["run", "directory", "flags"], texts),
        "</details>",
    ]
