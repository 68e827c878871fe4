"""Device selection: one device, multiple GPUs, multiple workers, or a TPU."""

from __future__ import annotations

import collections
import os
import re
import signal
import socket
import subprocess
import sys

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.framework import config as framework_config

from runtime import console, replicas, workers
from runtime.errors import UserError, first_line
from runtime.pipelines import PARALLEL_CALLS

_TPU_PORT, _TPU_SECONDS = 8470, 30
_TPU_DEVICES = "/dev/accel0", "/dev/vfio/0"  # files of a TPU VM's own TPU
_GPU_DEVICES = "/dev/nvidia0", "/dev/dxg"  # files of NVIDIA's driver on Linux and in WSL 2
# SIGALRM ends the process after two minutes.
_LISTING = (
    "import signal; signal.alarm(120); "
    "import tensorflow as tf; print(tf.config.list_physical_devices())"
)
_LISTED_LINES = 15
_TPU_CORE_BYTES = 16e9  # TPU v3 and v5e; most others have more.
# Compute capability of NVIDIA's Ampere GPUs, the first that support bfloat16 and TF32.
_AMPERE = (8, 0)


def make_strategy(
    use_tpu: bool = False,
    tpu_address: str | None = None,
    tpu_zone: str | None = None,
    gcp_project: str | None = None,
    collective: str = "auto",
) -> tf.distribute.Strategy:
    """Returns the distribution strategy for a TPU, multiple workers (TF_CONFIG), multiple GPUs, or one device.

    Args:
      use_tpu: whether to use a TPU.
      tpu_address: name or address (grpc://host:port) of the TPU, or "local" on a TPU VM. None: the
        environment variable TPU_NAME or, if it is not set, the TPU of the VM.
      tpu_zone: Google Cloud zone of the TPU, or None to read it from the environment.
      gcp_project: Google Cloud project of the TPU, or None to read it from the environment.
      collective: how workers communicate; the value of `--collective`.

    Raises:
      UserError: the TPU or the other workers cannot be reached.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        # NVIDIA's libraries read this variable, but XLA does not.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if use_tpu:
        return _tpu_strategy(tpu_address, tpu_zone, gcp_project)
    if workers.count_workers() > 1:
        return _multi_worker_strategy(collective)
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def _multi_worker_strategy(collective: str) -> tf.distribute.Strategy:
    if collective == "auto":  # TensorFlow's own choice is always gRPC.
        collective = "nccl" if has_gpu() else "ring"
    implementation = tf.distribute.experimental.CommunicationImplementation(collective.upper())
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise UserError(
            f"TF_CONFIG: the workers cannot connect to each other ({first_line(error)}). Check that"
            " the addresses are correct and the ports are free, then run the same command again on"
            " all workers."
        ) from error


def _tpu_strategy(
    tpu_address: str | None, tpu_zone: str | None, gcp_project: str | None
) -> tf.distribute.Strategy:
    """Connects to a TPU as described in TensorFlow's guide "Use TPUs", and returns the strategy.

    This function has not been tested on TPU hardware. On a TPU VM, the name `local`, which is the
    default there, selects the TPU of the VM and requires no connection. With other names, the input
    pipeline runs on the TPU's hosts, which can read only `gs://` paths, so `folder:` and local
    directories are not supported.
    The coordinator's CPU fits the `lbfgs` and `knn` classifiers, runs the `contrastive` protocol
    with one replica, and exports SavedModels. The tests compile the training step (also for two
    replicas) and the evaluation with XLA. They show that XLA supports all operations with static
    shapes. `benchmarks.compiled` shows the memory use on a TPU, but nothing shows the speed.
    """
    is_tpu_vm = any(map(os.path.exists, _TPU_DEVICES))
    address = tpu_address or os.environ.get("TPU_NAME") or ("local" if is_tpu_vm else None)
    if address is None:
        raise UserError(
            "--use_tpu: no TPU is selected, and this machine is not a TPU VM. Set --tpu_name=NAME, or"
            " run the program on a TPU VM (--tpu_name=local)."
        )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=address, zone=tpu_zone, project=gcp_project
        )
        if (master := resolver.master()).startswith("grpc://"):
            # If nothing is listening, TensorFlow would wait forever.
            host, _, port = master.removeprefix("grpc://").partition(":")
            probe = socket.create_connection((host, int(port or _TPU_PORT)), _TPU_SECONDS)
            probe.close()
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as error:
        # Requests to Google Cloud can fail in many ways, all with the same remedy.
        reason, remedy = first_line(error), "Check --tpu_name, or remove --use_tpu"
        if "No OpKernel" in reason:
            reason = "this build of TensorFlow does not support TPUs"
            remedy = "Install requirements-tpu.txt"
        elif address == "local":
            console.log(_list_devices())
        raise UserError(f"--use_tpu: no TPU could be reached ({reason}). {remedy}.") from error


def _list_devices() -> str:
    """Lists the devices in a child process with all log messages. Returns how it ended and what it printed last.

    In this process, the log messages, which state why a device cannot be used, are disabled.
    """
    variables = {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_ENABLE_ONEDNN_OPTS": "0",  # fewer messages
    }
    if tf.config.list_physical_devices("TPU_SYSTEM"):  # This process has locked libtpu.
        variables["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    process = subprocess.run(
        [sys.executable, "-c", _LISTING],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    status = process.returncode
    outcome = signal.Signals(-status).name if status < 0 else f"status {status}"
    # The messages start with the time and the place. Some are printed several times.
    lines = dict.fromkeys(re.sub(r"^.*?\] ", "", line) for line in process.stdout.splitlines())
    return "\n  ".join(
        [f"a process that listed the devices ended with {outcome}:", *list(lines)[-_LISTED_LINES:]]
    )


def has_gpu() -> bool:
    """Returns whether TensorFlow found a GPU on this machine."""
    return bool(tf.config.list_physical_devices("GPU"))


def _gpu_details() -> list[dict]:
    """Returns TensorFlow's details of each GPU, which may contain `device_name` and `compute_capability`."""
    return [
        tf.config.experimental.get_device_details(gpu)
        for gpu in tf.config.list_physical_devices("GPU")
    ]


