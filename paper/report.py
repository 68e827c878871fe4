"""Generates reports (Markdown, HTML, CSV and plots) that compare our results with the paper's."""

from __future__ import annotations

import collections
import html
import os
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any

import markdown
import pandas as pd

from checkpoints.records import Record
from config import RECIPES, as_flags
from paper import drawing, findings, results, runner, studies
from paper.runner import Runner
from runtime import console, progress, storage

# regular expression for the titles of columns -> format; the first match is used
_FORMATS = {
    "entropy": ".2f",
    "difference, entropy": "+.2f",
    "(our |)(change|difference).*": "+.1f",
    "detectable|paper.*|million parameters|minutes": ".1f",
    "|".join(map(re.escape, (*results.MEASURES, "mean", "standard deviation"))): ".1%",
    ".*": "g",
}
_DECIMALS = {"million parameters": 3, "minutes": 1, "difference, entropy": 2}  # in CSV files
_STYLE = pathlib.Path(__file__).with_name("report.css")


def write_report(names: list[str], runner: Runner) -> str:
    """Writes the reports on studies to the folder DIR/SCALE. Returns the Markdown text.

    For each study with results, STUDY.csv has one row per run and seed, and STUDY.svg is a plot.
    rows.jsonl has the results of all runs; see `results.read_records`.

    Raises:
      UserError: a record or predictions are corrupt, or a file cannot be written.
    """
    os.makedirs(runner.folder, exist_ok=True)
    records = results.read_records(runner)
    results.write_records(runner, records)
    tables, done, sections = {}, [], []
    for name in progress.track(names, "report"):
        found = results.find_results(name, runner, records)
        done += [result.record for result in found if result.record not in done]
        rows = results.table(name, found, runner)
        if found:
            tables[name], path = rows, os.path.join(runner.folder, name)
            changes = dict.fromkeys(rows.filter(regex="^(change|difference)"), 1)
            public = rows.drop(columns=["_ours", "_paper"]).round(changes | _DECIMALS)
            content = public.convert_dtypes().to_csv(index=False)
            storage.write_bytes(f"{path}.csv", content.encode())
        sections += section(name, rows, runner)
    blocks = [f"# The paper's tables, {runner.scale} scale", *introduction(done, runner)]
    if findings.FINDINGS.keys() & tables:
        blocks.append(findings.RULE)
    blocks += [*overview(tables, runner.scale), *sections]
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


# --------------------------------------------------------------------------------------------------------- Markdown


def _markdown(data: pd.DataFrame) -> str:
    """Returns a table of data as a Markdown table. The texts are HTML-escaped."""
    titles = [title.replace("_", " ") for title in data]
    rows = [map(_text, data, row) for row in data.itertuples(index=False)]
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
    specification = next(_FORMATS[titles] for titles in _FORMATS if re.fullmatch(titles, title))
    return format(value, specification).removesuffix("%")


def introduction(done: list[Record], runner: Runner) -> list[str]:
    """Returns a paragraph with the number of runs, their total time, the machines and the program versions.

    Args:
      done: records of the finished runs.
      runner: the runner with which the runs were executed.
    """
    if not done:
        return ["No finished runs."]
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
    lines, compared = [], {}
    for name, rows in tables.items():
        study = studies.STUDIES[name]
        title = f"{study.title} ({study.source})"
        compared[name] = findings.compare(name, rows, scale)
        for comparison in compared[name]:
            lines.append({"study": title, **_finding_row(comparison)})
            title = ""
    if sum(bool(line["study"]) for line in lines) < 2:
        return []
    sentences = []
    for origin, is_v2 in (("the paper", False), ("SimCLR v2", True)):
        names = [
            name
            for name in findings.FINDINGS
            if (studies.STUDIES[name].source == "SimCLR v2") == is_v2
        ]
        entries = [entry for name in names for entry in compared.get(name, ())]
        # A finding may have other runs at the other scale.
        total = len({(name, each.text) for name in names for each in findings.FINDINGS[name]})
        counts = collections.Counter(
            (entry.verdict, entry.finding.is_equality) for entry in entries
        )
        texts = [
            f"{counts[text, False]} + {counts[text, True]} {text}" for text in findings.VERDICTS
        ]
        sentences.append(
            f"Of the {total} findings of {origin} in paper/findings.csv, {', '.join(texts)}"
            " (differences + equalities)."
        )
    return ["### Findings", _markdown(pd.DataFrame(lines)), " ".join(sentences)]


def _finding_row(comparison: findings.Comparison) -> dict[str, Any]:
    estimate, p_value = comparison.estimate, comparison.p_value
    difference, detectable = "" if estimate is None else f"{estimate.difference:+.1f}", None
    if comparison.has_interval:
        difference += " [{:+.1f}, {:+.1f}]".format(*estimate.interval())
        detectable = estimate.detectable
    return {
        "finding": comparison.finding.text,
        "difference in the paper": comparison.paper,
        f"our difference [{100 * findings.LEVEL:.0f} % interval]": difference,
        "p": "" if p_value is None else f"{p_value:.2g}",
        "detectable": detectable,
        "result": comparison.verdict,
    }


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
        blocks += [
            " ".join(filter(None, above)),
            _markdown(table),
            drawing.accuracies(averaged, name, runner),
            *_findings(findings.compare(name, rows, runner.scale)),
            *correlations(name, rows),
        ]
        blocks += [*_averages(study, rows), *_flags(study, averaged, runner)]
    if study.cited:
        cited = pd.DataFrame({"": label, **values} for label, values in study.cited.items())
        blocks += ["From the paper:", _markdown(cited.astype(object))]
    return blocks


