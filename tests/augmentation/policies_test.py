"""Random augmentation operators and policies: their distributions, separate branches, AutoAugment, and settings."""

import collections
import functools
import re

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image, ImageEnhance, ImageOps

import config as config_lib
import data
import data_util
from augmentation import autoaugment, operators, policies
from augmentation.policies import view_policies
from config import Config
from runtime import rng
from sources import digits
from support import golden
from support.images import photographs

COUNT = 400


def make_seeds(count):
    indices = tf.range(count, dtype=tf.int64)
    return tf.stack([indices, tf.fill([count], tf.constant(5, tf.int64))], 1)


def apply(operator, image, count=COUNT, **parameters):
    """Returns `count` versions of a uint8 image [h, w, 3], each randomly augmented, as floats [count, h, w, 3]."""
    channels = data_util.to_channels(
        tf.constant(np.repeat(image[np.newaxis] / 255, count, 0), tf.float32)
    )
    return data_util.from_channels(
        list(operator(channels, make_seeds(count), **parameters))
    ).numpy()


PHOTO = photographs(24, 24)[0]
RAMP = np.stack(np.broadcast_arrays(np.arange(24)[:, None], np.arange(24), 0), -1)


def test_normal_samples_are_standard_normal_and_independent():
    draws = rng.normals(make_seeds(20_000), 7).numpy()
    assert draws.shape == (20_000, 7) and draws.dtype == np.float32
    assert all(scipy.stats.kstest(column, "norm").pvalue > 1e-3 for column in draws.T)
    assert np.abs(np.corrcoef(draws.T) - np.eye(7)).max() < 0.03


@pytest.mark.parametrize("turns", [(1, 2, 3), (0, 1, 2, 3)])
def test_rotations_are_uniformly_distributed(turns):
    results = apply(operators.random_rot90, PHOTO, turns=turns)
    rotations = np.stack([np.rot90(PHOTO, turn) / 255 for turn in turns])
    distances = np.abs(results[:, np.newaxis] - rotations).max((2, 3, 4))
    assert (np.sort(distances, 1)[:, 0] < 1e-6).all()
    assert scipy.stats.chisquare(np.bincount(distances.argmin(1))).pvalue > 1e-3


def test_cutout_has_the_given_size_and_a_uniformly_distributed_position():
    results = apply(operators.random_cutout, PHOTO, count=4000, fraction=0.25)
    is_changed = np.abs(results - PHOTO / 255).max(-1) > 1e-6
    assert (results[is_changed] == 0.5).all()
    # The square has at most 6x6 pixels.
    assert is_changed.sum((1, 2)).max() <= 36 and (is_changed.sum((1, 2)) >= 6).all()
    frequency = is_changed.mean(0)
    assert frequency.min() > 0 and frequency[8:-8, 8:-8].mean() == pytest.approx(36 / 576, rel=0.1)


def test_noise_standard_deviation_is_sampled_per_image():
    gray = np.full([24, 24, 3], 128, np.uint8)
    results = apply(operators.random_noise, gray, deviations=(0.02, 0.1)) - 128 / 255
    deviations = results.std((1, 2, 3))
    assert scipy.stats.kstest(deviations, scipy.stats.uniform(0.02, 0.08).cdf).statistic < 0.1
    standardized = results / deviations[:, np.newaxis, np.newaxis, np.newaxis]
    assert scipy.stats.kstest(standardized.ravel()[::7], "norm").statistic < 0.01
    assert abs(np.corrcoef(results[..., 0].ravel(), results[..., 1].ravel())[0, 1]) < 0.01
    white = apply(operators.random_noise, np.full([24, 24, 3], 255, np.uint8), count=2)
    assert white.max() == 1 and white.min() < 0.98


@pytest.mark.parametrize(
    "image, radius", [(np.pad(PHOTO, [[20, 20], [20, 20], [0, 0]]), 3), (photographs(12, 12)[0], 1)]
)
def test_blur_with_per_image_sigma_matches_scipy(image, radius):
    results = apply(operators.random_blur, image, count=50)
    sigmas = 0.1 + 1.9 * rng.uniforms(make_seeds(50), 1).numpy()[:, 0]
    for result, sigma in zip(results, sigmas):
        expected = scipy.ndimage.gaussian_filter(
            image / 255, sigma, axes=(0, 1), radius=radius, mode="constant"
        )
        assert_allclose(result, expected, atol=1e-5)
    assert sigmas.min() < 0.3 and sigmas.max() > 1.8


def test_motion_blur_preserves_the_mean_and_has_uniformly_distributed_directions():
    point = np.zeros([31, 31, 3], np.uint8)
    point[15, 15] = 255
    results = apply(operators.random_motion_blur, point, fraction=0.3)[..., 0]
    assert_allclose(results.sum((1, 2)), 1, atol=1e-5)
    y, x = np.mgrid[-15:16, -15:16]
    angles = np.rad2deg(
        0.5 * np.arctan2(-2 * (results * x * y).sum((1, 2)), (results * (x**2 - y**2)).sum((1, 2)))
    )
    assert scipy.stats.kstest(angles, scipy.stats.uniform(-90, 180).cdf).statistic < 0.1
    assert (results > 0.01).sum((1, 2)).max() <= 3 * 11


