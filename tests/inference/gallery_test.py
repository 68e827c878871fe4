"""Galleries: duplicates, outliers, clusters, confused classes, the page, and command-line errors."""

import csv
import html
import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from sklearn import model_selection
from sklearn import neighbors as sklearn_neighbors

from inference import analysis, endpoints, gallery, similarity, thumbnails
from inference import cli as inference_cli
from sources import folders
from support import networks
from support.images import write_images

STRANGE_NAME = '<b>x&".jpg'


def smooth_image(random, side=48):
    """Returns a random image without fine detail: uint8 [side, side, 3]."""
    image = Image.fromarray(random.integers(0, 256, [3, 3, 3], np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    return np.asarray(image)


def encode_pixels(path):
    """Returns a vector of an image's pixels (resized to 16 x 16) and the scaled differences between adjacent rows."""
    pixels = np.asarray(Image.open(path).convert("RGB").resize((16, 16)), np.float32) / 255
    return np.concatenate([(pixels - 0.5).ravel(), 2 * np.diff(pixels, axis=0).ravel()])


def write_vectors(folder, out, encode=encode_pixels):
    """Writes the vectors of all images in a folder in the same format as `embed`."""
    names = endpoints.find_images([str(folder)])
    np.savez(
        out,
        files=list(names.values()),
        vectors=np.stack([encode(path) for path in names]).astype(np.float32),
    )


def centered(directory):
    """Returns the file names in v.npz, and the vectors after their mean was subtracted, normalized."""
    with np.load(directory / "v.npz") as arrays:
        vectors = arrays["vectors"] - arrays["vectors"].mean(0)
        return arrays["files"].tolist(), similarity.normalize(vectors)


def near_axes(labels, noise):
    """Returns a normalized vector for each label, which is close to the axis with this number."""
    random = default_rng(0)
    return similarity.normalize(np.eye(8)[labels] + random.normal(0, noise, [len(labels), 8]))


def run_gallery(folder, vectors, out, *arguments):
    """Runs `python -m inference gallery` with the given vectors instead of a model. Returns the page."""
    inference_cli.main(
        ["gallery", "some model", str(folder), f"--vectors={vectors}", f"--out={out}", *arguments]
    )
    return out.read_text()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Writes 40 smooth images, a copy of one of them in another format, and 3 noise images."""
    folder, random = tmp_path_factory.mktemp("photos"), default_rng(0)
    for number in range(40):
        name = STRANGE_NAME if number == 7 else f"{number:02}.jpg"
        Image.fromarray(smooth_image(random)).save(folder / name, quality=95)
    Image.open(folder / "11.jpg").save(folder / "copy of 11.png")
    for number in range(3):
        Image.fromarray(random.integers(0, 256, [48, 48, 3], np.uint8)).save(
            folder / f"noise{number}.png"
        )
    return folder


@pytest.fixture(scope="module")
def queries(photos):
    """Returns flags that show the neighbors of an image given by its name, and of one given by its path."""
    return ["--query=12.jpg", f"--query={photos / '13.jpg'}"]


@pytest.fixture(scope="module")
def page(photos, queries, tmp_path_factory):
    """Writes a gallery of `photos`. Returns the directory and the text of the page."""
    directory = tmp_path_factory.mktemp("page")
    write_vectors(photos, directory / "v.npz")
    return directory, run_gallery(photos, directory / "v.npz", directory / "g.html", *queries)


def section(text, name):
    """Returns the part of a page from the level-2 heading with ID `name` to the next level-2 heading."""
    return text.partition(f'<h2 id="{name}">')[2].partition("<h2")[0]


def data_of(text):
    """Returns the data of a page's map."""
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text)[1])


def captions(text):
    """Returns the file names in the captions in one section of a page."""
    return [html.unescape(name) for name in re.findall(r'<figcaption title="([^"]*)"', text)]


# ------------------------------------------------------------------------------------------------------------ page


def test_page_has_no_external_references_and_escapes_file_names(page):
    text = page[1]
    assert not re.search(
        r"https?:|//\w|@import|url\(", re.sub(r"data:image/jpeg;base64,[\w+/=]+", "", text)
    )
    assert "<b>x" not in text and "&lt;b&gt;x&amp;&#34;.jpg" in text
    data = data_of(text)
    assert sum(label.startswith(STRANGE_NAME) for label in data["texts"]) == 1
    assert len(data["images"]) == 44
    assert all(image.startswith("data:image/jpeg;base64,/9j/") for image in data["images"])
    assert "some model" in text and "44 images" in text


def test_same_images_and_seed_give_the_same_page(page, photos, queries):
    directory, text = page
    again = run_gallery(photos, directory / "v.npz", directory / "again.html", *queries)
    assert again == text.replace("g.pairs.csv", "again.pairs.csv")


