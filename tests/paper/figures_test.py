"""Checks the data in the figures and in their CSV files, and that invalid input is rejected.

`tables_test.py` checks the image files.
"""

import inspect
import itertools
import statistics

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import scipy.linalg
import tensorflow as tf
import threadpoolctl
from matplotlib import container
from numpy.testing import assert_allclose, assert_array_equal
from pytest import approx
from sklearn import datasets, manifold

from paper import drawing, figures
from sources.digits import digits_source


@pytest.fixture
def draw(tmp_path):
    """Returns a function that plots a figure without saving it, and returns the table in its CSV file and its `Axes`.

    The argument `table` is the text of the file for --csv.
    """

    def plot(name, *arguments, table=""):
        arguments = [name, *arguments, f"--out={tmp_path}"]
        if table:
            (tmp_path / "in.csv").write_text(inspect.cleandoc(table))
            arguments.append(f"--csv={tmp_path}/in.csv")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plt, "close", plt.Figure.draw_without_rendering)
            figures.main(arguments)
        figure = plt.gcf()
        plt.close(figure)
        return pd.read_csv(tmp_path / f"{name}.csv"), figure.axes

    return plot


@pytest.fixture
def write_image(tmp_path):
    """Returns a function that writes a gray image and returns the flag --image with its path."""

    def write(level):
        path = tmp_path / f"{level}.png"
        path.write_bytes(tf.io.encode_png(tf.fill([64, 64, 3], np.uint8(level))).numpy())
        return f"--image={path}"

    return write


def bars_of(axis):
    """Returns a nested dict: legend label -> tick label -> (height, half the length of the error bar or NaN)."""
    ticks, series = [label.get_text() for label in axis.get_xticklabels()], {}
    for bars in axis.containers:
        if isinstance(bars, container.BarContainer):
            errors = [np.nan] * len(bars)
            if bars.errorbar is not None:
                errors = [
                    np.nan if len(segment) < 2 else (segment[1, 1] - segment[0, 1]) / 2
                    for segment in bars.errorbar.lines[2][0].get_segments()
                ]
            series[bars.get_label()] = {
                ticks[round(bar.get_x() + bar.get_width() / 2)]: (bar.get_height(), error)
                for bar, error in zip(bars, errors)
            }
    return series


def lines_of(rows):
    return rows.to_csv(index=False, header=False).splitlines()


def images_of(axes):
    return np.stack([axis.images[0].get_array() for axis in axes if axis.images])


def points_of(axis):
    """Returns a dict that maps the labels of scatter plots and of points with error bars to the points [n, 2]."""
    scattered = {points.get_label(): points.get_offsets().data for points in axis.collections}
    return scattered | {
        points.get_label(): points.lines[0].get_xydata() for points in axis.containers
    }


def test_each_operator_is_plotted_with_three_random_samples(draw):
    rows, axes = draw("operators")
    titles, images = [*drawing._OPERATORS], images_of(axes)
    assert [axis.get_title(loc="left") for axis in axes[: len(images) : 3]] == titles
    assert [*zip(rows["operator"], rows["draw"])] == [*itertools.product(titles, range(3))]
    measured = np.column_stack([images.mean((1, 2)), images.std((1, 2, 3))])
    assert_allclose(rows.iloc[:, 2:], measured, atol=1e-4)
    # The default image is the 427 x 640 photograph flower.jpg.
    photograph = datasets.load_sample_image("flower.jpg")[:, 107:534] / 255
    original = np.clip(tf.image.resize(photograph, [160, 160], tf.image.ResizeMethod.BICUBIC), 0, 1)
    assert_allclose(images[:3], [original] * 3, atol=1e-5)


