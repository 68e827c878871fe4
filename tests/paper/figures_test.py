"""Checks the data in the figures and in their CSV files, and that invalid input is rejected."""

import csv
import itertools
import statistics
import xml.etree.ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.linalg
import tensorflow as tf
from matplotlib import container
from sklearn import datasets, manifold

import model as model_lib
from checkpoints import restoring
from config import Config
from paper import drawing, figures
from sources.digits import digits_source
from support.images import write_images

SMALL = dict(
    resnet_depth=10, image_size=8, num_proj_layers=1, proj_head_mode="linear", proj_out_dim=512
)


def draw(tmp_path, name, *arguments):
    """Plots a figure, and checks that its files can be read.

    Returns:
      The rows of the CSV file and the list of the figure's `Axes`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing.plt, "close", lambda figure: None)
        figures.main([name, *arguments, f"--out={tmp_path / 'out'}"])
    figure = plt.gcf()
    plt.close(figure)
    tf.io.decode_png((tmp_path / "out" / f"{name}.png").read_bytes())
    xml.etree.ElementTree.parse(tmp_path / "out" / f"{name}.svg")
    with open(tmp_path / "out" / f"{name}.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert rows and all(len(row) == len(header) for row in rows)
    return rows, figure.axes


def bars_of(axis):
    """Returns a nested dict: legend label -> tick label -> (height, half the length of the error bar or NaN)."""
    ticks = {
        round(position): label.get_text()
        for position, label in zip(axis.get_xticks(), axis.get_xticklabels())
    }
    series = {}
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


def points_of(axis):
    """Returns a dict that maps the labels of scatter plots to their points [n, 2]."""
    return {points.get_label(): points.get_offsets().data for points in axis.collections}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Returns the checkpoint prefix of a network with a square linear projection head, and the kernel of the head."""
    model = model_lib.build_model(Config(**SMALL), 10)
    path = tf.train.Checkpoint(model=model).write(
        str(tmp_path_factory.mktemp("network") / "ckpt-1")
    )
    return path, model._projection_head.linear_layers[0].dense.kernel.numpy()


def test_each_operator_is_plotted_with_three_random_samples(tmp_path):
    rows, axes = draw(tmp_path, "operators")
    titles = [
        "original",
        "crop, resize",
        "crop, resize, flip",
        "color drop",
        "color jitter",
        "rotate",
        "cutout",
        "Gaussian noise",
        "Gaussian blur",
        "Sobel",
        "equalize",
        "solarize",
        "motion blur",
        "AutoAugment",
        "crop and color",
    ]
    assert [row[0] for row in rows[::3]] == titles
    shown = {
        title: [axis.images[0].get_array() for axis in axes[3 * index : 3 * index + 3]]
        for index, title in enumerate(titles)
    }
    assert [axis.get_title(loc="left") for axis in axes[: 3 * len(titles) : 3]] == titles
    for title, draw_index, *statistics_of_image in rows:
        image = shown[title][int(draw_index)]
        np.testing.assert_allclose(
            np.array(statistics_of_image, float), [*image.mean((0, 1)), image.std()], atol=1e-4
        )
    # The default image is the 427 x 640 photograph flower.jpg.
    photograph = datasets.load_sample_image("flower.jpg")[:, 107:534] / 255
    original = np.clip(tf.image.resize(photograph, [160, 160], tf.image.ResizeMethod.BICUBIC), 0, 1)
    for image in shown["original"]:
        np.testing.assert_allclose(image, original, atol=1e-5)
    for image in shown["color drop"]:
        gray = original @ [0.2989, 0.587, 0.114]
        np.testing.assert_allclose(image, np.repeat(gray[..., np.newaxis], 3, -1), atol=1e-5)
    for image in shown["rotate"]:
        assert min(np.abs(image - np.rot90(original, turns)).max() for turns in (1, 2, 3)) < 1e-5
    for image in shown["cutout"]:
        is_changed = np.abs(image - original).max(-1) > 1e-5
        assert is_changed.any() and (image[is_changed] == 0.5).all()
    for title in ("crop, resize", "color jitter", "Gaussian noise", "crop and color"):
        assert all(
            np.abs(image - other).max() > 0.05
            for image, other in itertools.combinations(shown[title], 2)
        )


