"""Selection of the devices: one device, several GPUs, several hosts, or a TPU."""

from __future__ import annotations

import os
import socket

import tensorflow as tf

from runtime import hosts
from runtime.errors import UserError, first_line

_TPU_PORT, _TPU_SECONDS = 8470, 30
_BFLOAT16_CAPABILITY = (8, 0)  # compute capability of Nvidia's Ampere GPUs


def start_runtime(use_tpu: bool) -> None:
    """Starts TensorFlow's runtime, unless hosts or a TPU must be connected first.

    The runtime prints messages when it starts, so it is started while native output is captured.
    """
    if not use_tpu and not os.environ.get("TF_CONFIG"):
        tf.config.list_logical_devices()


def make_strategy(use_tpu: bool = False, tpu_address: str | None = None, tpu_zone: str | None = None,
                  gcp_project: str | None = None) -> tf.distribute.Strategy:
    """Returns the distribution strategy for a TPU, several hosts (TF_CONFIG), several GPUs, or one device.

    Args:
      use_tpu: compute on a TPU.
      tpu_address: name of the TPU, its address grpc://host:port, or "local" on a TPU VM.
      tpu_zone: Google Cloud zone of the TPU; None: taken from the environment.
      gcp_project: Google Cloud project of the TPU; None: taken from the environment.

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
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except (tf.errors.OpError, RuntimeError) as error:
        raise UserError(f"TF_CONFIG: the hosts cannot be connected ({first_line(error)}). Check that the addresses are "
                        "correct and the ports free, then restart all hosts.") from error


def _tpu_strategy(tpu_address, tpu_zone, gcp_project):
    """Connects to the TPU as in TensorFlow's guide 'Use TPUs': resolver, cluster, system, strategy.

    This has not been tested on TPU hardware. `--tpu_name=local` selects the TPU of a TPU VM and needs no connection.
    With any other name, the input pipeline runs on the TPU's hosts, which can read `gs://` only, so that `folder:` and
    local directories do not work. The protocols `lbfgs` and `knn` are fitted on the coordinator; `contrastive`, which
    evaluates on one replica, and the export run on the CPU of the coordinator. The tests compile the training step and
    the evaluation with XLA, which shows that XLA supports all their operations, but nothing about speed or memory.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=tpu_address, zone=tpu_zone, project=gcp_project)
        _check_reachable(resolver.master())
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as error:  # The resolver's requests to Google Cloud fail in many ways with the same remedy.
        raise UserError(f"--use_tpu: no TPU could be reached ({first_line(error)}). Check --tpu_name, or remove "
                        "--use_tpu.") from error


def _check_reachable(address):
    """Raises OSError if nothing listens at grpc://host:port: TensorFlow would wait forever."""
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
    """Raises `UserError` if a GPU does not support the arithmetic of `precision`."""
    if precision != "mixed_bfloat16" or use_tpu:
        return
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        if details.get("compute_capability", _BFLOAT16_CAPABILITY) < _BFLOAT16_CAPABILITY:
            raise UserError(f"--precision=mixed_bfloat16: {details.get('device_name', 'a GPU')} does not "
                            "support bfloat16 (compute capability below 8.0). Use mixed_float16 or float32.")
