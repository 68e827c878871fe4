"""Cases of the benchmarks as data: which implementations are compared, on which sizes and in which units."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence

import config as config_lib

_STEP = (
    "--dataset=digits",
    "--resnet_depth=18",
    "--image_size=32",
    "--nouse_blur",
    "--train_steps=1000",
    "--warmup_epochs=0",
    "--learning_rate=0.01",
    "--seed=1",
)
_CIFAR10 = (
    "--flagfile=paper/recipes/cifar10_small.cfg",
    "--train_split=train[:20%]",
    "--train_steps=200",
)
# 33 pixels is the smallest size for which the original uses the ImageNet stem.
_RACE = (
    "--flagfile=paper/recipes/cifar10_small.cfg",
    "--image_size=33",
    "--checkpoint_epochs=5",
    "--keep_checkpoint_max=100",
)
# column of accuracies.csv -> key of the results
FROZEN_METRICS = {
    "accuracy": "eval/lbfgs_top_1_accuracy",
    "nearest neighbors": "eval/knn_top_1_accuracy",
}
# Larger baselines do not fit in memory.
_LARGEST_BATCH, _LARGEST_MATRIX = 1024, 2**14


@dataclasses.dataclass(frozen=True)
class Case:
    """A comparison of two implementations.

    Attributes:
      name: text for the output and for --only.
      ours: function and its arguments; see `measure.measure`.
      baseline: the same for the baseline, or None.
      units: keys of the measured values to print.
      calls: number of timed calls per process.
      warm_up: whether one call precedes the timed calls.
      images: number of images per call.
    """

    name: str
    ours: tuple[str, dict]
    baseline: tuple[str, dict] | None
    units: Sequence[str] = ("s", "MB")
    calls: int = 1
    warm_up: bool = False
    images: int = 0


def torch_python() -> str | None:
    """Returns the Python interpreter for PyTorch, or None if there is none with PyTorch."""
    found = sys.executable if importlib.util.find_spec("torch") else None
    return os.environ.get("SIMCLR_TORCH_PYTHON", found)


def step(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """training steps on SIZE images (--profile=DIR writes a profile of --calls steps)"""
    flags = [*_STEP, f"--train_batch_size={size}", *options.flags]
    if options.profile:
        form = "programs.profiled_step", dict(flags=flags, directory=options.profile)
        yield Case("profile", form, None, ("s",), options.calls or 10)
        return
    config = config_lib.from_arguments(flags)
    network = dict(
        depth=config.resnet_depth,
        size=config.image_size,
        cifar_stem=config.cifar_stem,
        precision=config.precision,
        batch=size,
    )

    def ours(*more, with_input=False):
        return "programs.step", dict(flags=[*flags, *more], with_input=with_input)

    micro = config.micro_batch_size or size // 4
    one_batch = ours("--micro_batch_size=0") if size <= _LARGEST_BATCH else None
    with_input = ours(with_input=True)
    keras = ("baselines.keras_step", dict(network, jit_compile=config.jit_compile))
    forms = [("plain Keras", ours(), keras)]
    if torch_python():
        forms += [
            ("PyTorch", ours(), ("torch_step.step", dict(network, backend=None))),
            ("torch.compile", ours(), ("torch_step.step", dict(network, backend="inductor"))),
        ]
    forms += [
        ("mixed_bfloat16 and float32", ours("--precision=mixed_bfloat16"), ours()),
        ("micro-batches and one batch", ours(f"--micro_batch_size={micro}"), one_batch),
        ("with and without XLA", ours("--jit_compile"), ours("--nojit_compile")),
        ("with input pipeline and without", with_input, ours()),
        (
            "with and without --deterministic, with input pipeline",
            ours("--deterministic", with_input=True),
            with_input,
        ),
    ]
    units = ("images/s", "MB", "s to first result")
    for name, form, other in forms:
        yield Case(f"{name}, batch {size}", form, other, units, 5, warm_up=True, images=size)


def input_pipeline(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """input pipeline, batches of SIZE images of --flags=--dataset=..."""
    flags = ["--dataset=digits", f"--train_batch_size={size}", *options.flags]

    def ours(*more, decodes_only=False):
        return "programs.pipeline", dict(flags=[*flags, *more], decodes_only=decodes_only)

    device = ours("--augment_on=device")
    forms = [
        ("--augment_on=device and host", device, ours()),
        ("crops as uint8 and float32", ours("--augment_on=device", "--crop_dtype=uint8"), device),
    ]
    if config_lib.FILES.holds(config_lib.from_arguments(flags)):
        scaled = ours("--augment_on=device", "--scaled_decoding")
        forms.append(("--scaled_decoding and full", scaled, device))
    forms.append(("decoding alone", ours(decodes_only=True), None))
    for name, form, other in forms:
        yield Case(name, form, other, ("images/s",), 50, warm_up=True, images=size)


def startup(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """time until SIZE images of a folder are known and checked, and until Keras knows them"""
    ours, keras = (
        (f"{module}.open_folder", dict(count=size)) for module in ("programs", "baselines")
    )
    yield Case(f"{size:,} images, first run", ours, keras)
    yield Case(f"{size:,} images, later runs", ours, keras, warm_up=True)


def loss(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """NT-Xent and its gradient for 2N = SIZE, in blocks of rows and with the whole matrix"""
    for metrics in (False, True):
        arguments = dict(size=size, metrics=metrics)
        blocked = ("programs.nt_xent", dict(arguments, blocked=True))
        whole = None
        if size <= _LARGEST_MATRIX:
            whole = ("programs.nt_xent", dict(arguments, blocked=False))
        name = f"2N={size}, with{'' if metrics else 'out'} metrics"
        yield Case(name, blocked, whole, calls=max(2**15 // size, 5), warm_up=True)


def compiled(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """counts of steps on SIZE images per H100 in mixed_bfloat16, and memory of TPUs, without accelerators"""
    flags = [*_STEP, "--resnet_depth=50", "--image_size=224", "--use_blur", *options.flags]
    bfloat16, device = "--precision=mixed_bfloat16", "--augment_on=device"
    units = ("kernels", "MB/view", "temporary MB/view", "all-reduces")

    def form(*more, batch=size, replicas=1, target=("cuda", "1x1x1")):
        arguments = dict(flags=[*flags, *more], batch=batch, replicas=replicas, target=target)
        return "compiled.step", arguments

    for name, replicas, jit in (
        ("one GPU", 1, "--jit_compile"),
        ("one GPU, without XLA", 1, "--nojit_compile"),
        ("two GPUs", 2, "--nojit_compile"),
    ):
        ours = form(bfloat16, jit, device, replicas=replicas)
        host = form(bfloat16, jit, replicas=replicas)
        yield Case(f"{name}, --augment_on=device and host", ours, host, units)
    for name, replicas, smallest, *target in (
        ("v3-8", 8, size // 2, "v3:2x2"),
        ("v3-32", 32, size // 2, "v3:4x4"),
        ("v4-8", 4, size, "v4:2x2x1", "megacore"),  # The two cores of a chip act as one.
        ("v5e-8", 8, size // 2, "v5e:2x4"),
    ):
        for batch in (smallest, 2 * smallest):
            sizes = dict(batch=batch, replicas=replicas, target=["tpu", *target])
            ours = form("--jit_compile", bfloat16, **sizes)
            title = f"{name}, batch {batch * replicas}, mixed_bfloat16 and float32"
            yield Case(title, ours, form("--jit_compile", **sizes), ["GiB/core"])


def _data_sets(
    options: argparse.Namespace, digits: Sequence[str], cifar10: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the flags of each data set that is available."""
    yield "digits", [*digits, *options.flags]
    if options.data_dir:
        yield "cifar10", [*cifar10, f"--data_dir={options.data_dir}", *options.flags]


