"""Checks image operators against recorded values, SciPy, TensorFlow and hand-computed results."""

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal

import data_util
from runtime import rng
from support import golden

ARRAYS = golden.load("images")
IMAGES = ("97x131", "240x180")
COUNT = 10_000
SEED = tf.constant([1, 2], tf.int64)


def seed_rows(count):
    """Returns `count` different seeds as a tensor [count, 2]."""
    indices = tf.range(count, dtype=tf.int64)
    return tf.stack([tf.fill([count], tf.constant(5, tf.int64)), indices], 1)


def seeds(count):
    """Returns a data set of the seeds in `seed_rows(count)`."""
    return tf.data.Dataset.from_tensor_slices(seed_rows(count))


def windows(height, width, count, *args):
    """Returns the offsets [count, 2] and the sizes [count, 2] of random windows in an image."""
    shape = tf.constant([height, width, 3])
    samples = seeds(count).map(lambda seed: tf.stack(data_util.random_window(shape, seed, *args)))
    return np.stack([*samples.as_numpy_iterator()])[..., :2].transpose(1, 0, 2)


def crop(image, seed, size, **ranges):
    """Returns a random crop of an image, without clipping."""
    window = data_util.random_window(tf.shape(image), seed, **ranges)
    return data_util.resize_window(image, *window, size, size)


def apply_to_images(operator, images, *args, **kwargs):
    """Splits images [n, h, w, 3] into channels, applies an operator to them, and joins the resulting channels."""
    return data_util.from_channels(
        operator(data_util.to_channels(tf.constant(images)), *args, **kwargs)
    ).numpy()


# ------------------------------------------------------------------------------------ comparison with the original


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("size", [32, 64])
def test_evaluation_crop_matches_the_original(image, size):
    crop = data_util.preprocess_image(ARRAYS[f"{image}/image"], size, size)
    # recorded in float16
    assert_allclose(crop, np.float32(ARRAYS[f"{image}/center_crop{size}"]), atol=6e-4)


@pytest.mark.parametrize("image", IMAGES)
def test_grayscale_matches_the_original(image):
    pixels = ARRAYS[f"{image}/image"][np.newaxis] / np.float32(255)
    mean = apply_to_images(data_util.to_grayscale, pixels).mean((0, 1, 2), dtype=np.float64)
    assert_allclose(mean, ARRAYS[f"{image}/grayscale_mean"], rtol=1e-5)


@pytest.mark.parametrize("image", IMAGES)
def test_blur_with_per_image_sigma_matches_the_original(image):
    golden.assert_blur_matches(image, 1e-6)


def view_statistics(views):
    """Returns the statistics [n, 8] of views [n, h, w, 3], ordered as in the recorded arrays."""
    chroma = tf.reduce_mean(tf.reduce_max(views, -1) - tf.reduce_min(views, -1), [1, 2])
    edge_x = tf.reduce_mean(tf.abs(views[:, :, 1:] - views[:, :, :-1]), [1, 2, 3])
    edge_y = tf.reduce_mean(tf.abs(views[:, 1:] - views[:, :-1]), [1, 2, 3])
    clipped = tf.reduce_mean(tf.cast((views <= 0) | (views >= 1), tf.float32), [1, 2, 3])
    others = tf.stack([tf.math.reduce_std(views, [1, 2, 3]), chroma, edge_x, edge_y, clipped], 1)
    return tf.concat([tf.reduce_mean(views, [1, 2]), others], 1)


@pytest.fixture(scope="module")
def crops():
    """Returns `COUNT` random crops of an image, float32 [COUNT, 32, 32, 3]."""
    image = tf.constant(ARRAYS["view/image"])
    dataset = seeds(COUNT).map(lambda seed: crop(image, seed, 32), tf.data.AUTOTUNE)
    return next(dataset.batch(COUNT).as_numpy_iterator())


@pytest.mark.parametrize(
    "case, strength, brightness",
    [
        ("crop_only", 0.0, "multiplicative"),
        ("s0.5", 0.5, "multiplicative"),
        ("s1.0", 1.0, "multiplicative"),
        ("s1.0_v1", 1.0, "additive"),
    ],
)
def test_view_statistics_match_the_original(case, strength, brightness, crops):
    policy = data_util.simclr_policy(strength, brightness)

    @tf.function(autograph=False)
    def statistics(images, rows):
        return view_statistics(data_util.apply_operators(images, policy, rows))

    batches = zip(np.split(crops, 50), tf.split(seed_rows(COUNT), 50))
    ours = np.concatenate([statistics(*batch) for batch in batches])
    assert ours.shape == (COUNT, 8)
    quantiles, mean, std = (ARRAYS[f"view/{case}/{name}"] for name in ("quantiles", "mean", "std"))
    for column, name in enumerate(ARRAYS["view/statistics"].astype(str)):
        if name in ("chroma", "frac_at_0_or_1"):  # Their distributions have atoms.
            error = np.sqrt((std[column] ** 2 + ours[:, column].var()) / COUNT)
            assert abs(ours[:, column].mean() - mean[column]) < 4 * error, name
        else:
            levels = np.searchsorted(np.sort(ours[:, column]), quantiles[1:-1, column]) / len(ours)
            assert np.abs(levels - np.linspace(0, 1, 101)[1:-1]).max() < 0.02, name


