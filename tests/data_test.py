"""Sources and pipelines: what is read, in which order, and how often."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import config as config_lib
import data
import data_util
import sources
from config import UserError


def make_config(**settings):
    small = dict(dataset="digits", image_size=8, train_batch_size=16, use_blur=False)
    return config_lib.Config(**{**small, **settings})


def write_images(root, *names, size=(12, 10)):
    """Writes one PNG a name; each is of one grey level of its own. Returns the levels by name."""
    levels = {}
    for number, name in enumerate(names):
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        levels[name] = number + 1
        path.write_bytes(tf.io.encode_png(tf.fill([*size, 3], np.uint8(number + 1))).numpy())
    return levels


@pytest.fixture(scope="module")
def tiny_tfds(tmp_path_factory):
    """A TFDS data set, two files a split: 40 training and 10 test images, image i of grey level i."""
    import tensorflow_datasets as tfds

    def rows(first, last):
        return [(level, {"image": np.full([9, 7, 3], level, np.uint8), "label": level % 4, "extra": "x"})
                for level in range(first, last)]

    directory = tmp_path_factory.mktemp("tfds")
    features = tfds.features.FeaturesDict({
        "image": tfds.features.Image(shape=(None, None, 3)), "label": tfds.features.ClassLabel(num_classes=4),
        "extra": tfds.features.Text()})
    tfds.dataset_builders.store_as_tfds_dataset(
        "tiny_shapes", "1.0.0", features, {"train": rows(0, 40), "test": rows(100, 110)}, data_dir=directory,
        download_config=tfds.download.DownloadConfig(num_shards=2))
    return str(directory)


def levels_of(records, source):
    """The grey levels of records, in order."""
    return [int(source.decode(item)[0, 0, 0]) for _, item, _ in records]


# -------------------------------------------------------------------------------------------------------- sources


def test_digits_are_real_balanced_and_divided_once_for_all():
    source = sources.digits_source()
    assert (source.num_examples("train"), source.num_examples("test"), source.num_classes) == (1437, 360, 10)
    rows = {split: list(source.records(split).as_numpy_iterator()) for split in ("train", "test")}
    train, test = ({item.tobytes() for _, item, _ in rows[split]} for split in ("train", "test"))
    assert len(train & test) == 0
    counts = np.bincount([label for _, _, label in rows["test"]])
    assert counts.min() >= 34 and counts.max() <= 38
    assert rows["train"][0][1].shape == (8, 8, 3) and rows["train"][0][1].max() > 200


def test_folder_of_classes(tmp_path):
    levels = write_images(tmp_path, "cats/a.png", "cats/deep/er/b.png", "dogs/c.png", ".hidden/d.png", "dogs/.e.png",
                          "dogs/.thumbs/f.png")
    (tmp_path / "dogs" / "notes.txt").write_text("not an image")
    source = sources.folder_source(str(tmp_path))
    assert source.class_names == ["cats", "dogs"] and source.split_names == ["train"]
    found = {(int(source.decode(item)[0, 0, 0]), int(label)) for _, item, label in source.records("train")}
    assert found == {(levels["cats/a.png"], 0), (levels["cats/deep/er/b.png"], 0), (levels["dogs/c.png"], 1)}


def test_folder_with_splits(tmp_path):
    write_images(tmp_path, "train/x/1.png", "train/y/2.png", "test/y/3.png", "val/x/4.png")
    source = sources.folder_source(str(tmp_path))
    assert source.split_names == ["test", "train", "validation"] and source.class_names == ["x", "y"]
    assert [int(label) for _, _, label in source.records("test")] == [1]


@pytest.mark.parametrize("names", [("1.png", "2.jpg.png"), ("train/1.png", "test/2.png")])
def test_folder_without_classes_is_unlabelled(tmp_path, names):
    write_images(tmp_path, *names)
    source = sources.folder_source(str(tmp_path))
    assert source.num_classes is None
    assert {int(label) for split in source.split_names for _, _, label in source.records(split)} == {-1}


@pytest.mark.parametrize("names, word", [
    ((), "no images"), (("a.png", "b/c.png"), "both images"), (("train/a.png", "test/b/c.png"), "one layout"),
    (("train/a/b.png", "d.png"), "beside its split folders"), (("val/a/b.png", "validation/a/b.png"), "keep one")])
def test_bad_folders_are_told_in_one_line(tmp_path, names, word):
    write_images(tmp_path, *names)
    with pytest.raises(UserError, match=word) as error:
        sources.folder_source(str(tmp_path))
    assert "--dataset=folder:" in str(error.value) and "\n" not in str(error.value)


def test_slices_of_folders_hold_all_classes(tmp_path):
    write_images(tmp_path, *(f"{name}/{number}.png" for name in "ab" for number in range(30)))
    source = sources.folder_source(str(tmp_path))
    parts = [[int(key) for key, _, _ in source.records(split)] for split in ("train[:20]", "train[20:]")]
    assert sorted(parts[0] + parts[1]) == list(range(60)) and len(parts[0]) == 20
    labels = [int(label) for _, _, label in source.records("train[:20]")]
    assert 4 < sum(labels) < 16


def test_tfds_records(tiny_tfds):
    source = sources.open_source("tiny_shapes", tiny_tfds)
    assert source.num_classes == 4 and source.split_names == ["test", "train"]
    records = list(source.records("train"))
    assert sorted(levels_of(records, source)) == list(range(40))
    assert all(int(label) == level % 4 for (_, _, label), level in zip(records, levels_of(records, source)))
    assert records[0][1].dtype == tf.string  # still encoded
    assert len({int(key) for key, _, _ in records}) == 40
    assert source.num_examples("train[:25%]") == 10 == len(list(source.records("train[:25%]")))


def test_keys_are_the_same_in_slices(tiny_tfds):
    tiny = sources.open_source("tiny_shapes", tiny_tfds)
    for source, split in ((tiny, "train[30:]"), (sources.digits_source(), "train[9:19]")):
        def named(split, source=source):
            return {np.array(item).tobytes(): int(key) for key, item, _ in source.records(split).as_numpy_iterator()}
        whole, part = named("train"), named(split)
        assert part and all(whole[item] == key for item, key in part.items())


@pytest.mark.parametrize("name", ["digits", "tiny_shapes"])
def test_order_depends_on_the_seed_alone(name, tiny_tfds):
    source = sources.open_source(name, tiny_tfds)

    def keys(seed, **kwargs):
        return [int(key) for key, _, _ in source.records("test", seed, **kwargs)]

    assert keys(1) == keys(1) != keys(2)
    assert sorted(keys(1)) == sorted(keys(2)) == sorted(keys(None))


@pytest.mark.parametrize("name, split", [("digits", "test"), ("tiny_shapes", "train"), ("tiny_shapes", "test")])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_divide_a_split(name, split, shards, tiny_tfds):
    source = sources.open_source(name, tiny_tfds)
    for seed in (None, 4):
        parts = [[int(key) for key, _, _ in source.records(split, seed, shards, shard)] for shard in range(shards)]
        assert [len(part) for part in parts] == [source.num_examples(split, shards, shard) for shard in range(shards)]
        assert sorted(sum(parts, [])) == sorted(int(key) for key, _, _ in source.records(split))


def test_shuffle_buffer_is_bounded_by_memory(tiny_tfds):
    source = sources.open_source("tiny_shapes", tiny_tfds)
    assert source.shuffle_buffer_size("train", 1) == 40
    mean = sum(info.num_bytes for info in source._builder.info.splits.values()) / 50
    assert source.shuffle_buffer_size("train", 5.01 * mean / 2**20) == 5


# ------------------------------------------------------------------------------------------------------ pipelines


def test_training_data_has_the_shapes_and_range_of_the_network():
    dataset = data.build_train_dataset(make_config(), sources.digits_source(), seed=3, batch_size=16)
    views, labels = next(iter(dataset))
    assert views.shape == [16, 8, 8, 6] and views.dtype == tf.float32 and labels.shape == [16]
    assert np.min(views) >= 0 and np.max(views) <= 1
    assert np.abs(views[..., :3] - views[..., 3:]).mean() > 0.02  # two different views
    finetune = make_config(train_mode="finetune")
    assert next(iter(data.build_train_dataset(finetune, sources.digits_source(), 3, 16)))[0].shape == [16, 8, 8, 3]


@pytest.mark.parametrize("name, cache, strength", [
    ("digits", False, 1.0), ("tiny_shapes", False, 0.0), ("tiny_shapes", True, 0.0)])
def test_any_step_can_be_continued_at(name, cache, strength, tiny_tfds):
    source = sources.open_source(name, tiny_tfds)
    config = make_config(train_split="train[:40]", cache_dataset=cache, color_jitter_strength=strength)
    whole = data.build_train_dataset(config, source, 5, 16)
    expected = list(whole.take(7).as_numpy_iterator())
    for step in (0, 1, 4, 6):
        views, labels = next(data.build_train_dataset(config, source, 5, 16, start_step=step).as_numpy_iterator())
        np.testing.assert_array_equal(views, expected[step][0])
        np.testing.assert_array_equal(labels, expected[step][1])


@pytest.mark.parametrize("name", ["digits", "tiny_shapes"])
def test_every_epoch_has_every_example_once_in_another_order(name, tiny_tfds):
    source = sources.open_source(name, tiny_tfds)
    config = make_config(train_split="train[:40]", color_jitter_strength=0.0)
    dataset = data.build_train_dataset(config, source, 5, 8)
    labels = np.concatenate([labels for _, labels in dataset.take(10).as_numpy_iterator()]).reshape(2, 40)
    expected = sorted(int(label) for _, _, label in source.records("train[:40]"))
    assert sorted(labels[0]) == expected == sorted(labels[1])
    assert (labels[0] != labels[1]).any()


def test_views_follow_seed_and_epoch_not_the_order():
    config = make_config(train_split="train[:40]", train_batch_size=40, color_jitter_strength=0.0)
    source = sources.digits_source()

    def batches(seed, **settings):
        dataset = data.build_train_dataset(config.replace(**settings), source, seed, 40)
        return [views[np.lexsort(views.reshape(40, -1).T)] for views, _ in dataset.take(2).as_numpy_iterator()]

    first, second = batches(1)
    assert np.abs(first - second).max() > 0.1  # epochs differ
    np.testing.assert_array_equal(first, batches(1, cache_dataset=True)[0])  # cached: another order, the same views
    assert np.abs(first - batches(2)[0]).max() > 0.1


def test_views_do_not_depend_on_the_batch_size():
    """Batches of 1, 6 and 20 are cropped and coloured in chunks of as many, and in other company."""
    source = sources.digits_source()
    reference = None
    for batch_size in (1, 6, 20):
        config = make_config(train_split="train[:24]")
        dataset = data.build_train_dataset(config, source, 5, batch_size).unbatch().take(60)
        views = np.stack([views for views, _ in dataset.as_numpy_iterator()])
        reference = views if reference is None else reference
        np.testing.assert_allclose(views, reference, atol=1e-5)
    assert reference.shape == (60, 8, 8, 6) and np.abs(reference[0] - reference[1]).max() > 0.1


@pytest.mark.parametrize("size, batch_size, expected", [
    (32, 512, 32), (32, 40, 20), (32, 7, 7), (224, 64, 1), (8, 16, 16)])
def test_chunks_divide_the_batch(size, batch_size, expected):
    assert data._chunk_size(size, batch_size) == expected


@pytest.mark.parametrize("pixels", ["jpeg", "jpeg_gray", "jpeg_without_subsampling", "png"])
def test_large_images_are_decoded_only_where_windows_need_it(pixels, tmp_path):
    colors = np.random.default_rng(0).integers(0, 256, [13, 17, 1 if pixels == "jpeg_gray" else 3])
    image = np.uint8(tf.image.resize(colors, [130, 171], tf.image.ResizeMethod.BICUBIC))
    options = {"chroma_downsampling": False} if pixels == "jpeg_without_subsampling" else {}
    encoded = tf.io.encode_png(image) if pixels == "png" else tf.io.encode_jpeg(image, quality=80, **options)
    (tmp_path / "a.png").write_bytes(encoded.numpy())  # Contents count, not suffixes.
    source = sources.open_source(f"folder:{tmp_path}")
    whole = source.decode(encoded).numpy()
    policy = data_util.simclr_policy(0.0, "multiplicative")

    @tf.function(autograph=False)
    def decode(seed):
        def draw(shape):
            return zip(*[data_util.window_by_policy(shape, policy, seed + view) for view in range(2)])
        part, begins, sizes = data._decode_windows(source, encoded, draw, 64)
        return part, [tf.slice(part, *window) for window in zip(begins, sizes)]

    smaller = 0
    for number in range(40):
        seed = tf.constant([number, 7], tf.int64)
        part, windows = decode(seed)
        smaller += part.shape[0] * part.shape[1] < 0.8 * 130 * 171
        for view, window in enumerate(windows):
            begin, size = data_util.window_by_policy(whole.shape, policy, seed + view)
            np.testing.assert_array_equal(window, tf.slice(whole, begin, size))
    assert smaller == 0 if pixels == "png" else smaller >= 10


# ------------------------------------------------------------------------------------------------ label fractions


@pytest.mark.parametrize("fraction, expected", [(0.1, [3, 3, 4]), (0.31, [10, 10, 11]), (0.61, [10, 25, 26]),
                                                (1.0, [10, 30, 60])])
def test_a_fraction_has_as_many_of_every_class_as_there_are(fraction, expected):
    labels = np.random.default_rng(0).permutation([0] * 10 + [1] * 30 + [2] * 60 + [-1] * 50)
    rows = sources.choose_balanced(labels, fraction, 3)
    counts = np.bincount(labels[rows], minlength=3)
    assert sorted(counts) == expected and len(set(rows)) == len(rows) and (np.diff(rows) > 0).all()
    assert (rows == sources.choose_balanced(labels, fraction, 3)).all()
    assert fraction == 1 or set(rows) != set(sources.choose_balanced(labels, fraction, 4))


def restricted(name, tiny_tfds, fraction=0.2, seed=0):
    source = sources.digits_source() if name == "digits" else sources.TfdsSource("tiny_shapes", tiny_tfds)
    source.restrict("train", fraction, seed)
    return source


@pytest.mark.parametrize("name, total", [("digits", 287), ("tfds", 8)])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_restricted_split_is_the_same_on_every_host_and_run(name, total, shards, tiny_tfds):
    def records(seed):
        source = restricted(name, tiny_tfds)
        parts = [list(source.records("train", seed, shards, shard).as_numpy_iterator()) for shard in range(shards)]
        assert [len(part) for part in parts] == [source.num_examples("train", shards, n) for n in range(shards)]
        return sorted((int(key), int(label)) for part in parts for key, _, label in part)

    found = records(None)
    assert found == records(5) and len(found) == len(set(found)) == total
    counts = np.bincount([label for _, label in found])
    assert counts.max() - counts.min() <= 1
    whole = sources.digits_source() if name == "digits" else sources.TfdsSource("tiny_shapes", tiny_tfds)
    assert set(found) < {(int(key), int(label)) for key, _, label in whole.records("train").as_numpy_iterator()}
    other = restricted(name, tiny_tfds, seed=1)
    assert set(found) != {(int(key), int(label)) for key, _, label in other.records("train").as_numpy_iterator()}


@pytest.mark.parametrize("name", ["digits", "tfds"])
def test_training_sees_only_the_fraction(name, tiny_tfds):
    source = restricted(name, tiny_tfds)
    chosen = source.num_examples("train")
    config = make_config(train_mode="finetune", label_fraction=0.2)
    keys = {int(key) for key, _, _ in source.records("train").as_numpy_iterator()}
    seen = set()

    def spy(records, fetch, *_):
        return records.map(lambda seed, handle: fetch(*tf.nest.flatten(handle))[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_batch_views", spy)
        for key in data.build_train_dataset(config, source, 3, 16).take(2 * chosen):
            seen.add(int(key))
    assert seen == keys


def test_too_small_a_fraction_is_told(tiny_tfds):
    with pytest.raises(UserError, match="--label_fraction=0.05 of --train_split=train is 2 examples for 4 classes: use "
                                        "at least 0.1"):
        restricted("tfds", tiny_tfds, 0.05)


def test_cache_reads_files_once(tmp_path):
    write_images(tmp_path, *(f"{name}/{number}.png" for name in "ab" for number in range(10)))
    source = sources.folder_source(str(tmp_path))
    config = make_config(train_batch_size=10, cache_dataset=True)
    batches = iter(data.build_train_dataset(config, source, 1, 10).prefetch(0))
    next(batches), next(batches)
    for path in tmp_path.glob("*/*.png"):
        path.unlink()
    for _ in range(6):
        assert next(batches)[0].shape == [10, 8, 8, 6]


@pytest.mark.parametrize("batch, replicas", [(7, 1), (16, 1), (4, 2), (360, 1), (100, 4)])
def test_evaluation_sees_every_example_once(batch, replicas):
    source = sources.digits_source()
    dataset = data.build_eval_dataset(make_config(), source, "test", batch, replicas=replicas)
    batches = list(dataset.as_numpy_iterator())
    assert len(batches) % replicas == 0 and all(len(images) == batch for images, _, _ in batches)
    labels, weights = (np.concatenate([part[column] for part in batches]) for column in (1, 2))
    assert weights.sum() == 360
    assert sorted(labels[weights > 0]) == sorted(int(label) for _, _, label in source.records("test"))
    assert (labels[weights == 0] == -1).all()


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_evaluate_as_many_batches(hosts):
    source = sources.digits_source()
    counts, total = set(), 0
    for host in range(hosts):
        context = tf.distribute.InputContext(hosts, host, hosts)
        parts = list(data.build_eval_dataset(make_config(), source, "test[:101]", 16, context).as_numpy_iterator())
        counts.add(len(parts))
        total += sum(weights.sum() for _, _, weights in parts)
    assert len(counts) == 1 and total == 101


def test_view_pairs_are_reproducible():
    source, config = sources.digits_source(), make_config(color_jitter_strength=0.0)
    first, second = (list(data.build_view_pairs(config, source, "test", 9, 50)) for _ in range(2))
    assert len(first) == 7
    np.testing.assert_array_equal(first[3][0], second[3][0])


# --------------------------------------------------------------------------------------------------------- errors


def test_unknown_data_set_and_split():
    with pytest.raises(UserError, match="--dataset=cifar11 is not known.*did you mean cifar10"):
        sources.open_source("cifar11")
    with pytest.raises(UserError, match="--dataset=folder:/no/such: there is no such directory"):
        sources.open_source("folder:/no/such")
    source = sources.digits_source()
    for split in ("validation", "train[:10", "train[99%%:]"):
        with pytest.raises(UserError, match="--eval_split=.*it has test, train"):
            sources.check_split(source, "eval_split", split)
    with pytest.raises(UserError, match="is empty"):
        sources.check_split(source, "train_split", "train[5:5]")


def test_evaluation_split_falls_back_to_test_only_if_unset():
    source = sources.digits_source()
    assert sources.choose_eval_split(source, "validation", given=False) == "test"
    assert sources.choose_eval_split(source, "validation", given=True) == "validation"
    assert sources.choose_eval_split(source, "train[:10%]", given=True) == "train[:10%]"
