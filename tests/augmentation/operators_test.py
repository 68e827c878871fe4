"""Checks image operators against PIL, SciPy and hand-computed results."""

import itertools

import numpy as np
import pytest
import scipy.ndimage
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image, ImageEnhance, ImageOps

import data_util
from augmentation import operators
from support.images import photographs

LEVEL = 1 / 255


def apply(operator, images, *amounts, **parameters):
    """Applies an operator to uint8 images [n, h, w, 3]. Returns float32 images."""
    channels = data_util.to_channels(tf.constant(images / 255, tf.float32))
    tensors = [tf.constant(amount, tf.float32) for amount in amounts]
    return data_util.from_channels(list(operator(channels, *tensors, **parameters))).numpy()


def apply_pil(function, images, *amounts):
    return (
        np.stack(
            [
                np.asarray(function(Image.fromarray(image), *row))
                for image, *row in zip(images, *amounts)
            ]
        )
        / 255
    )


@pytest.fixture(params=["addons", "core"])
def backend(request, monkeypatch):
    """Runs a test with tensorflow-addons (if installed) and again with core TensorFlow."""
    if request.param == "core":
        monkeypatch.setattr(operators, "addons", lambda: None)
    elif operators.addons() is None:
        pytest.skip("tensorflow-addons is not installed")


# Maps names to (our function, PIL's function, strengths for two images, maximum difference in
# multiples of 1/255).
PIL = {
    "invert": (operators.invert, ImageOps.invert, [], 0),
    "solarize": (
        operators.solarize,
        lambda image, t: ImageOps.solarize(image, round(t * 255)),
        [[0.2, 128 / 255]],
        0,
    ),
    "posterize": (operators.posterize, ImageOps.posterize, [[3, 6]], 0),
    "equalize": (operators.equalize, ImageOps.equalize, [], 0),
    "autocontrast": (operators.autocontrast, ImageOps.autocontrast, [], 1),
    "contrast": (
        operators.contrast,
        lambda i, f: ImageEnhance.Contrast(i).enhance(f),
        [[0.3, 1.8]],
        2,
    ),
    "color": (operators.color, lambda i, f: ImageEnhance.Color(i).enhance(f), [[0.1, 1.9]], 2),
    "sharpness": (
        operators.sharpness,
        lambda i, f: ImageEnhance.Sharpness(i).enhance(f),
        [[0.1, 1.9]],
        2,
    ),
}


@pytest.mark.parametrize("shape", [(60, 80), (33, 20), (8, 8)])
@pytest.mark.parametrize("name", PIL)
def test_pixel_operators_match_pil(name, shape):
    operator, pil_function, amounts, levels = PIL[name]
    images = photographs(*shape)
    result, expected = (
        apply(operator, images, *map(np.array, amounts)),
        apply_pil(pil_function, images, *amounts),
    )
    assert result.dtype == np.float32
    assert np.abs(result - expected).max() <= levels * LEVEL + 1e-6
    assert np.abs(result - images / 255).max() > 5 * LEVEL or name in ("autocontrast", "equalize")


def test_autocontrast_stretches_all_channels_except_constant_ones():
    image = np.stack(
        [
            np.linspace(20, 90, 12).reshape(1, 3, 4),
            np.linspace(0, 255, 12).reshape(1, 3, 4),
            np.full([1, 3, 4], 99),
        ],
        -1,
    )
    result = apply(operators.autocontrast, image)
    assert_allclose(result[..., 0], np.linspace(0, 1, 12).reshape(1, 3, 4), atol=1e-6)
    assert_allclose(result[..., 1:], image[..., 1:] / 255, atol=1e-6)


@pytest.mark.parametrize("operator", [operators.equalize, operators.autocontrast])
def test_uniform_images_are_unchanged(operator):
    flat = np.full([2, 9, 7, 3], 77, np.uint8)
    assert_allclose(apply(operator, flat), flat / 255, atol=1e-6)


# ---------------------------------------------------------------------------------------- geometric transformations


@pytest.mark.parametrize("turns", range(5))
def test_rot90_matches_numpy(turns):
    images = photographs(40, 40)
    assert_array_equal(
        apply(operators.rot90, images, turns=turns),
        np.float32(np.rot90(images, turns, (1, 2)) / 255),
    )


def apply_by_coordinates(images, input_position, fill=0.5):
    """Copies the nearest input pixel to each output pixel.

    `input_position` maps an image index and an output position (x, y) to an input position (x, y).
    """
    count, height, width, _ = images.shape
    result = np.full(images.shape, fill)
    for index in range(count):
        for y in range(height):
            for x in range(width):
                input_x, input_y = (
                    int(np.floor(value + 0.5)) for value in input_position(index, x, y)
                )
                if 0 <= input_x < width and 0 <= input_y < height:
                    result[index, y, x] = images[index, input_y, input_x] / 255
    return result


def rotation(degrees):
    """Returns an `input_position` function that rotates 30x40 images counterclockwise. The y axis points down."""

    def input_position(index, x, y):
        angle = np.deg2rad(degrees[index])
        dx, dy = x - 19.5, y - 14.5
        return (
            19.5 + np.cos(angle) * dx - np.sin(angle) * dy,
            14.5 + np.sin(angle) * dx + np.cos(angle) * dy,
        )

    return input_position


