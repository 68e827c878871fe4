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
from paper import common
from probing import features
from runtime.errors import UserError, first_line
from sources import datasets, image_files

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

_SEED = 1
_CROPS = 4  # an image and a row of the histograms
_MARKERS = "osv^D<>phX"
_HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")


def save(figure: plt.Figure, columns: tuple[str, ...], rows: list[tuple], out: str, name: str) -> str:
    """Writes a figure and its data; returns the path of the PNG file."""
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


def read_csv(path: str, columns: tuple[str, ...], numbers: tuple[str, ...] = ()) -> list[dict]:
    """The rows of a CSV file that have an accuracy, as dicts, `numbers` as floats.

    Raises:
      UserError: it has not these columns, or no sound numbers in some.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--csv={path} cannot be read ({first_line(error)}): check the path") from error
    missing = [column for column in columns if not rows or rows[0].get(column) is None]
    if missing:
        raise UserError(f"--csv={path} has no column {missing[0]}: it must have {', '.join(columns)}, and a row at "
                        "least")
    rows = [row for row in rows if row["accuracy"]]  # A run that was not judged leaves it empty.
    if not rows:
        raise UserError(f"--csv={path} has no row with an accuracy: it must have one at least")
    for row in rows:
        for column in numbers:
            row[column] = _number(path, column, row[column])
    return rows


def _number(path, column, text):
    is_share = column == "accuracy"
    try:
        number = float(text)
    except (TypeError, ValueError):  # None where a row is too short
        number = math.nan
    if not (0 <= number <= 1 if is_share else 0 < number < math.inf):
        raise UserError(f"--csv={path}: {column} {text} is no number {'from 0 to 1' if is_share else 'above 0'}")
    return number


def read_images(paths: list[str] | None) -> list[np.ndarray]:
    """Images uint8 [h, w, 3] of files; without any, two photographs that scikit-learn brings along."""
    if not paths:
        from sklearn import datasets
        return [datasets.load_sample_image(name) for name in ("flower.jpg", "china.jpg")]
    for path in paths:
        if reason := "there is no such file" if not os.path.isfile(path) else image_files.why_unusable(path):
            raise UserError(f"--image={path}: {reason}: name another")
    return [tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False).numpy() for path in paths]


def _panels(rows, columns, size=1.9):
    figure, axes = plt.subplots(rows, columns, figsize=(size * columns, size * rows + 0.3), squeeze=False)
    for axis in axes.flat:
        axis.set_xticks([]), axis.set_yticks([])
    return figure, axes


# ---------------------------------------------------------------------------------------------------- augmentation


_OPERATORS = {  # title -> names for `policies.branch_policy`, applied to the centre of the image
    "original": (), "crop, resize": ("crop",), "crop, resize, flip": ("crop",), "colour drop": ("drop",),
    "colour jitter": ("jitter",),
    "rotate": ("rotate",), "cutout": ("cutout",), "Gaussian noise": ("noise",), "Gaussian blur": ("blur",),
    "Sobel": ("sobel",), "equalize": ("equalize",), "solarize": ("solarize",), "motion blur": ("motion_blur",),
    "AutoAugment": ("autoaugment",), "crop and colour": ("crop", "color"),
}


def operators(image: np.ndarray, out: str, size: int = 160) -> str:
    """All operators on an image (Figure 4, and more), three draws of each that draws."""
    image = data_util.preprocess_for_eval(tf.image.convert_image_dtype(image, tf.float32), size, crop=False)
    figure, axes = _panels(-(-len(_OPERATORS) // 2), 6)
    for axis in axes.flat[3 * len(_OPERATORS):]:
        axis.axis("off")
    rows = []
    for number, (title, names) in enumerate(_OPERATORS.items()):
        for draw in range(3):
            seeds = tf.constant([[draw, _SEED]], tf.int64)
            policy = policies.branch_policy(names, 1.0, "multiplicative", flip=title != "crop, resize")
            if len(names) == 1:  # Shown by itself, it is shown to do something.
                policy = data_util.Policy(operators=tuple(
                    dataclasses.replace(operator, probability=1.0) for operator in policy.operators))
            channels = data_util.apply_after_crop(data_util.to_channels(image[tf.newaxis]), policy, seeds)
            shown = data_util.from_channels(channels)[0].numpy()
            axis = axes[number // 2, 3 * (number % 2) + draw]
            axis.imshow(shown)
            axis.set_title(title if draw == 0 else "", fontsize=9, loc="left")
            rows.append((title, draw, *(f"{value:.4f}" for value in (*shown.mean((0, 1)), shown.std()))))
    return save(figure, ("operator", "draw", "mean_red", "mean_green", "mean_blue", "std"), rows, out, "operators")


def views(config: Config, out: str, count: int = 8) -> str:
    """Pairs of views of a data set, as the network is shown them, the blur included."""
    source = common.open_source(config)
    count = min(count, datasets.check_split(source, "train_split", config.train_split))
    pairs, _ = next(iter(data.build_view_pairs(config, source, config.train_split, _SEED, count)))
    shown = model_lib.blurred_views(pairs, config, _SEED, 0).numpy()
    figure, axes = _panels(len(shown) // count, count, 1.3)
    rows = []
    for number, image in enumerate(shown):
        view, column = divmod(number, count)
        axes[view, column].imshow(image, interpolation="nearest")
        rows.append((column, view, f"{image.mean():.4f}", f"{image.std():.4f}"))
    for view, axis in enumerate(axes[:, 0]):
        axis.set_ylabel(f"view {view + 1}", fontsize=9)
    return save(figure, ("image", "view", "mean", "std"), rows, out, "views")


def histograms(images: list[np.ndarray], out: str, size: int = 160) -> str:
    """Pixel intensities, over all channels, of crops without and with colour distortion (Figure 6)."""
    crop = data_util.crop_and_flip_policy()
    jitter, grayscale = data_util.color_distortion(1.0, "multiplicative")
    # The same crops in both; with jitter for all images.
    crops = {"without": crop, "with": crop.then(dataclasses.replace(jitter, probability=1.0), grayscale)}
    figure, axes = plt.subplots(len(images), 2 * _CROPS, figsize=(1.5 * 2 * _CROPS, 1.4 * len(images) + 0.4),
                                sharex=True, sharey=True, squeeze=False)
    rows = []
    for row, image in enumerate(images):
        for block, (name, policy) in enumerate(crops.items()):
            for draw in range(_CROPS):
                view = data_util.apply_policy(image, policy, tf.constant([draw, _SEED], tf.int64), size).numpy()
                counts, edges = np.histogram(view, 32, (0, 1))
                axis = axes[row, block * _CROPS + draw]
                axis.stairs(counts / counts.sum(), edges, fill=True, color="0.25")
                axis.set_xticks([0, 1])
                if row == 0 and draw == 0:
                    axis.set_title(f"{name} colour distortion", fontsize=9, loc="left")
                rows += [(row, name, draw, f"{edge:.5f}", count) for edge, count in zip(edges, counts)]
    figure.supxlabel("intensity", fontsize=9)
    figure.supylabel("share of values", fontsize=9)
    return save(figure, ("image", "colour_distortion", "crop", "bin_from", "values"), rows, out, "histograms")


# ------------------------------------------------------------------------------------------------------ of a network


def eigenvalues(path: str, out: str) -> str:
    """Squared real parts of the eigenvalues of a square linear projection head, in order (paper, B.4)."""
    model, _ = common.load(path)
    layers = model._projection_head.linear_layers
    kernel = layers[0].dense.kernel.numpy() if len(layers) == 1 else np.zeros([0, 1])
    if kernel.shape[0] != kernel.shape[1]:
        raise UserError(f"--checkpoint={path} has no square linear projection head: pretrain one by --proj_head_mode="
                        f"linear --proj_out_dim={model.resnet_model.num_features}")
    values = np.sort(np.square(np.linalg.eigvals(kernel).real))[::-1]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3))
    for axis, scale in zip(axes, ("linear", "log")):
        axis.plot(np.arange(1, len(values) + 1), np.maximum(values, 1e-12) if scale == "log" else values, color="0.1")
        axis.set_yscale(scale)
        axis.set_xlabel("eigenvalue, in order")
        axis.set_ylabel(f"squared real part ({scale})")
    figure.tight_layout()
    return save(figure, ("number", "squared_real_part"), [(number + 1, f"{value:.6g}") for number, value in
                                                          enumerate(values)], out, "eigenvalues")


def tsne(model: model_lib.Model, config: Config, split: str, out: str, most: int = 1000) -> str:
    """t-SNE of h and of z = g(h) for the first ten classes of a data set (paper, B.4: ten that were drawn)."""
    from sklearn import manifold

    common.check_has_head(model)
    source = common.open_source(config)
    datasets.check_split(source, "split", split)
    if not source.class_names:
        raise UserError(f"--dataset={config.dataset} has no labels: name one that has")
    strategy = tf.distribute.get_strategy()
    batches = evaluate.eval_batches(config, source, split, strategy)

    def both(images):
        endpoints = model(images, training=False)
        return tf.concat([endpoints["final_avg_pool"], endpoints["proj_head_output"]], 1)

    vectors, labels = features.extract(strategy, both, batches, f"h and z of {split}")
    chosen = np.flatnonzero(labels < 10)
    chosen = np.sort(np.random.default_rng(_SEED).permutation(chosen)[:most])
    vectors, labels = vectors[chosen], labels[chosen]
    if len(labels) < 3:
        raise UserError(f"--split={split} of {config.dataset} has {len(labels)} examples of its first ten classes: "
                        "give a larger one")
    spaces = np.split(vectors, [model.resnet_model.num_features], 1)
    figure, axes = plt.subplots(1, 2, figsize=(10, 5))
    places = []
    for axis, title, space in zip(axes, ("h", "z = g(h)"), spaces):
        perplexity = min(30, (len(labels) - 1) / 3)
        place = manifold.TSNE(perplexity=perplexity, init="pca", random_state=_SEED).fit_transform(space)
        places.append(place)
        for label in np.unique(labels):
            axis.scatter(*place[labels == label].T, s=14, marker=_MARKERS[label], linewidths=0.5, edgecolors="0.2",
                         color=plt.cm.viridis(label / 9), label=source.class_names[label])
        axis.set_title(title)
        axis.set_xticks([]), axis.set_yticks([])
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
    rows = [(source.class_names[label], *(f"{value:.3f}" for value in (*h, *z)))
            for label, h, z in zip(labels, *places)]
    return save(figure, ("class", "h_x", "h_y", "z_x", "z_y"), rows, out, "tsne")


# ---------------------------------------------------------------------------------------------------- of many runs


def pairs(path: str, out: str) -> str:
    """Accuracies of pairs of augmentations, with the rows' averages (Figure 5); columns first, second, accuracy."""
    rows = read_csv(path, ("first", "second", "accuracy"), numbers=("accuracy",))
    names = list(dict.fromkeys([row["first"] for row in rows] + [row["second"] for row in rows]))
    grid = np.full([len(names), len(names) + 1], np.nan)
    for row in rows:
        grid[names.index(row["first"]), names.index(row["second"])] = 100 * row["accuracy"]
    filled = ~np.isnan(grid[:, :-1])
    grid[:, -1] = np.where(filled.any(1), np.where(filled, grid[:, :-1], 0).sum(1) / np.maximum(filled.sum(1), 1),
                           np.nan)
    low, high = np.nanmin(grid), np.nanmax(grid)
    figure, axis = plt.subplots(figsize=(1.5 + 0.8 * len(names), 1 + 0.7 * len(names)))
    axis.imshow(grid, cmap="Greys", vmin=low, vmax=high)
    for y, x in np.ndindex(grid.shape):
        dark = grid[y, x] > (low + high) / 2
        axis.text(x, y, "" if np.isnan(grid[y, x]) else f"{grid[y, x]:.1f}", ha="center", va="center",
                  color="white" if dark else "black")
    axis.axvline(len(names) - 0.5, color="black")
    axis.set_xticks(range(len(names) + 1), [*names, "average"], rotation=40, ha="right")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("second transformation")
    axis.set_ylabel("first transformation")
    axis.set_title("top-1 accuracy, %", fontsize=10)
    return save(figure, ("first", "second", "accuracy"), [(row["first"], row["second"], row["accuracy"])
                                                          for row in rows], out, "pairs")


