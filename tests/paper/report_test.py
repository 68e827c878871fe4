"""Reports: comparisons with the paper's results, significance tests, correlations, and a self-contained HTML page."""

import base64
import csv
import html.parser
import json
import os
import re
import shutil
import statistics
import xml.etree.ElementTree

import numpy as np
import pytest

import config as config_lib
from paper import report, runner, studies, tables
from paper import results as results_lib
from support import ROOT

COMMIT, HARDWARE = "abc123", "one processor, 2 cores"


def finish(base, study, run, results, scale="small", **entries):
    """Marks a run as finished and returns its directory."""
    directory = runner.directory_of(str(base), scale, study, run)
    done = dict(
        arguments=runner.arguments(run, scale),
        settings=runner.settings_of(run, scale),
        results=results,
        seconds=90,
        commits=[COMMIT],
        hardware=HARDWARE,
        million_parameters=4.9,
        **{"same_as": None, "probes": {}, "diverged": False, **entries},
    )
    os.makedirs(directory)
    runner.write_done(directory, done)
    return directory


def finish_transfer_runs(base, accuracies, seed=1):
    """Marks the transfer runs on `digits` as finished, with the given accuracies and seed.

    The runs are linear evaluation, fine-tuning and training from scratch.
    """
    random, labels = np.random.default_rng(0), np.arange(400) % 10
    for run, accuracy in zip(studies.STUDIES["transfer"].runs_at("small"), accuracies, strict=True):
        predictions = np.where(random.random(400) < accuracy, labels, (labels + 1) % 10)
        directory = finish(
            base,
            "transfer",
            run.with_seed(seed),
            dict(test=float((predictions == labels).mean()), metric="top_1", task="digits"),
        )
        np.savez(f"{directory}/predictions.npz", labels=labels, logits=np.eye(10)[predictions])


@pytest.mark.parametrize(
    "accuracies, best",
    [((0.6, 0.9, 0.89), [True, True, True]), ((0.6, 0.7, 0.9), [True, False, True])],
)
def test_runs_that_are_not_significantly_worse_than_the_best_are_shown_in_bold(
    accuracies, best, tmp_path
):
    # The linear evaluation is the only run in its group.
    finish_transfer_runs(tmp_path, accuracies)
    rows = results_lib.rows_of("transfer", str(tmp_path), "small")
    assert [row["best"] for row in rows] == best
    assert sum(
        "**" in line for line in report.markdown("transfer", rows, str(tmp_path), "small")
    ) == sum(best)


def test_runs_are_shown_in_bold_if_they_are_among_the_best_with_every_seed(tmp_path):
    finish_transfer_runs(tmp_path, (0.6, 0.9, 0.89))
    finish_transfer_runs(tmp_path, (0.6, 0.7, 0.9), seed=2)
    rows = results_lib.rows_of("transfer", str(tmp_path), "small")
    assert [row["best"] for row in rows] == [True, True, True, False, True, True]
    assert [row["best"] for row in results_lib.mean_rows("transfer", rows, "small")] == [
        True,
        False,
        True,
    ]


def test_correlated_accuracies_are_averaged_over_seeds(tmp_path):
    finish_seeds(tmp_path, "lengths", {"50 epochs": [0.40, 0.42]})
    finish_seeds(tmp_path, "few_labels_lengths", {"50 epochs, 1 %": [0.2, 0.3, 0.4]})
    (result,) = results_lib.correlations("few_labels_lengths", str(tmp_path), "small")
    assert result["points"] == [("50 epochs", pytest.approx(0.41), pytest.approx(0.3))]


