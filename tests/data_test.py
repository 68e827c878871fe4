"""Data sources and input pipelines: contents, order and repetition of examples."""

import functools
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose, assert_array_equal

import data
import data_util
from config import Config, Conversion
from runtime import rng
from sources import datasets, digits, image_files, label_subsets
from sources.indexed import IndexedSource
from sources.source import Source
from support.errors import rejects
from support.images import hashed_fractions, open_folder, write_images


def make_config(**settings):
    small = dict(dataset="digits", image_size=8, train_batch_size=16, use_blur=False)
    return Config(**{**small, **settings})


@pytest.fixture(scope="module")
def tiny_tfds(tmp_path_factory):
    """Writes a TFDS data set of 50 images with unique gray levels, in two files per split. Returns its path."""
    import tensorflow_datasets as tfds

    def rows(*levels):
        return [
            (
                level,
                {"image": np.full([9, 7, 3], level, np.uint8), "label": level % 4, "extra": "x"},
            )
            for level in range(*levels)
        ]

    directory = tmp_path_factory.mktemp("tfds")
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(num_classes=4),
            "extra": tfds.features.Text(),
        }
    )
    tfds.dataset_builders.store_as_tfds_dataset(
        "tiny_shapes",
        "1.0.0",
        features,
        {"train": rows(0, 40), "test": rows(100, 110)},
        data_dir=directory,
        download_config=tfds.download.DownloadConfig(num_shards=2),
    )
    return str(directory)


def arrays_of(source, split, *arguments):
    """Returns the keys, the items and the labels of all examples, given the arguments of `records`."""
    return next(source.records(split, *arguments).batch(10_000).as_numpy_iterator())


def keys_and_labels(source, split, *arguments):
    keys, _, labels = arrays_of(source, split, *arguments)
    return [*zip(keys.tolist(), labels.tolist())]


def labels_by_level(source, split="train"):
    """Returns a dict that maps the gray level of each image to its label."""
    return {
        int(source.decode(item)[0, 0, 0]): int(label) for _, item, label in source.records(split)
    }


def labels_in(source):
    return {label for split in source.split_names for _, label in keys_and_labels(source, split)}


# -------------------------------------------------------------------------------------------------------- sources


def test_digits_has_fixed_balanced_and_disjoint_splits():
    source = digits.digits_source()
    (_, train, _), (_, test, labels) = (arrays_of(source, split) for split in ("train", "test"))
    assert train.shape == (1437, 8, 8, 3) and test.shape == (360, 8, 8, 3) and train[0].max() > 200
    assert {*map(bytes, train)}.isdisjoint(map(bytes, test))
    counts = np.bincount(labels)
    assert len(counts) == source.num_classes == 10 and counts.min() >= 34 and counts.max() <= 38


@pytest.mark.parametrize("has_labels", [Source.has_labels, IndexedSource.has_labels])
def test_has_labels_is_true_if_any_example_of_the_split_is_labeled(has_labels):
    labels = np.full(2040, -1, np.int64)
    labels[2007] = 0
    splits = {"none": (np.zeros(2000), labels[:2000]), "one": (np.zeros(40), labels[2000:])}
    source = IndexedSource("x", splits, ["a"], tf.identity)
    assert has_labels(source, "one") and has_labels(source, "none+one")
    assert not has_labels(source, "none")
    source.class_names = None
    assert not has_labels(source, "one")


