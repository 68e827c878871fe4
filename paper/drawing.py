"""The paper's figures, drawn with matplotlib."""

from __future__ import annotations

import csv
import dataclasses
import math
import os

import matplotlib
import numpy as np
import tensorflow as tf

import data
import data_util
import evaluate
import model as model_lib
from augmentation import policies
from config import Config
from paper import common, studies
from probing import features
from runtime.errors import UserError, first_line
from sources import datasets, image_files

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import ticker, transforms  # noqa: E402

_SEED = 1
_CROPS = 4  # Number of crops per image. Each crop is shown with and without color distortion.
_CLASSES = 10  # Number of classes in the t-SNE figure.
_MARKERS = "osv^D<>phX"
_HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")


def save(
    figure: plt.Figure, columns: tuple[str, ...], rows: list[tuple], out: str, name: str
) -> str:
    """Saves a figure (PNG and SVG) and its data (CSV), and closes the figure. Returns the path of the PNG file."""
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, name)
    figure.savefig(f"{path}.png", dpi=110, bbox_inches="tight")
    figure.savefig(f"{path}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    with open(f"{path}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    return f"{path}.png"


def read_csv(
    path: str, columns: tuple[str, ...], numeric: tuple[str, ...] = (), measure: str = "accuracy"
) -> list[dict]:
    """Reads a CSV file and returns the rows that have an accuracy.

    Args:
      path: CSV file.
      columns: required columns.
      numeric: columns to convert to floats. Accuracies must be in [0, 1]. Values in the other
        numeric columns must be positive.
      measure: column that contains the accuracies.

    Returns:
      One dict per row.

    Raises:
      UserError: the file cannot be read, lacks columns or accuracies, or contains invalid numbers.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--csv={path}: the file cannot be read ({first_line(error)}). Check the path."
        ) from error
    missing = [column for column in columns if not rows or rows[0].get(column) is None]
    if missing:
        raise UserError(
            f"--csv={path}: column {missing[0]} is missing. Use a file with at least one row "
            f"and the columns {', '.join(columns)}."
        )
    # In the report, this field is empty if a run has no accuracy.
    rows = [row for row in rows if row[measure]]
    if not rows:
        raise UserError(f"--csv={path}: no row has an accuracy. Add at least one accuracy.")
    for row in rows:
        for column in numeric:
            row[column] = _parse_number(path, column, row[column], column == measure)
    return rows


def _average_over_seeds(rows, columns):
    """Merges rows that have the same values in `columns`, such as those of runs that differ only in their seeds.

    `accuracy` is replaced with the mean. The columns `standard_deviation` ("" for a single run) and
    `runs` are added.
    """
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    averages = []
    for group in groups.values():
        accuracies = [row["accuracy"] for row in group]
        averages.append(
            {
                **group[0],
                "accuracy": float(np.mean(accuracies)),
                **dict(zip(_DEVIATION_COLUMNS, _deviation(accuracies))),
            }
        )
    return averages


def _save_averages(figure, columns, rows, out, name):
    """Saves a figure and the result of `_average_over_seeds`. Omits the deviation columns if no rows were merged."""
    columns = (*columns, *_DEVIATION_COLUMNS[: 2 * any(row["runs"] > 1 for row in rows)])
    return save(
        figure, columns, [tuple(row[column] for column in columns) for row in rows], out, name
    )


def _parse_number(path, column, text, is_accuracy):
    try:
        value = float(text)
    except (TypeError, ValueError):  # DictReader fills short rows with None.
        value = math.nan
    if not (0 <= value <= 1 if is_accuracy else 0 < value < math.inf):
        raise UserError(
            f"--csv={path}: {column} is {text}. Use a number "
            f"{'from 0 to 1' if is_accuracy else 'above 0'}."
        )
    return value


def read_images(paths: list[str] | None) -> list[np.ndarray]:
    """Decodes image files to uint8 [h, w, 3]. If `paths` is empty, returns scikit-learn's two sample photographs."""
    if not paths:
        from sklearn import datasets

        return [datasets.load_sample_image(name) for name in ("flower.jpg", "china.jpg")]
    for path in paths:
        if reason := (
            "file not found" if not os.path.isfile(path) else image_files.why_unusable(path)
        ):
            raise UserError(f"--image={path}: {reason}. Use another file.")
    return [
        tf.io.decode_image(image_files.load(path), channels=3, expand_animations=False).numpy()
        for path in paths
    ]


def _panels(rows, columns, size=1.9):
    figure, axes = plt.subplots(
        rows, columns, figsize=(size * columns, size * rows + 0.3), squeeze=False
    )
    for axis in axes.flat:
        axis.set_xticks([]), axis.set_yticks([])
    return figure, axes


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


def operators(image: np.ndarray, out: str, size: int = 160) -> str:
    """Plots three random samples of each operator applied to the same image (extended version of Figure 4).

    Brightness is additive, as in the paper.
    """
    image = data_util.preprocess_for_eval(
        tf.image.convert_image_dtype(image, tf.float32), size, crop=False
    )
    figure, axes = _panels(-(-len(_OPERATORS) // 2), 6)
    for axis in axes.flat[3 * len(_OPERATORS) :]:
        axis.axis("off")
    rows = []
    for index, (title, names) in enumerate(_OPERATORS.items()):
        for draw in range(3):
            seeds = tf.constant([[draw, _SEED]], tf.int64)
            policy = policies.branch_policy(names, 1.0, "additive", flip=title != "crop, resize")
            if len(names) == 1:
                # With only one operator, the probability is 1, so that each image shows its effect.
                policy = data_util.Policy(
                    operators=tuple(
                        dataclasses.replace(operator, probability=1.0)
                        for operator in policy.operators
                    )
                )
            augmented = data_util.apply_operators(image[tf.newaxis], policy, seeds)[0].numpy()
            axis = axes[index // 2, 3 * (index % 2) + draw]
            axis.imshow(augmented)
            axis.set_title(title if draw == 0 else "", fontsize=9, loc="left")
            rows.append(
                (
                    title,
                    draw,
                    *(f"{value:.4f}" for value in (*augmented.mean((0, 1)), augmented.std())),
                )
            )
    return save(
        figure,
        ("operator", "draw", "mean_red", "mean_green", "mean_blue", "std"),
        rows,
        out,
        "operators",
    )


def views(config: Config, out: str, count: int = 8) -> str:
    """Plots pairs of augmented views of `count` images from a data set, with blur as in training."""
    source = common.open_source(config)
    count = min(count, datasets.check_split(source, "train_split", config.train_split))
    pairs, _ = next(iter(data.build_view_pairs(config, source, config.train_split, _SEED, count)))
    all_views = model_lib.blurred_views(pairs, config, _SEED, 0).numpy()
    figure, axes = _panels(len(all_views) // count, count, 1.3)
    rows = []
    for index, image in enumerate(all_views):
        view, column = divmod(index, count)
        axes[view, column].imshow(image, interpolation="nearest")
        rows.append((column, view, f"{image.mean():.4f}", f"{image.std():.4f}"))
    for view, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f"view {view + 1}", fontsize=9)
    return save(figure, ("image", "view", "mean", "std"), rows, out, "views")


def histograms(images: list[np.ndarray], out: str, size: int = 160) -> str:
    """Plots pixel-value histograms of crops with and without color distortion (Figure 6).

    Brightness is additive, as in the paper.
    """
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
        figsize=(1.5 * 2 * _CROPS, 1.4 * len(images) + 0.4),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    rows = []
    for row, image in enumerate(images):
        for block, (name, policy) in enumerate(crop_policies.items()):
            for draw in range(_CROPS):
                view = data_util.apply_policy(
                    image, policy, tf.constant([draw, _SEED], tf.int64), size
                ).numpy()
                counts, edges = np.histogram(view, 32, (0, 1))
                axis = axes[row, block * _CROPS + draw]
                axis.stairs(counts / counts.sum(), edges, fill=True, color="0.25")
                axis.set_xticks([0, 1])
                if row == 0 and draw == 0:
                    axis.set_title(f"{name} color distortion", fontsize=9, loc="left")
                rows += [
                    (row, name, draw, f"{edge:.5f}", count) for edge, count in zip(edges, counts)
                ]
    figure.supxlabel("intensity", fontsize=9)
    figure.supylabel("fraction of values", fontsize=9)
    return save(
        figure, ("image", "color_distortion", "crop", "bin_start", "count"), rows, out, "histograms"
    )


# --------------------------------------------------------------------------------------------------------- one network


def eigenvalues(path: str, out: str) -> str:
    """Plots the sorted squared real parts of the eigenvalues of a square linear projection head (Appendix B.4)."""
    model, _ = common.load(path)
    layers = model._projection_head.linear_layers
    kernel = layers[0].dense.kernel.numpy() if len(layers) == 1 else np.zeros([0, 1])
    if kernel.shape[0] != kernel.shape[1]:
        raise UserError(
            f"--checkpoint={path}: the network has no square linear projection head. Pretrain a"
            " network with --proj_head_mode=linear"
            f" --proj_out_dim={model.resnet_model.num_features}."
        )
    values = np.sort(np.square(np.linalg.eigvals(kernel).real))[::-1]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3))
    for axis, scale in zip(axes, ("linear", "log")):
        axis.plot(
            np.arange(1, len(values) + 1),
            np.maximum(values, 1e-12) if scale == "log" else values,
            color="0.1",
        )
        axis.set_yscale(scale)
        axis.set_xlabel("eigenvalue index, sorted")
        axis.set_ylabel(f"squared real part ({scale})")
    figure.tight_layout()
    return save(
        figure,
        ("index", "squared_real_part"),
        [(index, f"{value:.6g}") for index, value in enumerate(values, 1)],
        out,
        "eigenvalues",
    )


def tsne(
    model: model_lib.Model,
    config: Config,
    split: str,
    out: str,
    seed: int = _SEED,
    max_examples: int = 1000,
) -> str:
    """Plots t-SNE visualizations of h and z = g(h) for ten random classes of a data set (Appendix B.4).

    Args:
      model: a network with a projection head.
      config: settings of the data set and the images.
      split: split to draw the examples from.
      out: output directory.
      seed: seed for drawing the classes and the examples, and for t-SNE.
      max_examples: maximum number of examples.

    Returns:
      The path of the PNG file.

    Raises:
      UserError: the network has no projection head, or the split has no labels or too few examples.
    """
    from sklearn import manifold

    common.check_has_projection_head(model)
    source = common.open_source(config)
    datasets.check_split(source, "split", split)
    if not source.class_names:
        raise UserError(
            f"--dataset={config.dataset}: the data set has no labels. Use a data set with labels."
        )
    strategy = tf.distribute.get_strategy()
    batches = evaluate.eval_batches(config, source, split, strategy)

    def h_and_z(images):
        endpoints = model(images, training=False)
        return tf.concat([endpoints["final_avg_pool"], endpoints["proj_head_output"]], 1)

    vectors, labels = features.extract(strategy, h_and_z, batches, f"h and z of {split}")
    random = np.random.default_rng(seed)
    chosen = np.sort(random.permutation(np.unique(labels))[:_CLASSES])
    selected = np.flatnonzero(np.isin(labels, chosen))
    selected = np.sort(random.permutation(selected)[:max_examples])
    vectors, labels = vectors[selected], labels[selected]
    if len(labels) < 3:
        raise UserError(
            f"--split={split}: the split has {len(labels)} examples from {len(chosen)} classes of "
            f"{config.dataset}, but t-SNE needs at least 3 examples. Use a larger split."
        )
    spaces = np.split(vectors, [model.resnet_model.num_features], 1)
    figure, axes = plt.subplots(1, 2, figsize=(10, 5))
    embeddings = []
    for axis, title, space in zip(axes, ("h", "z = g(h)"), spaces):
        perplexity = min(30, (len(labels) - 1) / 3)
        points = manifold.TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(
            space
        )
        embeddings.append(points)
        for index, label in enumerate(chosen):
            axis.scatter(
                *points[labels == label].T,
                s=14,
                marker=_MARKERS[index],
                linewidths=0.5,
                edgecolors="0.2",
                color=plt.cm.viridis(index / (_CLASSES - 1)),
                label=source.class_names[label],
            )
        axis.set_title(title)
        axis.set_xticks([]), axis.set_yticks([])
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    rows = [
        (source.class_names[label], *(f"{value:.3f}" for value in (*h, *z)))
        for label, h, z in zip(labels, *embeddings)
    ]
    return save(figure, ("class", "h_x", "h_y", "z_x", "z_y"), rows, out, "tsne")


# -------------------------------------------------------------------------------------------------------- many runs


def pairs(path: str, out: str) -> str:
    """Plots the accuracy for each pair of augmentations, with row averages (Figure 5).

    The CSV file must contain the columns `first`, `second` and `accuracy`. For a pair with several
    rows, the figure shows the mean and the sample standard deviation.
    """
    columns = ("first", "second", "accuracy")
    rows = _average_over_seeds(read_csv(path, columns, numeric=("accuracy",)), columns[:2])
    names = list(dict.fromkeys([row["first"] for row in rows] + [row["second"] for row in rows]))
    grid, deviations = np.full([len(names), len(names) + 1], np.nan), {}
    for row in rows:
        position = names.index(row["first"]), names.index(row["second"])
        grid[position] = 100 * row["accuracy"]
        deviations[position] = (
            f"\n± {100 * row['standard_deviation']:.1f}" if row["runs"] > 1 else ""
        )
    has_value = ~np.isnan(grid[:, :-1])
    grid[:, -1] = np.where(
        has_value.any(1),
        np.where(has_value, grid[:, :-1], 0).sum(1) / np.maximum(has_value.sum(1), 1),
        np.nan,
    )
    low, high = np.nanmin(grid), np.nanmax(grid)
    figure, axis = plt.subplots(figsize=(1.5 + 0.8 * len(names), 1 + 0.7 * len(names)))
    axis.imshow(grid, cmap="Greys", vmin=low, vmax=high)
    for y, x in np.ndindex(grid.shape):
        dark = grid[y, x] > (low + high) / 2
        axis.text(
            x,
            y,
            "" if np.isnan(grid[y, x]) else f"{grid[y, x]:.1f}{deviations.get((y, x), '')}",
            ha="center",
            va="center",
            color="white" if dark else "black",
        )
    axis.axvline(len(names) - 0.5, color="black")
    axis.set_xticks(range(len(names) + 1), [*names, "average"], rotation=40, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("second transformation")
    axis.set_ylabel("first transformation")
    axis.set_title("top-1 accuracy, %", fontsize=10)
    return _save_averages(figure, columns, rows, out, "pairs")


def batches(path: str, out: str, measure: str = "accuracy", average: tuple[str, ...] = ()) -> str:
    """Plots accuracy by number of epochs, with one bar per batch size (Figures 9, B.1, B.2 and B.7).

    The CSV file must contain the columns `epochs` and `batch_size`, and the column named by
    `measure`. If the optional column `scaling` exists, each learning-rate scaling has separate
    bars. If the optional column `seed` contains several seeds, accuracies are also averaged over
    seeds.

    Args:
      path: CSV file.
      out: output directory.
      measure: name of the column to plot, "accuracy" or "top-5".
      average: names of the columns to average over. Each bar shows the mean over the runs that
        differ in these columns, and its error bar shows the sample standard deviation.
    """
    rows = read_csv(
        path,
        ("epochs", "batch_size", measure, *average),
        ("epochs", "batch_size", measure),
        measure,
    )
    if len({row.get("seed") for row in rows}) > 1:
        average = (*average, "seed")
    bars = {}
    for row in rows:
        key = row.get("scaling") or "", int(row["batch_size"])
        values = bars.setdefault(key, {}).setdefault(int(row["epochs"]), {})
        if (
            values.setdefault(tuple(row[column] for column in average), row[measure])
            != row[measure]
        ):
            raise UserError(
                f"--csv={path}: two rows have different accuracies for"
                f" batch_size={row['batch_size']:g} and epochs={row['epochs']:g}. Add the column"
                " 'scaling' to distinguish the rows, remove one of them, or use --average=COLUMN."
            )
    bars = {
        key: {epochs: list(values.values()) for epochs, values in series.items()}
        for key, series in sorted(bars.items())
    }
    count = len({epochs for series in bars.values() for epochs in series})
    figure, axis = plt.subplots(figsize=(2 + max(1.2, 0.15 * len(bars)) * count, 3))
    _grouped_bars(
        axis,
        {f"batch {size} {scaling}".strip(): series for (scaling, size), series in bars.items()},
    )
    axis.set_xlabel("epochs")
    axis.set_ylabel(f"{_measure_title(measure)}, %")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(
        figure,
        ("scaling", "batch_size", "epochs", measure, *_DEVIATION_COLUMNS[: 2 * bool(average)]),
        [
            (*key, epochs, np.mean(values), *(_deviation(values) if average else ()))
            for key, series in bars.items()
            for epochs, values in series.items()
        ],
        out,
        "batches",
    )


_DEVIATION_COLUMNS = ("standard_deviation", "runs")


def _deviation(values):
    """Returns the sample standard deviation ("" for a single value) and the number of values."""
    return np.std(values, ddof=1) if len(values) > 1 else "", len(values)


def _measure_title(measure):
    return "top-1 accuracy" if measure == "accuracy" else f"{measure} accuracy"


def _grouped_bars(axis, series):
    """Plots groups of bars that show accuracies in percent.

    Args:
      axis: Matplotlib `Axes`.
      series: nested dict: label -> number on the x-axis -> list of accuracies in [0, 1]. Each bar
        shows the mean of a list. If the list has more than one value, an error bar shows the sample
        standard deviation.
    """
    positions = sorted({x for bars in series.values() for x in bars})
    width = 0.8 / len(series)
    for index, (label, bars) in enumerate(series.items()):
        deviations = [
            100 * np.std(values, ddof=1) if len(values) > 1 else np.nan for values in bars.values()
        ]
        axis.bar(
            [positions.index(x) + (index - (len(series) - 1) / 2) * width for x in bars],
            [100 * np.mean(values) for values in bars.values()],
            width,
            label=label,
            yerr=None if np.isnan(deviations).all() else deviations,
            capsize=2,
            color=plt.cm.Greys(0.15 + 0.7 * index / len(series)),
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor="black",
            ecolor="black",
        )
    axis.set_xticks(range(len(positions)), positions)
    axis.set_ylim(
        80 * min(min(values) for bars in series.values() for values in bars.values()), None
    )


def temperatures(path: str, out: str) -> str:
    """Plots the mean accuracy by batch size, with one bar per temperature (Figure B.8).

    The CSV file must contain the columns `temperature`, `batch_size`, `training` and `accuracy`.
    The figure has one panel for each value in the column `training`. Each bar shows the mean over
    all other settings (learning rates, numbers of epochs and seeds), and its error bar shows the
    sample standard deviation.
    """
    columns = ("training", "temperature", "batch_size", "accuracy")
    panels = {}
    for row in read_csv(path, columns, columns[1:]):
        temperatures = panels.setdefault(row["training"], {}).setdefault(row["temperature"], {})
        temperatures.setdefault(int(row["batch_size"]), []).append(row["accuracy"])
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 4 * len(panels), 3), squeeze=False)
    for axis, (title, temperatures) in zip(axes.flat, panels.items()):
        _grouped_bars(
            axis,
            {
                f"temperature {temperature:g}": dict(sorted(bars.items()))
                for temperature, bars in sorted(temperatures.items())
            },
        )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("batch size")
    limits = [axis.get_ylim() for axis in axes.flat]
    plt.setp(axes, ylim=(min(low for low, _ in limits), max(high for _, high in limits)))
    axes[0, 0].set_ylabel("top-1 accuracy, %")
    axes[0, -1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(
        figure,
        (*columns, *_DEVIATION_COLUMNS),
        [
            (title, f"{temperature:g}", batch, np.mean(values), *_deviation(values))
            for title, temperatures in panels.items()
            for temperature, bars in sorted(temperatures.items())
            for batch, values in sorted(bars.items())
        ],
        out,
        "temperatures",
    )


_PARAMETER_COLUMNS = ("network", "million parameters", "accuracy", "group")


def parameters(path: str, out: str) -> str:
    """Plots accuracy against the number of parameters, with one marker per group (Figure 7).

    The CSV file must contain the columns `network`, `million parameters`, `accuracy` and `group`.
    Rows that differ only in their accuracies, such as those of runs with several seeds, are
    averaged. Error bars show the sample standard deviation.
    """
    rows = read_csv(path, _PARAMETER_COLUMNS, numeric=("million parameters", "accuracy"))
    return _parameters_figure(rows, out, "parameters")


def methods(path: str | None, out: str) -> str:
    """Plots the paper's accuracies against the number of parameters, for SimCLR and other methods (Figure 1).

    The paper's accuracies are from Table 6 and, for the supervised ResNet-50, from Table B.3. The
    optional CSV file adds our results. It has the same format as for `parameters`.
    """
    table, supervised = studies.read_numbers("table_6"), studies.read_numbers("table_b3")[0]
    rows = [
        {
            "network": (
                f"{row['Method'].removesuffix(' (ours)')},"
                f" {row['Architecture'].removesuffix(' (*)')}"
            ),
            "million parameters": row["Param (M)"],
            "accuracy": row["Top 1"] / 100,
            "group": (
                "SimCLR, paper" if row["Method"] == "SimCLR (ours)" else "other methods, paper"
            ),
        }
        for row in table
    ]
    size = next(row["Param (M)"] for row in table if row["Architecture"] == supervised["Model"])
    rows.append(
        {
            "network": f"supervised, {supervised['Model']}",
            "million parameters": size,
            "accuracy": supervised["Top 1: Crop"] / 100,
            "group": "supervised, paper",
        }
    )
    ours = (
        read_csv(path, _PARAMETER_COLUMNS, numeric=("million parameters", "accuracy"))
        if path
        else []
    )
    return _parameters_figure(
        [*rows, *({**row, "group": f"{row['group']}, ours"} for row in ours)], out, "methods"
    )


def _parameters_figure(rows, out, name):
    """Plots one marker per network, labeled with its name, and saves the figure. Shortens ResNet-50 to R50."""
    rows = _average_over_seeds(
        rows, [column for column in _PARAMETER_COLUMNS if column != "accuracy"]
    )
    figure, axis = plt.subplots(figsize=(8, 5.5))
    for index, group in enumerate(dict.fromkeys(row["group"] for row in rows)):
        group_rows = [row for row in rows if row["group"] == group]
        axis.scatter(
            [row["million parameters"] for row in group_rows],
            [100 * row["accuracy"] for row in group_rows],
            marker=_MARKERS[index % len(_MARKERS)],
            color=plt.cm.Greys((0.9, 0.5, 0.0)[index % 3]),
            edgecolors="black",
            label=group,
        )
        repeated = [row for row in group_rows if row["runs"] > 1]
        if repeated:
            axis.errorbar(
                [row["million parameters"] for row in repeated],
                [100 * row["accuracy"] for row in repeated],
                [100 * row["standard_deviation"] for row in repeated],
                fmt="none",
                ecolor="black",
                capsize=2,
            )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.margins(0.15)
    axis.set_xlabel("encoder parameters, million")
    axis.set_ylabel("top-1 accuracy, %")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _label_points(
        axis,
        [
            (
                row["network"].replace("ResNet-", "R"),
                (row["million parameters"], 100 * row["accuracy"]),
            )
            for row in rows
        ],
    )
    return _save_averages(figure, _PARAMETER_COLUMNS, rows, out, name)


# (x offset, y offset, horizontal alignment, vertical alignment). The offsets from the marker are in
# points.
_LABEL_POSITIONS = (
    (0, 5, "center", "bottom"),
    (0, -5, "center", "top"),
    (6, 0, "left", "center"),
    (-6, 0, "right", "center"),
    (5, 5, "left", "bottom"),
    (-5, 5, "right", "bottom"),
    (5, -5, "left", "top"),
    (-5, -5, "right", "top"),
    (0, 14, "center", "bottom"),
    (0, -14, "center", "top"),
)


def _label_points(axis, labels):
    """Writes labels next to points, avoiding overlaps with other points and labels where possible.

    Args:
      axis: Matplotlib `Axes` with its final limits.
      labels: list of (text, (x, y)).
    """
    canvas = axis.figure.canvas
    canvas.draw()  # Determines the limits.
    renderer = canvas.get_renderer()
    occupied = [
        transforms.Bbox.from_bounds(x - 5, y - 5, 10, 10)
        for x, y in axis.transData.transform([point for _, point in labels])
    ]
    for label, point in labels:
        texts = [
            axis.annotate(
                label,
                point,
                fontsize=7,
                ha=horizontal,
                va=vertical,
                textcoords="offset points",
                xytext=(x, y),
            )
            for x, y, horizontal, vertical in _LABEL_POSITIONS
        ]
        boxes = [text.get_window_extent(renderer) for text in texts]
        overlaps = [box.count_overlaps(occupied) for box in boxes]
        best = overlaps.index(min(overlaps))
        occupied.append(boxes[best])
        for index, text in enumerate(texts):
            if index != best:
                text.remove()
