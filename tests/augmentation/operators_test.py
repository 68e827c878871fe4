"""Checks image operators against PIL, SciPy and hand-computed results."""

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
    results = [function(Image.fromarray(image), *row) for image, *row in zip(images, *amounts)]
    return np.stack(results) / 255


@pytest.fixture(params=["addons", "core"])
def backend(request, monkeypatch):
    """Runs a test with tensorflow-addons (if installed) and again with core TensorFlow."""
    if request.param == "core":
        monkeypatch.setattr(operators, "addons", lambda: None)
    elif operators.addons() is None:
        pytest.skip("tensorflow-addons is not installed")


def enhance(name):
    return lambda image, factor: getattr(ImageEnhance, name)(image).enhance(factor)


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
    "contrast": (operators.contrast, enhance("Contrast"), [[0.3, 1.8]], 2),
    "color": (operators.color, enhance("Color"), [[0.1, 1.9]], 2),
    "sharpness": (operators.sharpness, enhance("Sharpness"), [[0.1, 1.9]], 2),
}


@pytest.mark.parametrize("shape", [(60, 80), (33, 20), (8, 8)])
@pytest.mark.parametrize("name", PIL)
def test_pixel_operators_match_pil(name, shape):
    operator, pil_function, amounts, levels = PIL[name]
    images = photographs(*shape)
    result = apply(operator, images, *amounts)
    expected = apply_pil(pil_function, images, *amounts)
    assert result.dtype == np.float32
    assert np.abs(result - expected).max() <= levels * LEVEL + 1e-6
    assert np.abs(result - images / 255).max() > 5 * LEVEL or name in ("autocontrast", "equalize")


def test_autocontrast_stretches_all_channels_except_constant_ones():
    ramp, constant = np.linspace(0, 1, 12).reshape(1, 3, 4), np.full([1, 3, 4], 99 / 255)
    image = np.stack([20 + 70 * ramp, 255 * ramp, 255 * constant], -1)
    result = apply(operators.autocontrast, image)
    assert_allclose(result, np.stack([ramp, ramp, constant], -1), atol=1e-6)


def test_equalize_does_not_change_uniform_images():
    flat = np.full([2, 9, 7, 3], 77, np.uint8)
    assert_allclose(apply(operators.equalize, flat), flat / 255, atol=1e-6)


# ---------------------------------------------------------------------------------------- geometric transformations


@pytest.mark.parametrize("turns", range(5))
def test_rot90_matches_numpy(turns):
    images = photographs(40, 40)
    expected = np.float32(np.rot90(images, turns, (1, 2)) / 255)
    assert_array_equal(apply(operators.rot90, images, turns=turns), expected)


def rotation(degrees):
    cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return np.array([[cosine, sine], [-sine, cosine]])


# Maps names to (amounts for two images, function that returns the matrix which maps an output
# position (y, x) to an input position, fixed point).
AFFINE = {
    "shear_x": ([0.21, -0.13], lambda amount: np.array([[1, 0], [amount, 1]]), [0, 0]),
    "rotate": ([17.0, -25.5], rotation, [14.5, 19.5]),
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine_operators_match_scipy(name, backend):
    images, (amounts, make_matrix, center) = photographs(30, 40), AFFINE[name]
    result = apply(getattr(operators, name), images, amounts)
    for index, color in np.ndindex(2, 3):
        matrix, image = make_matrix(amounts[index]), images[index, ..., color] / 255
        expected = scipy.ndimage.affine_transform(
            image, matrix, center - matrix @ center, order=0, mode="grid-constant", cval=0.5
        )
        # A position halfway between two pixels may be rounded either way.
        assert np.mean(np.abs(result[index, ..., color] - expected) > 1e-6) < 0.005


def test_rotation_by_90_degrees_matches_rot90(backend):
    images = photographs(30, 30)
    result = apply(operators.rotate, images, [90.0, -90.0])
    assert_allclose(result[0], np.rot90(images[0]) / 255, atol=1e-6)
    assert_allclose(result[1], np.rot90(images[1], -1) / 255, atol=1e-6)


# ---------------------------------------------------------------------------------------------- regions and filters


@pytest.mark.parametrize("side", [1, 4, 7])
def test_cutout_fills_a_square(side):
    images = photographs(20, 30)
    result = apply(operators.cutout, images, [0.0, 12.9], [5.5, 29.0], side=side, fill=0.25)
    expected, low, high = images / 255, side // 2, side - side // 2
    for image, row, column in zip(expected, (0, 12), (5, 29)):
        image[max(row - low, 0) : row + high, max(column - low, 0) : column + high] = 0.25
    assert_allclose(result, expected, atol=1e-6)


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


def test_motion_blur_averages_along_a_line():
    images = photographs(30, 40)
    result = apply(operators.motion_blur, images, [0.0, 90.0], [5.0, 3.0], size=7)
    for index, (axis, length) in enumerate([(1, 5), (0, 3)]):
        expected = scipy.ndimage.uniform_filter1d(images[index] / 255, length, axis, mode="reflect")
        assert_allclose(result[index], expected, atol=1e-6)
    point = np.zeros([2, 9, 9, 3], np.uint8)
    point[:, 4, 4] = 255
    result = apply(operators.motion_blur, point, [45.0, 135.0], [7.0, 1.0], size=7)
    # Angles are measured counterclockwise. The directions and the offsets are (row, column).
    directions = np.sqrt(0.5) * np.array([(-1, 1), (-1, -1)])
    offsets = np.stack(np.mgrid[-3:4, -3:4], -1)
    for blurred, direction, length in zip(result[..., 0], directions, (7, 1)):
        along = offsets @ direction
        across = np.linalg.norm(offsets - along[..., np.newaxis] * direction, axis=-1)
        weights = np.maximum(1 - across, 0) * np.clip((length + 1) / 2 - np.abs(along), 0, 1)
        assert_allclose(blurred, np.pad(weights / weights.sum(), 1), atol=1e-6)


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

    def run(operator, images):
        amounts = (np.full([len(images)], amount) for amount in AMOUNTS[name])
        return apply(operator, images, *amounts, **parameters)

    both = run(operator, images)
    assert_array_equal(both[1:], run(operator, images[1:]))
    assert run(operator, images[:0]).shape == (0, 16, 12, 3)
    assert_allclose(run(tf.function(operator, autograph=False), images), both, atol=1e-6)
