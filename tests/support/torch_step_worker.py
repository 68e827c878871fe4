"""Program that computes the losses of `benchmarks/torch_step.py` in a Python environment without TensorFlow.

    python tests/support/torch_step_worker.py DEPTH STEM INPUT.npz OUT.npz

INPUT.npz contains the weights by name, `views` [2n, h, w, 3] and `labels` [n]. OUT.npz contains
`losses` (contrastive loss, loss of the linear head) and the gradients of their sum by name.
"""

import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks import torch_step  # noqa: E402


def main():
    """Loads the weights, whose names and shapes must match, and computes the losses and the gradients."""
    depth, stem, path, out = sys.argv[1:]
    torch.set_num_threads(2)
    arrays = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    views, labels = arrays.pop("views").permute(0, 3, 1, 2).contiguous(), arrays.pop("labels")
    network = torch_step.make_network(int(depth), stem == "cifar")
    missing, unexpected = network.load_state_dict(arrays, strict=False)
    # TensorFlow's last batch norm of the projection head has no bias. PyTorch initializes it with zeros.
    suffixes = ("num_batches_tracked", "layer2.bn.bias")
    assert not unexpected and all(name.endswith(suffixes) for name in missing), missing
    losses = torch_step.losses(network, views, labels)
    sum(losses).backward()
    np.savez(
        out,
        losses=[loss.item() for loss in losses],
        **{name: parameter.grad.numpy() for name, parameter in network.named_parameters()},
    )


if __name__ == "__main__":
    main()
