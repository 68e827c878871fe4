"""Checks lists of images, and groups of images in lists and folders."""

import os

import numpy as np
import pytest

from sources import datasets, label_subsets
from support.errors import rejects
from support.images import hashed_fractions, write_images


def write_list(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return f"list:{path}"


def rows_of(source, split="train"):
    """Returns a dict mapping the gray level of each image to its label."""
    return {
        int(source.decode(item)[0, 0, 0]): label.numpy().tolist()
        for _, item, label in source.records(split)
    }


@pytest.mark.parametrize(
    "header, separator, encoding",
    [
        ("image,label", ",", "utf-8"),
        ("file_name;class", ";", "utf-8-sig"),
        ("path\tlabel", "\t", "utf-8"),
        (" filename , label ", ",", "utf-8"),
        ("FileName,Label", ",", "utf-8"),
    ],
)
def test_lists_have_paths_and_labels(header, separator, encoding, tmp_path, logged):
    levels = write_images(tmp_path, "a, b/1.png", "é.png", "3.png")
    rows = [f'"{name}"{separator}{label}' for name, label in zip(levels, ("dog", "cat", ""))]
    name = write_list(tmp_path / "x.csv", "\n".join([header, *rows]), encoding)
    source = datasets.open_source(name)
    assert source.class_names == ["cat", "dog"] and source.split_names == ["train"]
    assert rows_of(source) == {1: 1, 2: 0, 3: -1}
    assert source.class_counts("train") == {"cat": 1, "dog": 1}
    assert logged == [f"{name}: 1 of 3 images have no label"]
    source.drop_unlabeled("train")
    assert rows_of(source) == {1: 1, 2: 0}


def test_lists_may_have_splits_other_columns_and_another_directory(tmp_path):
    write_images(tmp_path / "images", "1.png", "2.png", "3.png")
    table = (
        "id,label,Species,Split\n1.png,0,ant,Training\n./2.png,0,bee,val2017\n"
        f"{tmp_path}/images/3.png,0,ant,test_set\n"
    )
    name = write_list(tmp_path / "x.csv", table)
    source = datasets.open_source(
        name, str(tmp_path / "images"), image_key="ID", label_key="species"
    )
    assert source.class_names == ["ant", "bee"]
    splits = {split: rows_of(source, split) for split in source.split_names}
    assert splits == {"train": {1: 0}, "validation": {2: 1}, "test": {3: 0}}
    assert [os.path.basename(path) for path in source.paths()] == ["1.png", "2.png", "3.png"]


def test_labels_separated_by_a_bar_are_multi_label(tmp_path):
    write_images(tmp_path, "1.png", "2.png", "3.png")
    table = "image,label\n1.png,b|a\n2.png, c \n3.png,\n"
    source = datasets.open_source(write_list(tmp_path / "x.csv", table))
    assert source.multi_label and source.class_names == ["a", "b", "c"]
    assert rows_of(source) == {1: [1, 1, 0], 2: [0, 0, 1], 3: [-1, -1, -1]}
    assert source.class_counts("train") == {"a": 1, "b": 1, "c": 1}
    source.drop_labels()
    assert rows_of(source) == {1: -1, 2: -1, 3: -1}


def test_lists_without_labels(tmp_path):
    write_images(tmp_path, "1.png", "2.png")
    for table in ("image\n1.png\n2.png\n", "image,label\n1.png,\n2.png,\n"):
        source = datasets.open_source(write_list(tmp_path / "x.csv", table))
        assert source.class_names is None and set(rows_of(source).values()) == {-1}


@pytest.mark.parametrize(
    "table, message",
    [
        ("img,label\n1.png,a\n", "no column image or file_name .*only img, label. Set --image_key"),
        ("image,label\n1.png,a\n9.png,b\n", "files are not in .*: 9.png .row 3.. Correct"),
        ("image,label\n1.png,a\n./1.png,b\n", "several times: 1.png .row 2., 1.png .row 3.."),
        ("image,label\n1.png,a\n../{0}/1.png,b\n", "several times: 1.png .row 2., 1.png .row 3.."),
        ("image,split\n1.png,fold1\n", "the split is not train, validation or test: 1.png .row 2"),
        ("", "the table cannot be read"),
        (
            "image,label\n1.png,a,b\n",
            "the table cannot be read .*as many fields in each row as in the",
        ),
    ],
)
def test_errors_in_lists_name_the_rows(table, message, tmp_path):
    write_images(tmp_path, "1.png")
    with rejects(f"--dataset=list:.*x.csv: .*{message}"):
        datasets.open_source(write_list(tmp_path / "x.csv", table.format(tmp_path.name)))


def test_changes_of_labels_and_groups_change_the_description(tmp_path):
    write_images(tmp_path, "1.png", "2.png")
    tables = ["image,label,group\n1.png,a,x\n2.png,b,y\n"]
    tables += [tables[0].replace("2.png,b", "2.png,a"), tables[0].replace(",y", ",x")]
    described = [
        datasets.open_source(write_list(tmp_path / "x.csv", table)).describe_data()
        for table in (tables[0], *tables)
    ]
    assert described[0] == described[1] and described[1]["name"] == "list"
    assert len({each["files"] for each in described}) == 3


# ---------------------------------------------------------------------------------------------------------- groups

PATIENTS = [f"{'np'[i % 2]}/patient{i:02d}_{j}.png" for i in range(12) for j in range(5)]


def patients_of(source, split):
    return [os.path.basename(path).partition("_")[0] for path in source.labeled_paths(split)[0]]


@pytest.mark.parametrize("pattern", [r"patient\d+", r"/(patient\d+)_"])
def test_slices_do_not_divide_groups(pattern, tmp_path):
    write_images(tmp_path, *PATIENTS)
    source = datasets.open_source(f"folder:{tmp_path}", group_pattern=pattern)
    names = sorted({os.path.basename(name).partition("_")[0] for name in PATIENTS})
    position = hashed_fractions(names)
    for split, low, high in (
        ("train[:30%]", 0, 0.3),
        ("train[30%:80%]", 0.3, 0.8),
        ("train[50%:]", 0.5, 1),
    ):
        expected = [name for name in names if low <= position[name] < high]
        assert sorted(patients_of(source, split)) == sorted(5 * expected)
    write_images(tmp_path, "n/patient00_new.png", "n/patient99_0.png")  # Nobody moves.
    other = datasets.open_source(f"folder:{tmp_path}", group_pattern=pattern)
    before, after = (set(patients_of(each, "train[:50%]")) for each in (source, other))
    assert before == after - {"patient99"}
    assert len(patients_of(source, "train[:20]")) == 20
    with rejects("boundary divides a group of images. Use 25, or a perc"):
        source.num_examples("train[:23]")


def test_lists_may_have_a_column_with_groups(tmp_path, logged):
    write_images(tmp_path, *(f"{number}.png" for number in range(40)))
    rows = [f"{number}.png,{number // 4}{' ' * (number % 2)}" for number in range(40)]
    name = write_list(tmp_path / "x.csv", "\n".join(["image,Group", *rows, ""]))
    source = datasets.open_source(name)
    numbers = [
        {int(os.path.basename(path)[:-4]) // 4 for path in source.labeled_paths(split)[0]}
        for split in ("train[:50%]", "train[50%:]")
    ]
    assert not numbers[0] & numbers[1] and all(numbers)
    assert logged == ["no labels: the columns are image, group. --label_key selects one."]
    with rejects("--group_pattern=png: all images are in the group png"):
        datasets.open_source(name, group_pattern="png")


def test_images_without_a_match_and_shared_groups_are_reported(tmp_path, logged):
    names = ["train/a/x1_0.png", "train/b/x2_0.png", "train/a/z.png", "test/a/x2_1.png"]
    write_images(tmp_path, *names, "test/b/x2_2.png")
    datasets.open_source(f"folder:{tmp_path}", group_pattern="x.")
    assert logged == [
        "--group_pattern=x.: 1 of 5 paths do not match, so each of these images forms its own"
        " group: train/a/z.png",
        "warning: groups in both test and train (1): x2",
    ]
    with rejects("--group_pattern=y: no path matches, for example test/a"):
        datasets.open_source(f"folder:{tmp_path}", group_pattern="y")
    with rejects("--group_pattern=t: all images are in the group t"):
        datasets.open_source(f"folder:{tmp_path}", group_pattern="t")


def test_label_fraction_chooses_whole_groups(tmp_path):
    write_images(tmp_path, *PATIENTS)
    source = datasets.open_source(f"folder:{tmp_path}", group_pattern=r"patient\d+")
    source.restrict("train", 0.5, 3)
    chosen = patients_of(source, "train")
    assert len(chosen) == 30 and set(map(chosen.count, chosen)) == {5}
    assert source.class_counts("train") == {"n": 15, "p": 15}
    with rejects(
        "--label_fraction=0.1: in --train_split=train, 1 examples are too few for 2 classes. Use at"
        " least 0.33334."
    ):
        source.restrict("train", 0.1, 3)


def test_groups_with_unlabeled_examples():
    labels, groups = np.array([-1, 0, -1, 1, 1, 0]), np.array([7, 7, 8, 9, 9, 5])
    chosen = label_subsets.choose_labeled(labels, "train", 1.0, 0, groups)
    np.testing.assert_array_equal(chosen, [1, 3, 4, 5])
