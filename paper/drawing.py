"""The paper's figures, drawn with matplotlib."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import tensorflow as tf

import data
import data_util
import evaluate
import simclr
from augmentation import policies
from checkpoints import loading
from paper import common, studies
from paper.runner import Runner
from runtime import console
from runtime.errors import UserError
from sources import datasets, image_files

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import ticker, transforms  # noqa: E402

# Settings of Matplotlib for all figures. By default, the element IDs in SVG files are random.
STYLE = {
    "svg.hashsalt": "paper",
    "savefig.bbox": "tight",
    "axes.titlesize": 9,
    "figure.labelsize": 9,
    "legend.fontsize": 8,
}
_SEED = 1
_NO_DATE = {"Date": None}  # metadata of SVG files
_CROPS = 4  # Number of crops per image. Each crop is shown with and without color distortion.
_CLASSES = 10  # Number of classes in the t-SNE figure.
_MARKERS = "osv^D<>phX"
_HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")


def save(figure: plt.Figure, rows: pd.DataFrame, out: str, name: str) -> str:
    """Saves a figure (PNG and SVG) and its data (CSV), and closes the figure. Returns the path of the PNG file."""
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, name)
    if os.path.exists(f"{path}.png"):
        console.log(f"replacing {path}.png, .svg and .csv")
    figure.savefig(f"{path}.png", dpi=110)
    figure.savefig(f"{path}.svg", metadata=_NO_DATE)
    plt.close(figure)
    rows.to_csv(f"{path}.csv", index=False)
    return f"{path}.png"


def read_csv(
    path: str, texts: Sequence[str], numbers: Sequence[str] = (), measure: str = "accuracy"
) -> pd.DataFrame:
    """Reads the rows of a CSV file that have an accuracy.

    Args:
      path: CSV file.
      texts: required columns that contain text.
      numbers: required columns that contain numbers.
      measure: required column that contains the accuracies.

    Raises:
      UserError: the file lacks columns, has no accuracies, or has accuracies outside [0, 1].
    """
    types = dict.fromkeys(texts, str)
    rows = pd.read_csv(path, dtype=types, keep_default_na=False, na_values="")
    columns = (*texts, *numbers, measure)
    for column in columns:
        if column not in rows:
            raise UserError(
                f"--csv={path}: column {column} is missing. Use a file with the columns"
                f" {', '.join(columns)}."
            )
    # In the report, this field is empty if a run has no accuracy.
    rows = rows.dropna(subset=measure)
    accuracies = rows[measure]
    if not 0 <= accuracies.min() <= accuracies.max() <= 1:
        raise UserError(
            f"--csv={path}: the column {measure} has no accuracies, or accuracies that are not in"
            " [0, 1]. Use a file with accuracies from 0 to 1."
        )
    return rows


def _average(rows: pd.DataFrame, columns: Sequence[str], measure: str = "accuracy") -> pd.DataFrame:
    """Averages the accuracies of rows with the same values in `columns`, such as those of runs with other seeds.

    Returns a table with the given columns, the mean accuracy, and the columns `standard_deviation`
    (NaN for a single row) and `runs`.
    """
    return (
        rows.groupby(list(columns), sort=False)[measure]
        .agg(**{measure: "mean", "standard_deviation": "std", "runs": "size"})
        .reset_index()
    )


def _without_deviations(rows: pd.DataFrame) -> pd.DataFrame:
    """Removes the columns with standard deviations if no rows were averaged."""
    return rows if (rows["runs"] > 1).any() else rows.drop(columns=["standard_deviation", "runs"])


def read_images(paths: list[str] | None) -> list[np.ndarray]:
    """Decodes image files to uint8 [h, w, 3]. If `paths` is empty, returns scikit-learn's two sample photographs."""
    if not paths:
        from sklearn import datasets

        return datasets.load_sample_images().images[::-1]  # The flower is first.
    return [
        tf.io.decode_image(image_files.load(path), channels=3, expand_animations=False).numpy()
        for path in paths
    ]


