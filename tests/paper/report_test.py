"""Reports: comparisons with the paper's results, significance tests, correlations, and HTML pages."""

import os
import re
import shutil
import xml.etree.ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
from pytest import approx

from checkpoints.records import Record
from paper import report, runner, studies, tables
from paper import results as results_lib
from paper.runner import Runner
from support import ROOT

COMMIT, HARDWARE = "abc123", "one processor, 2 cores"


def finish(base, run, results, scale="small", diverged=False):
    """Marks a run as finished and returns its directory."""
    executor = Runner(str(base), scale)
    directory = executor.directory(run)
    os.makedirs(directory, exist_ok=True)
    results = {"million_parameters": 4.9, **results}
    Record(executor.settings(run), results, diverged, 90.0, HARDWARE, COMMIT).write(directory)
    return directory


def rows_of(base, study, scale="small"):
    """Returns the table of a study's finished runs."""
    executor = Runner(str(base), scale)
    found = results_lib.find_results(study, executor, results_lib.read_records(executor))
    return results_lib.table(study, found, executor)


def lines_of(base, study):
    """Returns the lines of the report on a study."""
    executor = Runner(str(base), "small")
    blocks = report.section(study, rows_of(base, study), executor)
    return "\n".join(blocks).splitlines()


def finish_transfer_runs(base, accuracies, seed=1):
    """Marks the transfer runs on `digits` as finished, with the given accuracies and seed.

    The runs are linear evaluation, fine-tuning and training from scratch.
    """
    random, labels = np.random.default_rng(0), np.arange(400) % 10
    for run, accuracy in zip(studies.STUDIES["transfer"].runs_at("small"), accuracies, strict=True):
        predictions = np.where(random.random(400) < accuracy, labels, (labels + 1) % 10)
        results = {"test": np.mean(predictions == labels), "metric": "top_1", "task": "digits"}
        directory = finish(base, run.with_seed(seed), results)
        np.savez(f"{directory}/predictions.npz", labels=labels, logits=np.eye(10)[predictions])


def test_runs_that_are_not_significantly_worse_than_the_best_are_shown_in_bold(tmp_path):
    # The linear evaluation is the only run in its group.
    finish_transfer_runs(tmp_path, (0.6, 0.9, 0.89))
    assert sum("**" in line for line in lines_of(tmp_path, "transfer")) == 3
    finish_transfer_runs(tmp_path, (0.6, 0.7, 0.9), seed=2)
    rows = rows_of(tmp_path, "transfer")
    assert list(rows["best"]) == [True, True, True, False, True, True]
    # A run is shown in bold if it is among the best with every seed.
    assert list(results_lib.means(rows)["best"]) == [True, False, True]


def test_correlations_of_accuracies_averaged_over_seeds_match_numpy(tmp_path):
    lengths, linear = ("50 epochs", "100 epochs", "200 epochs"), [0.42, 0.45, 0.48]
    tuned = {"1 %": [0.2, 0.27, 0.48], "10 %": [0.5, 0.4, 0.5]}
    for length, mean in zip(lengths, linear):
        finish_seeds(tmp_path, "lengths", {length: [mean - 0.01, mean + 0.01]})
    for labels, accuracies in tuned.items():
        for length, accuracy in zip(lengths, accuracies):
            finish_seeds(tmp_path, "few_labels_lengths", {f"{length}, {labels}": [accuracy]})
    # not fine-tuned yet
    finish_seeds(tmp_path, "lengths", {"400 epochs": [0.6]})
    rows = rows_of(tmp_path, "few_labels_lengths")
    sentences = report.correlations("few_labels_lengths", rows)
    for sentence, (labels, accuracies) in zip(sentences, tuned.items(), strict=True):
        pearson = np.corrcoef(linear, accuracies)[0, 1]
        assert f"on {labels} of the labels (Appendix B.7): Pearson {pearson:.2f}, " in sentence
    assert sentences[0].endswith(" Spearman 1.00, 3 points.")
    assert sentences[0] in lines_of(tmp_path, "few_labels_lengths")
    assert not report.correlations("few_labels_lengths", rows[:2])