def test_correlations_match_numpy(tmp_path):
    points = {"1 %": [], "10 %": []}
    for index, epochs in enumerate((50, 100, 200)):
        linear = 0.42 + 0.03 * index
        finish(
            tmp_path,
            "lengths",
            studies.find_run(("lengths", f"{epochs} epochs")),
            {runner.LBFGS: linear},
        )
        for labels, tuned in (("1 %", 0.2 + 0.07 * index**2), ("10 %", 0.5 - 0.1 * (index == 1))):
            run = studies.find_run(("few_labels_lengths", f"{epochs} epochs, {labels}"))
            finish(tmp_path, "few_labels_lengths", run, {runner.TOP_1: tuned})
            points[labels].append((linear, tuned))
    # not fine-tuned yet
    finish(tmp_path, "lengths", studies.find_run(("lengths", "400 epochs")), {runner.LBFGS: 0.6})
    results = {
        result["labels"]: result
        for result in results_lib.correlations("few_labels_lengths", str(tmp_path), "small")
    }
    for labels, pairs in points.items():
        assert results[labels]["pearson"] == pytest.approx(np.corrcoef(np.transpose(pairs))[0, 1])
    assert results["1 %"]["spearman"] == pytest.approx(1.0)
    lines = report.markdown(
        "few_labels_lengths",
        results_lib.rows_of("few_labels_lengths", str(tmp_path), "small"),
        str(tmp_path),
        "small",
    )
    assert (
        "Correlation of linear evaluation with fine-tuning on 1 % of the labels (Appendix B.7): "
        f"Pearson {results['1 %']['pearson']:.2f}, Spearman 1.00, 3 points." in lines
    )
    assert not results_lib.correlations("few_labels_networks", str(tmp_path), "small")


def test_runs_from_changed_studies_or_recipes_are_omitted(tmp_path):
    first, *others = studies.STUDIES["color"].runs_at("small")[:4]
    directories = [finish(tmp_path, "color", run, {runner.LBFGS: 0.4}) for run in (first, *others)]
    done = [runner.read_done(directory) for directory in directories]
    runner.write_done(directories[1], {**done[1], "arguments": ["--flagfile=old.cfg"]})
    runner.write_done(
        directories[2], {**done[2], "settings": {**done[2]["settings"], "train_epochs": 3}}
    )
    runner.write_done(
        directories[3],
        {
            **done[3],
            "arguments": [*done[3]["arguments"], "--data_dir=a b", "--seed=7"],
            "settings": runner.settings_of(others[2], "small", dict(seed=7, data_dir="c")),
        },
    )
    assert [row["run"] for row in results_lib.rows_of("color", str(tmp_path), "small")] == [
        "1/8",
        "1",
    ]


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_differences_from_the_paper_are_shown_only_at_the_papers_scale(scale, tmp_path):
    finish(
        tmp_path,
        "temperature",
        studies.find_run(("temperature", "l2 norm, 0.1")),
        {runner.LBFGS: 0.5, "eval/contrast_acc": 0.9, "eval/contrast_entropy": 4.0},
        scale,
    )
    finish(
        tmp_path,
        "probes",
        studies.find_run(("probes", "rotation")),
        {runner.LBFGS: 0.5},
        scale,
        # Earlier versions wrote the key "guess".
        probes=dict(rotation=dict(guess=0.25, h=0.7, z=0.3)),
    )
    finish(
        tmp_path,
        "linear",
        studies.find_run(("linear", "ResNet-50 (1x)")),
        {runner.LBFGS: 0.5, "eval/label_top_5_accuracy": 0.9},
        scale,
    )
    shown = {}
    for name in ("temperature", "probes", "linear"):
        titles, (texts,) = report.shown_table(results_lib.rows_of(name, str(tmp_path), scale))
        shown[name] = dict(zip(titles, texts))
    if scale == "small":
        assert not [title for texts in shown.values() for title in texts if "difference" in title]
        return
    assert {
        title: text for title, text in shown["temperature"].items() if "difference" in title
    } == {
        "difference, entropy": "-0.50",
        "difference, contrastive accuracy": "+2.2",
        "difference": "-14.4",
    }
    assert {title: text for title, text in shown["probes"].items() if "difference" in title} == {
        "difference, h": "+2.4",
        "difference, g(h)": "+4.4",
    }
    assert shown["probes"]["majority baseline"] == "25.0"
    assert (shown["linear"]["difference"], shown["linear"]["difference, top-5"]) == (
        "-19.3",
        "+1.0",
    )
    assert (
        shown["linear"]["paper, million parameters"],
        shown["linear"]["million parameters"],
    ) == ("24", "4.9")


def finish_color_runs(base, accuracies):
    """Marks runs of the study `color` as finished, with the given accuracies."""
    for name, accuracy in accuracies.items():
        finish(base, "color", studies.find_run(("color", name)), {runner.LBFGS: accuracy})