# ------------------------------------------------------------------------------------------------------ operators


def test_batch_random_blur_samples_sigma_uniformly_for_half_of_the_images():
    image = np.zeros([40, 40, 1], np.float32)
    image[20, 20] = 1
    blurred = data_util.batch_random_blur(tf.repeat(image[np.newaxis], 2000, 0), SEED, 40).numpy()
    is_blurred = np.abs(blurred - image).max((1, 2, 3)) > 0
    sigmas = np.linspace(0.1, 2.0, 400)
    peaks = [
        scipy.ndimage.gaussian_filter(image[..., 0], sigma, radius=2)[20, 20] for sigma in sigmas
    ]
    assert scipy.stats.binomtest(int(is_blurred.sum()), 2000, 0.5).pvalue > 1e-3
    drawn = np.interp(-blurred[is_blurred, 20, 20, 0], -np.array(peaks), sigmas)
    assert scipy.stats.kstest(drawn[drawn > 0.3], "uniform", (0.3, 1.7)).pvalue > 1e-3


def test_batch_random_blur_depends_on_neither_the_number_of_replicas_nor_xla():
    images = tf.random.stateless_uniform([8, 20, 20, 3], [0, 0])
    whole = data_util.batch_random_blur(images, SEED, 20)
    compiled = tf.function(data_util.batch_random_blur, jit_compile=True)(images, SEED, 20)
    assert_allclose(compiled, whole, atol=1e-6)
    halves = [
        data_util.batch_random_blur(images[row : row + 4], SEED, 20, first_row=row)
        for row in (0, 4)
    ]
    assert_allclose(whole, tf.concat(halves, 0), atol=1e-6)


def test_crop_window_areas_and_aspect_ratios_match_the_paper():
    offsets, sizes = windows(300, 400, 3000)
    assert (offsets >= 0).all() and (offsets + sizes <= [300, 400]).all()
    area, aspect = sizes.prod(1) / 120_000, sizes[:, 1] / sizes[:, 0]
    # Areas are in [0.08, 1], and those below 0.1 are rejected.
    assert area.min() == pytest.approx(0.1, abs=0.005) and area.max() == pytest.approx(1, abs=0.03)
    assert aspect.min() == pytest.approx(3 / 4, abs=0.01) and aspect.max() == pytest.approx(
        4 / 3, abs=0.02
    )


def test_minimum_crop_area_takes_effect_and_its_default_matches_the_original():
    for min_area, smallest in ((0.02, 0.02), (0.08, 0.1), (0.09, 0.09)):
        _, sizes = windows(1000, 1000, 2000, (min_area, 1.0))
        assert smallest - 0.002 < sizes.prod(1).min() / 1e6 < smallest + 0.007


def test_crop_matches_slicing_followed_by_tf_image_resize_for_uint8_and_float():
    image = ARRAYS["97x131/image"]
    for seed in seed_rows(20):
        window = data_util.random_window(image.shape, seed)
        pixels = tf.slice(image / np.float32(255), *window)
        expected = tf.image.resize(pixels, [24, 40], tf.image.ResizeMethod.BICUBIC)
        for source in (image, image / np.float32(255)):
            resized = data_util.resize_window(tf.constant(source), *window, 24, 40)
            assert_allclose(resized, expected, atol=2e-6)


def test_half_of_the_images_are_flipped():
    images = np.tile(np.arange(12, dtype=np.float32).reshape(2, 2, 3), [400, 1, 1, 1])
    policy = data_util.crop_and_flip_policy()
    flipped = data_util.apply_operators(images / 12, policy, seed_rows(400)).numpy() * 12
    is_same, is_flipped = (
        np.isclose(flipped, expected).all((1, 2, 3)) for expected in (images, images[:, :, ::-1])
    )
    assert (is_same ^ is_flipped).all() and 160 < is_flipped.sum() < 240


# Includes values outside [0, 1] (as in bicubic crops) as well as ties and grays (special cases for
# hue and saturation).
_COLORS = np.random.default_rng(4).uniform(-0.1, 1.1, (40, 6, 7, 3)).astype(np.float32)
_COLORS[:10] = np.round(4 * _COLORS[:10]) / 4
_COLORS[10] = _COLORS[10, ..., :1]


