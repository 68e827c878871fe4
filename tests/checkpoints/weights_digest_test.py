"""Digest of the weights of a network."""

import tensorflow as tf

import model as model_lib
from checkpoints import inspection, restoring
from config import Config
from export import torch_weights
from support import golden


def digest(path, with_head):
    config = inspection.inspect_checkpoint(str(path)).config
    model = model_lib.build_model(config.replace(lineareval_while_pretraining=with_head), 3)
    restoring.load_parts(
        model, str(path), ("encoder", "linear head") if with_head else ("encoder",)
    )
    return restoring.weights_digest(model)


def test_weights_digest_is_the_same_for_all_formats(tmp_path):
    config = Config(resnet_depth=10, image_size=32, proj_head_mode="none")
    model = model_lib.build_model(config, 3)
    golden.assign_computed_weights(model)
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.write(str(tmp_path / "ckpt-1"))
    checkpoint.write(str(tmp_path / "saved_model" / "variables" / "variables"))
    (tmp_path / "saved_model" / "saved_model.pb").touch()
    variables = restoring.variables_by_key(model=model)
    golden.save_tensors(
        tmp_path / "tf1", {golden.tf1_name(key): value for key, value in variables.items()}
    )
    torch_weights.export_torch(str(tmp_path / "ckpt-1"), str(tmp_path / "torch.safetensors"))
    formats = {"ckpt-1", "saved_model", "tf1"}
    assert {digest(tmp_path / name, True) for name in formats} == {restoring.weights_digest(model)}
    # The linear head is exported to a separate PyTorch file.
    encoders = {digest(tmp_path / name, False) for name in (*formats, "torch.safetensors")}
    assert len(encoders) == 1
    kernel = next(iter(variables.values()))
    kernel.assign(tf.tensor_scatter_nd_add(kernel, [[0] * len(kernel.shape)], [1e-3]))
    assert restoring.weights_digest(model) != digest(tmp_path / "ckpt-1", True)