@pytest.mark.parametrize(
    "names, word",
    [
        ((), "no images"),
        (("a.png", "b/c.png"), "both images .a.png, .*sub-folders .b, .*Set --nolabels"),
        (("train/a.png", "train/b/c.png", "test/b/c.png"), "sub-folders .b, .* in train. Set"),
        (("train/a.png", "test/b/c.png"), "Use the same layout"),
        (("trainA/a.png", "trainB/b.png", "testA/a.png"), "testA, trainA, trainB are splits"),
        (
            ("seg_train/seg_train/a/1.png", "seg_test/seg_test/a/2.png", "seg_pred/3.png"),
            "seg_pred, seg_test, seg_train are splits rather than classes",
        ),
        (("images/a.png", "masks/a.png"), "images, masks are not classes. Pass the folder with"),
        (("JPEGImages/a.png", "SegmentationClass/a.png"), "are not classes. Pass the folder with"),
        (("HAM_images_part_1/a.png", "HAM_images_part_2/b.png"), "are not classes. Pass the"),
        (("images_001/images/a.png", "images_002/images/b.png"), "are not classes. Pass the"),
        (
            ("yes/1.png", "no/2.png", "all/no/2.png", "all/yes/1.png"),
            "the folder all contains folders with the names of other classes .no, yes.",
        ),
        (("data/1-Train/a/b.png", "data/images-val/a/b.png"), "are splits rather than classes"),
        (("train/a/b.png", "d.png"), "are next to split folders"),
        (
            ("val/a/b.png", "validation/a/b.png"),
            "two folders contain the same split .val, validation.. Keep only one",
        ),
        (
            ("train/a/b.png", "test/a/b.png", "extra/b.png"),
            "split folders .test, train. are next to other folders .ex",
        ),
        (
            ("train/a/b.png", "car/b.png"),
            "split folders .train. are next to other folders .car.. Move",
        ),
        (
            ("cat/train/a.png", "cat/test/b.png", "dog/c.png"),
            "cat would be a class, but contains split folders .*Pass .*, --dataset=folder:.*/cat or",
        ),
    ],
)
def test_ambiguous_folder_layouts_give_one_line_errors(tmp_path, names, word):
    write_images(tmp_path, *names)
    with rejects(f"--dataset=folder:.*{word}"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "names, splits",
    [
        ("train valid test", "test train validation"),
        ("TRAINING Val", "train validation"),
        ("training testing", "test train"),
        ("training_set test_set", "test train"),
        ("train2017 val2017", "train validation"),
        ("train dev eval", "test train validation"),
    ],
)
def test_common_names_of_split_folders_are_recognized(tmp_path, names, splits):
    images = (f"{folder}/{name}/1.png" for folder in names.split() for name in "xy")
    ignored = ("__MACOSX/train/._1.png", "__MACOSX/x.png", "@eaDir/y.png", "lost+found/z.png")
    write_images(tmp_path, *images, *ignored, ".git/a.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "boxes.xml").write_text("no image")
    source = open_folder(tmp_path)
    assert source.split_names == splits.split() and source.class_names == ["x", "y"]
    assert {source.num_examples(split) for split in source.split_names} == {2}


@pytest.mark.parametrize(
    "names, labels, classes, sizes, lines",
    [
        (
            "x/x/train/a/1 x/x/train/b/2 x/x/test/a/3",
            True,
            "a b",
            {"test": 1, "train": 2},
            ["NAME: the data set is in its sub-folder x/x (--dataset=NAME/x/x)"],
        ),
        (
            "train_set/train_set/a/1 train_set/train_set/b/2 test_set/test_set/b/3",
            True,
            "a b",
            {"test": 1, "train": 2},
            [],
        ),
        (
            "train/n1/images/1 train/n2/images/2 val/images/3",
            True,
            "n1 n2",
            {"train": 2},
            [
                "validation is not used, because its only folder, images, is not a class of train"
                " (with --nolabels, it is used)"
            ],
        ),
        (
            "fold1/a/1 fold1/b/2 fold1/c/5 fold2/x/a/3 fold2/x/b/4",
            True,
            "fold1 fold2",
            {"train": 5},
            [
                "fold1, fold2 are the classes, although they contain the same folders (a, b). If"
                " those are the classes, move them up."
            ],
        ),
        (
            "train/a/1 train/b/2 test/3",
            True,
            "a b",
            {"train": 2},
            ["test is not used, because it has no class folders (with --nolabels, it is used)"],
        ),
        (
            "train/images/1 val/images/2",
            True,
            None,
            {"train": 1, "validation": 1},
            ["no labels: NAME has only one class (images)"],
        ),
        (
            "2023/1 2023/summer/2",
            True,
            None,
            {"train": 2},
            ["no labels: NAME has only one class (2023)"],
        ),
        (
            "train/cafe\u0301/1 train/b/2 test/caf\u00e9/3",
            True,
            "b caf\u00e9",
            {"test": 1, "train": 2},
            [],
        ),
        (
            "train/1 car/2 ship/3",
            True,
            "car ship train",
            {"train": 3},
            [
                "NAME: the folder train counts as a class, not as a split, because it is next to"
                " car, ship"
            ],
        ),
        ("1 2.jpg", True, None, {"train": 2}, []),
        ("train/1 test/2", True, None, {"test": 1, "train": 1}, []),
        ("1 2023/2 2023/summer/3", False, None, {"train": 3}, []),
        ("train/a/1 train/b/2 test/3", False, None, {"test": 1, "train": 2}, []),
        ("train/a/1 extra/b/c/2 test/3", False, None, {"train": 3}, []),
    ],
)
def test_layouts_of_archives(names, labels, classes, sizes, lines, tmp_path, logged):
    write_images(tmp_path, *(f"{name}.png" for name in names.split()))
    source = datasets.open_source(f"folder:{tmp_path}", labels=labels)
    assert source.class_names == (classes and classes.split())
    assert {split: source.num_examples(split) for split in source.split_names} == sizes
    assert [line.replace(source.name, "NAME") for line in logged] == lines
    assert labels_in(source) == ({*range(len(source.class_names))} if classes else {-1})


def test_class_folders_without_images_are_reported(tmp_path, logged):
    write_images(tmp_path, "train/cat/1.png", "train/dog/2.png", "test/cat/3.png")
    for name in ("train/empty", "train/raw/deep", "test/empty", "test/dog"):
        (tmp_path / name).mkdir(parents=True)
    assert open_folder(tmp_path).class_names == ["cat", "dog"]
    assert logged == ["ignored class folders without images: empty, raw"]


def test_sub_folders_are_classes_with_the_same_labels_in_all_splits(tmp_path):
    names = (
        "train/blue/1.png",
        "train/green/deep/er/2.png",
        "test/green/3.png",
        "test/amber/4.png",
    )
    hidden = ("train/blue/.5.png", "train/.hidden/6.png", "test/green/.thumbs/7.png")
    write_images(tmp_path, *names, *hidden)
    source = open_folder(tmp_path)
    assert labels_by_level(source, "train") == {1: 1, 2: 2}
    assert labels_by_level(source, "test") == {3: 2, 4: 0}
    assert source.class_counts("train") == {"amber": 0, "blue": 1, "green": 1}
    assert source.class_counts("test+train") == {"amber": 1, "blue": 1, "green": 2}


def test_run_directories_in_an_image_folder_are_skipped(tmp_path, logged):
    write_images(tmp_path, "cat/1.png", "dog/2.png")
    before = open_folder(tmp_path).describe_data()
    assert not logged
    write_images(
        tmp_path,
        "cat/first/views.png",
        "run/views.png",
        "cat/run/best/views.png",
        "copied/views.png",
    )
    for lock in ("cat/first", "run", "cat/run"):
        (tmp_path / lock / "train.lock").touch()
        (tmp_path / lock / "flags.json").touch()
    for name in ("copied/flags.json", "copied/ckpt-3.index", "cat/flags.json", "dog/train.lock"):
        (tmp_path / name).touch()
    assert open_folder(tmp_path).describe_data() == before
    assert "ignored run directories: cat/first, cat/run, copied, run" in logged
    flat = tmp_path / "cat" / "first"  # A folder passed by the user is never skipped.
    assert open_folder(flat).num_examples("train") == 1


@pytest.mark.parametrize("name", ["a?b", "[!z]x", "a\\b", "--out=x", "\tü\n空 ", "{a,b}", "~"])
def test_folders_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    levels = write_images(tmp_path / name, f"{name}/1.png", "b/2.png")
    # If `name` were treated as a glob pattern, it would match these folders.
    write_images(tmp_path, "ab/other/9.png", "a1b/other/9.png")
    for path in (f"./{name}", tmp_path / name):
        source = datasets.open_source(f"folder:{path}")
        assert source.class_names == sorted([name, "b"])
        assert {*labels_by_level(source)} == {*levels.values()}


def keys_of(source, split):
    """Returns a dict mapping paths (relative to the root) to keys, in the order of the split."""
    keys, paths, *_ = source._select(split)
    return {os.fsdecode(path): int(key) for key, path in zip(keys, paths)}


def test_adding_removing_or_excluding_images_does_not_move_other_images_between_slices(tmp_path):
    """Checks that percent slices depend only on hashes of the image paths relative to the root."""
    names = [f"{name}/{number}.png" for name in "ab" for number in range(50)]
    root = tmp_path / "photos"
    write_images(root, *names)
    fractions = hashed_fractions(names)
    first = open_folder(root)
    for split, low, high in (
        ("train[:90%]", 0, 0.9),
        ("train[90%:]", 0.9, 1),
        ("train[-35%:]", 0.65, 1),
        ("train[10%:-70.5%]", 0.1, 0.295),
        ("train[20%:20%]", 0, 0),
    ):
        assert set(keys_of(first, split)) == {
            name for name in names if low <= fractions[name] < high
        }, split
    keys = keys_of(first, "train")
    assert [*keys] == sorted(names, key=fractions.get) and len(set(keys.values())) == len(names)
    write_images(root, "0/new.png", "a/new.png", "c/new.png")
    (root / "a" / "7.png").unlink()
    second = open_folder(root.rename(tmp_path / "elsewhere"))
    excluded = "b/3.png", "b/4.png"
    second.exclude(f"{second.root}/{name}" for name in excluded)
    for split in ("train[:90%]", "train[90%:]", "train"):
        before, after = keys_of(first, split), keys_of(second, split)
        assert {name: key for name, key in after.items() if "new" not in name} == {
            name: key for name, key in before.items() if name not in ("a/7.png", *excluded)
        }


def test_absolute_slices_and_combined_splits_preserve_the_order(tmp_path):
    write_images(tmp_path, *(f"train/{row}.png" for row in range(20)), "test/1.png", "test/2.png")
    source = open_folder(tmp_path)
    train, test = (list(keys_of(source, split)) for split in ("train", "test"))
    for split, expected in {
        "train[:8]": train[:8],
        "train[8:]": train[8:],
        "train[-5:]": train[-5:],
        "train[3:-9]": train[3:-9],
        "train[20:]": [],
        "train[:0]": [],
        "test+train": test + train,
        "all": test + train,
        "train[:3] + test[1:2]": train[:3] + test[1:2],
    }.items():
        assert list(keys_of(source, split)) == expected, split
    for split in (
        "validation",
        "train[:101%]",
        "train[5]",
        "train+",
        "all[:5]",
        "",
        "train[1:2:3]",
    ):
        with rejects("--train_split=.* has no such split. Use test, train, or a slice of"):
            datasets.check_split(source, "train_split", split)
    with rejects("is empty"):
        datasets.check_split(source, "train_split", "train[5:5]")


def test_describe_data_depends_on_splits_classes_and_files(tmp_path, tiny_tfds):
    assert datasets.open_source("tiny_shapes", tiny_tfds).describe_data() == {
        "name": "tiny_shapes",
        "version": "1.0.0",
        "config": None,
        "splits": {"test": 10, "train": 40},
    }
    write_images(tmp_path, "train/a/1.png", "train/b/2.png", "test/a/3.png")

    def describe():
        return open_folder(tmp_path).describe_data()

    described = describe()
    assert described == json.loads(json.dumps(described))
    assert described["splits"] == {"test": 1, "train": 2} and described["classes"] == ["a", "b"]
    restricted = open_folder(tmp_path)
    restricted.exclude(restricted.paths()[:1])
    assert restricted.describe_data() == described
    file = tmp_path / "train" / "a" / "1.png"
    renamed = file.rename(file.with_name("4.png"))
    changed = describe()
    assert changed["files"] != described["files"] and changed["splits"] == described["splits"]
    renamed.rename(file)
    assert describe() == described
    file.write_bytes(file.read_bytes() + b"x")
    assert describe()["files"] != described["files"]


def test_tfds_records_are_encoded_and_have_unique_keys(tiny_tfds):
    source = datasets.open_source("tiny_shapes", tiny_tfds)
    assert source.num_classes == 4 and source.split_names == ["test", "train"]
    keys, items, _ = arrays_of(source, "train")
    assert len(set(keys)) == 40 and isinstance(items[0], bytes)  # Images are not decoded yet.
    assert source.num_examples("train[:25%]") == 10 == len(arrays_of(source, "train[:25%]")[0])


@pytest.fixture
def tfds_copy(tiny_tfds, tmp_path):
    """Copies `tiny_tfds` so that tests can corrupt the copy.

    Returns the directory of the copy, and the second TFRecord file of its training split.
    """
    directory = shutil.copytree(tiny_tfds, tmp_path / "tfds")
    return str(directory), next(directory.glob("**/*train*-00001-of-00002"))


@pytest.mark.parametrize("problem", ["empty", "missing"])
def test_empty_or_missing_record_files_are_reported_before_training(tfds_copy, problem):
    directory, path = tfds_copy
    path.write_bytes(b"") if problem == "empty" else path.unlink()
    source = datasets.open_source("tiny_shapes", directory)
    with rejects(f"--dataset=tiny_shapes: .*-00001-of-00002 is {problem} .1 of 2"):
        datasets.check_split(source, "train_split", "train")
    assert datasets.check_split(source, "train_split", "train[:20]") == 20
    assert datasets.check_split(source, "eval_split", "test") == 10


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_corrupt_tfds_metadata_gives_a_one_line_error(content, tfds_copy):
    directory, path = tfds_copy
    info = pathlib.Path(path).parent / "dataset_info.json"
    info.unlink()
    if content is not None:
        info.write_bytes(content)
    with rejects("--data(set|_dir)="):
        datasets.open_source("tiny_shapes", directory)


def test_examples_have_the_same_key_in_slices_as_in_the_whole_split(tiny_tfds):
    tiny = datasets.open_source("tiny_shapes", tiny_tfds)
    for source, split in ((tiny, "train[30:]"), (digits.digits_source(), "train[9:19]")):
        whole, selected = (
            dict(zip(keys, items.tolist()))
            for keys, items, _ in (arrays_of(source, "train"), arrays_of(source, split))
        )
        assert selected and selected.items() <= whole.items()


def sharded(source, split, seed, shards):
    """Returns the sorted keys and labels of all workers, and checks the number of examples of each worker."""
    rows = [keys_and_labels(source, split, seed, shards, shard) for shard in range(shards)]
    assert list(map(len, rows)) == [
        source.num_examples(split, shards, shard) for shard in range(shards)
    ]
    return sorted(sum(rows, []))


# A shard of tiny_shapes consists of whole files if there are at least as many files as shards.
@pytest.mark.parametrize("name, shards", [("digits", 3), ("tiny_shapes", 2), ("tiny_shapes", 3)])
def test_shards_partition_a_split_whose_order_depends_only_on_the_seed(name, shards, tiny_tfds):
    source, split = datasets.open_source(name, tiny_tfds), "train[:39]"
    expected = sorted(keys_and_labels(source, split))
    assert sharded(source, split, 4, shards) == expected
    one, again, two = (keys_and_labels(source, split, seed) for seed in (1, 1, 2))
    assert one == again != two and sorted(one) == expected == sorted(two)


def test_shuffle_buffer_size_respects_the_memory_limit(tiny_tfds):
    source = datasets.open_source("tiny_shapes", tiny_tfds)
    assert source.shuffle_buffer_size("train", 1, 1, 0) == 40
    mean = sum(info.num_bytes for info in source._info.splits.values()) / 50
    assert source.shuffle_buffer_size("train", 5.01 * mean / 2**20, 1, 0) == 5


# ------------------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize("mode, num_views", [("pretrain", 2), ("finetune", 1)])
def test_training_views_match_a_loop_over_examples_and_views(mode, num_views):
    """Computes each view separately, with the crop, flip and color distortion that the paper specifies."""
    config = make_config(
        train_mode=mode, train_split="train[:4]", train_batch_size=4, image_size=12
    )
    source, seed = digits.digits_source(), 3
    views, labels = next(data.build_train_dataset(config, source, seed, 4).as_numpy_iterator())
    epoch_seed = rng.scalar_seed(rng.fold_in(tf.constant([seed, data._VIEWS], tf.int64), 0))
    flip = data_util.Operator("flip", data_util.flip_horizontally, 0.5)
    distortions = data_util.color_distortion(1.0, "multiplicative") if mode == "pretrain" else ()
    policy, rows = data_util.Policy((0.08, 1.0), (flip, *distortions)), []
    assert len(views) == num_views
    assert views[0].shape == (4, 12, 12, 3) and views[0].dtype == np.float32
    for key, image, label in source.records(config.train_split):
        view_seeds = (
            rng.nth_seed(tf.stack([epoch_seed, key]), view, rng.VIEW) for view in range(num_views)
        )
        expected = [
            data_util.apply_policy(image, policy, view_seed, 12) for view_seed in view_seeds
        ]
        # The examples are in random order.
        distances = np.abs(np.stack(views, 1) - expected).max((1, 2, 3, 4))
        rows.append(distances.argmin())
        assert distances.min() < 1e-5 and labels[rows[-1]] == label
    assert sorted(rows) == [*range(4)]


@pytest.mark.parametrize(
    "size, center_crop, window",
    [(40, True, slice(1, 8)), (40, False, slice(0, 8)), (16, True, slice(0, 8))],
)
def test_evaluation_images_are_resized_center_crops(size, center_crop, window):
    """The crop covers 87.5 % of the shorter side (7 of 8 pixels). With an image size of up to 32, there is no crop."""
    config = make_config(eval_center_crop=center_crop, image_size=size)
    source = digits.digits_source()
    images, labels, _ = next(iter(data.build_eval_dataset(config, source, "test[:50]", 50)))
    _, items, expected_labels = arrays_of(source, "test[:50]")
    crops = items[:, window, window] / np.float32(255)
    expected = np.clip(tf.image.resize(crops, [size, size], tf.image.ResizeMethod.BICUBIC), 0, 1)
    assert_allclose(images, expected, atol=1e-5)
    assert_array_equal(labels, expected_labels)


@pytest.mark.parametrize(
    "name, cache, strength",
    [("digits", False, 1.0), ("tiny_shapes", False, 0.0), ("tiny_shapes", True, 0.0)],
)
def test_every_epoch_contains_every_example_once_and_training_can_start_at_any_step(
    name, cache, strength, tiny_tfds
):
    source = datasets.open_source(name, tiny_tfds)
    config = make_config(
        train_split="train[:40]", cache_dataset=cache, color_jitter_strength=strength
    )
    batches = list(data.build_train_dataset(config, source, 5, 16).take(5).as_numpy_iterator())
    first, second = np.concatenate([labels for _, labels in batches]).reshape(2, 40)
    expected = sorted(arrays_of(source, "train[:40]")[2])
    assert sorted(first) == expected == sorted(second) and (first != second).any()
    # The fifth step is in the second epoch.
    later = data.build_train_dataset(config, source, 5, 16, start_step=4)
    tf.nest.map_structure(assert_array_equal, next(later.as_numpy_iterator()), batches[4])


def test_views_depend_on_seed_and_epoch_but_not_on_the_example_order():
    config = make_config(train_split="train[:40]", train_batch_size=40, color_jitter_strength=0.0)
    source = digits.digits_source()

    def batches(seed, **settings):
        dataset = data.build_train_dataset(config.replace(**settings), source, seed, 40)
        return [{*map(bytes, view)} for (view, _), _ in dataset.take(2).as_numpy_iterator()]

    first, second = batches(1)
    assert first.isdisjoint(second)  # Views differ between epochs.
    assert first == batches(1, cache_dataset=True)[0]  # Caching changes only the order.
    assert first.isdisjoint(batches(2)[0])


@pytest.mark.parametrize("place", ["host", "device"])
def test_examples_do_not_depend_on_the_batch_size(place):
    """Compares batches of one image with batches of two chunks of 12 images."""
    config = make_config(train_split="train[:30]", augment_on=place, image_size=40)
    source = digits.digits_source()
    build_train = functools.partial(data.build_train_dataset, config, source, 5)
    build_eval = functools.partial(data.build_eval_dataset, config, source, "test[:48]")
    for build in (build_train, build_eval):
        alone, together = (
            [*build(size).unbatch().take(48).as_numpy_iterator()] for size in (1, 24)
        )
        for pair in zip(alone, together, strict=True):
            tf.nest.map_structure(functools.partial(assert_allclose, atol=1e-5), *pair)


@pytest.mark.parametrize(
    "pixels", ["jpeg", "jpeg_gray", "jpeg_without_subsampling", "png", "bands"]
)
def test_only_the_crop_region_of_large_jpegs_is_decoded(pixels):
    colors = np.random.default_rng(0).integers(0, 256, [13, 17, 1 if pixels == "jpeg_gray" else 3])
    image = np.uint8(tf.image.resize(colors, [130, 171], tf.image.ResizeMethod.BICUBIC))
    options = {"chroma_downsampling": False} if pixels == "jpeg_without_subsampling" else {}
    encoded = (
        tf.io.encode_png(image)
        if pixels == "png"
        else tf.io.encode_jpeg(image, quality=80, **options)
    )
    source = digits.digits_source()
    if pixels == "bands":
        source.conversion = Conversion(None, (3, 2, 1))
    whole = source.decode(encoded).numpy()

    def draw(shape, seed):
        windows = [data_util.random_window(shape, seed + view) for view in range(2)]
        return map(tf.stack, zip(*windows))

    @tf.function(autograph=False)
    def decode(seed):
        region, *windows = data._decode_windows(
            source, encoded, lambda shape: draw(shape, seed), 64
        )
        return region, [tf.slice(region, *window) for window in zip(*map(tf.unstack, windows))]

    smaller = 0
    for number in range(40):
        seed = tf.constant([number, 7], tf.int64)
        region, windows = decode(seed)
        smaller += region.shape[0] * region.shape[1] < 0.8 * 130 * 171
        for window, begin, size in zip(windows, *draw(whole.shape, seed), strict=True):
            assert_array_equal(window, tf.slice(whole, begin, size))
    assert smaller == 0 if pixels in ("png", "bands") else smaller >= 10


def test_scaled_decoding_changes_smooth_images_little():
    """The slope is at most 0.001 per pixel and axis, and edges of windows move by at most 1.5 scaled pixels."""
    rows, columns = np.mgrid[:960, :1280] / 160
    image = np.stack([np.sin(rows), np.cos(columns), np.sin(rows + columns)], -1)
    encoded = tf.io.encode_jpeg(np.uint8(127.5 + 40 * image), quality=95)

    def crop(seed, scaled):
        region, begin, size = data._decode_windows(
            digits.digits_source(),
            encoded,
            lambda shape: [value[None] for value in data_util.random_window(shape, seed)],
            64,
            scaled,
        )
        return len(region), data_util.resize_window(region, begin[0], size[0], 64, 64)

    for seed in tf.reshape(tf.range(40), [20, 2]):
        _, size = data_util.random_window(image.shape, seed)
        (height, exact), (scaled_height, view) = crop(seed, False), crop(seed, True)
        assert_allclose(view, exact, atol=0.04)
        assert round(height / scaled_height) == 2 ** min(int(np.log2(min(size[:2]) / 64)), 3)


def test_batches_copied_to_a_device_in_advance_are_the_same(monkeypatch):
    """Uses the CPU in place of a GPU."""
    batches = data.build_eval_dataset(make_config(), digits.digits_source(), "test[:100]", 16)
    cpus = {"GPU": tf.config.list_logical_devices("CPU")}
    monkeypatch.setattr(tf.config, "list_logical_devices", cpus.get)
    copied = data.distribute(tf.distribute.get_strategy(), lambda *_: batches)
    assert copied is not batches and copied.options() == batches.options()
    for pair in zip(copied, batches, strict=True):
        tf.nest.map_structure(assert_array_equal, *pair)


# ------------------------------------------------------------------------------------------------ label fractions


@pytest.mark.parametrize(
    "fraction, expected", [(0.1, [3, 3, 4]), (0.61, [10, 25, 26]), (1.0, [10, 30, 60])]
)
def test_label_fraction_balances_classes_as_far_as_possible(fraction, expected):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, -1], [10, 30, 60, 50]))
    rows = label_subsets.choose_balanced(labels, fraction, 3)
    counts = np.bincount(labels[rows], minlength=3)
    assert sorted(counts) == expected and (np.diff(rows) > 0).all()
    assert (rows == label_subsets.choose_balanced(labels, fraction, 3)).all()
    assert fraction == 1 or set(rows) != set(label_subsets.choose_balanced(labels, fraction, 4))


