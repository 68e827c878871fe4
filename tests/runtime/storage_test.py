"""Atomic writes and type-checked reads of result files."""

import os

import pytest

from checkpoints import run_directory, weight_files
from runtime import storage
from support import no_space
from support.errors import rejects
from support.hostile import HOSTILE


@pytest.mark.parametrize("name", HOSTILE)
def test_reading_corrupt_content_or_an_unexpected_type_returns_none(name, tmp_path):
    (tmp_path / "x.json").write_bytes(HOSTILE[name])
    assert storage.read_json(f"{tmp_path}/x.json") is None
    for file_name in ("flags.json", "classes.json"):
        (tmp_path / file_name).write_bytes(HOSTILE[name])
    if not HOSTILE[name]:
        assert run_directory.read_flags(str(tmp_path)) == {}
        assert weight_files.read_classes(str(tmp_path)) == (None, False)
        return
    with rejects("flags.json: the file is corrupt"):
        run_directory.read_flags(str(tmp_path))
    if name in ("null", "list"):  # Runs on unlabeled data write null.
        assert weight_files.read_classes(str(tmp_path)) == ([] if name == "list" else None, False)
    else:
        with rejects("classes.json: the file is corrupt"):
            weight_files.read_classes(str(tmp_path))


def test_content_is_returned_only_if_it_has_the_expected_type(tmp_path):
    path = f"{tmp_path}/x.json"
    assert storage.read_json(path) is None and storage.read_json(str(tmp_path)) is None
    for content, expected_type in (({"a": 1}, dict), ([1, 2], list), ([1], (dict, list))):
        storage.write_json(path, content)
        assert storage.read_json(path, expected_type) == content
    assert storage.read_json(path) is None


def test_failed_writes_keep_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    storage.write_json(str(path), {"a": 1})

    with monkeypatch.context() as patch, rejects("No space left on device"):
        patch.setattr(os, "replace", no_space)
        storage.write_json(str(path), {"a": 2})
    assert storage.read_json(str(path)) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]
