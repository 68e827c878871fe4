"""Security: untrusted files are treated only as data. No code in these files is executed, and nothing is unpickled."""

import ast

import numpy as np
import pytest
import tensorflow as tf

import model as model_lib
from checkpoints import restoring, weight_files
from config import Config
from inference import writers
from support import ROOT, SMALL
from support.errors import rejects


def test_saved_model_passed_as_checkpoint_is_not_executed(tmp_path, monkeypatch):
    class WritesFileOnLoad(tf.saved_model.experimental.TrackableResource):
        def _create_resource(self):
            return tf.raw_ops.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)

        def _initialize(self):
            tf.io.write_file(str(tmp_path / "written"), "executed")

    model = model_lib.build_model(Config(**SMALL), 4)
    model(tf.zeros([1, 8, 8, 3]), training=False)  # Keras saves only traced calls.
    module = tf.Module()
    module.saved_model, module.trap = model, WritesFileOnLoad()
    module.use = tf.function(lambda: tf.shape(module.trap.resource_handle), input_signature=[])
    tf.saved_model.save(module, str(tmp_path / "module"))
    (tmp_path / "written").unlink(missing_ok=True)
    loaded = model_lib.build_model(Config(**SMALL), 4)
    restoring.load_model(loaded, str(tmp_path / "module"))
    for ours, theirs in zip(loaded.variables, model.variables):
        np.testing.assert_array_equal(ours, theirs)
    assert not (tmp_path / "written").exists()
    tf.saved_model.load(str(tmp_path / "module"))
    assert (tmp_path / "written").exists()  # In contrast, `tf.saved_model.load` executes the code.


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04\x95", b"\0" * 4096, b"cos\nsystem\n(S'true'\ntR."]
)
def test_files_that_are_not_checkpoints_are_rejected(content, tmp_path):
    for name in ("ckpt-1.index", "ckpt-1.data-00000-of-00001"):
        (tmp_path / name).write_bytes(content)
    with rejects("cannot be read"):
        weight_files.open_weights(str(tmp_path / "ckpt-1"))


def test_file_names_in_npz_are_not_pickled(tmp_path):
    with writers.open_writer(str(tmp_path / "v.npz"), "vectors") as add:
        add({"file": ["a", "../b", "c" * 300]}, np.ones([3, 2]))
    with np.load(tmp_path / "v.npz", allow_pickle=False) as arrays:
        assert arrays["files"].tolist() == ["a", "../b", "c" * 300]
        assert arrays["vectors"].shape == (3, 2)


def test_source_code_does_not_use_pickle_eval_or_exec():
    forbidden = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    packages = [init.parent for init in ROOT.glob("*/__init__.py")]
    modules = [
        *ROOT.glob("*.py"),
        *(path for package in packages for path in package.glob("**/*.py")),
    ]
    assert len(modules) > 80
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, (ast.Import, ast.ImportFrom))
                else []
            )
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not forbidden & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call):
                assert getattr(node.func, "id", "") not in ("eval", "exec"), path
                assert not any(
                    keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True)
                    for keyword in node.keywords
                ), path