def _panels(rows: int, columns: int, size: float = 1.9) -> tuple[plt.Figure, Any]:
    return plt.subplots(
        rows,
        columns,
        figsize=(size * columns, size * rows + 0.3),
        squeeze=False,
        subplot_kw=dict(xticks=[], yticks=[]),
    )


def _add_legend(axis: plt.Axes) -> None:
    """Adds a legend to the right of a panel."""
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


# ---------------------------------------------------------------------------------------------------- augmentation


# title -> names for `policies.branch_policy`; the operators are applied to the center crop
_OPERATORS = {
    "original": (),
    "crop, resize": ("crop",),
    "crop, resize, flip": ("crop",),
    "color drop": ("drop",),
    "color jitter": ("jitter",),
    "rotate": ("rotate",),
    "cutout": ("cutout",),
    "Gaussian noise": ("noise",),
    "Gaussian blur": ("blur",),
    "Sobel": ("sobel",),
    "equalize": ("equalize",),
    "solarize": ("solarize",),
    "motion blur": ("motion_blur",),
    "AutoAugment": ("autoaugment",),
    "crop and color": ("crop", "color"),
}


def operators(image: list[str] | None, out: str, size: int = 160) -> str:
    """Plots three random samples of each operator applied to the same image (extended version of Figure 4).

    Brightness is additive, as in the paper.
    """
    pixels = tf.image.convert_image_dtype(read_images(image)[0], tf.float32)
    pixels = data_util.preprocess_for_eval(pixels, size, crop=False)
    figure, axes = _panels(-(-len(_OPERATORS) // 2), 6)
    for axis in axes.flat[3 * len(_OPERATORS) :]:
        axis.axis("off")
    seeds = tf.constant([[draw, _SEED] for draw in range(3)], tf.int64)
    rows = []
    for index, (title, names) in enumerate(_OPERATORS.items()):
        policy = policies.branch_policy(names, 1.0, "additive", flip=title != "crop, resize")
        if len(names) == 1:
            # With only one operator, the probability is 1, so that each image shows its effect.
            (operator,) = policy.operators
            policy = data_util.Policy().then(dataclasses.replace(operator, probability=1.0))
        augmented = data_util.apply_operators(tf.stack([pixels] * 3), policy, seeds)
        axes.flat[3 * index].set_title(title, loc="left")
        for draw, drawn in enumerate(augmented.numpy()):
            axes.flat[3 * index + draw].imshow(drawn)
            rows.append((title, draw, *drawn.mean((0, 1)), drawn.std()))
    columns = ["operator", "draw", "mean_red", "mean_green", "mean_blue", "std"]
    return save(figure, pd.DataFrame(rows, columns=columns).round(4), out, "operators")


def views(dataset: str, flags: str, out: str) -> str:
    """Plots pairs of augmented views of up to eight images from a data set, with blur as in training."""
    config = common.parse_flags(flags, dataset=dataset)
    source = common.open_source(config)
    count = min(8, datasets.check_split(source, "train_split", config.train_split))
    pairs, _ = next(iter(data.build_view_pairs(config, source, config.train_split, _SEED, count)))
    views = simclr.views(pairs, config.replace(seed=_SEED), 0)
    figure, axes = _panels(len(views), count, 1.3)
    rows = []
    for view, images in enumerate(views):
        axes[view, 0].set_ylabel(f"view {view + 1}")
        for column, image in enumerate(images.numpy()):
            axes[view, column].imshow(image, interpolation="nearest")
            rows.append((column, view, image.mean(), image.std()))
    return save(
        figure, pd.DataFrame(rows, columns=["image", "view", "mean", "std"]).round(4), out, "views"
    )


def histograms(image: list[str] | None, out: str) -> str:
    """Plots pixel-value histograms of crops with and without color distortion (Figure 6).

    Brightness is additive, as in the paper.
    """
    images = read_images(image)
    crop = data_util.crop_and_flip_policy()
    jitter, grayscale = data_util.color_distortion(1.0, "additive")
    # Both policies use the same seeds, so the crops match. Jitter is always applied to show its
    # effect in every crop.
    crop_policies = {
        "without": crop,
        "with": crop.then(dataclasses.replace(jitter, probability=1.0), grayscale),
    }
    figure, axes = plt.subplots(
        len(images),
        2 * _CROPS,
        figsize=(3 * _CROPS, 1.4 * len(images) + 0.4),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    rows = []
    for row, pixels in enumerate(images):
        for block, (name, policy) in enumerate(crop_policies.items()):
            axes[0, block * _CROPS].set_title(f"{name} color distortion", loc="left")
            for draw in range(_CROPS):
                seed = tf.constant([draw, _SEED], tf.int64)
                view = data_util.apply_policy(pixels, policy, seed, 160).numpy()
                counts, edges = np.histogram(view, 32, (0, 1))
                axis = axes[row, block * _CROPS + draw]
                axis.stairs(counts / counts.sum(), edges, fill=True, color="0.25")
                axis.set_xticks([0, 1])
                rows += [(row, name, draw, *pair) for pair in zip(edges, counts)]
    figure.supxlabel("intensity")
    figure.supylabel("fraction of values")
    columns = ["image", "color_distortion", "crop", "bin_start", "count"]
    return save(figure, pd.DataFrame(rows, columns=columns).round(5), out, "histograms")


# --------------------------------------------------------------------------------------------------------- one network


def eigenvalues(checkpoint: str, out: str) -> str:
    """Plots the sorted squared real parts of the eigenvalues of a square linear projection head (Appendix B.4)."""
    model, _ = loading.open_network(checkpoint)
    layers = model._projection_head.linear_layers
    kernel = layers[0].dense.kernel.numpy() if len(layers) == 1 else np.zeros([0, 1])
    if kernel.shape[0] != kernel.shape[1]:
        raise UserError(
            f"--checkpoint={checkpoint}: the network has no square linear projection head. Pretrain a"
            " network with --proj_head_mode=linear"
            f" --proj_out_dim={model.resnet_model.num_features}."
        )
    values = np.sort(np.square(np.linalg.eigvals(kernel).real))[::-1]
    indices = np.arange(1, len(values) + 1)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3))
    for axis, scale in zip(axes, ("linear", "log")):
        axis.plot(indices, values, color="0.1")
        axis.set_yscale(scale)
        axis.set_xlabel("eigenvalue index, sorted")
        axis.set_ylabel(f"squared real part ({scale})")
    figure.tight_layout()
    rows = pd.DataFrame({"index": indices, "squared_real_part": values})
    return save(figure, rows, out, "eigenvalues")


def tsne(checkpoint: str, dataset: str, flags: str, split: str, seed: int, out: str) -> str:
    """Plots t-SNE visualizations of h and z = g(h) for ten random classes of a data set (Appendix B.4).

    The figure shows at most 1000 examples.

    Args:
      checkpoint: path of a network with a projection head.
      dataset: data set, specified as for run.py.
      flags: flags of run.py that override the settings of the network.
      split: split to draw the examples from.
      seed: seed for drawing the classes and the examples, and for t-SNE.
      out: output directory.

    Returns:
      The path of the PNG file.

    Raises:
      UserError: the network has no projection head, or the split has no labels.
    """
    from sklearn import manifold

    model, config = common.load(checkpoint, dataset, flags)
    source = common.open_source(config)
    datasets.check_split(source, "split", split)
    if not source.class_names or source.multi_label:
        raise UserError(
            f"--dataset={config.dataset}: the figure requires one label per image. Use another data set."
        )
    batches = evaluate.eval_batches(config, source, split, tf.distribute.get_strategy())
    *spaces, labels = common.extract_h_and_z(model, batches, f"h and z of {split}")
    random = np.random.default_rng(seed)
    chosen = np.sort(random.permutation(np.unique(labels))[:_CLASSES])
    selected = np.sort(random.permutation(np.flatnonzero(np.isin(labels, chosen)))[:1000])
    labels = labels[selected]
    figure, axes = _panels(1, 2, 5)
    embeddings = []
    for axis, title, space in zip(axes.flat, ("h", "z = g(h)"), spaces):
        points = manifold.TSNE(
            perplexity=min(30, (len(labels) - 1) / 3), init="pca", random_state=seed
        ).fit_transform(space[selected])
        embeddings.append(points)
        for index, label in enumerate(chosen):
            axis.scatter(
                *points[labels == label].T,
                s=14,
                marker=_MARKERS[index],
                linewidths=0.5,
                edgecolors="0.2",
                color=plt.cm.viridis(index / max(len(chosen) - 1, 1)),
                label=source.class_names[label],
            )
        axis.set_title(title)
    _add_legend(axes[0, 1])
    rows = pd.DataFrame(np.hstack(embeddings), columns=["h_x", "h_y", "z_x", "z_y"]).round(3)
    rows.insert(0, "class", np.take(source.class_names, labels))
    return save(figure, rows, out, "tsne")


# -------------------------------------------------------------------------------------------------------- many runs


def pairs(csv: str, out: str) -> str:
    """Plots the accuracy for each pair of augmentations, with row averages (Figure 5).

    The CSV file must contain the columns `first`, `second` and `accuracy`. For a pair with several
    rows, the figure shows the mean and the sample standard deviation.
    """
    columns = ("first", "second")
    rows = _average(read_csv(csv, columns), columns)
    names = pd.concat([rows["first"], rows["second"]]).unique()
    grid, deviations = (
        100
        * rows.pivot(index="first", columns="second", values=column).reindex(names, columns=names)
        for column in ("accuracy", "standard_deviation")
    )
    grid["average"] = grid.mean(axis=1)
    figure, axis = plt.subplots(figsize=(1.5 + 0.8 * len(names), 1 + 0.7 * len(names)))
    image = axis.imshow(grid, cmap="Greys")
    for (y, x), value in np.ndenumerate(grid):
        text = "" if np.isnan(value) else f"{value:.1f}"
        if x < len(names) and not np.isnan(deviations.iat[y, x]):
            text += f"\n± {deviations.iat[y, x]:.1f}"
        color = "white" if image.norm(value) > 0.5 else "black"
        axis.text(x, y, text, ha="center", va="center", color=color)
    axis.axvline(len(names) - 0.5, color="black")
    axis.set_xticks(range(len(names) + 1), list(grid), rotation=40, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("second transformation")
    axis.set_ylabel("first transformation")
    axis.set_title("top-1 accuracy, %")
    return save(figure, _without_deviations(rows), out, "pairs")


def heads(csv: str, out: str) -> str:
    """Plots accuracy by output dimension, with one bar per projection head and representation (Figure 8).

    The CSV file must contain the columns `head`, `dimension` (empty without a head),
    `representation` and `accuracy`. The optional column `logistic regression on g(h)` contains the
    accuracies of g(h) in the same runs. Several seeds are averaged, and error bars show the sample
    standard deviation.
    """
    rows = read_csv(csv, ("head", "dimension", "representation"))
    if "logistic regression on g(h)" in rows:
        projections = rows["logistic regression on g(h)"]
        rows = pd.concat([rows, rows.assign(accuracy=projections, representation="g(h)")])
    rows = rows.dropna(subset="accuracy").fillna({"dimension": "no head"})
    rows["label"] = rows["head"].replace("none", "no") + " head, " + rows["representation"]
    rows = _average(rows, ("label", "dimension"))
    sizes = sorted(rows["dimension"].unique(), key=lambda text: (len(text), text))
    rows["dimension"] = pd.Categorical(rows["dimension"], sizes)
    return _bars_figure(rows, rows["label"], "dimension", out, "heads")


def batches(csv: str, measure: str, average: str, out: str) -> str:
    """Plots accuracy by number of epochs, with one bar per batch size (Figures 9, B.1, B.2 and B.7).

    The CSV file must contain the columns `epochs` and `batch_size`, and the column named by
    `measure`. If the optional column `scaling` exists, each learning-rate scaling has separate
    bars. If the optional column `seed` exists, accuracies are also averaged over seeds.

    Args:
      csv: CSV file.
      measure: name of the column to plot, "accuracy" or "top-5".
      average: comma-separated names of the columns to average over. Each bar shows the mean over the runs that
        differ in these columns, and its error bar shows the sample standard deviation.
      out: output directory.
    """
    averaged = average.split(",") if average else []
    rows = read_csv(csv, averaged, ("epochs", "batch_size"), measure)
    columns = ["scaling", "batch_size", "epochs"]
    rows["scaling"] = rows["scaling"].fillna("") if "scaling" in rows else ""
    rows = rows.astype({"epochs": int, "batch_size": int}).sort_values(columns)
    if "seed" in rows:
        averaged.append("seed")
    rows = rows.drop_duplicates([*columns, *averaged, measure])
    for row in rows[rows.duplicated([*columns, *averaged])].itertuples():
        raise UserError(
            f"--csv={csv}: two rows have different accuracies for batch_size={row.batch_size}"
            f" and epochs={row.epochs}. Add the column 'scaling' to distinguish the rows, remove"
            " one of them, or use --average=COLUMN."
        )
    rows = _average(rows, columns, measure)
    labels = "batch " + rows["batch_size"].astype(str) + " " + rows["scaling"]
    return _bars_figure(rows, labels.str.strip(), "epochs", out, "batches", measure)


def temperatures(csv: str, out: str) -> str:
    """Plots the mean accuracy by batch size, with one bar per temperature (Figure B.8).

    The CSV file must contain the columns `temperature`, `batch_size`, `training` and `accuracy`.
    The figure has one panel for each value in the column `training`. Each bar shows the mean over
    all other settings (learning rates, numbers of epochs and seeds), and its error bar shows the
    sample standard deviation.
    """
    numeric = ["temperature", "batch_size"]
    rows = read_csv(csv, ("training",), numeric).astype({"batch_size": int})
    rows = _average(rows.sort_values(numeric), ("training", *numeric))
    labels = rows["temperature"].map("temperature {:g}".format)
    return _bars_figure(rows, labels, "batch_size", out, "temperatures", panels=rows["training"])


def _bars_figure(
    rows: pd.DataFrame,
    labels: pd.Series,
    x: str,
    out: str,
    name: str,
    measure: str = "accuracy",
    panels: pd.Series | str = "",
) -> str:
    """Plots groups of bars that show accuracies in percent, with error bars where accuracies were averaged.

    Args:
      rows: result of `_average`.
      labels: legend label for each row.
      x: column with the values on the x-axis.
      out: output directory.
      name: name of the figure.
      measure: column with the accuracies.
      panels: title of the panel for each row, or for all.
    """
    groups = rows.assign(label=labels, panel=panels).groupby("panel", sort=False)
    width = 2 + max(1.2, 0.15 * labels.nunique()) * rows[x].nunique()
    figure, axes = plt.subplots(
        1, len(groups), figsize=(width * len(groups), 3), squeeze=False, sharey=True
    )
    for axis, (title, group) in zip(axes.flat, groups):
        means, deviations = (
            100 * group.pivot(index=x, columns="label", values=column)[group["label"].unique()]
            for column in (measure, "standard_deviation")
        )
        means.plot.bar(
            ax=axis,
            yerr=None if deviations.isna().all(axis=None) else deviations,
            capsize=2,
            width=0.8,
            rot=0,
            legend=False,
            color=plt.cm.Greys(np.linspace(0.15, 0.85, len(means.columns))),
            edgecolor="black",
        )
        for index, bar in enumerate(axis.patches):
            bar.set_hatch(_HATCHES[index // len(means) % len(_HATCHES)])
        axis.set_title(title)
        axis.set_xlabel(x.replace("_", " "))
        axis.set_ylabel(f"{'top-1' if measure == 'accuracy' else measure} accuracy, %")
        axis.label_outer()
    _add_legend(axes[0, -1])
    return save(figure, _without_deviations(rows), out, name)


def parameters(csv: str, out: str) -> str:
    """Plots accuracy against the number of parameters, with one marker per group (Figure 7).

    The CSV file must contain the columns `network`, `million parameters`, `accuracy` and `group`.
    Rows that differ only in their accuracies, such as those of runs with several seeds, are
    averaged. Error bars show the sample standard deviation.
    """
    rows = read_csv(csv, ("network", "group"), ("million parameters",))
    return _points_figure(rows, out, "parameters")


def fine_tuning(csv: str, out: str) -> str:
    """Plots accuracy after fine-tuning against that of linear evaluation (Figures B.5 and B.6).

    The CSV file must contain the columns `start` (the pretrained network), `labels` (the fraction
    of the labels, which determines the marker), `accuracy before` (linear evaluation) and
    `accuracy`. Several seeds are averaged. Error bars show the sample standard deviation.
    """
    x, columns = "accuracy before", ["start", "labels"]
    rows = read_csv(csv, columns, (x,))
    rows[x] = 100 * rows.groupby(columns)[x].transform("mean")
    rows = rows.rename(columns=dict(zip(columns, ("network", "group"))))
    titles = "linear evaluation: top-1 accuracy, %", "fine-tuning: top-1 accuracy, %"
    return _points_figure(rows, out, "fine_tuning", x, titles)


def race(csv: str, out: str) -> str:
    """Plots accuracies of frozen encoders by minutes of training, with one line per run.

    The CSV file must contain the columns `program`, `run`, `minutes`, `accuracy` (of logistic
    regression) and `nearest neighbors`.
    """
    measures = ("accuracy", "nearest neighbors")
    rows = read_csv(csv, ("program", "run"), ("minutes", "nearest neighbors"))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for axis, measure in zip(axes, measures):
        for marker, ((program, _), points) in zip(
            _MARKERS, rows.groupby(["program", "run"], sort=False)
        ):
            axis.plot(points["minutes"], 100 * points[measure], f"k-{marker}", label=program)
        axis.set_xlabel("minutes of training")
        axis.set_title("logistic regression" if measure == "accuracy" else measure)
    axes[0].set_ylabel("top-1 accuracy, %")
    _add_legend(axes[-1])
    return save(figure, rows, out, "race")


def methods(csv: str | None, out: str) -> str:
    """Plots the paper's accuracies against the number of parameters, for SimCLR and other methods (Figure 1).

    The paper's accuracies are from Table 6 and, for the supervised ResNet-50, from Table B.3. The
    optional CSV file adds our results. It has the same format as for `parameters`.
    """
    supervised = studies.read_numbers("table_b3")[0]
    rows = [
        (
            f"{row['Method'].removesuffix(' (ours)')}, {row['Architecture'].removesuffix(' (*)')}",
            row["Param (M)"],
            f"{'SimCLR' if row['Method'] == 'SimCLR (ours)' else 'other methods'}, paper",
            row["Top 1"] / 100,
        )
        for row in studies.read_numbers("table_6")
    ]
    rows.append(
        (
            f"supervised, {supervised['Model']}",
            rows[0][1],  # The first row is a ResNet-50, too.
            "supervised, paper",
            supervised["Top 1: Crop"] / 100,
        )
    )
    columns = ["network", "million parameters", "group", "accuracy"]
    tables = [pd.DataFrame(rows, columns=columns)]
    if csv:
        ours = read_csv(csv, ("network", "group"), ("million parameters",))
        tables.append(ours.assign(group=ours["group"] + ", ours"))
    return _points_figure(pd.concat(tables), out, "methods")


def _points_figure(
    rows: pd.DataFrame,
    out: str,
    name: str,
    x: str = "million parameters",
    titles: tuple[str, str] = ("encoder parameters, million", "top-1 accuracy, %"),
) -> str:
    """Plots accuracy against `x`, with one marker per network, labeled with its name, and saves the figure.

    Shortens ResNet-50 to R50. `titles` are those of the axes.
    """
    rows = _average(rows, ("network", x, "group"))
    figure, axis = plt.subplots(figsize=(8, 5.5))
    for index, (group, members) in enumerate(rows.groupby("group", sort=False)):
        axis.errorbar(
            members[x],
            100 * members["accuracy"],
            100 * members["standard_deviation"],
            fmt=_MARKERS[index % len(_MARKERS)],
            color=plt.cm.Greys((0.9, 0.5, 0.0)[index % 3]),
            markeredgecolor="black",
            ecolor="black",
            capsize=2,
            label=group,
        )
    if x == "million parameters":
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.margins(0.15)
    axis.set_xlabel(titles[0])
    axis.set_ylabel(titles[1])
    _add_legend(axis)
    points = zip(rows[x], 100 * rows["accuracy"])
    _label_points(axis, list(zip(rows["network"].str.replace("ResNet-", "R"), points)))
    return save(figure, _without_deviations(rows), out, name)


# Directions from a point to its label, in order of preference.
# To the right first: above and below a point, there may be error bars.
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))


def _label_points(axis: plt.Axes, labels: list[tuple[str, tuple[float, float]]]) -> None:
    """Writes labels next to points, avoiding overlaps with points, labels and the frame where possible.

    Args:
      axis: axes with their final limits.
      labels: list of (text, (x, y)).
    """
    axis.figure.canvas.draw()  # Determines the limits.
    occupied = [
        transforms.Bbox.from_bounds(x - 5, y - 5, 10, 10)
        for x, y in axis.transData.transform([point for _, point in labels])
    ]
    frame = axis.bbox
    occupied += [
        transforms.Bbox.from_extents(x, frame.y0, x, frame.y1) for x in (frame.x0, frame.x1)
    ]
    for label, point in labels:
        texts = [
            axis.annotate(
                label,
                point,
                (6 * x, 5 * y),
                textcoords="offset points",
                fontsize=7,
                ha=("center", "left", "right")[x],
                va=("center", "bottom", "top")[y],
            )
            for x, y in _DIRECTIONS
        ]
        overlaps = [text.get_window_extent().count_overlaps(occupied) for text in texts]
        best = texts.pop(np.argmin(overlaps))
        occupied.append(best.get_window_extent())
        for text in texts:
            text.remove()


# ----------------------------------------------------------------------------------------------------------- report


@plt.rc_context(STYLE)
def accuracies(rows: pd.DataFrame, name: str, runner: Runner) -> str:
    """Plots our results (dots) and the paper's (diamonds) for a report. Returns the Markdown for the image, or "".

    At the paper's scale, the plot shows accuracies (for Table 3, those of predictions from h).
    Accuracies at the small scale are not comparable with the paper's. Therefore, the plot shows the
    changes in accuracy relative to a baseline run, or only our accuracies if no changes can be
    computed.
    """
    plots_changes = runner.scale == "small" and rows["change"].notna().any()
    if plots_changes:
        ours, paper = rows["change"], rows["change in the paper"]
    else:
        ours = 100 * rows["_ours"]
        paper = rows["_paper"] if runner.scale == "paper" else float("nan")
    points = rows[["run"]].assign(ours=ours, paper=paper).dropna(subset="ours")
    if points.empty:
        return ""
    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.26 * len(points)))
    heights = range(len(points))[::-1]
    for label, marker, face in (("ours", "o", "black"), ("paper", "D", "none")):
        if points[label].notna().any():
            axis.scatter(
                points[label],
                heights,
                marker=marker,
                color="black",
                facecolors=face,
                label=label,
                zorder=3,
            )
    if plots_changes:
        axis.axvline(0, color="0.6", linewidth=1)
    axis.set_yticks(heights, points["run"], fontsize=8)
    axis.set_xlabel("change in accuracy, percentage points" if plots_changes else "accuracy, %")
    axis.grid(axis="y", color="0.85")
    _add_legend(axis)
    figure.savefig(os.path.join(runner.folder, f"{name}.svg"), metadata=_NO_DATE)
    plt.close(figure)
    return f"![accuracies]({name}.svg)"