def test_histograms_count_every_pixel_value(tmp_path):
    path = tmp_path / "gray.png"
    path.write_bytes(tf.io.encode_png(tf.fill([64, 64, 3], tf.constant(100, tf.uint8))).numpy())
    rows, axes = draw(tmp_path, "histograms", f"--image={path}", f"--image={path}")
    assert len(rows) == 2 * 2 * 4 * 32 and len(axes) == 2 * 2 * 4
    counts = np.array([int(row[-1]) for row in rows]).reshape(2, 2, 4, 32)
    assert (counts.sum(-1) == 160 * 160 * 3).all()
    # Without color distortion, all values are 100 / 255, which is in bin 12: [12 / 32, 13 / 32).
    assert (counts[:, 0, :, 12] == 160 * 160 * 3).all() and (
        counts[:, 1, :, 12] < 160 * 160 * 3
    ).any()
    for axis, expected in zip(axes, counts.reshape(16, 32)):
        values, edges, _ = axis.patches[0].get_data()
        np.testing.assert_allclose(values, expected / (160 * 160 * 3))
        np.testing.assert_allclose(edges, np.arange(33) / 32)
    titles = [axis.get_title(loc="left") for axis in axes[::4]]
    assert titles == ["without color distortion", "with color distortion", "", ""]


def test_color_jitter_shifts_the_brightness_of_a_black_image_as_in_the_paper(tmp_path):
    path = tmp_path / "black.png"  # Multiplicative brightness would leave this image black.
    path.write_bytes(tf.io.encode_png(tf.zeros([64, 64, 3], tf.uint8)).numpy())
    for operator in ("color jitter", "crop and color"):
        rows = [row for row in draw_black(tmp_path, "operators", path) if row[0] == operator]
        assert len(rows) == 3 and any(float(row[2]) > 0.05 for row in rows)
    rows = draw_black(tmp_path, "histograms", path)
    values = [(row[1], float(row[3])) for row in rows if int(row[4])]
    assert max(value for name, value in values if name == "with") > 0.05
    assert max(value for name, value in values if name == "without") == 0


def draw_black(tmp_path, name, path):
    """Plots the figure `name` for the image at `path`. Returns the rows of the CSV file."""
    figures.main([name, f"--image={path}", f"--out={tmp_path / 'out'}"])
    with open(tmp_path / "out" / f"{name}.csv", newline="") as file:
        return list(csv.reader(file))[1:]


@pytest.mark.parametrize("split, count", [("train", 8), ("train[:5]", 5)])
def test_views_figure_shows_two_views_of_up_to_eight_images(split, count, tmp_path):
    """With crops of the whole image and without other operators, the views equal the images."""
    rows, axes = draw(
        tmp_path,
        "views",
        "--dataset=digits",
        f"--flags=--image_size=8 --train_split='{split}' "
        "--min_crop_area=1 --random_flip=false --color_jitter_strength=0 --use_blur=false",
    )
    images = [
        image / np.float32(255)
        for _, image, _ in digits_source().records(split).as_numpy_iterator()
    ]
    assert [(int(column), int(view)) for column, view, *_ in rows] == [
        (column, view) for view in range(2) for column in range(count)
    ]
    for (column, _, mean, deviation), axis in zip(rows, axes, strict=True):
        image = images[int(column)]
        np.testing.assert_allclose(axis.images[0].get_array(), image, atol=1e-6)
        assert (float(mean), float(deviation)) == pytest.approx(
            (image.mean(), image.std()), abs=1e-4
        )
    assert [axes[0].get_ylabel(), axes[count].get_ylabel()] == ["view 1", "view 2"]


def test_views_figure_shows_augmented_views(tmp_path):
    _, axes = draw(
        tmp_path, "views", "--dataset=digits", "--flags=--image_size=16 --augmentation=broader"
    )
    views = np.stack([axis.images[0].get_array() for axis in axes])
    assert views.shape == (16, 16, 16, 3)
    assert all(np.abs(one - other).max() > 0.1 for one, other in zip(views[:8], views[8:]))


def test_eigenvalues_match_scipy(tmp_path, network):
    path, kernel = network
    rows, axes = draw(tmp_path, "eigenvalues", f"--checkpoint={path}")
    values = np.array([float(row[1]) for row in rows])
    expected = np.sort(scipy.linalg.eig(np.float64(kernel), right=False).real ** 2)[::-1]
    np.testing.assert_allclose(values[:200], expected[:200], rtol=1e-3)
    for axis, scale in zip(axes, ("linear", "log"), strict=True):
        ((index, plotted),) = (line.get_data() for line in axis.lines)
        np.testing.assert_array_equal(index, np.arange(1, 513))
        np.testing.assert_allclose(plotted[:200], expected[:200], rtol=1e-3)
        assert axis.get_yscale() == scale