def test_changes_from_the_baseline_run_are_compared_with_those_in_the_paper(tmp_path):
    """Uses the paper's accuracies: 59.6 for run 1/8, 62.6 for 1/2, 63.2 for 1, and 64.5 for 1 + blur."""
    finish_color_runs(tmp_path, {"1/8": 0.40, "1/2": 0.45, "1": 0.44, "1 + blur": 0.45})
    rows = results_lib.rows_of("color", str(tmp_path), "small")
    assert [
        tuple(row[title] for title in ("run", "change", "change in the paper", "same direction"))
        for row in rows
    ] == [
        ("1/8", "-4.0", "-3.6", "yes"),
        ("1/2", "+1.0", "-0.6", "no"),
        ("1", None, None, None),
        ("1 + blur", "+1.0", "+1.3", "yes"),
    ]
    lines = report.markdown("color", rows, str(tmp_path), "small")
    assert 'Changes in accuracy are relative to the run "1", in percentage points.' in lines[1]


def finish_seeds(base, study, accuracies, **results):
    """Marks runs as finished. `accuracies` maps names of runs to lists with one accuracy per seed."""
    for name, values in accuracies.items():
        for seed, accuracy in enumerate(values, 1):
            finish(
                base,
                study,
                studies.find_run((study, name, seed)),
                {runner.LBFGS: accuracy, **results},
            )


def test_means_and_standard_deviations_over_seeds_are_shown(tmp_path):
    finish_seeds(
        tmp_path,
        "color",
        {"1/8": [0.40, 0.42, 0.41], "1": [0.44, 0.43, 0.45]},
        **{"eval/contrast_acc": 0.2},
    )
    rows = results_lib.rows_of("color", str(tmp_path), "small")
    assert [(row["run"], row["seed"], row["accuracy"], row["change"]) for row in rows] == [
        ("1/8", 1, 0.40, "-4.0"),
        ("1/8", 2, 0.42, "-1.0"),
        ("1/8", 3, 0.41, "-4.0"),
        ("1", 1, 0.44, None),
        ("1", 2, 0.43, None),
        ("1", 3, 0.45, None),
    ]
    lines = report.markdown("color", rows, str(tmp_path), "small")
    assert (
        "omitted: seeds = 3; contrastive accuracy = 20.0; minutes = 1.5. Each value is a mean over"
        in lines[1]
    )
    assert "| 1/8 | 59.6 | 41.0 ± 1.0 | -3.0 | -3.6 | yes |" in lines
    assert "Not finished: 1/4 (seeds 1, 2, 3); 1/2 (seeds 1, 2, 3);" in lines[1]
    # Flags are listed once per run.
    assert sum("--color_jitter_strength=0.125" in line for line in lines) == 1


def test_different_numbers_of_seeds_and_diverged_seeds_are_stated(tmp_path):
    finish_seeds(tmp_path, "flip", {"with": [0.40, 0.42, 0.41], "without": [0.39]})
    finish(tmp_path, "flip", studies.find_run(("flip", "without", 3)), {}, diverged=True)
    lines = report.markdown(
        "flip", results_lib.rows_of("flip", str(tmp_path), "small"), str(tmp_path), "small"
    )
    assert "| with | 3 | 64.5 | 41.0 ± 1.0 |  |  |  |  |" in lines
    # The change is relative to seed 1 of the baseline (40.0), not to its mean over all seeds.
    assert "| without | 2 | 63.4 | 39.0 | -1.0 | -1.1 | yes | diverged with seed 3 |" in lines
    assert "Not finished: without (seed 2)." in lines[1]