def test_jitter_amounts_are_uniformly_distributed_over_the_range_set_by_the_strength():
    for brightness, lowest, highest in (("multiplicative", 0.6, 1.4), ("additive", -0.4, 0.4)):
        amounts, order = data_util.jitter_amounts(seed_rows(2000), 0.5, brightness)
        ranges = (lowest, highest), (0.6, 1.4), (0.6, 1.4), (-0.1, 0.1)
        for column, (low, high) in zip(amounts.numpy().T, ranges, strict=True):
            assert scipy.stats.kstest(column, "uniform", (low, high - low)).pvalue > 1e-3
        orders, counts = np.unique(order, axis=0, return_counts=True)
        assert len(orders) == 24 and (np.sort(orders) == range(4)).all()
        assert scipy.stats.chisquare(counts).pvalue > 1e-3
    strongest = data_util.jitter_amounts(seed_rows(500), 2.0)[0].numpy()
    assert strongest.min(0) == pytest.approx([0, 0, 0, -0.4], abs=0.05)


@pytest.mark.parametrize(
    "brightness, strength", [("multiplicative", 2.0), ("additive", 0.5), ("additive", 0.0)]
)
def test_jitter_matches_a_loop_over_images_and_steps(brightness, strength):
    amounts, orders = data_util.jitter_amounts(seed_rows(40), strength, brightness)
    steps = (
        np.multiply if brightness == "multiplicative" else tf.image.adjust_brightness,
        tf.image.adjust_contrast,
        tf.image.adjust_saturation,
        tf.image.adjust_hue,
    )
    jittered = apply_to_images(
        data_util.color_jitter, _COLORS, seed_rows(40), strength=strength, brightness=brightness
    )
    for image, amount, order, result in zip(_COLORS, amounts, orders, jittered):
        for step in order.numpy():
            image = np.clip(steps[step](tf.constant(image), amount[step]), 0, 1)
        assert_allclose(result, image, atol=1e-5)


def test_random_numbers_are_uniform_and_independent():
    rows = seed_rows(20_000)
    draws = rng.uniforms(rows, 8).numpy()
    assert all(scipy.stats.kstest(column, "uniform").pvalue > 1e-3 for column in draws.T)
    derived = [rng.nth_seed(rows, number, level) for number in (1, 2, 3) for level in range(3)]
    # Each operator also draws a second number.
    derived += [rng.nth_seed(rng.nth_seed(rows, number), 1, rng.DRAW) for number in (1, 2, 3)]
    others = [rng.uniforms(seeds_of_others, 1) for seeds_of_others in derived]
    # The second array contains the draws for the next seed in the batch.
    columns = np.concatenate([draws, draws[np.r_[1:20_000, 0]], *others], 1)
    correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlations).max() < 5 / np.sqrt(20_000)


def test_uniform_samples_match_pure_python_splitmix64():
    mask = 2**64 - 1
    state = sum(part * int(factor) for part, factor in zip((3, 7), rng._SEED_FACTORS)) & mask
    for draw in rng.uniforms(tf.constant([[3, 7]]), 2)[0]:
        state = z = (state + 0x9E3779B97F4A7C15) & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        assert float(draw) == ((z ^ z >> 31) >> 40) / 2**24


# ------------------------------------------------------------------------------------------------------- policies


def test_pixel_values_of_views_are_clipped():
    image = tf.constant(ARRAYS["97x131/image"])
    unclipped = crop(image, SEED, 200).numpy()
    assert unclipped.min() < -0.01 and unclipped.max() > 1.01  # Bicubic interpolation overshoots.
    view = data_util.apply_policy(image, data_util.Policy(), SEED, 200)
    assert_array_equal(view, np.clip(unclipped, 0, 1))


def test_preprocess_image_applies_the_policy_of_pretraining():
    policy, image = data_util.simclr_policy(1.0, "multiplicative"), ARRAYS["97x131/image"]
    for seed in seed_rows(4):
        view = data_util.preprocess_image(image, 33, 33, True, 1.0, seed=seed)
        assert_array_equal(view, data_util.apply_policy(image, policy, seed, 33))


@pytest.mark.parametrize("shape", [(50, 50), (20, 60), (60, 20), (31, 30), (33, 80), (8, 8)])
def test_evaluation_without_crop_keeps_the_whole_shorter_side_or_the_whole_image(shape):
    image = np.random.default_rng(8).uniform(0, 1, (*shape, 3)).astype(np.float32)
    short, long = sorted(shape)
    top, left = ((length - short + 1) // 2 for length in shape)
    square = image[top : top + short, left : left + short]
    borders = [((long - length) // 2, (long - length + 1) // 2) for length in shape]
    for pixels, crop, resize in (
        (square, False, "crop"),
        (image, True, "squash"),
        (np.pad(image, [*borders, (0, 0)]), True, "pad"),
    ):
        actual = data_util.preprocess_image(image, 16, 16, test_crop=crop, resize=resize)
        expected = np.clip(tf.image.resize(pixels, [16, 16], "bicubic"), 0, 1)
        assert_allclose(actual, expected, atol=1e-6)
