"""The report of the paper's tables: numbers beside numbers, significance, correlations, and a page that is whole."""

import base64
import html.parser
import os
import xml.etree.ElementTree

import numpy as np
import pytest

from paper import catalogue, cells, report, tables

COMMIT, HARDWARE = "abc123", "one processor, 2 cores"


def finish(base, study, cell, results, **more):
    """Notes a cell of the small scale as finished; returns its directory."""
    directory = cells.directory_of(str(base), study, cell)
    done = dict(arguments=cells.arguments(cell, "small"), results=results, probes={}, seconds=90, commit=COMMIT,
                hardware=HARDWARE, million_parameters=4.9, **more)
    os.makedirs(directory)
    cells.write_done(directory, done)
    return directory


def transfer_digits(base, shares):
    """Linear evaluation, fine-tuning and random initialisation on the digits, each right for a share of them."""
    random, labels = np.random.default_rng(0), np.arange(400) % 10
    for cell, share in zip(catalogue.STUDIES["transfer"].cells_of("small"), shares, strict=True):
        guesses = np.where(random.random(400) < share, labels, (labels + 1) % 10)
        directory = finish(base, "transfer", cell, dict(
            test=float((guesses == labels).mean()), metric="top_1", task="digits"))
        np.savez(f"{directory}/predictions.npz", labels=labels, logits=np.eye(10)[guesses])


@pytest.mark.parametrize("shares, best", [
    ((0.6, 0.9, 0.89), [True, True, True]), ((0.6, 0.7, 0.9), [True, False, True])])
def test_what_is_not_worse_than_the_best_is_bold(shares, best, tmp_path):
    """The first is the only one of its protocol."""
    transfer_digits(tmp_path, shares)
    rows = report.rows_of("transfer", str(tmp_path), "small")
    assert [row["best"] for row in rows] == best
    assert sum("**" in line for line in report.markdown("transfer", rows, "small")) == sum(best)


def test_correlations_are_those_of_numpy(tmp_path):
    accuracies = {}
    for number, cell in enumerate(catalogue.STUDIES["few_labels_broader"].cells_of("small")):
        finish(tmp_path, "few_labels_broader", cell, {cells.TOP_1: 0.3 + 0.1 * number})
    finish(tmp_path, "broader", catalogue.cell_at(("broader", "broader (1x)")), {cells.LBFGS: 0.4})
    for number, width in enumerate((1, 2)):
        start = catalogue.cell_at(("linear", f"ResNet-50 ({width}x)"))
        finish(tmp_path, "linear", start, {cells.LBFGS: 0.42 + 0.03 * number})
        for labels in ("1 %", "10 %"):
            cell = catalogue.cell_at(("few_labels", f"ResNet-50 ({width}x), {labels}"))
            accuracies.setdefault(labels, []).append((0.42 + 0.03 * number, 0.2 + 0.07 * number**2))
            finish(tmp_path, "few_labels", cell, {cells.TOP_1: 0.2 + 0.07 * number**2})
    found = {each["labels"]: each for each in report.correlations(str(tmp_path), "small")}
    assert set(found) == {"1 %", "10 %", "100 %"} and found["100 %"]["pearson"] is None
    points = np.array([*accuracies["10 %"], (0.4, 0.4)])
    assert found["10 %"]["pearson"] == pytest.approx(np.corrcoef(points.T)[0, 1])
    ranks = points.argsort(0).argsort(0)
    assert found["10 %"]["spearman"] == pytest.approx(np.corrcoef(ranks.T)[0, 1])
    text = "\n".join(report.correlations_markdown(list(found.values())))
    assert f"10 % of the labels: r = {found['10 %']['pearson']:.2f}" in text
    assert "| 1 % | ResNet-50 (2x) | 45.0 | 27.0 |" in text


class Page(html.parser.HTMLParser):
    """Checks that elements are closed in order, and collects texts, links and images."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.links, self.ids, self.images = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.links += [attributes["href"]] if tag == "a" else []
        self.images += [attributes["src"]] if tag == "img" else []
        self.ids += [attributes["id"]] if "id" in attributes else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_is_whole_and_needs_no_other_file(tmp_path, capsys):
    transfer_digits(tmp_path, (0.6, 0.9, 0.89))
    for cell in catalogue.STUDIES["colour"].cells_of("small"):
        finish(tmp_path, "colour", cell, {cells.LBFGS: 0.5, cells.TOP_1: 0.4, "eval/label_top_5_accuracy": 0.9})
    tables.main(["report", "1", "transfer", "designs", f"--dir={tmp_path}"])
    page = Page()
    page.feed((tmp_path / "report.html").read_text())
    text = " ".join(page.texts)
    assert not page.open and set(page.links) == {f"#{name}" for name in page.ids}
    assert page.ids == ["colour", "colour_supervised", "transfer", "designs"]
    assert COMMIT in text and HARDWARE in text and "9 runs, 0:13:30 in all" in text
    assert "--color_jitter_strength=0.125" in text and "-9.6" in text and "Not run." in text
    assert "Fast AutoAugment" in text and "top-5" not in text  # The paper's Table 1 has none.
    for image in page.images:
        kind, content = image.split(",")
        assert kind == "data:image/svg+xml;base64"
        assert xml.etree.ElementTree.fromstring(base64.b64decode(content)).tag.endswith("svg")
    assert len(page.images) == 2
    markdown = (tmp_path / "report.md").read_text()
    assert markdown.strip().split("\n", 2)[2].strip() in capsys.readouterr().out
    assert "| 1/8 | 59.6 | 50.0 | 40.0 | -9.6 | 1.5 |" in markdown