def test_findings_are_listed_with_intervals_and_results(tmp_path, capsys):
    finish_seeds(tmp_path, "flip", {"with": [0.46, 0.45, 0.47], "without": [0.44, 0.43, 0.449]})
    finish_seeds(tmp_path, "broader", {"simclr (1x)": [0.4], "broader (1x)": [0.41]})
    tables.main(["report", "flip", "broader", "color", f"--dir={tmp_path}"])
    printed = capsys.readouterr().out
    # For two runs, the standard deviation of the noise is that of the differences (0.058), divided
    # by the square root of 2, and half the width of the interval is 4.30 x 0.058 / sqrt(3) = 0.14.
    assert (
        "Findings: Estimated standard deviation of the noise in one run: accuracy, 0.0 points (3"
        " seeds, 2 degrees of freedom).\n\n| finding | difference in the paper | our difference |"
        " 95 % interval | result |\n| --- | --- | --- | --- | --- |\n| flips help | +1.1 | +2.0 |"
        " +1.9 to +2.2 | shows |\n" in printed
    )
    assert "| broader augmentation helps | +0.7 | +1.0 |  | one seed |" in printed
    assert (
        "strength 1 is better" not in printed
        and printed.count("not adjusted for the number of findings") == 1
    )
    page = Page()
    page.feed((tmp_path / "small" / "report.html").read_text())
    assert not page.open and {"flips help", "+1.9 to +2.2", "shows", "one seed"} <= set(page.texts)
    # A report on several studies starts with a table of all findings.
    assert (
        "### Findings\n| study | finding | difference in the paper | our difference | 95 % interval"
        " | result |\n| --- | --- | --- | --- | --- | --- |\n| Random flips (Appendix A) | flips"
        " help | +1.1 | +2.0 | +1.9 to +2.2 | shows |\n| Broader augmentation (Appendix B.2) |"
        " broader augmentation helps | +0.7 | +1.0 |  | one seed |\n\n" in printed
    )
    assert page.texts.count("flips help") == 2
    tables.main(["report", "flip", "color", f"--dir={tmp_path}"])
    assert "### Findings" not in capsys.readouterr().out


def test_the_documents_agree_with_the_recorded_results(tmp_path):
    recorded = ROOT / "docs" / "tables" / "small"
    (tmp_path / "small").mkdir()
    for path in recorded.glob("*.jsonl"):
        shutil.copy(path, tmp_path / "small")
    tables.main(["report", "1", "4", "5", "pairs", "heads", "batches", f"--dir={tmp_path}"])
    text = (tmp_path / "small" / "report.md").read_text()
    assert text == (recorded / "report.md").read_text()
    _, overview = text.split("\n### Findings\n")
    assert overview.split("\n\n")[0] in (ROOT / "docs" / "studies.md").read_text()


def test_reports_can_be_reproduced_from_recorded_results(tmp_path, capsys):
    finish_seeds(tmp_path / "runs", "flip", {"with": [0.46, 0.45], "without": [0.44, 0.43]})
    finish(
        tmp_path / "runs",
        "probes",
        studies.find_run(("probes", "rotation")),
        {runner.LBFGS: 0.5},
        probes=dict(rotation=dict(majority_baseline=0.25, h=0.7, z=0.3)),
    )
    finish(
        tmp_path / "runs",
        "broader",
        studies.find_run(("broader", "simclr (1x)")),
        {runner.LBFGS: 0.46},
        same_as="small/flip/with",
    )
    finish_transfer_runs(tmp_path / "runs", (0.6, 0.9, 0.5))
    names = ["flip", "probes", "broader", "transfer"]
    tables.main(["report", *names, f"--dir={tmp_path / 'runs'}"])
    (tmp_path / "recorded" / "small").mkdir(parents=True)
    for name in names:
        (tmp_path / "runs" / "small" / f"{name}.jsonl").rename(
            tmp_path / "recorded" / "small" / f"{name}.jsonl"
        )
    for _ in range(2):  # The second time, `report` reads the files that it wrote the first time.
        tables.main(["report", *names, f"--dir={tmp_path / 'recorded'}"])
        for name in ("flip.csv", "probes.csv", "report.md", "report.html"):
            first, second = (
                (tmp_path / folder / "small" / name).read_text() for folder in ("runs", "recorded")
            )
            # Recorded results do not include the predictions that determine the best transfer runs
            # (in bold).
            assert re.sub(r"\*\*|</?b>", "", first) == re.sub(r"\*\*|</?b>", "", second)
    # `broader` shares the result of a run of `flip`.
    assert "8 runs, which took" in capsys.readouterr().out


def test_recorded_results_of_changed_studies_are_omitted(tmp_path, monkeypatch):
    finish_seeds(tmp_path, "flip", {"with": [0.46, 0.45], "without": [0.44]})
    tables.main(["report", "flip", f"--dir={tmp_path}"])
    (tmp_path / "small" / "flip").rename(tmp_path / "flip")
    parse = runner.config_of
    assert len(results_lib.rows_of("flip", str(tmp_path), "small")) == 3
    monkeypatch.setattr(
        runner, "config_of", lambda arguments: parse([*arguments, "--train_epochs=5"])
    )
    assert not results_lib.rows_of("flip", str(tmp_path), "small")