@pytest.mark.parametrize(
    "study, run, results, differences",
    [
        (
            "temperature",
            "l2 norm, 0.1",
            {runner.LBFGS: 0.5, "eval/contrast_acc": 0.9, "eval/contrast_entropy": 4.0},
            "difference, entropy -0.50; difference, contrastive accuracy +2.2; difference -14.4",
        ),
        (
            "probes",
            "rotation",
            {"probe/majority_baseline": 0.25, "probe/h": 0.7, "probe/z": 0.3},
            "difference, h +2.4; difference, g(h) +4.4",
        ),
        (
            "linear",
            "ResNet-50 (1x)",
            {runner.LBFGS: 0.5, "eval/label_top_5_accuracy": 0.9},
            "difference -19.3; difference, top-5 +1.0",
        ),
    ],
)
def test_differences_from_the_paper_are_shown_only_at_the_papers_scale(
    study, run, results, differences, tmp_path
):
    for scale, expected in (("paper", differences.split("; ")), ("small", [])):
        finish(tmp_path, studies.find_run((study, run)), results, scale)
        rows = results_lib.means(rows_of(tmp_path, study, scale))
        texts, _ = report.shown_table(studies.STUDIES[study], rows)
        shown = [*map(" ".join, texts.iloc[0].items())]
        assert {text for text in shown if "difference" in text} == {*expected}
        if study == "linear":
            assert {"paper, million parameters 24", "million parameters 4.9"} < {*shown}


def test_changes_from_the_baseline_run_are_compared_with_those_in_the_paper(tmp_path):
    """Uses the paper's accuracies: 59.6 for run 1/8, 62.6 for 1/2, 63.2 for 1, and 64.5 for 1 + blur."""
    finish_seeds(tmp_path, "color", {"1/8": [0.40], "1/2": [0.45], "1": [0.44], "1 + blur": [0.45]})
    rows = rows_of(tmp_path, "color").set_index("run")
    changes = {"1/8": -4.0, "1/2": 1.0, "1": np.nan, "1 + blur": 1.0}
    assert rows["change"].to_dict() == approx(changes, nan_ok=True)
    lines = lines_of(tmp_path, "color")
    assert "| 1/8 | 59.6 | 40.0 | -4.0 | -3.6 | yes |" in lines
    assert "| 1/2 | 62.6 | 45.0 | +1.0 | -0.6 | no |" in lines


def finish_probe(base, h, z):
    """Marks the run `rotation` of the study `probes` as finished."""
    accuracies = {"probe/majority_baseline": 0.25, "probe/h": h, "probe/z": z}
    finish_seeds(base, "probes", {"rotation": [0.5]}, **accuracies)


def finish_seeds(base, study, accuracies, scale="small", **results):
    """Marks runs as finished. `accuracies` maps names of runs to lists with one accuracy per seed.

    The accuracy is None if the run diverged.
    """
    for name, values in accuracies.items():
        for seed, accuracy in enumerate(values, 1):
            run, diverged = studies.find_run((study, name, seed)), accuracy is None
            measured = {} if diverged else {runner.LBFGS: accuracy, **results}
            finish(base, run, measured, scale, diverged)


def test_means_and_standard_deviations_over_seeds_are_shown(tmp_path):
    accuracies = {"1/8": [0.40, 0.42, 0.41], "1": [0.44, 0.43, 0.45]}
    finish_seeds(tmp_path, "color", accuracies, **{"eval/contrast_acc": 0.2})
    rows = rows_of(tmp_path, "color").set_index("run")
    assert list(rows.loc["1/8", "change"]) == approx([-4, -1, -4])
    lines = lines_of(tmp_path, "color")
    assert (
        "omitted: seeds = 3; contrastive accuracy = 20.0; minutes = 1.5. Each value is a mean over"
        in lines[1]
    )
    assert "| 1/8 | 59.6 | 41.0 ± 1.0 | -3.0 | -3.6 | yes |" in lines
    # Flags are listed once per run.
    assert sum("--color_jitter_strength=0.125" in line for line in lines) == 1


