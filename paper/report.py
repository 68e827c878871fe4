"""What the runs of `paper.catalogue`'s cells gave, beside the paper: Markdown, CSV, and one page of HTML."""

from __future__ import annotations

import base64
import csv
import html
import io
import math
import os
import re
import shlex

import numpy as np

from paper import catalogue, cells
from runtime import console, progress, storage
from runtime.errors import UserError
from transfer import output, significance

_COLUMNS = {  # title -> where it stands in the results of a finished cell
    "logistic regression": cells.LBFGS, "of g(h)": f"{cells.LBFGS}/projections", "linear head": cells.TOP_1,
    "top-5": "eval/label_top_5_accuracy", "transfer": "test", "contrastive accuracy": "eval/contrast_acc",
    "entropy": "eval/contrast_entropy",
}
_FEWER = {"top-5", "million parameters"}  # columns that are shown only where the paper has them
_FORMATS = {"entropy": "{:.2f}", "million parameters": "{:.1f}"}  # of ours; without, they are shares, told in %
_JUDGED = ("top-1", "mean per class", "mAP")  # the paper's measures that `cells.accuracy` stands beside
_SAME = ("top-5", "contrastive accuracy", "entropy")  # those that are called the same here
ALPHA = 0.05  # of the permutation test, as in the paper's tables
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # line breaks and escape sequences, too
_FORMULA_STARTS = ("=", "+", "-", "@")  # of cells that spreadsheets evaluate


# -------------------------------------------------------------------------------------------------------------- rows


def rows_of(name, base, scale):
    """A study's finished cells, as dicts from titles to values; accuracies of ours are shares, of the paper's in %."""
    rows = []
    for cell in catalogue.STUDIES[name].cells_of(scale):
        done = _finished(name, cell, base, scale)
        if done is not None:
            directory = cells.directory_of(base, scale, name, cell)
            at = directory if done["same_as"] is None else os.path.join(base, done["same_as"])
            rows.append(_row(cell, done, scale, at))
    _mark_best(rows)
    return rows


def _finished(name, cell, base, scale):
    """What was noted of a cell's run; None if it was not run, or as an older catalogue or recipe had it."""
    done = cells.read_done(cells.directory_of(base, scale, name, cell))
    return done if done is not None and cells.is_of(cell, scale, done) else None


def _row(cell, done, scale, directory):
    found = {title: _number(done["results"].get(key)) for title, key in _COLUMNS.items()}
    probes = {probe: {key: _number(values.get(key)) for key in ("guess", "h", "z")}
              for probe, values in done["probes"].items() if isinstance(values, dict)}
    for probe, values in probes.items():
        found |= {"guess": values["guess"], f"{probe} from h": values["h"], f"{probe} from g(h)": values["z"]}
    paper = {f"paper, {measure}": number for measure, number in cell.paper.items()}
    smaller = cell.small.items() if scale == "small" else ()
    here = ", ".join(f"{setting} {value}" for setting, value in smaller if setting != "eval_protocol")
    ours = cells.accuracy(done)
    beside = {**dict.fromkeys(_JUDGED, ours), **{measure: found[measure] for measure in _SAME},
              **{measure: values[key] for values in probes.values() for measure, key in (
                  ("h", "h"), ("g(h)", "z"))}}
    parameters = _number(done.get("million_parameters"))  # None for transfers.
    plotted = next((measure for measure in (*_JUDGED, "h") if measure in cell.paper), None)
    return {"cell": cell.name, "here": here or None, **paper, **found, **_differences(cell.paper, beside),
            "remark": "diverged" if done["diverged"] else None,
            "minutes": f"{done['seconds'] / 60:.1f}", **cell.data, "accuracy": ours,
            "million parameters": None if parameters is None else round(parameters, 3),
            "_plotted": beside.get(plotted, ours), "_paper": cell.paper.get(plotted), "_done": done,
            "_directory": directory}