def test_tsne_plots_every_example_of_the_split(tmp_path, network):
    rows, axes = draw(
        tmp_path,
        "tsne",
        f"--checkpoint={network[0]}",
        "--dataset=digits",
        "--split=test[:60]",
        "--flags=--image_size=8 --eval_batch_size=20",
    )
    records = list(digits_source().records("test[:60]").as_numpy_iterator())
    assert [row[0] for row in rows] == [str(label) for _, _, label in records]
    assert [axis.get_title() for axis in axes] == ["h", "z = g(h)"]
    assert [text.get_text() for text in axes[1].get_legend().get_texts()] == list("0123456789")
    model = model_lib.build_model(Config(**SMALL), 10)
    restoring.load_model(model, network[0])
    outputs = model(np.stack([image for _, image, _ in records]) / np.float32(255), training=False)
    for axis, columns, name in zip(
        axes, (slice(1, 3), slice(3, 5)), ("final_avg_pool", "proj_head_output")
    ):
        points = np.array([row[columns] for row in rows], float)
        plotted = points_of(axis)
        for digit in "0123456789":
            np.testing.assert_allclose(
                plotted[digit], points[[row[0] == digit for row in rows]], atol=1e-3
            )
        # Neighbors in the figure are also neighbors in the feature space. For random points, the
        # value is about 0.5. On some processors, it is only 0.7 for these features.
        assert manifold.trustworthiness(outputs[name].numpy(), points) > 0.6