def test_histograms_count_every_pixel_value(draw, write_image):
    rows, axes = draw("histograms", write_image(100), write_image(0))
    fractions = np.reshape(rows["count"] / (160 * 160 * 3), [2, 2, 4, 32])
    assert_allclose(fractions.sum(-1), 1)
    # Without color distortion, all values are 100 / 255, which is in bin 12: [12 / 32, 13 / 32).
    assert (fractions[0, 0, :, 12] == 1).all() and fractions[0, 1].min() < 1
    # Multiplicative brightness would leave the second image black.
    assert (fractions[1, 0, :, 0] == 1).all() and fractions[1, 1, :, 2:].any()
    for axis, expected in zip(axes, fractions.reshape(16, 32), strict=True):
        values, edges, _ = axis.patches[0].get_data()
        assert_allclose(values, expected)
        assert_allclose(edges, np.arange(33) / 32)


def test_color_jitter_shifts_the_brightness_of_a_black_image_as_in_the_paper(
    write_image, monkeypatch
):
    monkeypatch.setattr(drawing, "save", lambda figure, rows, *_: plt.close(figure) or rows)
    shown = {title: drawing._OPERATORS[title] for title in ("color jitter", "crop and color")}
    monkeypatch.setattr(drawing, "_OPERATORS", shown)
    rows = drawing.operators([write_image(0).removeprefix("--image=")], "", size=16)
    assert min(rows.groupby("operator")["mean_green"].max()) > 0.05


@pytest.mark.parametrize("split, count", [("train", 8), ("train[:5]", 5)])
def test_views_figure_shows_two_views_of_up_to_eight_images(split, count, draw):
    """With crops of the whole image and without other operators, the views equal the images."""
    rows, axes = draw(
        "views",
        "--dataset=digits",
        f"--flags=--image_size=8 --train_split='{split}' "
        "--min_crop_area=1 --random_flip=false --color_jitter_strength=0 --use_blur=false",
    )
    records = digits_source().records(split).take(count).as_numpy_iterator()
    images = [image / np.float32(255) for _, image, _ in records]
    assert_allclose(images_of(axes), [*images, *images], atol=1e-6)
    expected = [
        (column, view, image.mean(), image.std())
        for view in range(2)
        for column, image in enumerate(images)
    ]
    assert_allclose(rows, expected, atol=1e-4)


def test_views_figure_shows_augmented_views(draw):
    _, axes = draw("views", "--dataset=digits", "--flags=--image_size=16")
    views = images_of(axes)
    assert views.shape == (16, 16, 16, 3)
    assert all(np.abs(one - other).max() > 0.1 for one, other in zip(views[:8], views[8:]))


def test_eigenvalues_match_scipy(draw, network):
    path, model = network
    rows, axes = draw("eigenvalues", f"--checkpoint={path}")
    kernel = model._projection_head.linear_layers[0].dense.kernel.numpy()
    expected = np.sort(scipy.linalg.eig(np.float64(kernel), right=False).real ** 2)[::-1]
    assert_allclose(rows["squared_real_part"][:50], expected[:50], rtol=1e-3)
    for axis, scale in zip(axes, ("linear", "log"), strict=True):
        ((index, plotted),) = (line.get_data() for line in axis.lines)
        assert_array_equal(index, np.arange(1, 129))
        assert_allclose(plotted[:50], expected[:50], rtol=1e-3)
        assert axis.get_yscale() == scale


def test_tsne_plots_every_example_of_the_split(draw, network):
    path, model = network
    flags = ["--split=test[:60]", "--flags=--image_size=8 --eval_batch_size=20"]
    # On a busy machine, the threads of t-SNE would wait for each other for a minute.
    with threadpoolctl.threadpool_limits(1):
        rows, axes = draw("tsne", f"--checkpoint={path}", "--dataset=digits", *flags)
    records = list(digits_source().records("test[:60]").as_numpy_iterator())
    labels = rows.pop("class")
    assert_array_equal(labels, [label for _, _, label in records])
    assert [axis.get_title() for axis in axes] == ["h", "z = g(h)"]
    outputs = model(np.stack([image for _, image, _ in records]) / np.float32(255), training=False)
    all_points = np.split(rows.to_numpy(), 2, axis=1)
    for axis, points, name in zip(axes, all_points, ("final_avg_pool", "proj_head_output")):
        for digit, plotted in points_of(axis).items():
            assert_allclose(plotted, points[labels == int(digit)], atol=1e-3)
        # Neighbors in the figure are also neighbors in the feature space. For random points, the
        # value is about 0.5. On some processors, it is only 0.7 for these features.
        assert manifold.trustworthiness(outputs[name].numpy(), points) > 0.6