def _number(value):
    """The value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and abs(value) < math.inf else None


def _differences(paper, ours):
    """Ours less the paper's, as texts, for every measure that both have."""
    both = [(measure, number, ours[measure]) for measure, number in paper.items() if ours.get(measure) is not None]
    return {"difference" if measure in _JUDGED else f"difference, {measure}":
            f"{value - number:+.2f}" if measure == "entropy" else f"{100 * value - number:+.1f}"
            for measure, number, value in both}


def _mark_best(rows):
    """In transfer, sets `best`: whether the permutation test finds no difference from the best of a data set.

    Protocols are compared as in the paper: linear evaluation by itself, the trainings of whole networks together.
    """
    groups = {}
    for row in rows:
        if "protocol" in row and row["accuracy"] is not None:
            groups.setdefault((row["task"], row["protocol"] == "linear"), []).append(row)
    for group in groups.values():
        loaded = {row["cell"]: _scores_of(row) for row in group}
        best = loaded[max(group, key=lambda row: row["accuracy"])["cell"]]
        for row in group:
            labels, scores, metric = loaded[row["cell"]]
            if labels.shape != best[0].shape or (labels != best[0]).any():
                raise UserError(f"{row['_directory']}/predictions.npz: its labels differ from those of other runs of "
                                f"{row['task']}. Remove the run, and run the table again.")
            row["best"] = significance.compare(labels, best[1], scores, metric)["p"] > ALPHA


def _scores_of(row):
    """Labels, scores and metric of a transfer. Raises `UserError`."""
    path = os.path.join(row["_directory"], "predictions.npz")
    return *output.read_predictions(path), row["_done"]["results"].get("metric")


def _titles(rows, part):
    """The columns with this part in their titles, in order."""
    return dict.fromkeys(title for row in rows for title in row if part in title)


def shown_table(rows):
    """Titles, and for each row the texts to be shown; columns that no row has are left out."""
    shown = ("cell", "here", *_titles(rows, "paper, "), "million parameters", *_COLUMNS, "guess",
             *_titles(rows, " from "), *_titles(rows, "difference"), "remark", "minutes")
    in_paper = {title.removeprefix("paper, ") for title in _titles(rows, "paper, ")}
    titles = [title for title in dict.fromkeys(shown) if any(row.get(title) is not None for row in rows)
              and (title not in _FEWER or title in in_paper)]
    return titles, [[_shown(title, row) for title in titles] for row in rows]


def _shown(title, row):
    """A value as text: our accuracies in %, as the paper's are."""
    value = row.get(title)
    if isinstance(value, float) and "paper" not in title:
        text = _FORMATS.get(title, "{:.1%}").format(value).rstrip("%")
        return f"**{text}**" if title == "transfer" and row.get("best") else text
    return "" if value is None else str(value)


# ------------------------------------------------------------------------------------------------- Markdown and CSV


def markdown(name, rows, base, scale):
    """A study as lines of Markdown."""
    study = catalogue.STUDIES[name]
    lines = [f"### {study.title} ({study.source})", f"{_said(study, rows, scale)} Accuracies in %.", ""]
    if rows:
        titles, texts = shown_table(rows)
        lines += _markdown_table(titles, texts)
    elif study.cells_of(scale):
        lines += ["Not run."]
    told = [line for text in _correlation_texts(name, base, scale) for line in ("", text)]
    return [*lines, *told, "", *_markdown_flags(rows), *_markdown_cited(study)]


def _said(study, rows, scale):
    """What the paper found, and by what setting it was tried here."""
    finding = f"The paper: {study.finding}" if study.cells else f"{study.finding[:1].upper()}{study.finding[1:]}"
    recipes = dict.fromkeys(cell.small_recipe for cell in study.cells_of(scale) if not cell.transfer)
    if scale != "small" or not rows or not recipes:
        return f"{finding}."
    return f"{finding}. Here: {'; '.join(map(cells.setting_of, recipes))}; unless the table says otherwise."