def test_different_numbers_of_seeds_and_diverged_seeds_are_stated(tmp_path):
    finish_seeds(tmp_path, "flip", {"with": [0.40, 0.42, 0.41], "without": [0.39, None]})
    lines = lines_of(tmp_path, "flip")
    assert "| with | 3 | 64.5 | 41.0 ± 1.0 |  |  |  |  |" in lines
    # The change is relative to seed 1 of the baseline (40.0), not to its mean over all seeds.
    assert "| without | 2 | 63.4 | 39.0 | -1.0 | -1.1 | yes | diverged with seed 2 |" in lines


def test_findings_are_listed_with_intervals_and_results(tmp_path, program):
    finish_seeds(tmp_path, "flip", {"with": [0.46, 0.45, 0.47], "without": [0.44, 0.43, 0.449]})
    finish_seeds(tmp_path, "temperature", {"l2 norm, 0.1": [0.41], "l2 norm, 1": [0.4]})
    printed = program("report", "flip", "temperature", "losses")
    # For two runs, the standard deviation of the noise is that of the differences (0.058), divided
    # by the square root of 2, and half the width of the interval is 4.30 x 0.058 / sqrt(3) = 0.14.
    # The statistic is 2.03 / 0.033 = 61, and the detectable difference (4.30 + 1.06) x 0.033.
    header = "difference in the paper | our difference [95 % interval] | p | detectable | result |"
    row = "flips help | +1.1 | +2.0 [+1.9, +2.2] | 0.00027 | 0.2 | replicated |"
    assert (
        "Findings: Estimated standard deviation of the noise in one run: accuracy, 0.0 points (3"
        f" seeds, 2 degrees of freedom).\n\n| finding | {header}\n{'| --- ' * 6}|\n| {row}\n"
        in printed
    )
    assert "| temperature 0.1 is better than 1 | +6.4 | +1.0 |  |  | one seed |" in printed
    assert "semi-hard negatives help NT-Logistic" not in printed
    assert printed.count('A finding is "not replicated" if ') == 1
    assert "findings of the paper in paper/findings.csv, 1 + 0 replicated, 0 + 0 not" in printed
    # A report on several studies starts with a table of all findings.
    assert (
        f"### Findings\n\n| study | finding | {header}\n{'| --- ' * 7}|\n| Random flips (Appendix A) |"
        f" {row}\n| Temperature and l2 normalization (Table 5) | temperature 0.1 is better than 0.05"
        " | +4.7 |  |  |  | not run |\n" in printed
    )
    assert "### Findings" not in program("report", "flip", "losses")


def test_the_documents_agree_with_the_recorded_results(tmp_path, program):
    recorded = ROOT / "docs/tables/small"
    (tmp_path / "small").mkdir()
    shutil.copy(recorded / "rows.jsonl", tmp_path / "small")
    document = (ROOT / "docs/studies.md").read_text()
    (names,) = re.findall("report (.+) --dir=docs/tables", document)
    program("report", *names.split())
    text = (tmp_path / "small/report.md").read_text()
    assert text == (recorded / "report.md").read_text()
    _, overview = text.split("\n### Findings\n\n")
    table, counts = overview.split("\n\n")[:2]
    assert table in document and counts.strip() in document.replace("\n", " ")
    text += (recorded / "rows.jsonl").read_text()
    results = (ROOT / "docs/results.md").read_text()
    accuracies = re.findall(r"[\d.]+ ± [\d.]+|0\.\d{3,}", results)
    assert len(accuracies) == 26 and all(accuracy in text for accuracy in accuracies)
    for key in (("heads", "linear 512"), ("color", "1/2")):
        directory = Runner("runs/tables", "small").directory(studies.find_run(key))
        assert f"--checkpoint={directory} " in document.replace("\n", " ")