@pytest.mark.parametrize("name", ["digits", "tiny_shapes"])
def test_label_subset_is_the_same_on_every_worker_and_in_every_run(name, tiny_tfds):
    split = "train[:40]"

    def restricted(seed=0, hide=False):
        source = datasets.open_source(name, tiny_tfds)
        source.restrict(split, 0.3, seed, hide)
        return source

    selected = sharded(restricted(), split, None, 1)
    assert sharded(restricted(), split, 5, 3) == selected
    assert len(selected) == len(set(selected)) == 12
    counts = np.bincount([label for _, label in selected])
    assert counts.max() - counts.min() <= 1
    rows = {*keys_and_labels(datasets.open_source(name, tiny_tfds), split)}
    assert set(selected) < rows
    source = restricted(hide=True)
    hidden = keys_and_labels(source, split)
    assert sorted(row for row in hidden if row in rows) == selected and len(hidden) == len(rows)
    source.drop_unlabeled(split)
    assert sorted(keys_and_labels(source, split)) == selected
    assert sorted(keys_and_labels(restricted(1), split)) != selected


def test_cache_dataset_reads_files_only_once(tmp_path):
    write_images(tmp_path, *(f"{name}/{number}.png" for name in "ab" for number in range(10)))
    source = open_folder(tmp_path)
    config = make_config(cache_dataset=True, color_jitter_strength=0.0)
    batches = iter(data.build_train_dataset(config, source, 1, 10).prefetch(0))
    next(batches), next(batches)
    for path in tmp_path.glob("*/*.png"):
        path.unlink()
    for _ in range(6):
        assert next(batches)[0][0].shape == [10, 8, 8, 3]