def test_an_image_and_its_copy_in_another_format_are_the_closest_pair(page):
    first, second = captions(section(page[1], "duplicates"))[:2]
    assert {first, second} == {"11.jpg", "copy of 11.png"}
    header, *rows = csv.reader((page[0] / "g.pairs.csv").open())
    assert header == ["first", "second", "similarity"]
    assert rows[0][:2] == ["11.jpg", "copy of 11.png"] and float(rows[0][2]) > 0.99
    values = [float(row[2]) for row in rows]
    assert values == sorted(values, reverse=True) and min(values) >= 0.95


def test_noise_images_are_the_outliers(page):
    names = captions(section(page[1], "outliers"))[:3]
    assert set(names) == {f"noise{number}.png" for number in range(3)}


def test_queries_are_shown_with_their_nearest_neighbors(page):
    text = section(page[1], "neighbors")
    names = captions(text)
    assert names[0] == "12.jpg" and names[9] == "13.jpg" and text.count("query:") == 2
    all_names, vectors = centered(page[0])
    similarities = vectors @ vectors[all_names.index("12.jpg")]
    # Copies of an image have the same similarity up to rounding, so their order may vary.
    shown = [similarities[all_names.index(name)] for name in names[1:9]]
    assert_allclose(shown, np.sort(similarities)[::-1][1:9], atol=1e-6)


def test_flags_set_the_number_of_clusters_the_threshold_and_the_seed(
    page, photos, queries, tmp_path
):
    flags = ("--clusters=3", "--threshold=0.5", "--seed=1")
    text = run_gallery(photos, page[0] / "v.npz", tmp_path / "g.html", *queries, *flags)
    assert "divided the images into 3 clusters" in section(text, "clusters")
    default_shown, shown = (
        captions(section(page_text, "neighbors"))[::9] for page_text in (page[1], text)
    )
    assert shown[:2] == default_shown[:2] and shown != default_shown
    _, vectors = centered(page[0])
    expected = np.sum(np.triu(vectors @ vectors.T, 1) >= 0.5)
    header, *rows = csv.reader((tmp_path / "g.pairs.csv").open())
    assert len(rows) == expected > sum(float(row[2]) >= 0.95 for row in rows) > 0


@pytest.mark.parametrize("count", [1, 2])
def test_gallery_supports_small_folders_and_spreadsheets_do_not_evaluate_names(count, tmp_path):
    names = ("=a.png", "b.png")[:count]
    for name in names:
        Image.new("RGB", (8, 8), "red").save(tmp_path / name)
    write_vectors(tmp_path, tmp_path / "v.npz")
    text = run_gallery(tmp_path, tmp_path / "v.npz", tmp_path / "g.html")
    assert set(captions(text)) == set(names)
    pairs = (tmp_path / "g.pairs.csv").read_text().splitlines()[1:]
    assert pairs == ["./=a.png,b.png,1.00000"][: count - 1]


def test_gallery_supports_equal_vectors_and_zero_vectors(photos, tmp_path):
    for value in (0.0, 1.0):
        write_vectors(photos, tmp_path / "v.npz", lambda path, value=value: np.full(4, value))
        text = run_gallery(photos, tmp_path / "v.npz", tmp_path / "new" / f"{value}.html")
        assert (
            f"before the mean vector is subtracted: {value:.3f}" in text
            and ("collapsed</b>" in text) == (value == 1)
            and "nan" not in text.split("<script")[0]
        )


