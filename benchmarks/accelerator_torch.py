"""Part `torch` of `benchmarks.accelerator`: speed of the training step in PyTorch. Does not import TensorFlow."""

from __future__ import annotations

import torch

from benchmarks import measure, torch_step


def step(depth, size, batch, steps, rounds, precision, cifar_stem, backend):
    """Yields the speed of `torch_step` in images/s, with the key `baseline`.

    Args:
      depth: depth of the ResNet.
      size: height and width of the images, in pixels.
      batch: images per step. Each image has two views.
      steps: steps per call.
      rounds: timed calls of each implementation.
      precision: float32 (without TF32), tf32, mixed_float16 or mixed_bfloat16.
      cifar_stem: whether the network has the CIFAR stem.
      backend: backend of `torch.compile`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    views = torch.rand(2 * batch, 3, size, size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    labels = torch.randint(10, (batch,), device=device)

    def build(backend):
        network = torch_step.Network(depth, cifar_stem).to(
            device, memory_format=torch.channels_last
        )
        run_step = torch_step.make_step(network, precision, backend)

        def run_steps():
            for _ in range(steps):
                loss = run_step(views, labels)
            return loss.item()

        return run_steps

    builders = {
        "PyTorch": lambda: build(None),
        "PyTorch with torch.compile": lambda: build(backend),
    }
    functions, first_seconds, errors = measure.first_calls(builders)
    seconds = measure.time_alternately(functions, rounds)
    case = f"step, ResNet-{depth}, {size} pixels, batch {batch}, {precision}"
    for name in builders:
        if name in errors:
            yield dict(benchmark="accelerator", case=f"{case}, {name}", error=errors[name])
        else:
            yield measure.line(
                "accelerator",
                f"{case}, {name}",
                "images/s",
                None,
                steps * batch / seconds[name],
                first_call_seconds=round(first_seconds[name], 1),
                pytorch=torch.__version__,
                cuda=torch.version.cuda,
                cudnn=torch.backends.cudnn.version(),
            )