def _markdown_flags(rows):
    """What was run, to be unfolded."""
    table = _markdown_table(["cell", "flags"], [
        [row["cell"], _Code(shlex.join(row["_done"]["arguments"]))] for row in rows])
    return ["<details><summary>flags</summary>", "", *table, "", "</details>", ""] if rows else []


def _markdown_cited(study):
    return ["Cited by the paper:", "", *_markdown_table(*_cited_table(study)), ""] if study.cited else []


def _cited_table(study):
    """Titles and rows of what the paper cites."""
    titles = list(dict.fromkeys(measure for _, values in study.cited for measure in values))
    return ["", *titles], [[name, *(str(values.get(title, "")) for title in titles)] for name, values in study.cited]


class _Code(str):
    """Text that Markdown shows as code."""


def _markdown_table(titles, texts):
    return [f"| {' | '.join(map(_markdown_text, row))} |" for row in (titles, ["---"] * len(titles), *texts)]


def _markdown_text(text):
    """A text in one line, without HTML and without the separator of cells."""
    line = _CONTROL.sub(" ", text).replace("|", "/")
    if not isinstance(text, _Code):
        return html.escape(line, quote=False)
    if "`" not in line:
        return f"`{line}`"
    ticks = "`" * (1 + max(map(len, re.findall("`+", line))))  # Within these, shorter sequences are plain text.
    return f"{ticks} {line} {ticks}"


def write_csv(path, rows):
    """Writes the rows with all their values, for `paper.figures`. Texts that look like formulas begin with '."""
    public = [{_csv_value(title): _csv_value(value) for title, value in row.items() if not title.startswith("_")}
              for row in rows]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in public for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(public)
    storage.write_bytes(path, file.getvalue().encode())


def _csv_value(value):
    """A value that spreadsheets do not evaluate: in one line, and only numbers begin with a sign."""
    if not isinstance(value, str):
        return value
    text = _CONTROL.sub(" ", value)
    if not text.lstrip().startswith(_FORMULA_STARTS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


# ------------------------------------------------------------------------------------------------------ correlations


_CORRELATED = ("few_labels_lengths", "few_labels_networks")


def correlations(name, base, scale):
    """Linear evaluation against fine-tuning (paper, B.7) in a study of `_CORRELATED`, for each share of labels.

    Returns:
      list of dicts: `labels`; `points`: (name, accuracy of linear evaluation, accuracy when fine-tuned); and the
      coefficients `pearson` and `spearman`, None below three points.
    """
    from scipy import stats

    points = {}
    for cell in catalogue.STUDIES[name].cells_of(scale):
        places = (name, cell), (cell.start[0], catalogue.cell_at(cell.start))
        done = [_finished(*place, base, scale) for place in places]
        if all(each is not None and cells.accuracy(each) is not None for each in done):
            tuned, linear = map(cells.accuracy, done)
            points.setdefault(cell.data["labels"], []).append((cell.data["start"], linear, tuned))
    return [dict(labels=labels, points=found, **{
        title: float(function(*list(zip(*found))[1:]).statistic) if len(found) > 2 else None
        for title, function in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr))})
        for labels, found in points.items()]


def _correlation_texts(name, base, scale):
    """What `correlations` found, a sentence for each share of labels."""
    return [f"Linear evaluation and fine-tuning on {each['labels']} of the labels (Appendix B.7): r = "
            f"{each['pearson']:.2f}, rank correlation {each['spearman']:.2f}, {len(each['points'])} points."
            for each in correlations(name, base, scale) if each["pearson"] is not None] if name in _CORRELATED else []