def test_a_report_keeps_recorded_results_of_runs_that_are_not_repeated(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    finish_seeds(first, "flip", {"with": [0.46, 0.45], "without": [0.44, 0.43]})
    tables.main(["report", "flip", f"--dir={first}"])
    lines = (first / "small" / "flip.jsonl").read_text().splitlines()
    outdated = json.dumps({**json.loads(lines[0]), "run": "removed"})
    (second / "small").mkdir(parents=True)
    path = second / "small" / "flip.jsonl"
    path.write_text("".join(f"{line}\n" for line in [*lines, outdated]))
    recorded = path.read_bytes()
    tables.main(["report", "flip", f"--dir={second}"])
    assert path.read_bytes() == recorded
    finish(second, "flip", studies.find_run(("flip", "with", 2)), {runner.LBFGS: 0.5})
    for _ in range(2):
        rows = results_lib.rows_of("flip", str(second), "small")
        assert [(row["run"], row["seed"], row["accuracy"]) for row in rows] == [
            ("with", 1, 0.46),
            ("with", 2, 0.5),
            ("without", 1, 0.44),
            ("without", 2, 0.43),
        ]
        tables.main(["report", "flip", f"--dir={second}"])
        repeated = path.read_text().splitlines()
        assert json.loads(repeated.pop(1))["results"] == {runner.LBFGS: 0.5}
        assert repeated == [lines[0], *lines[2:], outdated]


def test_recorded_transfer_runs_with_an_unfinished_directory_are_not_tested_for_significance(
    tmp_path,
):
    finish_transfer_runs(tmp_path, (0.6, 0.9, 0.89))
    tables.main(["report", "transfer", f"--dir={tmp_path}"])
    for path in (tmp_path / "small" / "transfer").glob("*/*"):
        path.unlink()
    rows = results_lib.rows_of("transfer", str(tmp_path), "small")
    assert len(rows) == 3 and not any("best" in row for row in rows)


def test_recorded_results_with_a_changed_default_are_omitted(tmp_path):
    finish_seeds(tmp_path, "flip", {"with": [0.46]})
    tables.main(["report", "flip", f"--dir={tmp_path}"])
    path = tmp_path / "small" / "flip.jsonl"
    record, name = json.loads(path.read_text()), "semi_hard"
    (tmp_path / "small" / "flip").rename(tmp_path / "flip")
    default = getattr(config_lib.Config, name)
    assert record["settings"][name] == default
    # The default was changed since then.
    for settings, num_rows in (
        ({**record["settings"], name: not default}, 0),
        ({key: value for key, value in record["settings"].items() if key != name}, 1),
    ):
        path.write_text(json.dumps({**record, "settings": settings}))
        assert len(results_lib.rows_of("flip", str(tmp_path), "small")) == num_rows


def test_settings_that_a_later_version_adds_do_not_invalidate_results():
    settings = runner.settings_of(studies.find_run(("few_labels", "ResNet-50 (1x), 1 %")), "small")
    earlier = {name: value for name, value in settings.items() if name != "semi_hard"}
    earlier["start"] = {
        name: value for name, value in settings["start"].items() if name != "semi_hard"
    }
    assert earlier != settings
    assert runner.changed_setting(earlier, settings) is None
    changed = {**earlier, "start": {**earlier["start"], "temperature": 0.1}}
    assert runner.changed_setting(changed, settings)[0] == "start"
    assert runner.changed_setting({**earlier, "semi_hard": True}, settings) == (
        "semi_hard",
        True,
        False,
    )


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"run": "with", "seed": 0}',
        b"[" * 100_000,
        '{"results": 0.4}',
        '{"settings": "0123456789abcdef"}',
    ],
)
def test_corrupt_recorded_results_are_rejected(line, tmp_path, capsys):
    finish_seeds(tmp_path, "flip", {"with": [0.46]})
    tables.main(["report", "flip", f"--dir={tmp_path}"])
    (tmp_path / "small" / "flip").rename(tmp_path / "flip")
    path = tmp_path / "small" / "flip.jsonl"
    content = path.read_bytes()
    path.write_bytes(
        content
        + (
            line
            if isinstance(line, bytes)
            else json.dumps({**json.loads(content), **json.loads(line)}).encode()
        )
        + b"\n"
    )
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        tables.main(["report", "flip", f"--dir={tmp_path}"])
    message = capsys.readouterr().err
    assert (
        error.value.code == 2
        and f"{path}: line 2 is corrupt. Restore or remove the file." in message
    )
    assert message.count("\n") == 1


