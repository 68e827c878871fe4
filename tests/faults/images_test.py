"""Image files: formats, corruption, limits, links and messages about unusable files."""

import functools
import io
import os
import pathlib
import re
import signal
import threading
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tifffile
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from PIL import ExifTags, Image

import checks
import data
import data_util
import train
from checkpoints.run_directory import Recorded
from config import Config
from inference import endpoints, thumbnails
from runtime import command_line
from sources import datasets, digits, image_checks, image_files, tfds_source
from support import read_json, runs
from support.errors import rejects
from support.images import open_folder

pytestmark = pytest.mark.usefixtures("stem_only_resnet")

PIXELS = default_rng(0).integers(0, 256, [24, 20, 3], np.uint8)
SMOOTH = np.stack(
    [*np.meshgrid(np.linspace(0, 255, 20), np.linspace(0, 255, 24)), np.full([24, 20], 99.0)], -1
).astype(np.uint8)


def encode(image, file_format, **options):
    """Returns the content of an image file, if possible without loss. `image` is an array or a Pillow image."""
    buffer = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    lossless = dict(lossless=True, irreversible=False, sizes=[(20, 24)])
    image.save(buffer, file_format, **{**lossless, **options})
    return buffer.getvalue()


JPEG, PNG = (encode(SMOOTH, "jpeg", quality=95), encode(PIXELS, "png"))
PNG_16_BIT = tf.io.encode_png(PIXELS.astype(np.uint16) * 257).numpy()
PALETTE = Image.fromarray(PIXELS // 64 * 64).convert("P", palette=Image.Palette.ADAPTIVE)
GRAY = np.repeat(PIXELS[..., :1], 3, -1)
FRAMES = [Image.fromarray(np.roll(PIXELS // 64 * 64, shift, 0)) for shift in (0, 5)]
TRANSPARENT = np.concatenate([PIXELS, np.roll(PIXELS[..., :1], 3, 0)], -1)


def on_white(pixels):
    opacity = pixels[..., 3:] / 255
    return np.round(pixels[..., :3] * opacity + 255 * (1 - opacity)).astype(np.uint8)


ON_WHITE = on_white(TRANSPARENT)
VALID = {  # name -> (content, expected pixels, maximum difference)
    "rgb.jpg": (JPEG, SMOOTH, 16),
    "cmyk.jpg": (encode(Image.fromarray(SMOOTH).convert("CMYK"), "jpeg", quality=95), SMOOTH, 16),
    "gray.jpg": (encode(SMOOTH[..., 0], "jpeg", quality=95), np.repeat(SMOOTH[..., :1], 3, -1), 8),
    "gray.png": (encode(PIXELS[..., 0], "png"), GRAY, 0),
    **{
        f"transparent.{suffix}": (encode(TRANSPARENT, suffix), ON_WHITE, 1)
        for suffix in ("png", "webp", "tiff", "tga")
    },
    "gray_transparent.png": (
        encode(Image.fromarray(TRANSPARENT[..., 2:], "LA"), "png"),
        on_white(TRANSPARENT[..., [2, 2, 2, 3]]),
        1,
    ),
    "transparent_sixteen_bits.png": (
        tf.io.encode_png(TRANSPARENT.astype(np.uint16) * 257).numpy(),
        ON_WHITE,
        1,
    ),
    "transparent_color.png": (
        encode(SMOOTH, "png", transparency=(0, 0, 99)),
        np.where((SMOOTH == (0, 0, 99)).all(-1, keepdims=True), np.uint8(255), SMOOTH),
        0,
    ),
    "transparent.gif": (
        encode(PIXELS[..., 0] % 3, "gif", transparency=0),
        np.where(GRAY % 3, GRAY % 3, np.uint8(255)),
        0,
    ),
    "palette.png": (encode(PALETTE, "png"), np.array(PALETTE.convert("RGB")), 0),
    "sixteen_bits.png": (PNG_16_BIT, PIXELS, 1),
    "animated.gif": (
        encode(FRAMES[0], "gif", save_all=True, append_images=FRAMES[1:]),
        np.array(Image.open(io.BytesIO(encode(FRAMES[0], "gif"))).convert("RGB")),
        0,
    ),
    "palette.bmp": (encode(PALETTE, "bmp"), np.array(PALETTE.convert("RGB")), 0),
    "animated.webp": (
        encode(FRAMES[0], "webp", save_all=True, append_images=FRAMES[1:]),
        np.array(FRAMES[0]),
        0,
    ),
    "cmyk.tif": (encode(Image.fromarray(255 - PIXELS).convert("CMYK"), "tiff"), 255 - PIXELS, 0),
    "sixteen_bits.tif": (encode(PIXELS[..., 0].astype(np.uint16) * 257, "tiff"), GRAY, 0),
    **{
        f"rgb.{suffix}": (encode(PIXELS, Image.registered_extensions()[f".{suffix}"]), PIXELS, 0)
        for suffix in (
            "png",
            "bmp",
            "webp",
            "tiff",
            "ppm",
            "jp2",
            "tga",
            "ico",
            "pcx",
            "sgi",
            "dds",
        )
    },
    "image.jfif": (JPEG, SMOOTH, 16),
    "smooth.avif": (encode(SMOOTH, "avif", quality=95), SMOOTH, 24),
    "png_called.jpg": (PNG, PIXELS, 0),
}
ORIENTED = {
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: np.swapaxes(x, 0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.swapaxes(np.rot90(x, 2), 0, 1),
    8: np.rot90,
}
NOT_AN_IMAGE = "not an image that Pillow can read"
UNUSABLE = {  # name -> (content, pattern of the reason)
    "empty.png": (b"", "empty"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], "truncated or corrupt"),
    "cut.png": (PNG[: len(PNG) // 2], "truncated or corrupt"),
    "cut.webp": (VALID["rgb.webp"][0][:500], "truncated or corrupt"),
    "cut.gif": (VALID["animated.gif"][0][:300], "truncated or corrupt"),
    "head_only.gif": (b"GIF89a", NOT_AN_IMAGE),
    "text.jpg": (b"not an image at all", NOT_AN_IMAGE),
    "page.jpg": (b"<html>404</html>", NOT_AN_IMAGE),
    "program.png": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",
        NOT_AN_IMAGE,
    ),
    "float.tiff": (
        encode(PIXELS[..., 0].astype(np.float32), "tiff"),
        "values up to 254; set --white_level=auto",
    ),
    "heic.jpg": (b"\0\0\0\x18ftypheic" + bytes(40), r"HEIC or similar \(pip install pillow-heif\)"),
    "depth.bmp": (
        encode(PIXELS, "bmp").replace(b"\1\0\x18\0", b"\1\0\7\0", 1),
        r"not supported: Unsupported BMP pixel depth \(7\)",
    ),
}


@pytest.mark.parametrize("name", VALID)
def test_images_in_all_formats_are_decoded_up_to_the_pixel_limit(name, tmp_path, monkeypatch):
    content, pixels, difference = VALID[name]
    path = tmp_path / name
    path.write_bytes(content)
    monkeypatch.setattr(image_files, "MAX_PIXELS", 480)
    assert why_unusable(path) is None
    source = open_folder(tmp_path)
    ((_, item, _),) = source.records("train")
    assert_close(source.decode(item).numpy(), pixels, difference)
    monkeypatch.setattr(image_files, "MAX_PIXELS", 479)
    monkeypatch.setattr(tf.io, "decode_image", lambda *_, **__: pytest.fail("decoded"))
    reason = "480 pixels, more than the limit of 479"
    assert why_unusable(path) == reason
    assert str(endpoints.image_loader(Config(image_size=8))(str(path))) == reason


def assert_close(image, expected, difference=12):
    assert image.shape == expected.shape
    assert np.abs(image.astype(int) - expected).max() <= difference


def why_unusable(path):
    return image_files.why_unusable(str(path))


def tiff(array, **options):
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, array, **options)
    return buffer.getvalue()


def fits(array):
    """Returns a FITS file, whose first row is the lowest one, with signed integers of 32 bits."""
    height, width = array.shape
    cards = [
        "SIMPLE  =                    T",
        "BITPIX  =                   32",
        "NAXIS   =                    2",
        f"NAXIS1  = {width:20}",
        f"NAXIS2  = {height:20}",
        "END",
    ]
    header = "".join(card.ljust(80) for card in cards).ljust(2880).encode()
    data = array.astype(">i4").tobytes()
    return header + data.ljust(-(-len(data) // 2880) * 2880, b"\0")


def sixteen_bit_png(array):
    return tf.io.encode_png(array.astype(np.uint16)).numpy()


TWELVE = default_rng(1).integers(0, 4096, [9, 7, 3]).astype(np.uint16)
TWELVE[0, 0] = 4095
GRAY_12 = TWELVE[..., 0]
LEVELS = GRAY_12 / 4095
SIGNED = default_rng(2).integers(-1000, 1001, [9, 7]).astype(np.int16)
SIGNED[0, 0] = -1000
UNIT = default_rng(3).uniform(0, 1, [9, 7]).astype(np.float32)
BANDS = default_rng(4).integers(0, 3000, [9, 7, 13]).astype(np.uint16)
CHUNKY = tiff(BANDS, photometric="minisblack", planarconfig="contig")
DEEP = {  # name -> (content, expected values in [0, 1], white level, bands)
    "gray": (sixteen_bit_png(TWELVE[..., :1]), LEVELS, "4095"),
    "gray at full range": (sixteen_bit_png(TWELVE[..., :1]), GRAY_12 / 65535),
    "clipped RGB": (sixteen_bit_png(TWELVE), np.minimum(TWELVE / 2000, 1), "2000"),
    "TIFF": (tiff(GRAY_12), LEVELS, "4095"),
    "big endian": (tiff(GRAY_12, byteorder=">"), LEVELS, "4095"),
    "compressed RGB TIFF": (
        tiff(TWELVE, photometric="rgb", compression="zlib", predictor=True),
        TWELVE / 4095,
        "4095",
    ),
    "white is zero": (tiff(GRAY_12, photometric="miniswhite"), 1 - GRAY_12 / 5000, "5000"),
    "signed": (tiff(SIGNED), (SIGNED / 1000 + 1) / 2, "1000"),
    "signed with 8 bits": (tiff((SIGNED // 8).astype(np.int8)), (SIGNED // 8 / 127 + 1) / 2),
    "32 bits": (tiff(GRAY_12.astype(np.uint32)), LEVELS, "4095"),
    "float": (tiff(UNIT), UNIT),
    "32 bits in FITS": (fits(TWELVE[::-1, :, 0]), (LEVELS + 1) / 2, "4095"),
    "large float": (tiff(UNIT * 300), UNIT, "300"),
    "bands": (CHUNKY, BANDS[..., [3, 2, 1]] / 3000, "3000", "4,3,2"),
    "planes": (
        tiff(np.moveaxis(BANDS, -1, 0), photometric="minisblack", planarconfig="separate"),
        BANDS[..., [12, 0, 6]] / 3000,
        "3000",
        "13,1,7",
    ),
    "white is zero, big endian": (
        tiff(GRAY_12, photometric="miniswhite", byteorder=">"),
        1 - GRAY_12 / 5000,
        "5000",
    ),
    "RGB and an unspecified channel": (
        tiff(BANDS[..., :4], photometric="rgb", extrasamples=["unspecified"]),
        BANDS[..., :3] / 3000,
        "3000",
    ),
    "RGB and opacity": (
        tiff(np.dstack([TWELVE, 16 * GRAY_12]), photometric="rgb", extrasamples=[2]),
        1 - (1 - TWELVE / 4095) * (16 * TWELVE[..., :1] / 65535),
        "4095",
    ),
    "a band of RGB and near infrared of 8 bits": (
        tiff(np.dstack([PIXELS, PIXELS[::-1, :, 0]]), photometric="rgb", extrasamples=[0]),
        np.dstack([PIXELS[::-1, :, 0], PIXELS[..., :2]]) / 255,
        None,
        "4,1,2",
    ),
    "rotated float": (
        tiff(UNIT[..., np.newaxis].astype(np.float64), extratags=[(274, "H", 1, 3, True)]),
        UNIT[::-1, ::-1],
    ),
    "bands of 8 bits": (encode(PIXELS, "png"), PIXELS[..., [2, 0, 0]] / 255, None, "3,1,1"),
    "PGM": (b"P5 7 9 65535\n" + GRAY_12.astype(">u2").tobytes(), LEVELS, "4095"),
}


def config_of(folder, white_level=None, bands=None):
    return Config(dataset=f"folder:{folder}", image_size=8, white_level=white_level, bands=bands)


@pytest.mark.parametrize("name", DEEP)
def test_values_of_more_than_eight_bits(name, tmp_path):
    content, expected, *settings = DEEP[name]
    (tmp_path / "a.tif").write_bytes(content)
    config = config_of(tmp_path, *settings)
    source = datasets.open_configured(config)
    ((_, item, _),) = source.records("train")
    expected = np.atleast_3d(expected) + np.zeros(3)
    # Half of a level for rounding.
    assert_allclose(source.decode(item) / 255, expected, atol=0.51 / 255)
    assert image_checks._find_unusable(config, source) == {}
    loaded = endpoints.image_loader(config)(str(tmp_path / "a.tif")).numpy()
    resized = data_util.preprocess_for_eval(tf.constant(source.decode(item) / 255), 8, False)
    assert_allclose(loaded, resized, atol=1e-6)
    thumbnail = thumbnails.load_thumbnail(str(tmp_path / "a.tif"), 64, config.conversion)
    assert_array_equal(thumbnail, source.decode(item))


@pytest.mark.parametrize(
    "name, expected", [("signed", "1000"), ("planes", str(BANDS[..., [12, 0, 6]].max()))]
)
def test_the_white_level_is_the_largest_value_of_the_training_images(name, expected, tmp_path):
    content, _, _, *bands = DEEP[name]
    for index in range(3):
        (tmp_path / f"{index}.tif").write_bytes(content)
    config = config_of(tmp_path, "auto", *bands)
    source = datasets.open_configured(config)
    config, lines = checks.complete(config, checks.Inputs(source, [], Recorded(), 1))
    assert config.white_level == expected and f"white_level: {expected}" in lines


def test_training_uses_the_white_level_that_was_found(tmp_path, monkeypatch):
    for index in range(8):
        tf.io.write_file(f"{tmp_path}/images/{index}.tif", DEEP["gray"][0])
    convert = mock.Mock(wraps=image_files.convert)
    monkeypatch.setattr(image_files, "convert", convert)
    settings = dict(dataset=f"folder:{tmp_path}/images", train_batch_size=4, train_steps=1)
    runs.run(tmp_path / "run", **settings, train_split="train", white_level="auto")
    assert {conversion.white_level for (_, conversion), _ in convert.call_args_list} == {4095.0}
    assert read_json(tmp_path / "run" / "flags.json")["white_level"] == "4095"


@pytest.mark.parametrize(
    "content, reason",
    [
        *UNUSABLE.values(),
        (CHUNKY, "13 channels per pixel: choose three, as in --bands=4,3,2"),
        (tiff((GRAY_12 > 9).astype(np.uint32)), "values up to 1; set --white_level=auto"),
        (
            tiff(BANDS[..., :4], photometric="minisblack", planarconfig="contig"),
            "4 channels per pixel: choose three, .*",
        ),
        (tiff(UNIT - 5), r"values down to -4.*; scale the values to \[0, 1\]"),
        (tiff(np.where(UNIT > 0.5, np.nan, UNIT)), r"values down to nan; scale .*"),
        (tiff(TWELVE)[:-200], "truncated or corrupt"),
        (
            tiff(np.zeros([4, 4, 4], np.uint16), photometric="separated"),
            "CMYK with more than 8 bits",
        ),
        (  # LZW, for which tifffile needs another package
            CHUNKY.replace(b"\x03\x01\x03\0\x01\0\0\0\x01", b"\x03\x01\x03\0\x01\0\0\0\x05", 1),
            r"compressed data .pip install imagecodecs.",
        ),
    ],
)
def test_reasons_why_images_are_unusable_are_true(content, reason, tmp_path, capfd):
    (tmp_path / "a.tif").write_bytes(content)
    assert re.fullmatch(reason, why_unusable(tmp_path / "a.tif"))
    assert "sample" not in capfd.readouterr().err


def encode_rotated(pixels, file_format, orientation=6):
    """Returns the content of an image file whose EXIF data specify an orientation."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encode(pixels, file_format, exif=exif, quality=95)


def load(path):
    return tf.io.decode_image(image_files.load(str(path)), 3, expand_animations=False).numpy()


@pytest.mark.parametrize("file_format", ["jpeg", "png", "webp", "tiff"])
def test_images_are_rotated_as_specified_by_their_exif_data(file_format, tmp_path):
    pixels = SMOOTH[:, :16]
    load_resized = endpoints.image_loader(Config(image_size=24))
    for orientation in range(1, 10):  # Orientation 1 is upright, and 9 is undefined.
        path = tmp_path / f"{orientation}.{file_format}"
        path.write_bytes(encode_rotated(pixels, file_format, orientation))
        expected = ORIENTED.get(orientation, np.array)(pixels)
        assert_close(load(path), expected)
        assert why_unusable(path) is None
        resized = load_resized(str(path))
        assert np.abs(resized - tf.image.resize(expected / 255, [24, 24], "bicubic")).mean() < 0.05


@pytest.mark.parametrize("file_format", ["jpeg", "png"])
def test_exif_data_behind_other_data_are_found(file_format, tmp_path):
    pixels = SMOOTH[:, :16]
    if file_format == "jpeg":  # A segment of 60,000 bytes, such as a color profile, comes first.
        content = encode_rotated(pixels, file_format)
        content = content[:2] + b"\xff\xe2\xea\x60" + b"\1" * 59998 + content[2:]
    else:  # The eXIf chunk is the last one. Noise cannot be compressed.
        pixels = default_rng(5).integers(0, 256, [50, 40, 3], np.uint8)
        content = encode_rotated(pixels, file_format)
        begin, last = content.index(b"eXIf") - 4, content.index(b"IEND") - 4
        end = begin + 12 + int.from_bytes(content[begin : begin + 4], "big")
        content = content[:begin] + content[end:last] + content[begin:end] + content[last:]
    assert re.search(b"Exif|eXIf", content).start() > 4096
    (tmp_path / "a").write_bytes(content)
    assert_close(load(tmp_path / "a"), ORIENTED[6](pixels))


def test_malformed_exif_data_are_ignored(tmp_path):
    content = encode_rotated(SMOOTH, "jpeg")
    malformed = re.sub(rb"(?s)(Exif\0\0..)..", rb"\1??", content)
    assert malformed != content
    (tmp_path / "a.jpg").write_bytes(malformed)
    assert load(tmp_path / "a.jpg").shape == SMOOTH.shape
    assert why_unusable(tmp_path / "a.jpg") is None


@pytest.fixture
def folder(tmp_path):
    """Creates a folder that contains valid images of two classes and all types of unusable images."""
    for index in range(12):
        for name in ("cat", "dog"):
            content = encode(np.roll(PIXELS, index, 0), "png")
            tf.io.write_file(f"{tmp_path}/images/{name}/{index}.png", content)
    for name, (content, _) in UNUSABLE.items():
        tf.io.write_file(f"{tmp_path}/images/dog/{name}", content)
    return tmp_path / "images"


def remove_unusable(folder):
    for name in UNUSABLE:
        (folder / "dog" / name).unlink()


def decode_only(count, monkeypatch):
    """Makes the check before training decode `count` images of more than 20."""
    monkeypatch.setattr(image_checks, "_MANY_IMAGES", 20)
    monkeypatch.setattr(image_checks, "_MAX_SAMPLE", count)


def check(folder, **settings):
    """Checks the images of a folder as before training."""
    config = Config(dataset=f"folder:{folder}", **settings)
    image_checks.check_images(config, datasets.open_configured(config))


def run(tmp_path, folder, **settings):
    """Trains for 24 steps and returns the log."""
    return runs.run(
        tmp_path / "run",
        dataset=f"folder:{folder}",
        train_split="train",
        train_batch_size=8,
        train_steps=24,
        **settings,
    )


def test_corrupt_images_give_an_error_that_lists_the_first_ten(folder, tmp_path):
    with rejects("12 of 36 images cannot be used: dog/cut.gif .trunc") as error:
        run(tmp_path, folder)
    assert str(error.value).count("dog/") == 10
    assert not list((tmp_path / "run").glob("ckpt*"))


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Counts the images that are decoded in order to check them. The user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    why_unusable = mock.Mock(wraps=image_files.why_unusable)
    monkeypatch.setattr(image_files, "why_unusable", why_unusable)
    return why_unusable


def test_corrupt_images_are_skipped_and_the_check_is_cached_for_all_runs(
    folder, tmp_path, checked, logged
):
    def expect(message, count, **settings):
        checked.reset_mock()
        check(folder, corrupt_images="skip", **settings)
        assert message in logged[-1] and checked.call_count == count

    expect("skipped: 12 of 36 images cannot be used: dog/cut.gif", 36)
    # Only unusable images are checked again, for which a package may have been installed.
    expect("skipped: 12 of 36", 12)
    (folder / "dog" / "cut.gif").unlink()
    expect("skipped: 11 of 35", 35)
    # An image with 32 bits can be used with a white level.
    expect("skipped: 10 of 35", 35, white_level="9")
    for cached in (tmp_path / "cache" / "simclr-tf2").iterdir():
        cached.write_text("{")  # A corrupt cache is replaced.
    expect("skipped: 11 of 35", 35)
    (tmp_path / "cache" / "simclr-tf2").rename(tmp_path / "other")
    (tmp_path / "cache" / "simclr-tf2").write_text("not a directory")
    expect("skipped: 11 of 35", 35)


def test_a_run_logs_skipped_images_missing_classes_and_files_with_several_pages(folder, tmp_path):
    for path in folder.glob("cat/*"):
        path.unlink()
    (folder / "cat" / os.fsdecode(b"\xff.png")).write_bytes(PNG)
    for name in ("a.gif", "b.tif"):
        FRAMES[0].save(folder / "dog" / name, save_all=True, append_images=FRAMES[1:])
    log = run(tmp_path, folder, corrupt_images="skip")
    assert "skipped: 13 of 27 images cannot be used: cat/" in log
    assert "file name is not UTF-8" in log
    assert "train has no images of 1 of 2 classes (cat)" in log
    names = re.search("only the first page or frame of 2 images is used: (.*)", log)[1].split(", ")
    assert sorted(names) == ["dog/a.gif (2)", "dog/b.tif (2)"]
    assert (tmp_path / "run" / "ckpt-24.index").exists()


COMPLETE = {
    "exif.jpg": encode(SMOOTH, "jpeg", exif=b"Exif\0\0" + bytes(60000)),
    "progressive.jpg": encode(SMOOTH, "jpeg", progressive=True),
    "fill.jpg": JPEG.replace(b"\xff\xc0", b"\xff\xff\xc0", 1),
    "rgb.jpg": JPEG,
    "rgb.png": PNG,
    "a.webp": encode(PIXELS, "webp"),
    "a.tif": encode(PIXELS, "tiff"),
}
INCOMPLETE = {
    "cut.jpg": JPEG[:-20],
    "cut.png": PNG[:-20],
    "text.jpg": b"\xff\xd8 text \xff\xd9",
    "text.png": b"<html>",
    "empty.png": b"",
    "short.png": b"\x89P",
    "large.jpg": re.sub(rb"(?s)(?<=\xff\xc0...)....", b"\xff\xff\xff\xff", JPEG),
}


def test_headers_and_ends_of_files_are_checked(tmp_path):
    path = tmp_path / "a.jpg"
    for contents in (COMPLETE, INCOMPLETE):
        for name, content in contents.items():
            path.write_bytes(content)
            is_complete = contents is COMPLETE
            assert image_files.looks_complete(str(path)) == is_complete, name
            assert (why_unusable(path) is None) == is_complete, name
    assert not image_files.looks_complete(str(tmp_path / "missing.jpg"))


def test_of_many_images_only_a_sample_is_decoded(folder, checked, monkeypatch, logged):
    decode_only(3, monkeypatch)
    with rejects("10 of 36 images cannot be used: dog/cut.jpg"):
        check(folder)
    remove_unusable(folder)
    (folder / "dog" / "a.png").write_bytes(PNG)
    checked.reset_mock()
    logged.clear()
    check(folder)
    assert logged[0].startswith("checked the headers of 25 images and the pixels of 3;")
    check(folder)
    assert len(logged) == 1 and checked.call_count == 3
    check(folder, corrupt_images="skip")
    check(folder)
    assert len(logged) == 1 and checked.call_count == 28


CORRUPT_PIXELS = PNG[:60] + bytes(8) + PNG[68:]  # The header and the end are those of a PNG file.


def test_an_image_that_cannot_be_decoded_stops_training_after_a_checkpoint_and_stops_evaluation(
    folder, tmp_path, checked, monkeypatch
):
    remove_unusable(folder)
    decode_only(1, monkeypatch)
    # All steps after the second are one call.
    monkeypatch.setattr(train, "_SECONDS_PER_CALL", 1000.0)
    settings = dict(
        dataset=f"folder:{folder}", train_split="train", train_batch_size=4, train_steps=6
    )
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    config = runs.tiny_config(**settings)
    source = open_folder(folder)
    first_images = source.labeled_paths("train")[0][:8]  # views.png shows them.
    tf.random.set_seed(config.seed + 1)  # as in training
    order = data.training_paths(source, config, 0)
    # an image of the fifth step
    path = next(path for path in order[16:20] if path not in first_images)
    runs.run(reference, **settings, checkpoint_steps=1, keep_checkpoint_max=9)
    pathlib.Path(path).write_bytes(CORRUPT_PIXELS)
    problem = f"an image cannot be used: {os.path.relpath(path, folder)} .truncated or corrupt."
    with rejects(f"{problem}. Saved .*stopped/ckpt-4. Fix"):
        runs.run(stopped, **settings)
    readers = [tf.train.load_checkpoint(str(path / "ckpt-4")) for path in (reference, stopped)]
    for key in readers[0].get_variable_to_shape_map():
        if "OBJECT_GRAPH" not in key and "save_counter" not in key:
            assert_array_equal(*(reader.get_tensor(key) for reader in readers))
    decode_only(0, monkeypatch)
    settings.update(mode="eval", eval_protocol="knn", eval_split="train[:50%]")
    with rejects(problem):
        runs.run(stopped, **settings)


# ---------------------------------------------------------------------------------------------------------- links


def test_links_are_followed_and_cycles_are_detected(folder, tmp_path):
    for name in ("a.png", "deep/b.png"):
        tf.io.write_file(f"{tmp_path}/elsewhere/{name}", PNG)
    count = open_folder(folder).num_examples("train")
    for link, target in {
        "cat/inside.png": folder / "cat" / "0.png",
        "cat/outside.png": tmp_path / "elsewhere" / "a.png",
        "cat/linked": tmp_path / "elsewhere" / "deep",
        "cat/circle": folder / "cat",
        "cat/linked/circle": folder,
    }.items():
        (folder / link).symlink_to(target)
    (tmp_path / "link").symlink_to(folder)
    assert open_folder(tmp_path / "link").num_examples("train") == count + 3


# ----------------------------------------------------------------------------------------- image files in training runs


def test_deleting_the_images_stops_training_with_a_one_line_error(
    folder, tmp_path, monkeypatch, fails
):
    check = image_checks.check_images

    def check_and_remove(config, source, strategy):
        check(config, source, strategy)
        for path in folder.rglob("*.png"):
            path.unlink()

    monkeypatch.setattr(image_checks, "check_images", check_and_remove)
    training = functools.partial(run, tmp_path, folder, corrupt_images="skip")
    fails(".png (missing). Fix", command_line.run_command, "run.py", training)


def test_truncated_record_file_stops_training_with_a_one_line_error(tmp_path, monkeypatch, fails):
    path = str(tmp_path / "x")
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(b"only one")

    source = digits.digits_source()
    records = tfds_source._read_file(path, 0, tf.constant(3, tf.int64), 0, "tfrecord")
    source.references = lambda *_: records.map(lambda key, _: key)
    monkeypatch.setattr(datasets, "open_source", lambda *_, **__: source)
    training = functools.partial(runs.run, tmp_path / "run", train_steps=1)
    fails("run.py: error: ", command_line.run_command, "run.py", training)


# ------------------------------------------------------------------------------------------------ random corruption


@pytest.mark.parametrize(
    "name",
    [
        "rgb.jpg",
        "rgb.png",
        "animated.gif",
        "rgb.bmp",
        "cmyk.jpg",
        "rgb.webp",
        "rgb.tiff",
        "smooth.avif",
    ],
)
def test_checking_randomly_corrupted_images_never_raises_an_exception(name, tmp_path):
    random, path = default_rng(0), tmp_path / name
    reasons = set()
    for _ in range(200):
        content = bytearray(VALID[name][0])
        for position in random.integers(0, len(content), random.integers(1, 6)):
            content[position] = random.integers(0, 256)
        path.write_bytes(
            bytes(content[: random.integers(0, len(content))] if random.random() < 0.3 else content)
        )
        reasons.add(str(why_unusable(path)))
    expected = (
        f"None|empty|{NOT_AN_IMAGE}|truncated or corrupt|.* pixels(, more)? than the limit.*"
        "|not supported: Unsupported.*|HEIC.*"
    )
    assert len(reasons) > 1 and all(re.fullmatch(expected, reason) for reason in reasons)


# ----------------------------------------------------------------------------------------------- sizes and file types


def test_files_that_are_not_regular_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.png")
    links = {"device.png": "/dev/zero", "a.png": "nowhere.png", "b.png": "b.png"}
    for name, target in links.items():
        os.symlink(target, name)
    load_image = endpoints.image_loader(Config(image_size=8))
    signal.alarm(60)  # If a FIFO were opened, the test would block.
    try:
        for name, reason in {
            "fifo.png": "not a regular file",
            "device.png": "not a regular file",
            "a.png": "broken link",
            "b.png": "broken link",
            "c.png": "missing",
        }.items():
            assert image_files.why_unusable(name) == str(load_image(name)) == reason
    finally:
        signal.alarm(0)


@pytest.mark.parametrize(
    "limit, value", [("_LARGE_BYTES", 479), ("_LARGE_PIXELS", 479), ("_LARGE_PIXELS", 480)]
)
def test_large_files_and_images_are_decoded_one_at_a_time(tmp_path, monkeypatch, limit, value):
    paths = [str(tmp_path / f"{index}.png") for index in range(12)]
    for path in paths:
        tf.io.write_file(path, PNG)
    monkeypatch.setattr(image_files, limit, value)
    is_parallel = value == 480  # the number of pixels
    decode, active, num_active = tf.io.decode_image, [], []
    barrier = threading.Barrier(2)

    def decode_and_count(content, **options):
        active.append(content)
        num_active.append(len(active))
        if is_parallel:
            barrier.wait(60)  # The barrier opens only if two threads decode at the same time.
        decode(content, **options)
        active.pop()

    monkeypatch.setattr(tf.io, "decode_image", decode_and_count)
    assert image_files.find_unusable(paths, image_files.why_unusable) == {}
    assert len(num_active) == 12 and (max(num_active) > 1) == is_parallel
