"""Security: untrusted files are treated only as data. No code in these files is executed, and nothing is unpickled."""

import re

import numpy as np
import pytest
import tensorflow as tf

import model as model_lib
from checkpoints import loading, weight_files
from config import Config
from support import ROOT, SMALL
from support.errors import rejects

pytestmark = pytest.mark.usefixtures("stem_only_resnet")


def test_saved_model_passed_as_checkpoint_is_not_executed(tmp_path, monkeypatch):
    class WritesFileOnLoad(tf.saved_model.experimental.TrackableResource):
        def _create_resource(self):
            return tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)

        def _initialize(self):
            tf.io.write_file(f"{tmp_path}/written", "executed")

    model = model_lib.build_model(Config(**SMALL), 4)
    model(tf.zeros([1, 8, 8, 3]), training=False)  # Keras saves only traced calls.
    module = tf.Module()
    module.saved_model, module.trap = model, WritesFileOnLoad()
    module.use = tf.function(lambda: tf.shape(module.trap.resource_handle), input_signature=[])
    tf.saved_model.save(module, f"{tmp_path}/module")
    (tmp_path / "written").unlink(missing_ok=True)
    loaded = model_lib.build_model(Config(**SMALL), 4)
    loading.load_model(loaded, f"{tmp_path}/module")
    for ours, theirs in zip(loaded.variables, model.variables):
        np.testing.assert_array_equal(ours, theirs)
    assert not (tmp_path / "written").exists()
    tf.saved_model.load(f"{tmp_path}/module")
    assert (tmp_path / "written").exists()  # In contrast, `tf.saved_model.load` executes the code.


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04\x95", b"\0" * 4096, b"cos\nsystem\n(S'true'\ntR."]
)
def test_files_that_are_not_checkpoints_are_rejected(content, tmp_path):
    for name in ("ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        (tmp_path / name).write_bytes(content)
    with rejects("cannot be read"):
        weight_files.open_weights(f"{tmp_path}/ckpt-1")


def test_source_code_does_not_use_pickle_eval_or_exec():
    modules = r"\b(pickle|cloudpickle|dill|joblib|marshal|shelve)\b"
    forbidden = rf"^\s*(import|from)\b.*{modules}|(?<![\w.])(eval|exec)\(|allow_pickle=(?!False)"
    paths = [*ROOT.glob("*.py")]
    for init in ROOT.glob("*/__init__.py"):
        paths += init.parent.rglob("*.py")
    assert len(paths) > 80
    for path in paths:
        assert not re.search(forbidden, path.read_text(), re.MULTILINE), path