def test_reports_can_be_reproduced_from_recorded_results(tmp_path, capsys, monkeypatch, savefig):
    monkeypatch.setattr(plt.Figure, "savefig", savefig)
    runs, recorded = tmp_path / "runs", tmp_path / "recorded/small"
    finish_seeds(runs, "flip", {"with": [0.46, 0.45], "without": [0.44, 0.43]})
    finish_probe(runs, 0.7, 0.3)
    finish_transfer_runs(runs, (0.6, 0.9, 0.5))
    # The run `simclr (1x)` of `broader` is identical to a run of `flip`.
    names = ["flip", "probes", "broader", "transfer"]
    tables.main(["report", *names, f"--dir={runs}"])
    recorded.mkdir(parents=True)
    shutil.copy(runs / "small/rows.jsonl", recorded)
    for _ in range(2):  # The second time, `report` reads the files that it wrote the first time.
        tables.main(["report", *names, f"--dir={recorded.parent}"])
        for name in ("flip.csv", "probes.csv", "flip.svg", "report.md"):
            first, second = ((folder / name).read_text() for folder in (runs / "small", recorded))
            # Recorded results do not include the predictions that determine the best transfer runs
            # (in bold).
            assert first.replace("**", "") == second
    assert "8 runs, which took" in capsys.readouterr().out