def shown_table(study: studies.Study, rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Returns a table of texts to display, and sentences that explain it.

    Columns with the same text in all rows are omitted if there are several rows.

    Args:
      study: the study.
      rows: result of `results.means`.
    """
    several = rows["seeds"].max() > 1
    measures = [
        title
        for title in results.MEASURES
        # Shown only if listed in the paper's table or in `Study.shown`.
        if title not in ("top-5", "million parameters")
        or title in study.shown
        or f"paper, {title}" in rows
    ]
    order = [
        *("run", "seeds", "selected", "changed flags"),
        *rows.filter(like="paper, "),
        *measures,
        *rows.filter(like="difference"),
        *("baseline", "change", "change in the paper", "same direction", "status", "minutes"),
    ]
    if not several:
        order.remove("seeds")
    if rows["baseline"].nunique() < 2:
        order.remove("baseline")
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
    sentences = []
    if listed:
        sentences.append(f"Columns with the same value in all rows are omitted: {listed}.")
    if several:
        sentences.append(
            "Each value is a mean over seeds; ± is followed by the sample standard deviation."
        )
    return texts, sentences


def _settings(study: studies.Study, runner_: Runner) -> str:
    """Describes the settings for our runs."""
    recipes = dict.fromkeys(run.small_recipe for run in study.runs_at("small") if not run.transfer)
    if runner_.scale != "small" or not recipes:
        return ""
    settings = []
    for recipe in recipes:
        config = runner.config_of([f"--flagfile={RECIPES}/{recipe}", *as_flags(runner_.extra)])
        settings.append(
            f"{recipe} ({config.network_name} on {config.train_split} of {config.dataset},"
            f" {config.image_size} pixels, batch size {config.train_batch_size},"
            f" {config.train_epochs} epochs)"
        )
    return f"Except for the flags below, our runs use the settings of {' or '.join(settings)}."


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
    noise = []
    for entry in comparisons:
        if entry.has_interval:
            fit = entry.fit
            details = f"{fit.num_seeds} seeds, {fit.degrees_of_freedom} degrees of freedom"
            if fit.is_unequal:
                details = f"{fit.num_seeds} seeds; unequal, so the differences per seed are tested"
            noise.append(f"{entry.finding.metric}, {fit.deviation:.1f} points ({details})")
    text = "; ".join(dict.fromkeys(noise))
    text = f" Estimated standard deviation of the noise in one run: {text}." if noise else ""
    return [f"Findings:{text}", _markdown(pd.DataFrame(map(_finding_row, comparisons)))]


def _averages(study: studies.Study, rows: pd.DataFrame) -> list[str]:
    """Returns a table of averages over the runs that differ only in `averaged_over` or in the seed, if that is set.

    The table has one row per group of runs, with the number of runs with an accuracy. A run with
    several seeds counts once per seed.
    """
    if not study.averaged_over:
        return []
    columns = [title for title in study.plotted if title not in study.averaged_over]
    groups = rows.dropna(subset="accuracy").groupby(columns, sort=False)["accuracy"]
    averages = groups.agg(**{"runs": "size", "mean": "mean", "standard deviation": "std"})
    return ["Mean and standard deviation over runs:", _markdown(averages.reset_index())]


def correlations(name: str, rows: pd.DataFrame) -> list[str]:
    """Returns a sentence per label fraction: the correlation of linear evaluation with fine-tuning (Appendix B.7).

    Each point is a pair of accuracies, averaged over seeds. At least three points are required.

    Args:
      name: name of the study. Only two studies of fine-tuning have correlations.
      rows: result of `results.table`, with at least one row.
    """
    if name not in ("few_labels_lengths", "few_labels_networks"):
        return []
    columns = ["accuracy before", "accuracy"]
    points = rows.groupby(["labels", "run"], sort=False)[columns].mean().dropna()
    return [
        f"Correlation of linear evaluation with fine-tuning on {labels} of the labels"
        f" (Appendix B.7): Pearson {group.corr().iat[0, 1]:.2f}, Spearman"
        f" {group.corr('spearman').iat[0, 1]:.2f}, {len(group)} points."
        for labels, group in points.groupby("labels", sort=False)
        if len(group) > 2
    ]


def _flags(study: studies.Study, rows: pd.DataFrame, runner: Runner) -> list[str]:
    """Returns a collapsible table with the flags of the runs, and the directories of their first seeds."""
    flags = {
        run.name: f"`{shlex.join(runner.arguments(run))}`" for run in study.runs_at(runner.scale)
    }
    return [
        '<details markdown="1"><summary>flags</summary>',
        _markdown(rows[["run", "directory"]].assign(flags=rows["run"].map(flags))),
        "</details>",
    ]