AFFINE = {
    "shear_x": ([0.21, -0.13], lambda a: lambda i, x, y: (x + a[i] * y, y)),
    "rotate": ([17.0, -25.5], rotation),
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine_operators_match_a_loop_over_pixels(name, backend):
    images, (amounts, make_input_position) = photographs(30, 40), AFFINE[name]
    result = apply(getattr(operators, name), images, np.array(amounts))
    expected = apply_by_coordinates(images, make_input_position(amounts))
    # A position halfway between two pixels may be rounded either way.
    assert np.mean(np.abs(result - expected).max(-1) > 1e-6) < 0.005


def test_rotation_by_90_degrees_matches_rot90(backend):
    images = photographs(30, 30)
    result = apply(operators.rotate, images, np.array([90.0, -90.0]))
    assert_allclose(result[0], np.rot90(images[0]) / 255, atol=1e-6)
    assert_allclose(result[1], np.rot90(images[1], -1) / 255, atol=1e-6)


# ---------------------------------------------------------------------------------------------- regions and filters


@pytest.mark.parametrize("side", [1, 4, 7])
def test_cutout_fills_a_square(side):
    images = photographs(20, 30)
    result = apply(
        operators.cutout, images, np.array([0.0, 12.9]), np.array([5.5, 29.0]), side=side, fill=0.25
    )
    for index, (row, column) in enumerate([(0, 5), (12, 29)]):
        expected = images[index] / 255
        low, high = side // 2, side - side // 2
        expected[max(row - low, 0) : row + high, max(column - low, 0) : column + high] = 0.25
        assert_allclose(result[index], expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(60, 80), (9, 8)])
def test_sobel_matches_scipy(shape):
    images = photographs(*shape)
    result = apply(operators.sobel, images)
    for index, color in np.ndindex(2, 3):
        x, y = (
            scipy.ndimage.sobel(images[index, ..., color] / 255, axis, mode="reflect")
            for axis in (1, 0)
        )
        assert_allclose(result[index, ..., color], np.clip(np.hypot(x, y) / 4, 0, 1), atol=1e-5)
    edge = np.zeros([1, 5, 6, 3])
    edge[:, :, 3:] = 255
    assert_allclose(apply(operators.sobel, edge)[0, :, :, 0], [[0, 0, 1, 1, 0, 0]] * 5, atol=1e-6)


def test_motion_blur_averages_along_a_line():
    images = photographs(30, 40)
    result = apply(
        operators.motion_blur, images, np.array([0.0, 90.0]), np.array([5.0, 3.0]), size=7
    )
    for index, (axis, length) in enumerate([(1, 5), (0, 3)]):
        expected = scipy.ndimage.uniform_filter1d(images[index] / 255, length, axis, mode="reflect")
        assert_allclose(result[index], expected, atol=1e-6)
    point = np.zeros([2, 9, 9, 3], np.uint8)
    point[:, 4, 4] = 255
    result = apply(
        operators.motion_blur, point, np.array([45.0, 135.0]), np.array([7.0, 1.0]), size=7
    )
    # Angles are measured counterclockwise. The directions are (row, column).
    for blurred, direction, length in zip(
        result[..., 0], np.sqrt(0.5) * np.array([(-1, 1), (-1, -1)]), (7, 1)
    ):
        expected = np.zeros([9, 9])
        for row, column in itertools.product(range(1, 8), repeat=2):
            offset = np.array([row - 4, column - 4])
            along = abs(offset @ direction)
            across = np.linalg.norm(offset - offset @ direction * direction)
            expected[row, column] = max(1 - across, 0) * np.clip((length + 1) / 2 - along, 0, 1)
        assert_allclose(blurred, expected / expected.sum(), atol=1e-6)


AMOUNTS = {
    **{name: [0.3] for name in (*AFFINE, "solarize", "contrast", "color", "sharpness")},
    "posterize": [3.0],
    "motion_blur": [30.0, 2.0],
    "cutout": [3.0, 4.0],
    **{name: [] for name in ("invert", "autocontrast", "equalize", "sobel")},
}


@pytest.mark.parametrize("name", AMOUNTS)
def test_operators_treat_images_independently_and_accept_empty_batches(name):
    images = photographs(16, 12)
    parameters = {"motion_blur": dict(size=3), "cutout": dict(side=4)}.get(name, {})
    operator = getattr(operators, name)

    def run(images):
        return apply(
            operator,
            images,
            *(np.full([len(images)], amount) for amount in AMOUNTS[name]),
            **parameters,
        )

    both = run(images)
    assert_array_equal(both[1:], run(images[1:]))
    assert run(images[:0]).shape == (0, 16, 12, 3)
    graph = tf.function(
        lambda channels: list(
            operator(channels, *(tf.fill([2], amount) for amount in AMOUNTS[name]), **parameters)
        ),
        autograph=False,
    )
    channels = data_util.to_channels(tf.constant(images / 255, tf.float32))
    assert_allclose(data_util.from_channels(graph(channels)), both, atol=1e-6)