def precision(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """accuracy of runs with seed SIZE in mixed_bfloat16 and in float32"""
    digits = ("--flagfile=paper/recipes/digits.cfg", "--label_fraction=1")
    for name, flags in _data_sets(options, digits, _CIFAR10):
        bfloat16, float32 = (
            (
                "programs.accuracies",
                dict(
                    flags=[*flags, f"--precision={dtype}", f"--seed={size}"],
                    model_dir=f"{options.runs_dir}/{name}_{dtype}_{size}",
                ),
            )
            for dtype in ("mixed_bfloat16", "float32")
        )
        metrics = (*FROZEN_METRICS.values(), "eval/label_top_1_accuracy")
        yield Case(f"{name}, seed {size}", bfloat16, float32, metrics)


def parity(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """accuracy of short runs with seed SIZE, and of the original's program (--original=DIR; without seeds)"""
    recipes = ([f"--flagfile=paper/recipes/parity_{name}.cfg"] for name in ("digits", "cifar10"))
    for data, flags in _data_sets(options, *recipes):
        arguments = [*flags, f"--seed={size}"], f"{data}_{size}", options
        ours = _training("simclr", *arguments)
        original = _training("original", *arguments)
        yield Case(f"{data}, seed {size}", ours, original, tuple(FROZEN_METRICS))


def race(size: int, options: argparse.Namespace) -> Iterator[Case]:
    """accuracy during SIZE epochs on CIFAR-10 by this program, the original's (--original) and lightly"""
    data_dir = [f"--data_dir={options.data_dir}"] if options.data_dir else []
    flags = [*_RACE, f"--train_epochs={size}", *data_dir, *options.flags]
    for name in ("simclr", "original", "lightly"):
        if form := _training(name, flags, f"race_{size}", options):
            yield Case(name, form, None, ("minutes", *FROZEN_METRICS))


def _training(
    name: str, flags: list[str], directory: str, options: argparse.Namespace
) -> tuple[str, dict] | None:
    """Returns training with a program as an implementation, or None if the program is not available."""
    available = dict(original=options.original, lightly=torch_python())
    if not available.get(name, True):
        return None
    model_dir = f"{options.runs_dir}/{name}_{directory}"
    return "other_programs.accuracies", dict(
        name=name, flags=flags, model_dir=model_dir, checkout=options.original
    )


# name -> function of a size and the command-line options that yields cases, and default sizes
BENCHMARKS = {
    "step": (step, (128,)),
    "input": (input_pipeline, (256,)),
    "startup": (startup, (10_000, 100_000, 310_000, 1_000_000)),
    "compiled": (compiled, (256,)),
    "loss": (loss, tuple(2**power for power in range(9, 16))),
    "precision": (precision, (1, 2, 3)),
    "parity": (parity, tuple(range(1, 9))),
    "race": (race, (20,)),
}