@pytest.mark.parametrize(
    "split, batch, replicas, workers",
    [
        ("test[:61]", 7, 1, 1),
        ("test[:61]", 31, 2, 1),
        ("test[:2]", 1, 4, 1),
        ("test", 360, 1, 1),
        ("test[:97]", 16, 1, 2),
        ("test[:97]", 8, 2, 3),
    ],
)
def test_evaluation_includes_every_example_exactly_once(split, batch, replicas, workers):
    source, batches = digits.digits_source(), []
    for worker in range(workers):
        context = tf.distribute.InputContext(workers, worker)
        dataset = data.build_eval_dataset(make_config(), source, split, batch, context, replicas)
        batches.append(list(dataset.as_numpy_iterator()))
    (count,) = set(map(len, batches))  # All workers evaluate the same number of batches.
    batches = sum(batches, [])
    assert count % replicas == 0 and all(len(images) == batch for images, _, _ in batches)
    _, labels, weights = map(np.concatenate, zip(*batches))
    assert weights.sum() == source.num_examples(split)
    assert sorted(labels[weights > 0]) == sorted(arrays_of(source, split)[2])
    assert (labels[weights == 0] == -1).all()


@pytest.mark.parametrize(
    "given, split, replicas, expected",
    [(2048, "test[:61]", 2, 31), (256, "train", 4, 64), (8, "test[:2]", 4, 1)],
)
def test_evaluation_batch_size_is_limited_to_the_split_size(given, split, replicas, expected):
    config, source = make_config(eval_batch_size=given), digits.digits_source()
    assert data.eval_batch_size(config, source, split, replicas) == expected