def has_bfloat16() -> bool:
    """Returns whether a GPU supports bfloat16 and TF32."""
    return any(values.get("compute_capability", (0, 0)) >= _AMPERE for values in _gpu_details())


def describe(strategy: tf.distribute.Strategy) -> str:
    """Returns a description of the devices that `strategy` uses, for the log."""
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return f"TPU, {strategy.num_replicas_in_sync} cores"
    details = _gpu_details()
    names = collections.Counter(values.get("device_name", "GPU") for values in details)
    device = ", ".join(f"{count} x {name}" for name, count in names.items())
    if has_bfloat16():
        is_enabled = tf.config.experimental.tensor_float_32_execution_enabled()
        device += f"; TF32 {'on' if is_enabled else 'off'}"
    if not details:
        device = f"CPU, {PARALLEL_CALLS} cores; no GPU found"
        if sys.platform == "linux":
            device += f" (for NVIDIA GPUs: pip install 'tensorflow[and-cuda]=={tf.__version__}')"
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if any(map(os.path.exists, _GPU_DEVICES)) and not is_hidden:
            device += f"; {_list_devices()}"
    num_workers = workers.count_workers()
    if num_workers == 1:
        return device
    collective = strategy.extended._communication_options.implementation.value
    return f"{num_workers} workers, communication by {collective}; this worker: {device}"


def accelerator_memory(use_tpu: bool) -> float | None:
    """Returns the memory of the smallest GPU or of a TPU core in bytes, or None if there is neither."""
    if use_tpu:
        return _TPU_CORE_BYTES
    local_devices = device_lib.list_local_devices() if _gpu_details() else []
    limits = [device.memory_limit for device in local_devices if device.device_type == "GPU"]
    return min(limits, default=None)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process is the chief, which writes checkpoints, results and messages."""
    # A property of `tf.compat.v1.distribute.StrategyExtended`, from which all strategies' classes derive.
    return strategy.extended.should_checkpoint


def check_precision(precision: str, use_tpu: bool) -> None:
    """Raises `UserError` if a GPU does not support `precision`."""
    if precision != "mixed_bfloat16" or use_tpu:
        return
    for details in _gpu_details():
        if details.get("compute_capability", _AMPERE) < _AMPERE:
            raise UserError(
                f"--precision=mixed_bfloat16: {details.get('device_name', 'a GPU')} does not "
                "support bfloat16 (compute capability below 8.0). Use mixed_float16 or float32."
            )


def compiles_step(jit_compile: bool | None, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether XLA compiles a whole training step: by default, on a single GPU.

    On several GPUs, the step contains communication, and users of TensorFlow report that such
    programs may hang. `replicas.compiled_on_gpus` is used there instead. With `--deterministic`, the
    default is not to compile, because XLA may choose kernels by measuring them.
    """
    if jit_compile is None:
        is_deterministic = framework_config.is_op_determinism_enabled()
        return strategy.num_replicas_in_sync == 1 and has_gpu() and not is_deterministic
    return jit_compile


def check_jit_compile(strategy: tf.distribute.Strategy) -> None:
    """Raises `UserError` if XLA cannot compile a step for the devices of `strategy`."""
    if strategy.num_replicas_in_sync > 1 and not replicas.are_gpus(strategy):
        raise UserError(
            "--jit_compile: XLA cannot compile communication between CPUs. Remove the flag, use"
            " GPUs, or start a single process."
        )