def test_a_report_keeps_recorded_results_of_runs_that_are_not_repeated(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    finish_seeds(first, "flip", {"with": [0.46, 0.45], "without": [0.44, 0.43]})
    tables.main(["report", "flip", f"--dir={first}"])
    lines = (first / "small/rows.jsonl").read_text().splitlines()
    # Results of a run whose settings have changed are kept, but not shown.
    outdated = lines[0].replace('"directory": "resnet10_', '"directory": "resnet10_0')
    path = second / "small/rows.jsonl"
    path.parent.mkdir(parents=True)
    recorded = sorted([*lines, outdated])
    path.write_text("".join(f"{line}\n" for line in recorded))
    tables.main(["report", "flip", f"--dir={second}"])
    assert path.read_text().splitlines() == recorded
    finish_seeds(second, "flip", {"without": [0.5]})
    for _ in range(2):
        assert list(rows_of(second, "flip")["accuracy"]) == [0.46, 0.45, 0.5, 0.43]
        tables.main(["report", "flip", f"--dir={second}"])
        repeated = path.read_text().splitlines()
        assert len({*recorded} & {*repeated}) == 4 and len(repeated) == 5


def test_corrupt_recorded_results_are_rejected(tmp_path):
    path = tmp_path / "small/rows.jsonl"
    path.parent.mkdir()
    for line in ("x", "{}", "[]"):
        path.write_text(line)
        with pytest.raises((ValueError, KeyError, TypeError)):
            tables.main(["report", "flip", f"--dir={tmp_path}"])


def test_accuracy_change_of_a_probe_is_the_accuracy_on_h_minus_the_accuracy_on_g_of_h(tmp_path):
    """Uses the paper's accuracies for rotation: 67.6 from h and 25.6 from g(h)."""
    finish_probe(tmp_path, 0.3, 0.4)
    lines = lines_of(tmp_path, "probes")
    assert "Changes in accuracy are from g(h) to h," in lines[1]
    assert any("| 25.0 | 30.0 | 40.0 | -10.0 | +42.0 | no |" in line for line in lines)


def test_plotted_columns_are_the_settings_at_each_scale(tmp_path):
    columns = ["batch_size", "epochs", "learning_rate", "temperature", "training"]
    for scale, settings, epochs in (
        ("paper", (1024, 500, 0.5, 0.5, "more than 300 epochs"), 90),
        ("small", (128, 2, 0.05, 0.5, "up to 300 epochs"), 12),
    ):
        run = "batch 1024, 500 epochs, rate 0.5"
        finish_seeds(tmp_path, "cifar_batches", {run: [0.5]}, scale)
        assert (*rows_of(tmp_path, "cifar_batches", scale)[columns].iloc[0],) == settings
        finish_seeds(tmp_path, "networks", {"supervised ResNet-18 (1x)": [0.5]}, scale)
        (row,) = rows_of(tmp_path, "networks", scale).to_dict("records")
        assert (row["network"], row["group"]) == ("ResNet-18 (1x)", f"supervised, {epochs} epochs")


def test_runs_with_different_learning_rates_are_averaged(tmp_path, program):
    accuracies = {
        "batch 512, 300 epochs, rate 0.5": [0.9],
        "batch 512, 300 epochs, rate 1.0": [0.93],
        "batch 512, 300 epochs, rate 1.5": [0.915],
        "batch 1024, 300 epochs, rate 0.5": [0.8],
        "batch 1024, 300 epochs, rate 1.0": [None],
    }
    finish_seeds(tmp_path, "cifar_batches", accuracies, "paper")
    printed = program("report", "cifar_batches", "--scale=paper")
    assert (
        "Mean and standard deviation over runs:\n\n| temperature | batch size | epochs | training |"
        " runs | mean | standard deviation |\n| --- | --- | --- | --- | --- | --- | --- |\n| 0.5 |"
        " 512 | 300 | up to 300 epochs | 3 | 91.5 | 1.5 |\n| 0.5 | 1024 | 300 | up to 300 epochs |"
        " 1 | 80.0 |  |\n" in printed
    )


def test_top_5_accuracy_is_shown_for_figure_b1(tmp_path):
    top_5 = {"eval/label_top_5_accuracy": 0.825}
    finish_seeds(tmp_path, "batches", {"linear 512, 100 epochs": [0.6]}, **top_5)
    finish_seeds(tmp_path, "flip", {"with": [0.6]}, **top_5)
    shown = lines_of(tmp_path, "batches")
    assert "| top-5 |" in shown[2] and "| 82.5 |" in shown[4]
    assert "top-5" not in lines_of(tmp_path, "flip")[2]  # Appendix A has no top-5 accuracies.


def test_additional_evaluations_are_not_shown_as_changed_flags(tmp_path):
    finish_seeds(tmp_path, "heads", {"linear 512": [0.5]}, **{f"{runner.LBFGS}/projections": 0.4})
    (row,) = rows_of(tmp_path, "heads").to_dict("records")
    assert row["changed flags"] == "" and row["logistic regression on g(h)"] == 0.4
    assert (row["head"], row["dimension"]) == ("linear", 512)


def test_diverged_runs_are_marked_in_the_table(tmp_path):
    finish_seeds(tmp_path, "flip", {"with": [None]})
    assert "| with | 64.5 | diverged | 1.5 |" in lines_of(tmp_path, "flip")


def test_text_from_records_is_escaped():
    record = Record({}, {}, False, 1.0, "<script>alert(1)</script>", "a")
    assert report.introduction([record], Runner("", "small")) == [
        "This report includes 1 runs, which took 0:00:01 in total. Hardware:"
        " &lt;script&gt;alert(1)&lt;/script&gt;. Version: a."
    ]


def test_predictions_with_nan_or_with_differing_labels_are_rejected(tmp_path, fails):
    finish_transfer_runs(tmp_path, (0.6, 0.9, 0.89))
    for num_classes, logit in ((10, np.nan), (9, 0)):
        labels, logits = np.arange(400) % num_classes, np.full([400, 10], logit)
        np.savez(min(tmp_path.rglob("predictions.npz")), labels=labels, logits=logits)
        fails("predictions.npz: ", tables.main, ["report", "transfer", f"--dir={tmp_path}"])


def test_the_html_page_shows_the_same_as_the_markdown_file(tmp_path, program):
    finish_transfer_runs(tmp_path, (0.6, 0.9, 0.89))
    finish_seeds(tmp_path, "color", {"1/8": [0.5], "1/2": [0.5]})
    printed = program("report", "1", "flip", "transfer", "designs")
    folder = tmp_path / "small"
    page, markdown = ((folder / f"report.{suffix}").read_text() for suffix in ("html", "md"))
    for text in (COMMIT, HARDWARE, "5 runs, which took 0:07:30", "Not run", "Fast AutoAug."):
        assert text in page and text in markdown
    assert set(re.findall(r'href="#(.*?)"', page)) <= set(re.findall(r'id="(.*?)"', page))
    images = re.findall(r'src="(.*?)"', page)
    # The run with flips is identical to a run of the study `color`.
    assert images == ["color.svg", "flip.svg", "transfer.svg"]
    for image in images:
        assert xml.etree.ElementTree.parse(folder / image).getroot().tag.endswith("svg")
    assert markdown.strip() in printed