def test_pairs_figure_is_plotted_from_a_csv_file(draw):
    rows, (axis,) = draw(
        "pairs",
        table="""
        first,second,accuracy
        crop,crop,0.3
        crop,color,0.55
        color,crop,0.5
    """,
    )
    assert lines_of(rows) == ["crop,crop,0.3", "crop,color,0.55", "color,crop,0.5"]
    # The last column contains the row means.
    assert_allclose(axis.images[0].get_array().filled(np.nan), [[30, 55, 42.5], [50, np.nan, 50]])
    assert [text.get_text() for text in axis.texts] == ["30.0", "55.0", "42.5", "50.0", "", "50.0"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["crop", "color", "average"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["crop", "color"]


def test_batches_figure_is_plotted_from_a_csv_file(draw):
    rows, (axis,) = draw(
        "batches",
        table="""
        epochs,batch_size,accuracy
        20,32.0,0.9
        20,64,0.6
        10,32,0.6
        10,64,0.5
        10,128,
    """,
    )
    # Rows without an accuracy are skipped.
    assert lines_of(rows) == [",32,10,0.6", ",32,20,0.9", ",64,10,0.5", ",64,20,0.6"]
    nan = np.nan
    assert bars_of(axis) == {
        "batch 32": {"10": (60, nan), "20": (90, nan)},
        "batch 64": {"10": (50, nan), "20": (60, nan)},
    }
    assert axis.get_ylabel() == "top-1 accuracy, %" and axis.get_xlabel() == "epochs"


def test_heads_figure_shows_both_representations_of_the_same_runs(draw):
    _, (axis,) = draw(
        "heads",
        table="""
        head,dimension,representation,accuracy,logistic regression on g(h)
        none,,h,0.4,
        linear,32,h,0.5,0.3
        linear,32,h,0.6,0.4
        linear,128,g(h),0.2,
    """,
    )
    bars, nan = bars_of(axis), np.nan
    deviation = 100 * statistics.stdev([0.5, 0.6])
    assert bars.keys() == {"no head, h", "linear head, h", "linear head, g(h)"}
    assert bars["no head, h"]["no head"] == (40, nan)
    assert bars["linear head, h"]["32"] == approx((55, deviation))
    assert bars["linear head, g(h)"]["32"] == approx((35, deviation))
    assert bars["linear head, g(h)"]["128"] == (20, nan)


def test_fine_tuning_figure_has_one_marker_per_network_and_fraction_of_the_labels(draw):
    _, (axis,) = draw(
        "fine_tuning",
        table="""
        start,labels,accuracy before,accuracy
        R18,1 %,0.4,0.3
        R18,1 %,0.5,0.4
        R18,10 %,0.45,0.6
        R50,1 %,0.55,0.5
    """,
    )
    points = points_of(axis)
    assert_allclose(points["1 %"], [[45, 35], [55, 50]])
    assert_allclose(points["10 %"], [[45, 60]])
    assert axis.get_xscale() == "linear" and "linear evaluation" in axis.get_xlabel()


def test_race_has_one_line_per_run_and_panel(draw):
    _, axes = draw(
        "race",
        table="""
        run,program,minutes,accuracy,nearest neighbors
        a,simclr,5,0.4,0.3
        b,lightly,3,0.1,0.1
        c,lightly,6,0.3,0.2
        a,simclr,10,0.5,0.35
    """,
    )
    drawn = [{line.get_label(): line.get_xydata() for line in axis.lines} for axis in axes]
    assert_allclose(drawn[0]["simclr"], [[5, 40], [10, 50]])
    assert_allclose(drawn[1]["simclr"], [[5, 30], [10, 35]])
    assert_allclose(drawn[1]["lightly"], [[6, 20]])


def test_top_5_accuracy_is_plotted_with_separate_bars_for_each_learning_rate_scaling(draw):
    rows, (axis,) = draw(
        "batches",
        "--measure=top-5",
        table="""
        scaling,epochs,batch_size,accuracy,top-5
        linear,1,8,0.5,0.75
        sqrt,1,8,0.6,0.5
        sqrt,1,16,0.5,
    """,
    )
    assert lines_of(rows) == ["linear,8,1,0.75", "sqrt,8,1,0.5"]
    assert bars_of(axis) == {
        "batch 8 linear": {"1": (75, np.nan)},
        "batch 8 sqrt": {"1": (50, np.nan)},
    }
    assert axis.get_ylabel() == "top-5 accuracy, %"


def test_bars_show_means_and_standard_deviations(draw):
    _, (axis,) = draw(
        "batches",
        "--average=learning_rate",
        table="""
        epochs,batch_size,learning_rate,accuracy
        1,8,0.5,0.5
        1,8,1.0,0.6
        1,8,1.5,0.85
        2,8,0.5,0.7
    """,
    )
    bars = bars_of(axis)["batch 8"]
    assert bars["1"] == approx((65, 100 * statistics.stdev([0.5, 0.6, 0.85])))
    assert bars["2"] == (70, np.nan)


@pytest.mark.parametrize(
    "figure, columns, one, other",
    [
        ("pairs", "first,second", "crop,color", "color,crop"),
        ("batches", "batch_size,epochs", "8,1", "16,1"),
        ("parameters", "network,million parameters,group", "R50,24,a", "R18,11,a"),
    ],
)
def test_means_and_standard_deviations_over_seeds_are_plotted(figure, columns, one, other, draw):
    text = f"seed,{columns},accuracy\n1,{one},0.5\n2,{one},0.6\n1,{other},0.7"
    rows, _ = draw(figure, table=text)
    expected = [[0.55, statistics.stdev([0.5, 0.6]), 2], [0.7, np.nan, 1]]
    assert_allclose(rows.iloc[:, -3:], expected)


def test_temperatures_figure_averages_runs_with_the_same_training_length(draw):
    rows, axes = draw(
        "temperatures",
        table="""
        training,temperature,batch_size,accuracy
        up to 300,0.1,256,0.8
        up to 300,0.1,256,0.84
        more than 300,0.1,256,0.91
        up to 300,0.5,256,0.9
        up to 300,0.5,256,0.88
    """,
    )
    groups = lines_of(rows.iloc[:, :3])
    assert groups == ["up to 300,0.1,256", "more than 300,0.1,256", "up to 300,0.5,256"]
    first, second = (statistics.stdev(values) for values in ([0.8, 0.84], [0.9, 0.88]))
    assert [axis.get_title() for axis in axes] == ["up to 300", "more than 300"]
    short, long = map(bars_of, axes)
    assert short["temperature 0.1"]["256"] == approx((82, 100 * first))
    assert short["temperature 0.5"]["256"] == approx((89, 100 * second))
    assert long == {"temperature 0.1": {"256": (91, np.nan)}}


# The values are copied by hand from Table 6 and, for the supervised ResNet-50, from Table B.3.
PAPER_METHODS = """
Local Agg., ResNet-50: 24 60.2
MoCo, ResNet-50: 24 60.6
PIRL, ResNet-50: 24 63.6
CPC v2, ResNet-50: 24 63.8
SimCLR, ResNet-50: 24 69.3
Rotation, RevNet-50 (4x): 86 55.4
BigBiGAN, RevNet-50 (4x): 86 61.3
AMDIM, Custom-ResNet: 626 68.1
CMC, ResNet-50 (2x): 188 68.4
MoCo, ResNet-50 (4x): 375 68.6
CPC v2, ResNet-161: 305 71.5
SimCLR, ResNet-50 (2x): 94 74.2
SimCLR, ResNet-50 (4x): 375 76.5
supervised, ResNet-50: 24 76.5
"""


def test_methods_figure_shows_the_results_of_the_paper_and_of_our_runs(draw):
    lines = (line.split(": ") for line in PAPER_METHODS.strip().splitlines())
    expected = {name: (*map(float, numbers.split()),) for name, numbers in lines}
    rows, (axis,) = draw("methods")
    points = zip(rows["million parameters"], 100 * rows["accuracy"])
    assert dict(zip(rows["network"], map(approx, points))) == expected
    assert_allclose(points_of(axis)["SimCLR, paper"], [(24, 69.3), (94, 74.2), (375, 76.5)])
    labels = {text.get_text(): approx(text.xy) for text in axis.texts}
    assert labels == {name.replace("ResNet-", "R"): point for name, point in expected.items()}
    rows, (axis,) = draw(
        "methods", table="network,million parameters,accuracy,group\nResNet-50 (1x),24,0.69,SimCLR"
    )
    assert [*rows["network"]] == [*expected, "ResNet-50 (1x)"]
    assert lines_of(rows[-1:]) == ['ResNet-50 (1x),24,"SimCLR, ours",0.69']
    assert_allclose(points_of(axis)["SimCLR, ours"], [(24, 69)])


def test_invalid_arguments_give_one_line_errors_and_exit_status_2(fails):
    for arguments, words in {
        "pairs --csv=/no/such.csv": "/no/such.csv: No such file",
        "operators --image=/no/such.png": "/no/such.png",
        "views --dataset=digits --flags=--temprature=1": "--flags: unknown command line flag",
        "tsne --checkpoint=c --dataset=digits --seed=-1": "--seed: must be an integer from 0",
        "eigenvalues --checkpoint=/no/such": "--checkpoint=/no/such",
    }.items():
        fails(words, figures.main, arguments.split())


def test_invalid_csv_values_are_reported(tmp_path, fails):
    path = tmp_path / "in.csv"
    for average, text, words in (
        ("", "epochs,accuracy\n1,0.5", ": column batch_size is missing. Use a file with the"),
        ("", "epochs,batch_size,accuracy\n1,8,58", ": the column accuracy has no accuracies, or"),
        ("", "epochs,batch_size,accuracy\n1,8,", ": the column accuracy has no accuracies, or"),
        ("", "epochs,batch_size,accuracy\n1,8,0.5\n1,8,0.6", "two rows have different accuracies"),
        (
            "rate",
            "rate,epochs,batch_size,accuracy\n1,1,8,0.5\n1,1,8,0.6",
            "two rows have different",
        ),
        ("seed", "epochs,batch_size,accuracy\n1,8,0.5", "column seed is missing"),
    ):
        path.write_text(text)
        fails(words, figures.main, ["batches", f"--csv={path}", f"--average={average}"])


@pytest.mark.parametrize(
    "figure, settings, words",
    [
        ("tsne --dataset=digits", {"proj_head_mode": "none"}, "has no projection head"),
        ("eigenvalues", {"proj_out_dim": 16}, "--proj_head_mode=linear --proj_out_dim=128."),
    ],
)
def test_networks_with_unsuitable_heads_are_rejected(
    figure, settings, words, tmp_path, write_network, fails
):
    path, _ = write_network(tmp_path, **settings)
    fails(words, figures.main, [*figure.split(), f"--checkpoint={path}"])