def batches(path: str, out: str) -> str:
    """Accuracies by epochs, a bar for each batch size (Figure 9); columns epochs, batch_size, accuracy, and scaling.

    The last, of the learning rate, may be missing.
    """
    rows = read_csv(path, ("epochs", "batch_size", "accuracy"), numbers=("epochs", "batch_size", "accuracy"))
    bars = {}
    for row in rows:
        series = bars.setdefault((row.get("scaling") or "", int(row["batch_size"])), {})
        if series.setdefault(int(row["epochs"]), row["accuracy"]) != row["accuracy"]:
            raise UserError(f"--csv={path} has two accuracies for batch {row['batch_size']:g}, {row['epochs']:g} "
                            "epochs: tell them apart by a column scaling, or leave one out")
    epochs = sorted({epoch for series in bars.values() for epoch in series})
    figure, axis = plt.subplots(figsize=(2 + 1.2 * len(epochs), 3))
    width = 0.8 / len(bars)
    for number, ((scaling, size), series) in enumerate(sorted(bars.items())):
        axis.bar([epochs.index(epoch) + (number - (len(bars) - 1) / 2) * width for epoch in series],
                 [100 * value for value in series.values()], width, label=f"batch {size} {scaling}".strip(),
                 color=plt.cm.Greys(0.15 + 0.7 * number / len(bars)), hatch=_HATCHES[number % len(_HATCHES)],
                 edgecolor="black")
    axis.set_xticks(range(len(epochs)), epochs)
    axis.set_ylim(80 * min(min(series.values()) for series in bars.values()), None)
    axis.set_xlabel("epochs")
    axis.set_ylabel("top-1 accuracy, %")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, ("scaling", "batch_size", "epochs", "accuracy"), [
        (*key, epoch, value) for key, series in bars.items() for epoch, value in series.items()], out, "batches")


def parameters(path: str, out: str) -> str:
    """Accuracies against millions of parameters (Figure 7); columns network, million parameters, accuracy, group."""
    columns = ("network", "million parameters", "accuracy", "group")
    rows = read_csv(path, columns, numbers=("million parameters", "accuracy"))
    figure, axis = plt.subplots(figsize=(6, 4))
    for number, group in enumerate(dict.fromkeys(row["group"] for row in rows)):
        found = [row for row in rows if row["group"] == group]
        x, y = ([row[name] * scale for row in found] for name, scale in (("million parameters", 1),
                                                                              ("accuracy", 100)))
        axis.scatter(x, y, marker=_MARKERS[number % len(_MARKERS)], color=plt.cm.Greys(0.9 - 0.25 * (number % 3)),
                     edgecolors="black", label=group)
        for row, *place in zip(found, x, y):
            axis.annotate(row["network"], place, textcoords="offset points", xytext=(0, 6), fontsize=8, ha="center")
    axis.set_xscale("log")
    for each in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        each("{x:g}")
    axis.margins(0.2)
    axis.set_xlabel("parameters of the encoder, million")
    axis.set_ylabel("top-1 accuracy, %")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, columns, [tuple(row[column] for column in columns) for row in rows], out, "parameters")