# --------------------------------------------------------------------------------------------------------- errors


def test_a_data_directory_that_is_missing_or_empty_is_reported(tmp_path):
    with rejects("the directory does not exist"):
        datasets.open_source("tiny_shapes", str(tmp_path / "none"))
    with rejects("^--dataset: no data set is selected, .* folder:PATH"):
        datasets.open_source("cifar10", str(tmp_path), may_prepare=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "cifar11",
            "the data set is unknown .*Did you mean cifar10_1. For .* prepared, set --data_dir",
        ),
        ("folder:/no/such", "the directory does not exist"),
        ("photos", "the data set is unknown .* Did you mean folder:photos?"),
        ("huggingface:x", "the data set cannot be loaded .* Run `pip install datasets`"),
    ],
)
def test_unknown_data_sets_are_rejected(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with rejects(f"--dataset={name}: {message}"):
        datasets.open_source(name)


@pytest.mark.parametrize("name, count", [("digits", 1437), ("folder:.", 2), ("tiny_shapes", 40)])
def test_error_for_a_slice_longer_than_the_split_contains_the_size_of_the_split(
    name, count, tmp_path, monkeypatch, tiny_tfds
):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path, "1.png", "2.png")
    source = datasets.open_source(name, tiny_tfds)
    message = f"the slice is longer than the split, which has {count} examples"
    for split in (f"train[:{count + 1}]", f"train[-{count + 1}:]"):
        with rejects(message):
            datasets.check_split(source, "train_split", split)


