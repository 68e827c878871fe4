"""Program that executes documented PyTorch code, in a Python environment without TensorFlow.

    python tests/support/torch_worker.py DOCUMENT.md IMAGES.npy MODULE OUT.npz

Executes the code block of DOCUMENT.md that imports MODULE, in the directory of IMAGES.npy. The
images are float32 or float64 [n, height, width, 3]; the network has the same type. OUT.npz contains
h and, if the code computes them, z and logits. If `stock:NAME` is given instead of DOCUMENT.md, the
program builds the model NAME of torchvision or timm with random weights, and replaces its max
pooling with the max pooling of this project. It then writes the weights to OUT.npz.safetensors and
the logits to OUT.npz.
"""

import importlib
import os
import re
import sys

import numpy as np
import safetensors.torch
import torch
from torch import library


def define_missing_operators():
    """Defines the operators that torchvision's Python code expects from its compiled library.

    The default torchvision packages are compiled for PyTorch with CUDA. With a CPU-only build of
    PyTorch, the compiled library does not load, and importing torchvision fails because the
    operators are unknown. ResNets do not use these operators.

    Returns:
      The PyTorch operator library that contains the operators. They are removed when this object is
      garbage-collected.
    """
    operators = library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor x) -> Tensor")
    return operators


def import_torchvision():
    """Imports torchvision, and defines missing operators if necessary. Returns an object that must be kept alive."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        return define_missing_operators()
    return None


def find_code(document, module):
    """Returns the Python code block of a Markdown document that imports `module`."""
    blocks = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    return next(block for block in blocks if re.search(rf"^(from|import) {module}\b", block, re.M))


def stock_network(name, library, path):
    """Builds a torchvision or timm network with random weights and statistics, saves these, and returns it."""
    models = importlib.import_module(f"{library}.models")
    torch.manual_seed(0)
    network = getattr(models, name)()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.1)
            torch.nn.init.normal_(module.running_mean, std=0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    safetensors.torch.save_file(network.state_dict(), path)
    return network.eval()


def main():
    """Executes the code or builds the stock model, and writes the outputs."""
    source, images, module, out = sys.argv[1:]
    torch.set_num_threads(2)
    operators = import_torchvision() if module != "torch_resnet" else None  # noqa: F841
    torch.set_default_dtype(torch.from_numpy(np.load(images)).dtype)
    variables = {"images": torch.from_numpy(np.load(images).transpose(0, 3, 1, 2).copy())}
    with torch.no_grad():
        if source.startswith("stock:"):
            network = stock_network(source.removeprefix("stock:"), module, f"{out}.safetensors")
            network.maxpool = torch.nn.MaxPool2d(3, 2, ceil_mode=True)
            outputs = {"logits": network(variables["images"])}
        else:
            with open(source, encoding="utf-8") as file:
                document = file.read()
            os.chdir(os.path.dirname(images))
            sys.path.insert(0, ".")
            exec(find_code(document, module), variables)
            outputs = variables["outputs"] if module == "torch_resnet" else {"h": variables["h"]}
    np.savez(out, **{name: value.numpy() for name, value in outputs.items()})


if __name__ == "__main__":
    main()