def test_accuracy_change_of_a_probe_is_the_accuracy_on_h_minus_the_accuracy_on_g_of_h(tmp_path):
    """Uses the paper's accuracies for rotation: 67.6 from h and 25.6 from g(h)."""
    finish(
        tmp_path,
        "probes",
        studies.find_run(("probes", "rotation")),
        {runner.LBFGS: 0.5},
        probes=dict(rotation=dict(majority_baseline=0.25, h=0.3, z=0.4)),
    )
    (row,) = results_lib.rows_of("probes", str(tmp_path), "small")
    assert (row["change"], row["change in the paper"], row["same direction"]) == (
        "-10.0",
        "+42.0",
        "no",
    )
    assert (
        "Changes in accuracy are from g(h) to h,"
        in report.markdown("probes", [row], str(tmp_path), "small")[1]
    )


def test_constant_columns_are_described_in_a_sentence(tmp_path):
    finish_color_runs(tmp_path, {"1/8": 0.40, "1": 0.44})
    lines = report.markdown(
        "color", results_lib.rows_of("color", str(tmp_path), "small"), str(tmp_path), "small"
    )
    assert "Columns with the same value in all rows are omitted: minutes = 1.5." in lines[1]
    assert not any("minutes" in line for line in lines[2:])


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_every_study_with_several_runs_has_a_baseline(scale):
    for name, study in studies.STUDIES.items():
        names = {run.name for run in study.runs_at(scale)}
        compared = [run for run in names if study.baseline_of(run) in names]
        exempt = {"probes"} | ({"few_labels_broader"} if scale == "small" else set())  # no baseline
        assert compared or len(names) < 2 or name in exempt, name
        assert not [run for run in names if study.baseline_of(run) not in {*names, None}], name


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_plotted_columns_match_the_settings_at_each_scale(scale, tmp_path):
    for study in ("batches", "networks", "lengths", "cifar_batches", "cifar_temperature"):
        runs = studies.STUDIES[study].runs_at(scale)
        for run in runs:
            finish(tmp_path, study, run, {"eval/label_top_1_accuracy": 0.5}, scale)
        rows = results_lib.rows_of(study, str(tmp_path), scale)
        assert len(rows) == len(runs)
        for run, row in zip(runs, rows):
            config = runner.config_of(runner.arguments(run, scale))
            if study == "networks":
                length = f"{config.train_epochs} epochs" if scale == "paper" else "small scale"
                assert (
                    row["group"]
                    == ("supervised, " if config.train_mode == "supervised" else "") + length
                )
                continue
            assert (row["batch_size"], row["epochs"]) == (
                config.train_batch_size,
                config.train_epochs,
            )
            if study == "batches":
                assert row["scaling"] == config.learning_rate_scaling
            if study.startswith("cifar"):
                assert (row["learning_rate"], row["temperature"]) == (
                    config.learning_rate,
                    config.temperature,
                )


def test_runs_with_different_learning_rates_are_averaged(tmp_path, capsys):
    accuracies = {0.5: 0.9, 1.0: 0.93, 1.5: 0.915}
    for rate, accuracy in accuracies.items():
        run = studies.find_run(("cifar_batches", f"batch 512, 300 epochs, rate {rate}"))
        finish(tmp_path, "cifar_batches", run, {runner.TOP_1: accuracy}, "paper")
    for rate, results in ((0.5, {runner.TOP_1: 0.8}), (1.0, {})):  # The second run diverged.
        run = studies.find_run(("cifar_batches", f"batch 1024, 300 epochs, rate {rate}"))
        finish(tmp_path, "cifar_batches", run, results, "paper", diverged=not results)
    rows = results_lib.rows_of("cifar_batches", str(tmp_path), "paper")
    first, second = results_lib.averages("cifar_batches", rows)
    group = dict(temperature=0.5, epochs=300, training="up to 300 epochs")
    assert first == {
        **group,
        "batch_size": 512,
        "runs": 3,
        "mean": pytest.approx(0.915),
        "standard deviation": pytest.approx(statistics.stdev(accuracies.values())),
    }
    assert second == {
        **group,
        "batch_size": 1024,
        "runs": 1,
        "mean": pytest.approx(0.8),
        "standard deviation": None,
    }
    tables.main(["report", "cifar_batches", "--scale=paper", f"--dir={tmp_path}"])
    assert (
        "Mean and standard deviation over runs:\n\n| temperature | batch size | epochs | training |"
        " runs | mean | standard deviation |\n| --- | --- | --- | --- | --- | --- | --- |\n| 0.5 |"
        " 512 | 300 | up to 300 epochs | 3 | 91.5 | 1.5 |\n| 0.5 | 1024 | 300 | up to 300 epochs |"
        " 1 | 80.0 |  |\n" in capsys.readouterr().out
    )
    page = Page()
    page.feed((tmp_path / "paper" / "report.html").read_text())
    assert not page.open and {"standard deviation", "91.5", "1.5"} <= set(page.texts)