@pytest.mark.parametrize(
    "given, hold_out, expected",
    [
        ([], True, ("train[:80%]", "train[80%:]")),
        ([], False, ("train", "validation")),
        (["train_split"], True, ("train", "train")),
        (["eval_split"], True, ("train", "validation")),
    ],
)
def test_a_fifth_of_the_examples_is_held_out_if_there_is_only_one_split(
    given, hold_out, expected, tmp_path
):
    write_images(tmp_path, *(f"{index}.png" for index in range(50)))
    source = open_folder(tmp_path)
    splits = datasets.choose_splits(source, "train", "validation", given, hold_out)
    assert splits == expected
    if splits[0] != "train":
        assert (
            sum(map(source.num_examples, splits)) == 50
            and 3 <= source.num_examples(splits[1]) <= 20
        )


def test_evaluation_split_falls_back_to_test_unless_it_is_set():
    source = digits.digits_source()
    assert datasets.choose_splits(source, "train", "validation", [], True) == ("train", "test")
    for split in ("validation", "train[:10%]"):
        chosen = datasets.choose_splits(source, "train", split, ["eval_split"], True)
        assert chosen == ("train", split)


def test_files_that_are_not_images_are_counted_by_suffix(tmp_path, logged):
    write_images(tmp_path, "cat/1.png", "dog/2.jpg")
    for name in ("a.txt", "cat/b.TXT", "cat/deep/c.svg", "README", "cat/.DS_Store", ".git/a.txt"):
        tf.io.write_file(f"{tmp_path}/{name}", "")
    open_folder(tmp_path)
    (line,) = logged
    assert line.startswith("ignored files that are not images: 2 .txt, ")
    assert {*line.partition(": ")[2].split(", ")} == {"2 .txt", "1 .svg", "1 no suffix"}
    (tmp_path / "dog" / "d.heic").touch()
    open_folder(tmp_path)
    if ".heic" not in image_files.IMAGE_SUFFIXES:
        assert logged[-1].endswith(" (HEIC images require: pip install pillow-heif)")


@pytest.mark.parametrize("name", ["digits", "tiny_shapes", "folder:."])
def test_labels_can_be_ignored(name, tmp_path, monkeypatch, tiny_tfds):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path, "a/1.png", "b/2.png")
    source = datasets.open_source(name, tiny_tfds, labels=False)
    assert source.num_classes is None and not source.has_labels("train")
    assert labels_in(source) == {-1} and source.class_counts("train") == {}
    # The weights of a run without labels are recognized as trained on the same data.
    assert source.describe_data() == datasets.open_source(name, tiny_tfds).describe_data()