# -------------------------------------------------------------------------------------------------------------- HTML


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 0.8em 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2em 0.7em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
thead th { border-bottom: 2px solid #888; }
h2 { margin-top: 2em; }
nav a { margin-right: 0.9em; }
code { font-size: 12px; }
.scroll { overflow-x: auto; }
.cited { color: #666; }
img { max-width: 100%; }
"""


def _html(text):
    """A text as HTML, without control characters."""
    return html.escape(_CONTROL.sub(" ", text))


def summary(found):
    """How many runs there are, their time, on what machines, by which versions of the program: a sentence or three.

    Args:
      found: dict: name -> `rows_of` it.
    """
    done = {row["_directory"]: row["_done"] for rows in found.values() for row in rows}
    machines = sorted({_CONTROL.sub(" ", each["hardware"]) for each in done.values()})
    versions = sorted({_CONTROL.sub(" ", version) for each in done.values() for version in each["commits"] if version})
    parts = [f"{len(done)} runs, {console.format_duration(sum(each['seconds'] for each in done.values()))} in all"]
    parts += ["; ".join(machines)] * bool(machines) + [f"Version {', '.join(versions)}"] * bool(versions)
    return ". ".join(parts) + "."


def write_html(path, found, base, scale):
    """All studies on one page without other files: ours, the paper's, plots, flags, time, machine and version.

    Args:
      path: of the page.
      found: dict: name -> `rows_of` it.
      base, scale: as there.
    """
    sections = [_section(name, rows, base, scale)
                for name, rows in progress.track(found.items(), len(found), "report")]
    links = "".join(f'<a href="#{name}">{_html(catalogue.STUDIES[name].source)} ({name.replace("_", " ")})</a>'
                    for name in found)
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>SimCLR: the paper's tables</title>
<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>
<h1>The paper's tables, {_html(scale)} scale</h1>
<p>{_html(summary(found))} Accuracies in %.</p>
<nav>{links}</nav>
{"".join(sections)}</body></html>
"""
    storage.write_bytes(path, page.encode())


def _section(name, rows, base, scale):
    study = catalogue.STUDIES[name]
    parts = [f'<h2 id="{name}">{_html(study.title)} <small>({_html(study.source)})</small></h2>',
             f"<p>{_html(_said(study, rows, scale))}</p>"]
    if rows:
        titles, texts = shown_table(rows)
        parts += [_html_table(titles, texts), _plot(rows), *(f"<p>{_html(text)}</p>" for text in
                                                             _correlation_texts(name, base, scale)), _flags(rows)]
    elif study.cells_of(scale):
        parts.append("<p>Not run.</p>")
    if study.cited:
        parts += ['<p class="cited">Cited by the paper:</p>', _html_table(*_cited_table(study), "cited")]
    return "\n".join(parts) + "\n"


def _html_table(titles, texts, kind=""):
    def cell(text):
        bold = text.startswith("**")
        return f"<td><b>{_html(text.strip('*'))}</b></td>" if bold else f"<td>{_html(text)}</td>"

    head = "".join(f"<th>{_html(title)}</th>" for title in titles)
    body = "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in texts)
    return (f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
            "</div>")


def _flags(rows):
    """What was run, to be unfolded."""
    lines = "\n".join(f"<tr><td>{_html(row['cell'])}</td><td><code>"
                      f"{_html(shlex.join(row['_done']['arguments']))}</code></td></tr>" for row in rows)
    return f"<details><summary>flags</summary><table>{lines}</table></details>"


def _plot(rows):
    """Our accuracies as points, the paper's as diamonds, as an image within the page; of Table 3, those of h."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["_plotted"] is not None]
    if not rows:
        return ""
    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.26 * len(rows)))
    places = np.arange(len(rows))[::-1]
    axis.scatter([100 * row["_plotted"] for row in rows], places, color="black", label="ours", zorder=3)
    papers = [(place, row["_paper"]) for place, row in zip(places, rows) if row["_paper"] is not None]
    if papers:
        axis.scatter([number for _, number in papers], [place for place, _ in papers], marker="D", color="black",
                     facecolors="white", label="paper", zorder=3)
    axis.set_yticks(places, [row["cell"] for row in rows], fontsize=8)
    axis.set_xlabel("accuracy, %")
    axis.grid(axis="y", color="0.85")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    content = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="accuracies" src="data:image/svg+xml;base64,{content}"></p>'