def test_gallery_computes_vectors_with_a_network_and_lists_unreadable_images(
    tmp_path, monkeypatch, capsys
):
    write_images(tmp_path / "photos", "a.png", "b.png")
    broken, out = tmp_path / "photos" / "broken.jpg", tmp_path / "new" / "g.html"
    broken.write_bytes(b"no image")
    networks.replace_network(
        monkeypatch, lambda images: tf.image.resize(images, [4, 4]) - 0.5, image_size=16
    )
    inference_cli.main(
        ["gallery", "model", str(broken.parent), f"--out={out}", "--query=broken.jpg"]
    )
    assert f"skipped {broken}: " in capsys.readouterr().out
    text = out.read_text()
    assert "no vector: 1<" in text and "broken.jpg: not an image" in text
    assert {path.name for path in out.parent.iterdir()} == {"g.html", "g.pairs.csv"}


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--out=g.txt"], "g.txt: unsupported format. Use a file name that ends in .html"),
        (["--threshold=2"], "must be a number from -1 to 1; got 2"),
        (["--clusters=0"], "must be an integer from 1 to 1000000000; got 0"),
        (["--query=missing.jpg"], "--query=missing.jpg: this file is not among the images"),
        (
            ["--vectors=text.npz"],
            "text.npz: the arrays `files` [n] and `vectors` [n, d] cannot be read",
        ),
        (["--vectors=other.npz"], "other.npz: none of the listed files is among the images"),
        (
            ["--vectors=shapes.npz"],
            "shapes.npz: the arrays `files` [n] and `vectors` [n, d] cannot be read",
        ),
        (["--vectors=nan.npz"], "nan.npz: the vectors contain NaN or Inf"),
    ],
)
def test_invalid_arguments_give_one_line_errors(
    arguments, words, photos, tmp_path, monkeypatch, fails
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("text")
    for name, file, vectors in (
        ("other", "other.jpg", [[1, 1]]),
        ("shapes", "11.jpg", [[1, 1], [1, 1]]),
        ("nan", "11.jpg", [[1, np.nan]]),
    ):
        np.savez(f"{name}.npz", files=[file], vectors=np.float32(vectors))
    before = set(tmp_path.iterdir())
    command = ["gallery", "model", str(photos), "--out=g.html", *arguments]
    fails(words, inference_cli.main, command)
    assert set(tmp_path.iterdir()) == before


# --------------------------------------------------------------------------------------------------------- classes


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    """Writes images of three classes in two splits, and a vector for each image.

    Two images of class a have vectors like those of class b.
    """
    folder, random = tmp_path_factory.mktemp("labeled"), default_rng(1)
    for split, count in (("train", 12), ("test", 4)):
        write_images(folder, *(f"{split}/{c}/{i}.png" for c in "abc" for i in range(count)))

    def encode(path):
        is_wrong = path.endswith(("train/a/0.png", "train/a/1.png"))
        name = "b" if is_wrong else os.path.basename(os.path.dirname(path))
        return np.eye(3)["abc".index(name)] + random.normal(0, 0.1, 3)

    write_vectors(folder, folder / "v.npz", encode)
    return folder


def test_confused_classes_are_shown_and_split_folders_are_not_treated_as_classes(labeled, tmp_path):
    text = section(run_gallery(labeled, labeled / "v.npz", tmp_path / "g.html"), "classes")
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert [row[:2] for row in rows] == [("a", "16"), ("b", "16"), ("c", "16")]
    assert rows[0][2:] == ("87.5 %", "b") and rows[2][2:] == ("100.0 %", "")
    assert "a, classified as b: 2 images (12.5 % of the class)" in text
    examples = captions(text)
    assert set(examples[::2]) == {"train/a/0.png", "train/a/1.png"} and all(
        "/b/" in name for name in examples[1::2]
    )


def test_folders_that_are_not_a_valid_data_set_have_no_classes(labeled, tmp_path, capsys):
    assert set(endpoints.find_classes([str(labeled)]).values()) == set("abc")
    assert endpoints.find_classes([str(labeled), str(labeled)]) == {}
    Image.new("RGB", (8, 8)).save(labeled / "loose.png")
    assert endpoints.find_classes([str(labeled)]) == {}
    (labeled / "loose.png").unlink()
    assert (
        "no classes are used: images (loose.png, ...) are next to split folders"
        in capsys.readouterr().out
    )


def test_leave_one_out_predictions_match_scikit_learn():
    labels = np.arange(50) % 4
    vectors = near_axes(labels, 0.5)
    indices = similarity.search(vectors, 5, 2.0).indices
    classifier = sklearn_neighbors.KNeighborsClassifier(5, metric="cosine")
    cv = model_selection.LeaveOneOut()
    expected = model_selection.cross_val_predict(classifier, vectors, labels, cv=cv)
    assert_array_equal(analysis.predict_from_neighbors(indices, labels), expected)


# -------------------------------------------------------------------------------------------------------- analysis


def test_mean_similarity_is_the_mean_over_all_pairs_and_0_after_the_mean_is_subtracted():
    vectors = default_rng(0).normal(1, 1, [300, 8]).astype(np.float32)
    unit = similarity.normalize(vectors)
    raw = analysis.mean_similarity(unit)
    assert raw == pytest.approx((unit @ unit.T)[~np.eye(300, dtype=bool)].mean(), abs=1e-5)
    assert raw > 0.3 and abs(analysis.mean_similarity(similarity.center(vectors))) < 0.01
    # The mean of few vectors is not subtracted.
    assert_array_equal(similarity.center(vectors[:9]), unit[:9])


def test_clusters_are_sorted_by_size_and_typical_images_are_closest_to_the_center():
    truth = np.repeat([0, 1, 2], [10, 50, 25])
    vectors = near_axes(truth, 0.05)
    clusters = analysis.find_clusters(vectors, 3, 0, 4)
    assert clusters.sizes.tolist() == [50, 25, 10]
    for number, original in enumerate([1, 2, 0]):
        assert (truth[clusters.assignments == number] == original).all()
        members = np.flatnonzero(truth == original)
        distances = np.linalg.norm(
            vectors[members] - similarity.normalize(vectors[members].mean(0)[None]), axis=1
        )
        assert_array_equal(clusters.typical[number], members[np.argsort(distances)[:4]])


def test_map_places_similar_vectors_next_to_each_other():
    truth = np.repeat([0, 1, 2], 20)
    vectors = near_axes(truth, 0.05)
    points, method = analysis.map_points(vectors, 0)
    assert method == "t-SNE" and points.min() >= 0 and points.max() == 1
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (truth[distances.argmin(1)] == truth).all()


# ------------------------------------------------------------------------------------------------------ thumbnails


def test_thumbnails_are_upright_and_keep_their_aspect_ratio(tmp_path):
    image = np.zeros([40, 200, 3], np.uint8)
    image[:, :100] = 255  # The left half is white. Orientation 6 rotates this half to the top.
    exif = Image.Exif()
    exif[0x112] = 6
    Image.fromarray(image).save(tmp_path / "rotated.jpg", exif=exif)
    thumbnail = thumbnails.load_thumbnail(f"{tmp_path}/rotated.jpg", 50)
    assert thumbnail.size == (10, 50)
    assert min(thumbnail.getpixel((5, 10))) > 200 and max(thumbnail.getpixel((5, 40))) < 50


@pytest.mark.parametrize("mode, suffix", [("CMYK", "jpg"), ("L", "jpg"), ("RGBA", "png")])
def test_thumbnails_have_the_right_brightness_and_are_not_enlarged(mode, suffix, tmp_path):
    path = tmp_path / f"image.{suffix}"
    Image.new("RGB", (20, 30), (128, 128, 128)).convert(mode).save(path)
    thumbnail = thumbnails.load_thumbnail(str(path), 96)
    assert thumbnail.mode == "RGB" and thumbnail.size == (20, 30)
    assert_allclose(np.asarray(thumbnail), 128, atol=2)


def test_unreadable_files_have_no_thumbnail(tmp_path):
    Image.new("RGB", (500, 500)).save(tmp_path / "cut.jpg")
    os.truncate(tmp_path / "cut.jpg", 400)
    assert thumbnails.load_thumbnail(f"{tmp_path}/cut.jpg", 96) is None
    assert thumbnails.encode(None) is None


# ------------------------------------------------------------------------------------------------- gallery of a run


def test_gallery_of_a_run_omits_excluded_files_and_samples_large_splits(
    labeled, tmp_path, monkeypatch
):
    networks.replace_network(monkeypatch, lambda images: images + 1.0)
    monkeypatch.setattr(gallery, "_MAX_SAMPLE", 30)
    source = folders.folder_source(str(labeled))
    source.exclude([str(labeled / "train" / "a" / "3.png")])
    for split, shown in (("test", 12), ("train", 30)):
        page = tmp_path / "gallery.html"
        assert gallery.write_for_run("model", source, split, str(tmp_path), 0, print) == str(page)
        text = page.read_text()
        assert f"{shown} images" in text
        assert ("chosen at random from 35" in text) == (split == "train")
        texts = data_of(text)["texts"]
        assert len(texts) == shown and "train/a/3.png" not in texts
        assert all(name.startswith(split) for name in texts)


# ------------------------------------------------------------------------------------------------ copies, raw pixels


def test_neighbors_by_raw_pixels_match_a_search_in_numpy(page, photos):
    text = section(page[1], "neighbors")
    rows = [captions(row) for row in text.split('<div class="row">') if "by raw pixels:" in row]
    names = sorted(os.listdir(photos))
    images = [Image.open(photos / name).convert("RGB").resize((32, 32)) for name in names]
    pixels = np.reshape(images, [len(names), -1]).astype(np.float32)
    vectors = similarity.normalize(pixels - pixels.mean(0))
    assert len(rows) == 3
    for query, *shown in rows:
        nearest = np.argsort(-vectors @ vectors[names.index(query)])[1:6]
        assert len({names[row] for row in nearest} & set(shown[:5])) >= 4  # JPEG rounding


def test_copies_are_to_be_removed_unless_most_pairs_are_similar(photos, page, tmp_path):
    assert "remove copies" in section(page[1], "duplicates")
    write_vectors(photos, tmp_path / "v.npz", lambda path: [ord(path[-5]) % 2, 1.0])
    text = run_gallery(photos, tmp_path / "v.npz", tmp_path / "g.html")
    text = section(text, "duplicates")
    assert "remove copies" not in text and "probably not copies" in text