def test_random_resized_crop_crops_all_images_and_flips_half_of_them():
    ramp = np.uint8(10 * RAMP)
    crop = tf.function(operators.random_resized_crop, autograph=False)
    results = apply(crop, ramp)
    slopes = results[:, 12, 16, 1] - results[:, 12, 8, 1]
    assert 0.4 < (slopes < 0).mean() < 0.6 and (np.abs(slopes) <= 80 / 255 * 1.16 + 1e-3).all()
    assert (results[:, 16, 12, 0] > results[:, 8, 12, 0]).all()
    assert (apply(crop, ramp, flip_probability=0.0)[:, 12, 16, 1] > 0).all()
    whole = apply(crop, ramp, count=3, area_range=(1.0, 1.0), flip_probability=0.0)
    assert_allclose(whole, np.stack([ramp / 255] * 3), atol=1e-6)


def test_operators_in_a_branch_are_independent():
    """Tests that the crop's random flip is independent of the next operator's random numbers."""
    images = tf.constant(np.repeat(RAMP[np.newaxis] * 5 / 255, COUNT, 0), tf.float32)

    def augment(*names):
        policy = policies.branch_policy(names, 1.0, "multiplicative")
        function = functools.partial(data_util.apply_operators, images, policy)
        return tf.function(function, autograph=False)(make_seeds(COUNT)).numpy()

    one, both = augment("crop"), augment("crop", "rotate")
    is_flipped = one[:, 12, 16, 1] < one[:, 12, 8, 1]
    is_rotated_by_270_degrees = both[:, 12, 16, 0] - both[:, 12, 8, 0] < -0.02
    table = np.histogram2d(is_flipped, is_rotated_by_270_degrees, 2)[0]
    assert table.sum(0).min() > 40 and scipy.stats.chi2_contingency(table).pvalue > 1e-3, table


# ---------------------------------------------------------------------------------------------------- autoaugment


def transform_pil(image, matrix):
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=(128,) * 3)


def apply_pil(image, name, level, sign):
    """Applies an operator from Table 9 of the AutoAugment paper to a PIL image."""
    fraction = level / 9
    if name == "rotate":
        return image.rotate(sign * 30 * fraction, fillcolor=(128,) * 3)
    if name == "shear_x":
        return transform_pil(image, (1, sign * 0.3 * fraction, 0, 0, 1, 0))
    if name in ("color", "contrast", "sharpness"):
        return getattr(ImageEnhance, name.title())(image).enhance(0.1 + 1.8 * fraction)
    if name == "posterize":
        return ImageOps.posterize(image, round(8 - 4 * fraction))
    if name == "solarize":
        return ImageOps.solarize(image, 256 - 256 * fraction)
    return getattr(ImageOps, name)(image)


def test_autoaugment_sub_policies_match_timm():
    suffix = re.compile("Original$")  # timm has several variants of posterize.
    theirs = [
        tuple(
            (suffix.sub("", operator).lower(), probability, level)
            for operator, probability, level in pair
        )
        for pair in golden.load_json("autoaugment")["original"]
    ]
    assert [
        tuple((operator.replace("_", ""), *rest) for operator, *rest in pair)
        for pair in autoaugment.SUB_POLICIES
    ] == theirs


def test_autoaugment_outputs_match_pil_and_have_the_expected_frequencies():
    """Tests that each output matches a sub-policy applied with PIL, and that outputs have the expected frequencies."""
    results = apply(autoaugment.autoaugment, PHOTO, count=1000)
    image, probability_of = Image.fromarray(PHOTO), collections.Counter()
    for pair in autoaugment.SUB_POLICIES:
        options = [
            [(1 - p, None)] + [(p / 2, (name, level, sign)) for sign in (-1, 1)]
            for name, p, level in pair
        ]
        for p, first in options[0]:
            for q, second in options[1]:
                output = image
                for step in (first, second):
                    output = apply_pil(output, *step) if step else output
                probability_of[output.tobytes()] += p * q / 25
    pil_images = np.stack(
        [np.frombuffer(pixels, np.uint8).reshape(PHOTO.shape) / 255 for pixels in probability_of]
    )
    probabilities = np.array([*probability_of.values()])

    def matches(image):
        # Values may differ due to rounding. Pixels whose input position is halfway between two
        # pixels may differ more.
        return (np.abs(pil_images - image).max(-1) > 0.03).mean((1, 2)) < 0.13

    matched = np.stack([matches(result) for result in results])
    assert matched.any(1).all()
    # Different sub-policies may produce nearly equal images, so one result may match several PIL
    # images.
    match_probabilities = probabilities @ np.stack([matches(image) for image in pil_images])
    assert probabilities.sum() == pytest.approx(1) and (match_probabilities > 0.02).sum() > 8
    tolerance = 4 * np.sqrt(match_probabilities / 1000) + 0.01
    assert (np.abs(matched.mean(0) - match_probabilities) < tolerance).all()


# ------------------------------------------------------------------------------------------------------- policies