def test_figure_b8_is_averaged_over_learning_rates_and_epochs(tmp_path):
    for index, run in enumerate(studies.STUDIES["cifar_temperature"].runs):
        finish(tmp_path, "cifar_temperature", run, {runner.TOP_1: index / 1000}, "paper")
    groups = results_lib.averages(
        "cifar_temperature", results_lib.rows_of("cifar_temperature", str(tmp_path), "paper")
    )
    assert len(groups) == 3 * 5 * 2 and sum(group["runs"] for group in groups) == len(
        studies.STUDIES["cifar_temperature"].runs
    )
    assert {group["runs"] for group in groups if group["training"] == "up to 300 epochs"} == {3 * 3}


def test_top_5_accuracy_is_shown_for_figure_b1(tmp_path):
    results = {runner.TOP_1: 0.6, "eval/label_top_5_accuracy": 0.825}
    finish(tmp_path, "batches", studies.find_run(("batches", "linear 512, 100 epochs")), results)
    finish(tmp_path, "flip", studies.find_run(("flip", "with")), results)
    shown = {
        name: report.markdown(
            name, results_lib.rows_of(name, str(tmp_path), "small"), str(tmp_path), "small"
        )
        for name in ("batches", "flip")
    }
    assert "| top-5 |" in shown["batches"][3] and "| 82.5 |" in shown["batches"][5]
    assert "top-5" not in shown["flip"][3]  # Appendix A has no top-5 accuracies.


def test_additional_evaluations_are_not_shown_as_changed_flags(tmp_path):
    run = studies.find_run(("heads", "linear 512"))
    finish(tmp_path, "heads", run, {runner.LBFGS: 0.5, f"{runner.LBFGS}/projections": 0.4})
    (row,) = results_lib.rows_of("heads", str(tmp_path), "small")
    assert row["changed flags"] is None and row["logistic regression on g(h)"] == 0.4
    assert (row["head"], row["dimension"]) == ("linear", 512)


def test_diverged_runs_are_marked_in_the_table(tmp_path):
    finish(tmp_path, "flip", studies.find_run(("flip", "with")), {}, diverged=True)
    lines = report.markdown(
        "flip", results_lib.rows_of("flip", str(tmp_path), "small"), str(tmp_path), "small"
    )
    assert "| with | 64.5 | diverged | 1.5 |" in lines
    assert (
        "our runs use the settings of study_small.cfg (resnet10 on train[:20%] of cifar10, 32"
        " pixels, batch size 128, " in lines[1]
    )


HOSTILE = "=1+1|<script>alert(1)</script>\n\x1b[31m`x``"


