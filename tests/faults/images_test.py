"""Image files: formats, corruption, limits, links and messages about unusable files."""

import functools
import io
import os
import pathlib
import re
import signal
import threading
import zlib

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
from sources.indexed import IndexedSource
from support import read_json, runs
from support.errors import rejects
from support.images import open_folder

pytestmark = pytest.mark.usefixtures("stem_only_resnet")

PIXELS = default_rng(0).integers(0, 256, [24, 20, 3], np.uint8)
SMOOTH = np.stack(
    [*np.meshgrid(np.linspace(0, 255, 20), np.linspace(0, 255, 24)), np.full([24, 20], 99.0)], -1
).astype(np.uint8)


def encode(image, file_format, **options):
    """Returns the content of an image file. `image` is an array or a Pillow image."""
    buffer = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(buffer, file_format, **options)
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
    "rgb.png": (PNG, PIXELS, 0),
    "cmyk.jpg": (encode(Image.fromarray(SMOOTH).convert("CMYK"), "jpeg", quality=95), SMOOTH, 16),
    "gray.jpg": (encode(SMOOTH[..., 0], "jpeg", quality=95), np.repeat(SMOOTH[..., :1], 3, -1), 8),
    "gray.png": (encode(PIXELS[..., 0], "png"), GRAY, 0),
    "opaque.png": (encode(Image.fromarray(PIXELS).convert("RGBA"), "png"), PIXELS, 0),
    **{
        f"transparent.{suffix}": (encode(TRANSPARENT, suffix, lossless=True), ON_WHITE, 1)
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
    "palette.png": (
        encode(FRAMES[0].convert("P", palette=Image.Palette.ADAPTIVE), "png"),
        np.array(FRAMES[0].convert("P", palette=Image.Palette.ADAPTIVE).convert("RGB")),
        0,
    ),
    "sixteen_bits.png": (PNG_16_BIT, PIXELS, 1),
    "animated.gif": (
        encode(FRAMES[0], "gif", save_all=True, append_images=FRAMES[1:]),
        np.array(Image.open(io.BytesIO(encode(FRAMES[0], "gif"))).convert("RGB")),
        0,
    ),
    "palette.bmp": (encode(PALETTE, "bmp"), np.array(PALETTE.convert("RGB")), 0),
    "animated.webp": (
        encode(FRAMES[0], "webp", save_all=True, append_images=FRAMES[1:], lossless=True),
        np.array(FRAMES[0]),
        0,
    ),
    "cmyk.tif": (encode(Image.fromarray(255 - PIXELS).convert("CMYK"), "tiff"), 255 - PIXELS, 0),
    "sixteen_bits.tif": (encode(PIXELS[..., 0].astype(np.uint16) * 257, "tiff"), GRAY, 0),
    **{
        name: (encode(PIXELS, file_format, **options), PIXELS, 0)
        for name, file_format, options in (
            ("bitmap.bmp", "bmp", {}),
            ("lossless.webp", "webp", {"lossless": True}),
            ("rgb.tiff", "tiff", {}),
            ("image.ppm", "ppm", {}),
            ("image.jp2", "jpeg2000", {"irreversible": False}),
            ("image.tga", "tga", {}),
            ("image.ico", "ico", {"sizes": [(20, 24)]}),
            ("image.pcx", "pcx", {}),
            ("image.sgi", "sgi", {}),
            ("image.dds", "dds", {}),
        )
    },
    "image.jfif": (JPEG, SMOOTH, 16),
    "image.pgm": (encode(PIXELS[..., 0], "ppm"), GRAY, 0),
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
UNUSABLE = {  # name -> (content, reason)
    "empty.png": (b"", "empty"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], "truncated or corrupt"),
    "cut.png": (PNG[: len(PNG) // 2], "truncated or corrupt"),
    "cut.webp": (VALID["lossless.webp"][0][:500], "truncated or corrupt"),
    "cut.gif": (VALID["animated.gif"][0][:300], "truncated or corrupt"),
    "head_only.gif": (b"GIF89a", "truncated or corrupt"),
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
}
IN_FOLDER = [*UNUSABLE, "cut2.jpg", "cut3.jpg"]


@pytest.mark.parametrize("name", VALID)
def test_images_in_all_formats_are_decoded_to_the_expected_pixels(name, tmp_path):
    content, pixels, difference = VALID[name]
    (tmp_path / name).write_bytes(content)
    assert why_unusable(tmp_path / name) is None
    source = open_folder(tmp_path)
    ((_, item, _),) = source.records("train")
    assert_close(source.decode(item).numpy(), pixels, difference)


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
    cards = ["SIMPLE  =                    T", "BITPIX  =                   32"]
    cards += [
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
DEEP = {  # name -> (content, white level, bands, expected values in [0, 1])
    "gray": (sixteen_bit_png(TWELVE[..., :1]), 4095, None, LEVELS),
    "gray at full range": (sixteen_bit_png(TWELVE[..., :1]), None, None, GRAY_12 / 65535),
    "RGB": (sixteen_bit_png(TWELVE), 4095, None, TWELVE / 4095),
    "clipped": (sixteen_bit_png(TWELVE), 2000, None, np.minimum(TWELVE / 2000, 1)),
    "TIFF": (tiff(GRAY_12), 4095, None, LEVELS),
    "big endian": (tiff(GRAY_12, byteorder=">"), 4095, None, LEVELS),
    "RGB TIFF": (tiff(TWELVE, photometric="rgb"), 4095, None, TWELVE / 4095),
    "compressed RGB TIFF": (
        tiff(TWELVE, photometric="rgb", compression="zlib", predictor=True),
        4095,
        None,
        TWELVE / 4095,
    ),
    "white is zero": (tiff(GRAY_12, photometric="miniswhite"), 5000, None, 1 - GRAY_12 / 5000),
    "signed": (tiff(SIGNED), 1000, None, (SIGNED / 1000 + 1) / 2),
    "signed with 8 bits": (
        tiff((SIGNED // 8).astype(np.int8)),
        None,
        None,
        (SIGNED // 8 / 127 + 1) / 2,
    ),
    "signed at full range": (tiff(SIGNED), None, None, (SIGNED / 32767 + 1) / 2),
    "32 bits": (tiff(GRAY_12.astype(np.uint32)), 4095, None, LEVELS),
    "float": (tiff(UNIT), None, None, UNIT),
    "32 bits in FITS": (fits(TWELVE[::-1, :, 0]), 4095, None, (LEVELS + 1) / 2),
    "large float": (tiff(UNIT * 300), 300, None, UNIT),
    "bands": (CHUNKY, 3000, "4,3,2", BANDS[..., [3, 2, 1]] / 3000),
    "planes": (
        tiff(np.moveaxis(BANDS, -1, 0), photometric="minisblack", planarconfig="separate"),
        3000,
        "13,1,7",
        BANDS[..., [12, 0, 6]] / 3000,
    ),
    "white is zero, big endian": (
        tiff(GRAY_12, photometric="miniswhite", byteorder=">"),
        5000,
        None,
        1 - GRAY_12 / 5000,
    ),
    "RGB and an unspecified channel": (
        tiff(BANDS[..., :4], photometric="rgb", extrasamples=["unspecified"]),
        3000,
        None,
        BANDS[..., :3] / 3000,
    ),
    "RGB and opacity": (
        tiff(np.dstack([TWELVE, 16 * GRAY_12]), photometric="rgb", extrasamples=[2]),
        4095,
        None,
        1 - (1 - TWELVE / 4095) * (16 * TWELVE[..., :1] / 65535),
    ),
    "a band of RGB and near infrared of 8 bits": (
        tiff(np.dstack([PIXELS, PIXELS[::-1, :, 0]]), photometric="rgb", extrasamples=[0]),
        None,
        "4,1,2",
        np.dstack([PIXELS[::-1, :, 0], PIXELS[..., :2]]) / 255,
    ),
    "rotated float": (
        tiff(UNIT[..., np.newaxis].astype(np.float64), extratags=[(274, "H", 1, 3, True)]),
        None,
        None,
        UNIT[::-1, ::-1],
    ),
    "bands of 8 bits": (encode(PIXELS, "png"), None, "3,1,1", PIXELS[..., [2, 0, 0]] / 255),
    "PGM": (b"P5 7 9 65535\n" + GRAY_12.astype(">u2").tobytes(), 4095, None, LEVELS),
}


@pytest.mark.parametrize("name", DEEP)
def test_values_of_more_than_eight_bits(name, tmp_path):
    content, white_level, bands, expected = DEEP[name]
    (tmp_path / "a.tif").write_bytes(content)
    white_level = white_level and str(white_level)
    settings = dict(dataset=f"folder:{tmp_path}", white_level=white_level, bands=bands)
    config = Config(**settings, image_size=8)
    source = datasets.open_configured(config)
    ((_, item, _),) = source.records("train")
    expected = expected if expected.ndim == 3 else np.repeat(expected[..., None], 3, -1)
    # Half of a level for rounding.
    assert_allclose(source.decode(item) / 255, expected, atol=0.51 / 255)
    assert image_checks._find_unusable(config, source) == {}
    loaded = endpoints.image_loader(config)(str(tmp_path / "a.tif")).numpy()
    resized = data_util.preprocess_for_eval(tf.constant(source.decode(item) / 255), 8, False)
    assert_allclose(loaded, resized, atol=1e-6)
    thumbnail = thumbnails.load_thumbnail(str(tmp_path / "a.tif"), 64, config.conversion)
    assert_array_equal(thumbnail, source.decode(item))


@pytest.mark.parametrize(
    "name, expected",
    [("gray", "4095"), ("signed", "1000"), ("planes", str(BANDS[..., [12, 0, 6]].max()))],
)
def test_the_white_level_is_the_largest_value_of_the_training_images(name, expected, tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.tif").write_bytes(DEEP[name][0])
    config = Config(dataset=f"folder:{tmp_path}", white_level="auto", bands=DEEP[name][2])
    source = datasets.open_configured(config)
    config, lines = checks.complete(config.replace(train_batch_size=2), source, [], Recorded(), 1)
    assert config.white_level == expected and f"white_level: {expected}" in lines


def test_training_uses_the_white_level_that_was_found(tmp_path, monkeypatch):
    for index in range(12):
        path = tmp_path / "images" / "ab"[index % 2] / f"{index}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DEEP["gray"][0])
    used, convert = set(), image_files.convert
    monkeypatch.setattr(
        image_files,
        "convert",
        lambda content, conversion: (
            used.add(conversion.white_level) or convert(content, conversion)
        ),
    )
    settings = dict(dataset=f"folder:{tmp_path}/images", train_batch_size=4, train_steps=1)
    runs.run(tmp_path / "run", **settings, train_split="train", white_level="auto")
    assert used == {4095.0}
    assert read_json(tmp_path / "run" / "flags.json")["white_level"] == "4095"


@pytest.mark.parametrize(
    "content, reason",
    [
        (CHUNKY, "13 channels per pixel: choose three, as in --bands=4,3,2"),
        (tiff(UNIT * 300), r"values up to \d.*; set --white_level=auto"),
        (tiff(GRAY_12.astype(np.uint32)), "values up to 4095; set --white_level=auto"),
        (tiff((GRAY_12 > 9).astype(np.uint32)), "values up to 1; set --white_level=auto"),
        (
            tiff(BANDS[..., :4], photometric="minisblack", planarconfig="contig"),
            "4 channels per pixel: choose three, .*",
        ),
        (tiff(UNIT - 5), r"values down to -4.*; scale the values to \[0, 1\]"),
        (tiff(np.where(UNIT > 0.5, np.nan, UNIT)), r"values down to nan; scale .*"),
        (b"\0\0\0\x18ftypheic" + bytes(40), r"HEIC or similar \(pip install pillow-heif\)"),
        (tiff(TWELVE)[:-200], "truncated or corrupt"),
        (
            tiff(np.zeros([4, 4, 4], np.uint16), photometric="separated"),
            "CMYK with more than 8 bits",
        ),
        (
            encode(PIXELS, "bmp").replace(b"\1\0\x18\0", b"\1\0\7\0", 1),
            r"not supported: Unsupported BMP pixel depth \(7\)",
        ),
        (  # LZW, for which tifffile needs another package
            CHUNKY.replace(b"\x03\x01\x03\0\x01\0\0\0\x01", b"\x03\x01\x03\0\x01\0\0\0\x05", 1),
            r"compressed data .pip install imagecodecs.",
        ),
    ],
)
def test_reasons_for_unsupported_values_are_true(content, reason, tmp_path, capfd):
    (tmp_path / "a.tif").write_bytes(content)
    assert re.fullmatch(reason, why_unusable(tmp_path / "a.tif"))
    assert "sample" not in capfd.readouterr().err


def encode_rotated(pixels, file_format, orientation=6):
    """Returns the content of an image file whose EXIF data specify an orientation."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encode(pixels, file_format, exif=exif, quality=95, lossless=True)


def load(path):
    return tf.io.decode_image(image_files.load(str(path)), 3, expand_animations=False).numpy()


@pytest.mark.parametrize("file_format", ["jpeg", "png", "webp", "tiff"])
def test_images_are_rotated_as_specified_by_their_exif_data(file_format, tmp_path):
    pixels = SMOOTH[:, :16]
    for orientation in range(1, 10):  # Orientation 1 is upright, and 9 is undefined.
        path = tmp_path / f"{orientation}.{file_format}"
        path.write_bytes(encode_rotated(pixels, file_format, orientation))
        expected = ORIENTED.get(orientation, np.array)(pixels)
        assert_close(load(path), expected)
        assert why_unusable(path) is None
        resized = endpoints.image_loader(Config(image_size=24))(str(path)).numpy()
        assert np.abs(resized - tf.image.resize(expected / 255, [24, 24], "bicubic")).mean() < 0.05


@pytest.mark.parametrize("file_format", ["jpeg", "png"])
def test_exif_data_behind_other_metadata_are_found(file_format, tmp_path):
    content = encode_rotated(SMOOTH[:, :16], file_format)
    if file_format == "jpeg":  # A segment of 60,000 bytes, such as a color profile, comes first.
        content = content[:2] + b"\xff\xe2\xea\x60" + b"\1" * 59998 + content[2:]
    else:  # The eXIf chunk is the last one.
        begin, last = content.index(b"eXIf") - 4, content.index(b"IEND") - 4
        end = begin + 12 + int.from_bytes(content[begin : begin + 4], "big")
        text = b"teXt" + b"1" * 6000
        text = (6000).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
        content = content[:begin] + content[end:last] + text + content[begin:end] + content[last:]
    assert content.index({"jpeg": b"Exif", "png": b"eXIf"}[file_format]) > 4096
    (tmp_path / "a").write_bytes(content)
    assert_close(load(tmp_path / "a"), ORIENTED[6](SMOOTH[:, :16]))


def test_malformed_exif_data_are_ignored(tmp_path):
    content = encode_rotated(SMOOTH, "jpeg")
    (tmp_path / "a.jpg").write_bytes(re.sub(rb"(Exif\0\0..)..", rb"\1??", content, flags=re.DOTALL))
    assert (tmp_path / "a.jpg").read_bytes() != content
    assert load(tmp_path / "a.jpg").shape == SMOOTH.shape
    assert why_unusable(tmp_path / "a.jpg") is None


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_images_are_reported_with_a_reason(name, tmp_path):
    (tmp_path / name).write_bytes(UNUSABLE[name][0])
    assert why_unusable(tmp_path / name) == UNUSABLE[name][1]


@pytest.fixture
def folder(tmp_path):
    """Creates a folder that contains valid images of two classes and all types of unusable images."""
    for index in range(12):
        for name in ("cat", "dog"):
            path = tmp_path / "images" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tf.io.encode_png(np.roll(PIXELS, index, 0)).numpy())
    for name in IN_FOLDER:
        content, _ = UNUSABLE[name.replace("2", "").replace("3", "")]
        (tmp_path / "images" / "dog" / name).write_bytes(content)
    return tmp_path / "images"


def remove_unusable(folder):
    for name in IN_FOLDER:
        (folder / "dog" / name).unlink()


def decode_only(count, monkeypatch):
    """Makes the check before training decode `count` images of more than 20."""
    monkeypatch.setattr(image_checks, "_MANY_IMAGES", 20)
    monkeypatch.setattr(image_checks, "_MAX_SAMPLE", count)


def run(tmp_path, folder, **settings):
    """Trains for one step and returns the log."""
    return runs.run(
        tmp_path / "run",
        dataset=f"folder:{folder}",
        train_split="train",
        train_batch_size=8,
        train_steps=1,
        **settings,
    )


def test_corrupt_images_give_an_error_that_lists_the_first_ten(folder, tmp_path):
    with rejects("12 of 36 images cannot be used: dog/cut.gif .trunc") as error:
        run(tmp_path, folder)
    assert str(error.value).count("dog/") == 10
    assert not list((tmp_path / "run").glob("ckpt*"))


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Returns a list of the paths that are decoded in order to check them. The user's cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths, check = [], image_files.why_unusable
    monkeypatch.setattr(
        image_files, "why_unusable", lambda path, *_: paths.append(path) or check(path, *_)
    )
    return paths


def test_corrupt_images_are_skipped_and_the_check_is_cached_for_all_runs(folder, tmp_path, checked):
    def train(name, **settings):
        checked.clear()
        return run(tmp_path / name, folder, corrupt_images="skip", **settings)

    assert "skipped: 12 of 36 images cannot be used: dog/cut.gif" in train("a")
    assert len(checked) == 36
    # Only unusable images are checked again, for which a package may have been installed.
    assert "skipped: 12 of 36" in train("b") and len(checked) == 12
    train("a", mode="eval", eval_protocol="knn", eval_split="train[:50%]")
    assert len(checked) == 12
    (folder / "dog" / "cut.gif").unlink()
    assert "skipped: 11 of 35" in train("a", allow_flag_changes=True) and len(checked) == 35
    # An image with 32 bits can be used with a white level.
    assert "skipped: 10 of 35" in train("c", white_level="9") and len(checked) == 35
    for cached in (tmp_path / "cache" / "simclr-tf2").iterdir():
        cached.write_text("{")  # A corrupt cache is replaced.
    assert "skipped: 11 of 35" in train("b", allow_flag_changes=True) and len(checked) == 35
    (tmp_path / "cache" / "simclr-tf2").rename(tmp_path / "other")
    (tmp_path / "cache" / "simclr-tf2").write_text("not a directory")
    assert "skipped: 11 of 35" in train("d") and len(checked) == 35


def test_images_with_several_pages_are_logged(folder, tmp_path):
    for name in ("a.gif", "b.tif"):
        FRAMES[0].save(folder / "dog" / name, save_all=True, append_images=FRAMES[1:])
    log = run(tmp_path, folder, corrupt_images="skip")
    names = re.search("only the first page or frame of 2 images is used: (.*)", log)[1].split(", ")
    assert sorted(names) == ["dog/a.gif (2)", "dog/b.tif (2)"]


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


@pytest.mark.parametrize(
    ("content", "complete"),
    [*((content, True) for content in COMPLETE.values())]
    + [(content, False) for content in INCOMPLETE.values()],
    ids=[*COMPLETE, *INCOMPLETE],
)
def test_headers_and_ends_of_files_are_checked(content, complete, tmp_path):
    (tmp_path / "a.jpg").write_bytes(content)
    assert image_files.looks_complete(str(tmp_path / "a.jpg")) == complete
    assert (why_unusable(tmp_path / "a.jpg") is None) == complete
    assert not image_files.looks_complete(str(tmp_path / "missing.jpg"))


def test_of_many_images_only_a_sample_is_decoded(folder, tmp_path, checked, monkeypatch):
    decode_only(3, monkeypatch)
    with rejects("10 of 36 images cannot be used: dog/cut.jpg"):
        run(tmp_path, folder)
    remove_unusable(folder)
    (folder / "dog" / "a.png").write_bytes(PNG)
    checked.clear()
    log = run(tmp_path, folder)
    assert "checked the headers of 25 images and the pixels of 3" in log and len(checked) == 3
    assert "checked" not in run(tmp_path / "other", folder) and len(checked) == 3
    assert "skipped" not in run(tmp_path / "all", folder, corrupt_images="skip")
    assert len(checked) == 28
    assert "checked" not in run(tmp_path / "more", folder) and len(checked) == 28


CORRUPT_PIXELS = PNG[:60] + bytes(8) + PNG[68:]  # The header and the end are those of a PNG file.


def test_an_image_that_cannot_be_decoded_stops_training_after_a_checkpoint(
    folder, tmp_path, checked, monkeypatch
):
    remove_unusable(folder)
    decode_only(1, monkeypatch)
    monkeypatch.setattr(
        train, "_SECONDS_PER_CALL", 1000.0
    )  # All steps after the second are one call.
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
    runs.run(reference, **{**settings, "checkpoint_steps": 1, "keep_checkpoint_max": 9})
    pathlib.Path(path).write_bytes(CORRUPT_PIXELS)
    message = f"cannot be used: {os.path.relpath(path, folder)} .truncated or corrupt.. Saved .*stopped/ckpt-4. Fix"
    with rejects(message):
        runs.run(stopped, **settings)
    readers = [tf.train.load_checkpoint(str(path / "ckpt-4")) for path in (reference, stopped)]
    for key in readers[0].get_variable_to_shape_map():
        if "OBJECT_GRAPH" not in key and "save_counter" not in key:
            assert_array_equal(*(reader.get_tensor(key) for reader in readers))
    pathlib.Path(path).write_bytes(PNG)
    assert "resumed at step 4" in runs.run(stopped, **settings, allow_flag_changes=True)


def test_an_image_that_cannot_be_decoded_stops_evaluation(folder, tmp_path, checked, monkeypatch):
    remove_unusable(folder)
    run(tmp_path, folder)
    decode_only(0, monkeypatch)
    (folder / "dog" / "3.png").write_bytes(CORRUPT_PIXELS)
    with rejects("an image cannot be used: dog/3.png .truncated"):
        run(tmp_path, folder, mode="eval", eval_protocol="knn", eval_split="train[:50%]")


def test_files_whose_names_are_not_utf8_are_skipped_and_logged(folder, tmp_path):
    os.rename(folder / "cat" / "0.png", os.fsencode(folder / "cat") + b"/\xff.png")
    log = run(tmp_path, folder, corrupt_images="skip")
    assert "skipped: 13 of 36 images cannot be used: cat/" in log
    assert "file name is not UTF-8" in log
    assert (tmp_path / "run" / "ckpt-1.index").exists()


def test_skipping_files_does_not_change_the_keys_of_other_files(folder):
    complete, reduced = (open_folder(folder) for _ in range(2))
    unusable = [path for path in reduced.paths() if os.path.basename(path) in IN_FOLDER]
    reduced.exclude(unusable)
    assert reduced.num_examples("train[:50%]") + reduced.num_examples("train[50%:]") == 24
    keys = {path: int(key) for key, path in zip(*complete._select("train")[:2])}
    for key, path in zip(*reduced._select("train")[:2]):
        assert keys[path] == key and path not in unusable


# ---------------------------------------------------------------------------------------------------------- links


def test_links_are_followed_and_cycles_are_detected(folder, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b.png"):
        (tmp_path / "elsewhere" / name).write_bytes(PNG)
    count = open_folder(folder).num_examples("train")
    (folder / "cat" / "inside.png").symlink_to(folder / "cat" / "0.png")
    (folder / "cat" / "outside.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    (folder / "cat" / "linked").symlink_to(tmp_path / "elsewhere" / "deep")
    (folder / "cat" / "circle").symlink_to(folder / "cat")
    (folder / "cat" / "linked" / "circle").symlink_to(folder)
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

    class TruncatedSource(IndexedSource):
        def references(self, *_):
            records = tfds_source._read_file(path, 0, tf.constant(3, tf.int64), 0, "tfrecord")
            return records.map(lambda key, _: key)

    source = digits.digits_source()
    truncated = TruncatedSource("digits", source._splits, source.class_names, tf.identity)
    monkeypatch.setattr(datasets, "open_source", lambda *_, **__: truncated)
    training = functools.partial(runs.run, tmp_path / "run", train_steps=1)
    fails("run.py: error: ", command_line.run_command, "run.py", training)


# ------------------------------------------------------------------------------------------------ random corruption


@pytest.mark.parametrize(
    "name",
    [
        "rgb.jpg",
        "rgb.png",
        "animated.gif",
        "bitmap.bmp",
        "cmyk.jpg",
        "lossless.webp",
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
        reasons.add(
            re.sub(
                r".* pixels(, more)? than the limit.*|not supported: Unsupported.*|HEIC.*",
                "not supported",
                str(why_unusable(path)),
            )
        )
    assert len(reasons) > 1
    assert reasons <= {"None", "empty", NOT_AN_IMAGE, "truncated or corrupt", "not supported"}


# ----------------------------------------------------------------------------------------------- sizes and file types


@pytest.mark.parametrize("name", VALID)
def test_images_above_the_pixel_limit_are_not_decoded(name, tmp_path, monkeypatch):
    path = tmp_path / name
    path.write_bytes(VALID[name][0])
    monkeypatch.setattr(image_files, "MAX_PIXELS", 480)
    assert why_unusable(path) is None
    monkeypatch.setattr(image_files, "MAX_PIXELS", 479)
    monkeypatch.setattr(tf.io, "decode_image", lambda *_, **__: pytest.fail("decoded"))
    reason = "480 pixels, more than the limit of 479"
    assert why_unusable(path) == reason
    assert str(endpoints.image_loader(Config(image_size=8))(str(path))) == reason


@pytest.mark.parametrize("file_type", ["fifo", "link to a device"])
def test_non_regular_files_are_not_opened(tmp_path, monkeypatch, file_type):
    monkeypatch.chdir(tmp_path)
    if file_type == "fifo":
        os.mkfifo("x.png")
    else:
        os.symlink("/dev/zero", "x.png")
    signal.alarm(60)  # If a FIFO were opened, the test would block.
    try:
        assert image_files.why_unusable("x.png") == "not a regular file"
        image = endpoints.image_loader(Config(image_size=8))("x.png")
        assert str(image) == "not a regular file"
    finally:
        signal.alarm(0)


def test_broken_links_and_missing_files_are_reported(tmp_path):
    os.symlink("nowhere.png", tmp_path / "a.png")
    os.symlink("b.png", tmp_path / "b.png")
    assert [why_unusable(tmp_path / name) for name in ("a.png", "b.png", "c.png")] == [
        "broken link",
        "broken link",
        "missing",
    ]


@pytest.mark.parametrize("large", ["files", "images", "neither"])
def test_large_files_and_images_are_decoded_one_at_a_time(tmp_path, monkeypatch, large):
    paths = [str(tmp_path / f"{index}.png") for index in range(12)]
    for path in paths:
        (tmp_path / path).write_bytes(PNG)
    monkeypatch.setattr(
        image_files,
        "_LARGE_BYTES" if large == "files" else "_LARGE_PIXELS",
        479 if large != "neither" else 480,
    )
    decode, active, num_active = tf.io.decode_image, [], []
    barrier = threading.Barrier(2)

    def decode_and_count(content, **options):
        active.append(content)
        num_active.append(len(active))
        if large == "neither":
            barrier.wait(60)  # The barrier opens only if two threads decode at the same time.
        decode(content, **options)
        active.pop()

    monkeypatch.setattr(tf.io, "decode_image", decode_and_count)
    assert image_files.find_unusable(paths, image_files.why_unusable) == {}
    assert len(num_active) == 12 and (max(num_active) > 1) == (large == "neither")


def test_class_with_only_corrupt_images_is_logged(folder, tmp_path):
    for path in folder.glob("cat/*.png"):
        path.write_bytes(PNG[:40])
    log = run(tmp_path, folder, corrupt_images="skip")
    assert "train has no images of 1 of 2 classes (cat)" in log


# ------------------------------------------------------------------------------------------------ large photographs


def test_the_speed_of_decoding_is_measured_if_files_are_large(tmp_path):
    for index in range(45):
        for size in (24, 300):
            path = tmp_path / str(size) / f"{index}.jpg"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(SMOOTH).resize([size, 2 * size]).save(path)
    config = runs.tiny_config(train_split="train")
    small, large = (open_folder(tmp_path / name) for name in ("24", "300"))
    assert train.measure_decoding(config, small) == (float("inf"), "")
    rate, text = train.measure_decoding(config, large)
    assert 0 < rate < 1e5
    speed, side, factor, size = re.fullmatch(
        r"decoding limits the speed to about (\d+) images/s\. Files with a shorter side of (\d+)"
        r" pixels would be decoded ([\d.]+) times as fast \(see docs/own_images.md, Large"
        r" photographs\)\. --cache_dataset keeps all files \(([\d.]+) GB\) in memory\.",
        text,
    ).groups()
    assert (int(speed), side, size) == (round(rate), "16", "0.0") and float(factor) > 1
    assert "cache" not in train.measure_decoding(config.replace(cache_dataset=True), large)[1]


@pytest.mark.parametrize("rate, is_logged", [(1e-9, True), (1e9, False)])
def test_the_limit_is_logged_once_if_training_is_about_as_fast(
    rate, is_logged, tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "measure_decoding", lambda *_: (rate, "advice"))
    log = runs.run(tmp_path, train_steps=24)
    assert log.splitlines().count("advice") == is_logged