# "jitter" and "drop" are the operators of "color".
@pytest.mark.parametrize("name", ["", *config_lib.AUGMENTATIONS[:2], *config_lib.AUGMENTATIONS[4:]])
def test_policies_give_the_same_views_in_eager_mode_in_tf_data_and_in_batches(name):
    policy = policies.branch_policy([name] if name else [], 1.0, "multiplicative")
    images, seeds = tf.constant(np.tile(photographs(), [2, 1, 1, 1])), make_seeds(4)

    def crop(image, seed):
        window = data_util.random_window(image.shape, seed, policy.area_range)
        return data_util.resize_window(image, *window, 20, 20)

    @tf.autograph.experimental.do_not_convert
    def augment(image, seed):
        return data_util.apply_policy(image, policy, seed, 20)

    eager, crops = (
        np.stack([function(*pair) for pair in zip(images, seeds)]) for function in (augment, crop)
    )
    assert eager.dtype == np.float32
    piped = tf.data.Dataset.from_tensor_slices((images, seeds)).map(augment, 2)
    assert_allclose(list(piped.as_numpy_iterator()), eager, atol=1e-5)
    assert_allclose(data_util.apply_operators(tf.constant(crops), policy, seeds), eager, atol=1e-5)
    assert not name or np.abs(eager - np.clip(crops, 0, 1)).max() > 0.05


def make_views(**settings):
    config = Config(dataset="digits", image_size=12, train_batch_size=8, use_blur=False, **settings)
    views, _ = next(iter(data.build_train_dataset(config, digits.digits_source(), 3, 8)))
    return [view.numpy() for view in views]


def test_branches_share_the_crop_and_apply_only_their_own_operators_in_the_given_order():
    left, right = make_views(augment_left="", augment_right="")
    assert_array_equal(left, right)
    sobel, crop = make_views(augment_left="sobel")
    assert_array_equal(crop, right)
    expected = data_util.from_channels(operators.sobel(data_util.to_channels(tf.constant(right))))
    assert_allclose(sobel, expected, atol=1e-6)
    crop, rotated = make_views(augment_right="rotate,noise")
    assert_array_equal(crop, right)
    assert np.abs(rotated - right).max() > 0.2
    first, second = make_views(augment_left="sobel,solarize", augment_right="solarize,sobel")
    assert np.abs(first - second).max() > 0.2


def test_extra_rotations_may_leave_images_upright():
    *_, rotate = view_policies(Config(augment_extra="rotate"))[0].operators
    assert rotate.function.keywords["turns"] == (0, 1, 2, 3)


@pytest.mark.parametrize("brightness", ["additive", "multiplicative"])
@pytest.mark.parametrize("settings", [{}, dict(augment_left="color")], ids=str)
def test_brightness_flag_selects_the_operator(settings, brightness):
    (jitter,) = [
        operator
        for operator in view_policies(Config(brightness=brightness, **settings))[0].operators
        if operator.name == "color_jitter"
    ]
    assert jitter.function.keywords["brightness"] == brightness


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, "flip 0.5, color_jitter 0.8, grayscale 0.2"),
        (dict(random_flip=False), "color_jitter 0.8, grayscale 0.2"),
        (dict(augmentation="autoaugment"), "flip 0.5, autoaugment 1.0"),
        (
            dict(augmentation="broader", train_mode="supervised"),
            (
                "flip 0.5, color_jitter 0.8, grayscale 0.2, equalize 0.2, "
                "solarize 0.2, sobel 0.2, motion_blur 0.2"
            ),
        ),
        (
            dict(augment_extra="noise,sobel,rotate"),
            "flip 0.5, color_jitter 0.8, grayscale 0.2, noise 0.5, sobel 0.5, rotate 1.0",
        ),
        (
            dict(
                augment_left="crop,color,jitter,drop,rotate,cutout,noise,blur,sobel,equalize,solarize,motion_blur"
            ),
            (
                "crop 1.0, color_jitter 0.8, grayscale 0.2, color_jitter 1.0, grayscale 1.0, rotate"
                " 1.0, cutout 1.0, noise 1.0, blur 0.5, sobel 1.0, equalize 1.0, solarize 1.0,"
                " motion_blur 1.0"
            ),
        ),
    ],
    ids=str,
)
def test_flags_select_operators_and_their_probabilities(settings, expected):
    policy = view_policies(Config(color_jitter_strength=1.0, **settings))[0]
    assert (
        ", ".join(f"{operator.name} {operator.probability}" for operator in policy.operators)
        == expected
    )


@pytest.mark.parametrize(
    "settings, num_views, blurs_views",
    [
        ({}, 2, True),
        (dict(augmentation="autoaugment"), 2, False),
        (dict(augmentation="broader", train_mode="supervised"), 1, True),
        (dict(augment_left="blur"), 2, False),
        (dict(train_mode="finetune"), 1, False),
    ],
)
def test_settings_determine_the_number_of_views_and_blur_on_the_device(
    settings, num_views, blurs_views
):
    config = Config(**settings)
    assert len(view_policies(config)) == num_views and config.blurs_views == blurs_views