def test_untrusted_text_from_result_files_is_escaped(tmp_path, capsys):
    run = studies.find_run(("flip", "with"))
    directory = finish(
        tmp_path,
        "flip",
        run,
        {runner.LBFGS: 0.5, "eval/label_top_5_accuracy": HOSTILE},
        probes={HOSTILE: dict(majority_baseline=0.25, h=0.7, z=HOSTILE), "x": [1]},
    )
    done = {
        **runner.read_done(directory),
        "hardware": HOSTILE,
        "commits": [HOSTILE, None],
        "million_parameters": HOSTILE,
    }
    runner.write_done(
        directory, {**done, "arguments": [*done["arguments"], f"--data_dir={HOSTILE}"]}
    )
    tables.main(["report", "flip", f"--dir={tmp_path}"])
    directory = tmp_path / "small"
    markdown, page = (directory / "report.md").read_text(), Page()
    outside = re.sub(r"(`+) .*? \1(?!`)", "", markdown)
    assert "<script" not in outside and "&lt;script" in outside and "<script" in markdown
    assert "\x1b" not in markdown + capsys.readouterr().out
    table = [line for line in markdown.splitlines() if line.startswith("| with")]
    assert len(table) == 2 and all(line.endswith(" |") for line in table)
    page.feed((directory / "report.html").read_text())
    assert not page.open and "script" not in page.tags and "alert(1)" in " ".join(page.texts)
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", (directory / "report.html").read_text()
    )
    with open(directory / "flip.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 2
    for text in (text for row in rows for text in row):
        assert not text.startswith(("=", "@", "\t", "\r")) and (
            not text.startswith(("+", "-")) or float(text)
        )


@pytest.mark.parametrize(
    "labels, logits",
    [
        (np.arange(400) % 10, np.full([400, 10], np.nan)),
        (np.arange(400) % 9, np.zeros([400, 10])),
        (np.arange(40) % 10, np.zeros([40, 10])),
        (np.arange(0), np.zeros([0, 10])),
    ],
)
def test_predictions_with_nan_or_with_differing_labels_are_rejected(
    labels, logits, tmp_path, capsys
):
    finish_transfer_runs(tmp_path, (0.6, 0.9, 0.89))
    for path in tmp_path.rglob("predictions.npz"):
        if "scratch" in str(path):
            np.savez(path, labels=labels, logits=logits)
    with pytest.raises(SystemExit) as error:
        tables.main(["report", "transfer", f"--dir={tmp_path}"])
    message = capsys.readouterr().err
    assert error.value.code == 2 and "predictions.npz: " in message and message.count("\n") == 1


class Page(html.parser.HTMLParser):
    """HTML parser that checks the nesting of elements and collects text, links and images."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.links, self.ids, self.images, self.tags = (
            [],
            [],
            [],
            [],
            [],
            set(),
        )

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.links += [attributes["href"]] if tag == "a" else []
        self.images += [attributes["src"]] if tag == "img" else []
        self.ids += [attributes["id"]] if "id" in attributes else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_html_page_is_well_formed_and_self_contained(tmp_path, capsys):
    finish_transfer_runs(tmp_path, (0.6, 0.9, 0.89))
    for run in studies.STUDIES["color"].runs_at("small"):
        finish(
            tmp_path,
            "color",
            run,
            {runner.LBFGS: 0.5, runner.TOP_1: 0.4, "eval/label_top_5_accuracy": 0.9},
        )
    run = studies.find_run(("flip", "with"))
    finish(tmp_path, "flip", run, {runner.LBFGS: 0.5}, same_as="small/color/1_2")
    tables.main(["report", "1", "flip", "transfer", "designs", f"--dir={tmp_path}"])
    page = Page()
    page.feed((tmp_path / "small" / "report.html").read_text())
    text = " ".join(page.texts)
    assert not page.open and set(page.links) == {f"#{name}" for name in page.ids}
    assert page.ids == ["color", "color_supervised", "flip", "transfer", "designs"]
    assert COMMIT in text and HARDWARE in text and "9 runs, which took 0:13:30 in total" in text
    assert "--color_jitter_strength=0.125" in text and "-3.6" in text
    assert "Not run. python -m paper.tables run" in text
    # Table 1 of the paper has no top-5 accuracies.
    assert "Fast AutoAug." in text and "top-5" not in text
    for image in page.images:
        prefix, content = image.split(",")
        assert prefix == "data:image/svg+xml;base64"
        assert xml.etree.ElementTree.fromstring(base64.b64decode(content)).tag.endswith("svg")
    assert len(page.images) == 3
    markdown = (tmp_path / "small" / "report.md").read_text()
    assert markdown.strip().split("\n", 2)[2].strip() in capsys.readouterr().out
    assert "| 1/8 | 59.6 | +0.0 | -3.6 | no |" in markdown
    assert (
        f"9 runs, which took 0:13:30 in total. Hardware: {HARDWARE}. Version: {COMMIT}." in markdown
    )
    assert (
        "| 1/8 | `--flagfile=paper/recipes/study_small.cfg --color_jitter_strength=0.125"
        " --nouse_blur` |" in markdown
    )
