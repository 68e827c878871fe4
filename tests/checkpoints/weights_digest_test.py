"""Digest of the weights of a network."""

import tensorflow as tf

from checkpoints import loading, weight_files
from config import Config
from export import torch_weights
from support import golden


def test_weights_digest_is_the_same_for_all_formats(tmp_path):
    config = Config(resnet_depth=10, image_size=32, proj_head_mode="none")
    model, variables = golden.build_model(config, 3)
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.write(f"{tmp_path}/ckpt-1")
    checkpoint.write(str(tmp_path / "saved_model" / "variables" / "variables"))
    (tmp_path / "saved_model" / "saved_model.pb").touch()
    golden.save_tensors(
        tmp_path / "tf1", {golden.tf1_name(key): value for key, value in variables.items()}
    )
    torch_weights.export_torch(f"{tmp_path}/ckpt-1", f"{tmp_path}/torch.safetensors")
    digests = {
        name: weight_files.open_weights(f"{tmp_path}/{name}").digest()
        for name in ("ckpt-1", "saved_model", "tf1", "torch.safetensors")
    }
    # The linear head is exported to a separate PyTorch file.
    encoder, _ = golden.build_model(config.replace(lineareval_while_pretraining=False), None)
    assert digests.pop("torch.safetensors") == loading.weights_digest(encoder)
    assert set(digests.values()) == {loading.weights_digest(model)}
    kernel = next(iter(variables.values()))
    kernel.assign(tf.tensor_scatter_nd_add(kernel, [[0] * len(kernel.shape)], [1e-3]))
    assert loading.weights_digest(model) not in digests.values()