def test_seed_determines_the_ten_random_classes_in_the_tsne_figure(tmp_path, network):
    names = [f"class{index:02}" for index in range(14)]
    write_images(
        tmp_path / "images", *(f"{name}/{number}.png" for name in names for number in range(3))
    )
    drawn = [
        [
            row[0]
            for row in draw(
                tmp_path,
                "tsne",
                f"--checkpoint={network[0]}",
                f"--dataset=folder:{tmp_path / 'images'}",
                "--split=train",
                "--flags=--image_size=8 --eval_batch_size=21",
                *seed,
            )[0]
        ]
        for seed in ([], ["--seed=1"], ["--seed=2"])
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    for classes in drawn:
        assert len(classes) == 30 and len(set(classes)) == 10 and set(classes) < set(names)
    assert set(drawn[0]) != set(names[:10]) or set(drawn[2]) != set(names[:10])


def write_csv(path, text):
    path.write_text(text)
    return f"--csv={path}"


def test_pairs_figure_is_plotted_from_a_csv_file(tmp_path):
    lines = ["crop,crop,0.3", "crop,color,0.55", "color,crop,0.5"]
    table = write_csv(tmp_path / "in.csv", "first,second,accuracy\n" + "\n".join(lines))
    rows, (axis,) = draw(tmp_path, "pairs", table)
    assert rows == [line.split(",") for line in lines]
    # The last column contains the row means.
    np.testing.assert_allclose(
        axis.images[0].get_array().filled(np.nan), [[30, 55, 42.5], [50, np.nan, 50]]
    )
    assert [text.get_text() for text in axis.texts] == ["30.0", "55.0", "42.5", "50.0", "", "50.0"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["crop", "color", "average"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["crop", "color"]


def test_batches_figure_is_plotted_from_a_csv_file(tmp_path):
    accuracies = {
        (epochs, size): 0.3 + 0.1 * epochs / size for epochs in (20, 10) for size in (32, 64, 128)
    }
    lines = [f"{epochs},{size},{accuracy}" for (epochs, size), accuracy in accuracies.items()]
    rows, (axis,) = draw(
        tmp_path,
        "batches",
        write_csv(tmp_path / "in.csv", "epochs,batch_size,accuracy\n" + "\n".join(lines)),
    )
    assert {
        (int(epochs), int(size)): float(accuracy) for _, size, epochs, accuracy in rows
    } == accuracies
    bars = bars_of(axis)
    assert (
        list(bars)
        == [text.get_text() for text in axis.get_legend().get_texts()]
        == ["batch 32", "batch 64", "batch 128"]
    )
    for (epochs, size), accuracy in accuracies.items():
        assert bars[f"batch {size}"][str(epochs)] == pytest.approx(
            (100 * accuracy, np.nan), nan_ok=True
        )
    assert axis.get_ylabel() == "top-1 accuracy, %" and axis.get_xlabel() == "epochs"


def test_bars_show_means_and_standard_deviations(tmp_path):
    table = write_csv(
        tmp_path / "in.csv",
        "epochs,batch_size,learning_rate,accuracy\n"
        "1,8,0.5,0.5\n1,8,1.0,0.6\n1,8,1.5,0.85\n2,8,0.5,0.7\n",
    )
    ((*first, mean, deviation, runs), second), (axis,) = draw(
        tmp_path, "batches", table, "--average=learning_rate"
    )
    assert (first, runs) == (["", "8", "1"], "3") and float(mean) == pytest.approx(0.65)
    assert float(deviation) == pytest.approx(statistics.stdev([0.5, 0.6, 0.85]))
    assert second == ["", "8", "2", "0.7", "", "1"]
    bars = bars_of(axis)["batch 8"]
    assert bars["1"] == pytest.approx((65, 100 * statistics.stdev([0.5, 0.6, 0.85])))
    assert bars["2"] == pytest.approx((70, np.nan), nan_ok=True)


@pytest.mark.parametrize(
    "figure, columns, rows",
    [
        ("pairs", "first,second", ["crop,color", "color,crop"]),
        ("batches", "batch_size,epochs", ["8,1", "16,1"]),
        ("parameters", "network,million parameters,group", ["R50,24,a", "R18,11,a"]),
    ],
)
def test_means_and_standard_deviations_over_seeds_are_plotted(figure, columns, rows, tmp_path):
    lines = [f"1,{rows[0]},0.5", f"2,{rows[0]},0.6", f"1,{rows[1]},0.7"]
    draw(
        tmp_path,
        figure,
        write_csv(tmp_path / "in.csv", f"seed,{columns},accuracy\n" + "\n".join(lines)),
    )
    with open(tmp_path / "out" / f"{figure}.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert float(first["accuracy"]) == pytest.approx(0.55) and first["runs"] == "2"
    assert float(first["standard_deviation"]) == pytest.approx(statistics.stdev([0.5, 0.6]))
    assert (second["accuracy"], second["standard_deviation"], second["runs"]) == ("0.7", "", "1")


def test_top_5_accuracy_is_plotted(tmp_path):
    table = write_csv(
        tmp_path / "in.csv", "epochs,batch_size,accuracy,top-5\n1,8,0.5,0.75\n1,16,0.5,\n"
    )
    rows, (axis,) = draw(tmp_path, "batches", table, "--measure=top-5")
    assert rows == [["", "8", "1", "0.75"]] and axis.get_ylabel() == "top-5 accuracy, %"
    assert bars_of(axis)["batch 8"]["1"][0] == 75


def test_temperatures_figure_averages_runs_with_the_same_training_length(tmp_path):
    accuracies = {
        ("up to 300 epochs", 0.1): (0.8, 0.84),
        ("more than 300 epochs", 0.1): (0.91,),
        ("up to 300 epochs", 0.5): (0.9, 0.88),
    }
    table = write_csv(
        tmp_path / "in.csv",
        "training,temperature,batch_size,accuracy\n"
        + "\n".join(
            f"{training},{temperature},256,{value}"
            for (training, temperature), values in accuracies.items()
            for value in values
        ),
    )
    rows, axes = draw(tmp_path, "temperatures", table)
    assert [axis.get_title() for axis in axes] == ["up to 300 epochs", "more than 300 epochs"]
    bars = {axis.get_title(): bars_of(axis) for axis in axes}
    assert [(training, float(temperature)) for training, temperature, *_ in rows] == list(
        accuracies
    )
    for (*_, batch, mean, deviation, runs), values in zip(rows, accuracies.values()):
        assert (batch, int(runs)) == ("256", len(values)) and float(mean) == pytest.approx(
            statistics.mean(values)
        )
        assert (
            deviation == ""
            if len(values) == 1
            else float(deviation) == pytest.approx(statistics.stdev(values))
        )
    for (training, temperature), values in accuracies.items():
        expected = (
            100 * statistics.mean(values),
            (100 * statistics.stdev(values) if len(values) > 1 else np.nan),
        )
        assert bars[training][f"temperature {temperature:g}"]["256"] == pytest.approx(
            expected, nan_ok=True
        )


# The values are copied by hand from Table 6 and, for the supervised ResNet-50, from Table B.3.
PAPER_METHODS = {
    "Local Agg., ResNet-50": (24, 60.2),
    "MoCo, ResNet-50": (24, 60.6),
    "PIRL, ResNet-50": (24, 63.6),
    "CPC v2, ResNet-50": (24, 63.8),
    "SimCLR, ResNet-50": (24, 69.3),
    "Rotation, RevNet-50 (4x)": (86, 55.4),
    "BigBiGAN, RevNet-50 (4x)": (86, 61.3),
    "AMDIM, Custom-ResNet": (626, 68.1),
    "CMC, ResNet-50 (2x)": (188, 68.4),
    "MoCo, ResNet-50 (4x)": (375, 68.6),
    "CPC v2, ResNet-161": (305, 71.5),
    "SimCLR, ResNet-50 (2x)": (94, 74.2),
    "SimCLR, ResNet-50 (4x)": (375, 76.5),
    "supervised, ResNet-50": (24, 76.5),
}


def test_methods_figure_shows_the_results_of_the_paper_and_of_our_runs(tmp_path):
    rows, (axis,) = draw(tmp_path, "methods")
    assert {
        name: (float(size), pytest.approx(100 * float(accuracy)))
        for name, size, _, accuracy in rows
    } == PAPER_METHODS
    assert {name for name, _, group, _ in rows if group == "SimCLR, paper"} == {
        "SimCLR, ResNet-50",
        "SimCLR, ResNet-50 (2x)",
        "SimCLR, ResNet-50 (4x)",
    }
    points = points_of(axis)
    np.testing.assert_allclose(points["SimCLR, paper"], [(24, 69.3), (94, 74.2), (375, 76.5)])
    np.testing.assert_allclose(points["supervised, paper"], [(24, 76.5)])
    others = [
        point
        for name, point in PAPER_METHODS.items()
        if not name.startswith(("SimCLR", "supervised"))
    ]
    np.testing.assert_allclose(sorted(map(tuple, points["other methods, paper"])), sorted(others))
    labels = {text.get_text(): text.xy for text in axis.texts}
    assert labels == {
        name.replace("ResNet-", "R"): pytest.approx(point) for name, point in PAPER_METHODS.items()
    }
    ours = write_csv(
        tmp_path / "in.csv",
        "network,million parameters,accuracy,group\nResNet-50 (1x),24,0.69,SimCLR\n",
    )
    more_rows, (axis,) = draw(tmp_path, "methods", ours)
    assert [[row[0], float(row[1]), *row[2:]] for row in more_rows] == [
        *([row[0], float(row[1]), *row[2:]] for row in rows),
        ["ResNet-50 (1x)", 24.0, "SimCLR, ours", "0.69"],
    ]
    np.testing.assert_allclose(points_of(axis)["SimCLR, ours"], [(24, 69)])


def test_labels_of_close_points_do_not_overlap():
    figure, axis = plt.subplots()
    points = [(0.5, 0.5), (0.5, 0.51), (0.52, 0.5), (0.5, 0.9)]
    axis.scatter(*zip(*points))
    axis.set(xlim=(0, 1), ylim=(0, 1))
    drawing._label_points(axis, [(f"network {index}", point) for index, point in enumerate(points)])
    assert [text.get_text() for text in axis.texts] == [f"network {index}" for index in range(4)]
    boxes = [text.get_window_extent() for text in axis.texts]
    assert not any(
        box.overlaps(other) for index, box in enumerate(boxes) for other in boxes[:index]
    )
    plt.close(figure)


def test_parameters_figure_is_plotted_from_a_csv_file(tmp_path):
    lines = ["R50,24,0.69,1000 epochs", "R50 (2x),94,0.74,1000 epochs", "R18,11,0.5,100 epochs"]
    rows, (axis,) = draw(
        tmp_path,
        "parameters",
        write_csv(
            tmp_path / "in.csv", "network,million parameters,accuracy,group\n" + "\n".join(lines)
        ),
    )
    assert [row[0] for row in rows] == ["R50", "R50 (2x)", "R18"] and axis.get_xscale() == "log"
    points = points_of(axis)
    assert list(points) == [text.get_text() for text in axis.get_legend().get_texts()]
    np.testing.assert_allclose(points["1000 epochs"], [(24, 69), (94, 74)])
    np.testing.assert_allclose(points["100 epochs"], [(11, 50)])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["pairs", "--csv=/no/such.csv"], "--csv=/no/such.csv: the file cannot be read"),
        (
            ["operators", "--image=/no/such.png"],
            "--image=/no/such.png: file not found. Use another file.",
        ),
        (
            ["views", "--dataset=digits", "--flags=--temprature=1"],
            "--flags: unknown command line flag",
        ),
        (["views", "--dataset=digits", "--flags=x"], "--flags: x is not a flag"),
        (
            ["tsne", "--checkpoint=c", "--dataset=digits", "--seed=-1"],
            "--seed: must be an integer from 0 to 999999999",
        ),
        (["eigenvalues", "--checkpoint=/no/such"], "--checkpoint=/no/such"),
    ],
)
def test_invalid_arguments_give_one_line_errors_and_exit_status_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        figures.main(arguments)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1


def test_a_missing_csv_column_is_reported(tmp_path, capsys):
    with pytest.raises(SystemExit):
        figures.main(["batches", write_csv(tmp_path / "in.csv", "epochs,accuracy\n1,0.5\n")])
    assert ": column batch_size is missing. Use a file with the columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words",
    [
        ("epochs,batch_size,accuracy\n1,8,58 %\n", "accuracy is 58 %. Use a number from 0 to 1."),
        ("epochs,batch_size,accuracy\n1,8,58\n", "accuracy is 58. Use a number from 0 to 1."),
        ("epochs,batch_size,accuracy\n1,8,nan\n", "accuracy is nan. Use a number from 0 to 1."),
        (
            "epochs,accuracy,batch_size\n1,0.5,8\n1,0.5\n",
            "batch_size is nan. Use a number above 0.",
        ),
        ("epochs,batch_size,accuracy\n0,8,0.5\n", "epochs is 0. Use a number above 0."),
        (
            "epochs,batch_size,accuracy\n1,8,\n",
            ": no row has an accuracy. Add at least one accuracy.",
        ),
        (
            "epochs,batch_size,accuracy\n1,8,0.5\n1,8,0.6\n",
            "two rows have different accuracies for batch_size=8 and epochs=1.",
        ),
    ],
)
def test_invalid_csv_values_are_reported(text, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        figures.main(["batches", write_csv(tmp_path / "in.csv", text)])
    assert words in capsys.readouterr().err


def test_averaging_rejects_missing_columns_and_duplicate_rows(tmp_path, capsys):
    text = "epochs,batch_size,seed,accuracy\n1,8,1,0.5\n1,8,1,0.6\n"
    for column, words in (
        ("rate", "column rate is missing"),
        ("seed", "two rows have different accuracies for"),
    ):
        with pytest.raises(SystemExit):
            figures.main(["batches", write_csv(tmp_path / "in.csv", text), f"--average={column}"])
        assert words in capsys.readouterr().err


def test_each_learning_rate_scaling_has_separate_bars(tmp_path):
    rows, (axis,) = draw(
        tmp_path,
        "batches",
        write_csv(
            tmp_path / "in.csv",
            "scaling,epochs,batch_size,accuracy\nlinear,1,8,0.5\nsqrt,1,8,0.6\n",
        ),
    )
    assert rows == [["linear", "8", "1", "0.5"], ["sqrt", "8", "1", "0.6"]]
    assert {label: bars["1"][0] for label, bars in bars_of(axis).items()} == {
        "batch 8 linear": 50,
        "batch 8 sqrt": 60,
    }


def test_rows_without_an_accuracy_are_skipped(tmp_path):
    rows, (axis,) = draw(
        tmp_path,
        "batches",
        write_csv(tmp_path / "in.csv", "epochs,batch_size,accuracy\n1,8.0,0.5\n1,16,\n"),
    )
    assert rows == [["", "8", "1", "0.5"]] and list(bars_of(axis)) == ["batch 8"]


def test_tsne_requires_a_projection_head(tmp_path, capsys):
    model = model_lib.build_model(Config(**{**SMALL, "proj_head_mode": "none"}), 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(SystemExit):
        figures.main(["tsne", f"--checkpoint={path}", "--dataset=digits", "--flags=--image_size=8"])
    assert "--checkpoint: the network has no projection head" in capsys.readouterr().err


def test_eigenvalues_require_a_square_linear_head(tmp_path, capsys):
    model = model_lib.build_model(Config(**{**SMALL, "proj_out_dim": 16}), 10)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(SystemExit):
        figures.main(["eigenvalues", f"--checkpoint={path}"])
    assert (
        "no square linear projection head. Pretrain a network with --proj_head_mode=linear"
        " --proj_out_dim=512." in capsys.readouterr().err
    )
