"""The devices to compute on: one device, several GPUs, several hosts, or a TPU."""

from __future__ import annotations

import os
import socket

import tensorflow as tf

from runtime import hosts
from runtime.errors import UserError, first_line

_TPU_PORT, _TPU_SECONDS = 8470, 30
_BFLOAT16_CAPABILITY = (8, 0)  # Nvidia's Ampere


def start_runtime(use_tpu: bool) -> None:
    """Starts TensorFlow's runtime, which prints messages, unless hosts or a TPU must be connected before that."""
    if not use_tpu and not os.environ.get("TF_CONFIG"):
        tf.config.list_logical_devices()


# ------------------------------------------------------------------------------------------------------- strategy


def make_strategy(use_tpu: bool = False, tpu_address: str | None = None, tpu_zone: str | None = None,
                  gcp_project: str | None = None) -> tf.distribute.Strategy:
    """Returns the strategy for a TPU, several hosts (TF_CONFIG), several GPUs, or one device.

    Args:
      use_tpu: compute on a TPU.
      tpu_address: its name, its address grpc://host:port, or "local" for that of a TPU VM.
      tpu_zone: its zone in Google Cloud; None: that of the environment.
      gcp_project: its project in Google Cloud; None: that of the environment.

    Raises:
      UserError: the TPU or the other hosts cannot be connected.
    """
    if use_tpu:
        return _tpu_strategy(tpu_address, tpu_zone, gcp_project)
    if hosts.count_hosts() > 1:
        return _hosts_strategy()
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def _hosts_strategy():
    """Connects to the other hosts of TF_CONFIG."""
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except (tf.errors.OpError, RuntimeError) as error:
        raise UserError(f"TF_CONFIG: the hosts could not be connected ({first_line(error)}). Check the addresses and "
                        "free ports, and start all hosts again.") from error


def _tpu_strategy(tpu_address, tpu_zone, gcp_project):
    """Connects to the TPU, as TensorFlow's guide 'Use TPUs' does: resolver, cluster, system, strategy.

    Not tried on hardware. `--tpu_name=local` is a TPU VM's own TPU, to which nothing is connected; with another name
    the input pipeline and all files are on the TPU's hosts, which see `gs://` only, so that `folder:` and local
    directories do not work. `lbfgs` and `knn` fit on the coordinator; `contrastive`, which evaluates on one replica,
    and the export run on the host's processor. The tests lower the training step and the evaluation to XLA, and so
    show that XLA supports all operations in them; they show nothing about speed or memory.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=tpu_address, zone=tpu_zone, project=gcp_project)
        _check_reachable(resolver.master())
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as error:  # The resolver asks Google's services, which fail in many ways; the remedy is the same.
        raise UserError(f"--use_tpu: no TPU could be reached ({first_line(error)}). Check --tpu_name, or remove "
                        "--use_tpu.") from error


def _check_reachable(address):
    """Raises OSError if nothing listens at grpc://host:port, where TensorFlow would wait without end."""
    if address.startswith("grpc://"):
        host, _, port = address[len("grpc://"):].partition(":")
        socket.create_connection((host, int(port or _TPU_PORT)), timeout=_TPU_SECONDS).close()


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process is the chief, which writes checkpoints, results and messages."""
    resolver = strategy.cluster_resolver
    if resolver is None or resolver.task_type in (None, "", "chief"):
        return True
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type == "worker" and not resolver.task_id and not has_chief


def check_precision(precision: str, use_tpu: bool) -> None:
    """Raises `UserError` if the GPUs, if there are any, do not support the arithmetic `precision`."""
    if precision != "mixed_bfloat16" or use_tpu:
        return
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        if details.get("compute_capability", _BFLOAT16_CAPABILITY) < _BFLOAT16_CAPABILITY:
            raise UserError(f"--precision=mixed_bfloat16: {details.get('device_name', 'a GPU')} does not "
                            "support bfloat16 (compute capability below 8.0). Use mixed_float16 or float32.")
