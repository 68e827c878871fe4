"""Image files of every kind, good and bad: which are used, what is said of the others."""

import io
import os
import re
import signal
import socket
import struct
import threading
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageSequence

from inference import endpoints
from runtime import console
from runtime.errors import UserError
from sources import datasets, digits, folders, image_checks, image_files, tfds_source
from sources.indexed import IndexedSource
from support import runs

pytestmark = pytest.mark.usefixtures("tiny_resnet")

PIXELS = np.random.default_rng(0).integers(0, 256, [24, 20, 3], np.uint8)
SMOOTH = np.stack([*np.meshgrid(np.linspace(0, 255, 20), np.linspace(0, 255, 24)), np.full([24, 20], 99.0)], -1).astype(
    np.uint8)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


JPEG, PNG = encoded(Image.fromarray(SMOOTH), "jpeg", quality=95), encoded(Image.fromarray(PIXELS), "png")
SIXTEEN_BITS = tf.io.encode_png(PIXELS.astype(np.uint16) * 257).numpy()
FRAMES = [Image.fromarray(np.roll(PIXELS // 64 * 64, shift, 0)) for shift in (0, 5)]
GOOD = {  # name -> (content, the pixels it stands for, greatest difference)
    "rgb.jpg": (JPEG, SMOOTH, 16),
    "rgb.png": (PNG, PIXELS, 0),
    "cmyk.jpg": (encoded(Image.fromarray(SMOOTH).convert("CMYK"), "jpeg", quality=95), SMOOTH, 16),
    "grey.jpg": (encoded(Image.fromarray(SMOOTH[..., 0]), "jpeg", quality=95),
                 np.repeat(SMOOTH[..., :1], 3, -1), 8),
    "grey.png": (encoded(Image.fromarray(PIXELS[..., 0]), "png"), np.repeat(PIXELS[..., :1], 3, -1), 0),
    "alpha.png": (encoded(Image.fromarray(PIXELS).convert("RGBA"), "png"), PIXELS, 0),
    "grey_alpha.png": (encoded(Image.fromarray(PIXELS[..., 0]).convert("LA"), "png"),
                       np.repeat(PIXELS[..., :1], 3, -1), 0),
    "palette.png": (encoded(FRAMES[0].convert("P", palette=Image.Palette.ADAPTIVE), "png"),
                    np.array(FRAMES[0].convert("P", palette=Image.Palette.ADAPTIVE).convert("RGB")), 0),
    "sixteen_bits.png": (SIXTEEN_BITS, PIXELS, 1),
    "animated.gif": (encoded(FRAMES[0], "gif", save_all=True, append_images=FRAMES[1:]),
                     np.array(Image.open(io.BytesIO(encoded(FRAMES[0], "gif"))).convert("RGB")), 0),
    "bitmap.bmp": (encoded(Image.fromarray(PIXELS), "bmp"), PIXELS, 0),
    "grey.bmp": (encoded(Image.fromarray(PIXELS[..., 0]), "bmp"), np.repeat(PIXELS[..., :1], 3, -1), 0),
    "png_called.jpg": (PNG, PIXELS, 0),
    "jpeg_called.gif": (JPEG, SMOOTH, 16),
}
CONVERT = "; convert it to JPEG or PNG"
BAD = {  # name -> (content, reason)
    "empty.png": (b"", "empty"),
    "cut.jpg": (JPEG[:len(JPEG) // 2], "truncated or corrupt"),
    "cut.png": (PNG[:len(PNG) // 2], "truncated or corrupt"),
    "head_only.gif": (b"GIF89a", "truncated or corrupt"),
    "text.jpg": (b"not an image at all", "not an image"),
    "page.jpg": (b"<html>404</html>", "unsupported format: HTML or SVG" + CONVERT),
    "webp_called.jpg": (encoded(Image.fromarray(PIXELS), "webp"), "unsupported format: WebP" + CONVERT),
    "tiff_called.png": (encoded(Image.fromarray(PIXELS), "tiff"), "unsupported format: TIFF" + CONVERT),
    "palette.bmp": (encoded(FRAMES[0].convert("P", palette=Image.Palette.ADAPTIVE), "bmp"),
                    "unsupported format: BMP with a palette" + CONVERT),
    "black_and_white.bmp": (encoded(Image.fromarray(PIXELS[..., 0]).convert("1"), "bmp"),
                            "unsupported format: BMP with a palette" + CONVERT),
}


@pytest.mark.parametrize("name", GOOD)
def test_images_of_every_kind_are_what_they_show(name, tmp_path):
    content, pixels, difference = GOOD[name]
    (tmp_path / name).write_bytes(content)
    assert image_files.why_unusable(str(tmp_path / name)) is None
    source = folders.folder_source(str(tmp_path))
    (_, item, _), = source.records("train")
    shown = source.decode(item).numpy()
    assert shown.shape == pixels.shape and np.abs(shown.astype(int) - pixels).max() <= difference


@pytest.mark.parametrize("name", BAD)
def test_corrupt_images_are_known_with_the_reason(name, tmp_path):
    (tmp_path / name).write_bytes(BAD[name][0])
    assert image_files.why_unusable(str(tmp_path / name)) == BAD[name][1]


@pytest.fixture
def folder(tmp_path):
    """Good images of two classes, and every kind of bad ones."""
    for number in range(12):
        for name in ("cat", "dog"):
            path = tmp_path / "images" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tf.io.encode_png(np.roll(PIXELS, number, 0)).numpy())
    for name, (content, _) in {**BAD, "cut2.jpg": BAD["cut.jpg"], "cut3.jpg": BAD["cut.jpg"]}.items():
        (tmp_path / "images" / "dog" / name).write_bytes(content)
    return tmp_path / "images"


def run(tmp_path, folder, **settings):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "log", said.append)
        runs.run(tmp_path / "run", dataset=f"folder:{folder}", train_split="train", train_batch_size=8,
                            train_steps=1, **settings)
    return "\n".join(said)


def test_corrupt_images_are_an_error_at_the_start_that_names_ten(folder, tmp_path):
    with pytest.raises(UserError, match="12 of 36 images cannot be used: dog/black_and_white.bmp .unsup") as error:
        run(tmp_path, folder)
    assert "and 2 more. Fix or remove them, or skip them with --corrupt_images=skip" in str(error.value)
    assert "\n" not in str(error.value) and str(error.value).count("dog/") == 10
    assert not list((tmp_path / "run").glob("ckpt*"))


def test_corrupt_images_may_be_skipped_and_are_looked_for_once(folder, tmp_path, monkeypatch):
    assert "skipped: 12 of 36 images cannot be used: dog/black" in run(tmp_path, folder, corrupt_images="skip")
    looked = []
    monkeypatch.setattr(image_files, "find_unusable", lambda paths, _: looked.append(paths) or {})
    assert "skipped: 12 of 36" in run(tmp_path, folder, corrupt_images="skip") and not looked
    (folder / "cat" / "0.png").touch()
    assert "skipped" not in run(tmp_path, folder, corrupt_images="skip") and len(looked) == 1


def test_names_that_are_no_text_are_left_out_and_told(folder, tmp_path, capsys):
    os.rename(folder / "cat" / "0.png", os.fsencode(folder / "cat") + b"/\xff.png")
    runs.run(tmp_path / "run", dataset=f"folder:{folder}", train_split="train", train_batch_size=8,
                        train_steps=1, corrupt_images="skip", eval_split="train[:8]", eval_split_given=True)
    printed = capsys.readouterr().out
    assert "skipped: 13 of 36 images cannot be used: cat/\\udcff.png (file name is not UTF-8), dog/black" in printed
    assert (tmp_path / "run" / "ckpt-1.index").exists()


def test_keys_of_the_others_stay(folder):
    whole, rest = (folders.folder_source(str(folder)) for _ in range(2))
    bad = [path for path in rest.paths() if os.path.basename(path) in BAD or "cut" in path]
    rest.exclude(bad)
    assert [rest.num_examples(split) for split in ("train", "train[:0]")] == [24, 0]
    assert rest.num_examples("train[:50%]") + rest.num_examples("train[50%:]") == 24
    keys = {path: int(key) for key, path in zip(*whole._select("train")[:2])}
    for key, path in zip(*rest._select("train")[:2]):
        assert keys[path] == key and path not in bad


def test_a_folder_of_only_corrupt_images_is_an_error(folder, tmp_path):
    for path in folder.rglob("*.*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="36 of 36 images cannot be used"):
        run(tmp_path, folder, corrupt_images="skip")


# ---------------------------------------------------------------------------------------------------------- links


def test_links_out_of_the_folder_need_leave(folder, tmp_path):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    for name in ("a.png", "deep/b.png"):
        (tmp_path / "elsewhere" / name).write_bytes(PNG)
    (folder / "cat" / "0.png").rename(folder / "cat" / "zero.png")
    (folder / "cat" / "inside.png").symlink_to(folder / "cat" / "zero.png")
    count = folders.folder_source(str(folder)).num_examples("train")
    (folder / "cat" / "outside.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    (folder / "cat" / "more").symlink_to(tmp_path / "elsewhere" / "deep")
    (folder / "cat" / "circle").symlink_to(folder / "cat")
    with pytest.raises(UserError, match="2 images are links to files outside of the directory .*--follow_links"):
        folders.folder_source(str(folder))
    assert folders.folder_source(str(folder), follow_links=True).num_examples("train") == count + 2


def test_a_linked_data_set_is_no_link_out_of_it(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert folders.folder_source(str(tmp_path / "link")).num_examples("train") == 36


# ------------------------------------------------------------------------------------------- while a run is going on


def test_a_folder_that_vanishes_is_told(folder, tmp_path, monkeypatch):
    check = image_checks.check_images

    def check_and_remove(config, source, is_chief):
        check(config, source, is_chief)
        for path in folder.rglob("*.png"):
            path.unlink()

    monkeypatch.setattr(image_checks, "check_images", check_and_remove)
    with pytest.raises(UserError, match="--dataset=folder:.* can no longer be read .*same command") as error:
        run(tmp_path, folder, corrupt_images="skip")
    assert "\n" not in str(error.value)


def test_a_damaged_record_file_is_told(tmp_path, monkeypatch):
    class Broken(IndexedSource):
        def references(self, *arguments, **options):
            path = tmp_path / "broken.tfrecord"
            path.write_bytes(b"\0" * 999)
            records = tf.data.TFRecordDataset(str(path)).map(lambda _: tf.constant(0, tf.int64))
            return records.concatenate(super().references(*arguments, **options))

    source = digits.digits_source()
    broken = Broken("digits", source._splits, source.class_names, tf.identity)
    monkeypatch.setattr(datasets, "open_source", lambda *_: broken)
    with pytest.raises(UserError, match="--dataset=digits: it can no longer be read .*Repair or restore") as error:
        runs.run(tmp_path / "run", train_steps=1)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("name", ["rgb.jpg", "rgb.png", "animated.gif", "bitmap.bmp", "cmyk.jpg"])
def test_random_damage_is_an_image_or_a_reason_and_never_more(name, tmp_path):
    random, path = np.random.default_rng(0), tmp_path / name
    reasons = set()
    for _ in range(200):
        content = bytearray(GOOD[name][0])
        for place in random.integers(0, len(content), random.integers(1, 6)):
            content[place] = random.integers(0, 256)
        path.write_bytes(bytes(content[:random.integers(0, len(content))] if random.random() < 0.3 else content))
        reasons.add(re.sub(r"\d+ pixels, more.*", "too many pixels", str(image_files.why_unusable(str(path)))))
    assert len(reasons) > 1
    assert reasons <= {"None", "empty", "not an image", "truncated or corrupt", "too many pixels",
                       "unsupported format: BMP with a palette" + CONVERT}


# ------------------------------------------------------------------------------------------------- sizes and kinds


def huge_png(side):
    """A valid PNG file of black pixels, one bit each, that is a thousandth of its image."""
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    compressor, rows = zlib.compressobj(9), bytes(1 + (side + 7) // 8)
    pixels = b"".join(compressor.compress(rows) for _ in range(side)) + compressor.flush()
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
            + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def test_images_of_more_pixels_than_the_limit_are_not_decoded(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(huge_png(23_000))
    assert path.stat().st_size < 2**20
    with pytest.raises(Image.DecompressionBombError, match="529000000 pixels"):
        Image.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(tf.io, "decode_image", lambda *_, **__: pytest.fail("decoded"))
        assert image_files.why_unusable(str(path)) == "529000000 pixels, more than --max_image_pixels=100000000"
        error = endpoints._load_image(str(path), 8, False)
        assert isinstance(error, image_files.UnusableImage)
    path.write_bytes(huge_png(300))
    assert image_files.why_unusable(str(path), 90_000) is None
    assert image_files.why_unusable(str(path), 89_999) == "90000 pixels, more than --max_image_pixels=89999"


@pytest.mark.parametrize("name", GOOD)
def test_pixels_are_those_of_all_frames(name, tmp_path):
    content = GOOD[name][0]
    with Image.open(io.BytesIO(content)) as image:
        boxes = [frame.tile[0][1] if frame.tile else (0, 0, 20, 24) for frame in ImageSequence.Iterator(image)]
    pixels = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
    assert len(boxes) == (2 if name == "animated.gif" else 1) and pixels >= 480
    path = tmp_path / name
    path.write_bytes(content)
    assert image_files.why_unusable(str(path), pixels) is None
    assert "more than" in image_files.why_unusable(str(path), pixels - 1)


def test_a_gif_of_many_frames_is_refused(tmp_path):
    """TensorFlow reads all frames, although it returns the first: 300 frames of a million pixels each."""
    frames = [Image.new("P", (1000, 1000), number % 2) for number in range(300)]
    content = encoded(frames[0], "gif", save_all=True, append_images=frames[1:], optimize=False)
    (tmp_path / "a.gif").write_bytes(content)
    assert image_files.why_unusable(str(tmp_path / "a.gif")) == (
        "300000000 pixels, more than --max_image_pixels=100000000")
    crossed = struct.pack("<6sHHBBB", b"GIF89a", 1, 1, 0, 0, 0) + b"".join(
        struct.pack("<BHHHHB", 0x2c, 0, 0, *size, 0) + b"\2\1\0\0" for size in ((60_000, 1), (1, 60_000)))
    (tmp_path / "b.gif").write_bytes(crossed + b";")
    assert image_files.why_unusable(str(tmp_path / "b.gif")).startswith("3600000000 pixels")


def test_a_sparse_file_is_refused_unread(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    os.truncate(path, 60 * 2**30)
    monkeypatch.setattr(image_files, "_read", lambda _: pytest.fail("read"))
    assert image_files.why_unusable(str(path)) == (
        "64424509440 bytes, too many for --max_image_pixels=100000000")


def test_a_large_file_that_is_no_image_is_not_read(tmp_path):
    path = tmp_path / "a.png"
    path.touch()
    os.truncate(path, 700 * 2**20)
    assert len(image_files._read(str(path))) == 32
    assert image_files.why_unusable(str(path)) == "not an image"


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "link to a device"])
def test_files_that_are_not_regular_are_not_opened(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    if kind == "fifo":
        os.mkfifo("x.png")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("x.png")
    elif kind == "link to a device":
        os.symlink("/dev/zero", "x.png")
    path = "/dev/zero" if kind == "device" else "x.png"
    signal.alarm(60)  # Opening a FIFO would wait for ever.
    try:
        assert image_files.why_unusable(path) == "not a regular file"
        assert str(endpoints._load_image(path, 8, False)) == "not a regular file"
    finally:
        signal.alarm(0)


def test_broken_links_are_named(tmp_path):
    os.symlink("nowhere.png", tmp_path / "a.png")
    os.symlink("b.png", tmp_path / "b.png")
    assert [image_files.why_unusable(str(tmp_path / name)) for name in ("a.png", "b.png", "c.png")] == [
        "broken link", "broken link", "missing"]


@pytest.mark.parametrize("large", ["files", "images", "neither"])
def test_large_files_and_images_are_handled_one_at_a_time(tmp_path, monkeypatch, large):
    paths = [str(tmp_path / f"{number}.png") for number in range(12)]
    for path in paths:
        (tmp_path / path).write_bytes(PNG)
    monkeypatch.setattr(image_files, "_LARGE_BYTES" if large == "files" else "_LARGE_PIXELS",
                        479 if large != "neither" else 480)
    decode, inside, most = tf.io.decode_image, [], []
    both = threading.Barrier(2)

    def watched(content, **options):
        inside.append(content)
        most.append(len(inside))
        if large == "neither":
            both.wait(60)  # Passes only if two threads are here.
        decode(content, **options)
        inside.pop()

    monkeypatch.setattr(tf.io, "decode_image", watched)
    assert image_files.find_unusable(paths) == {}
    assert len(most) == 12 and (max(most) > 1) == (large == "neither")


def test_the_limit_is_a_setting_and_another_limit_checks_again(folder, tmp_path):
    for path in folder.glob("dog/*.[jgb]*"):
        path.unlink()
    for path in folder.glob("dog/[a-z]*.png"):
        path.unlink()
    assert "skipped" not in run(tmp_path, folder, max_image_pixels=480)
    with pytest.raises(UserError, match="24 of 24 images cannot be used: cat/0.png .480 pixels, more than --max"):
        run(tmp_path, folder, max_image_pixels=479)


def test_a_class_whose_images_are_all_corrupt_is_named(folder, tmp_path):
    for path in folder.glob("cat/*.png"):
        path.write_bytes(PNG[:40])
    said = run(tmp_path, folder, corrupt_images="skip")
    assert f"folder:{folder}: train has no images of 1 of 2 classes (cat)" in said


def test_a_model_dir_among_the_classes_does_not_change_the_second_start(folder, tmp_path):
    for path in [*folder.glob("dog/*.[jgb]*"), *folder.glob("dog/[a-z]*.png")]:
        path.unlink()
    run(folder, folder)
    (folder / "run" / "views.png").write_bytes(PNG)
    assert "2 classes" not in run(folder, folder)
    assert folders.folder_source(str(folder)).class_names == ["cat", "dog"]


def test_a_record_file_that_is_cut_ends_training_with_one_line(tmp_path, monkeypatch):
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        writer.write(b"only one")

    class Cut(IndexedSource):
        def references(self, *arguments, **options):
            records = tfds_source._read_file(str(tmp_path / "a"), 0, tf.constant(3, tf.int64), 0)
            return records.map(lambda key, _: key).concatenate(super().references(*arguments, **options))

    source = digits.digits_source()
    cut = Cut("digits", source._splits, source.class_names, tf.identity)
    monkeypatch.setattr(datasets, "open_source", lambda *_: cut)
    with pytest.raises(UserError, match="--dataset=digits: it can no longer be read") as error:
        runs.run(tmp_path / "run", train_steps=1)
    assert "\n" not in str(error.value)
