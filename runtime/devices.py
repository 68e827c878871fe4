"""The devices to compute on: one device, several GPUs, several hosts, or a TPU."""

from __future__ import annotations

import os
import socket

import tensorflow as tf

from runtime import hosts
from runtime.errors import UserError, first_line

_TPU_PORT, _TPU_SECONDS = 8470, 30
_BFLOAT16_CAPABILITY = (8, 0)  # Nvidia's Ampere


def start_runtime(config):
    """Starts TensorFlow's runtime, which chatters; unless hosts or a TPU must be set up before that."""
    if not config.use_tpu and not os.environ.get("TF_CONFIG"):
        tf.config.list_logical_devices()


# ------------------------------------------------------------------------------------------------------- strategy


def make_strategy(config):
    """Where to compute: a TPU, several hosts (TF_CONFIG), several GPUs, or one device. Raises `UserError`."""
    if config.use_tpu:
        return _tpu_strategy(config)
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
        raise UserError(f"TF_CONFIG: the hosts could not be connected ({first_line(error)}): check addresses and free "
                        "ports, and start all hosts anew") from error


def _tpu_strategy(config):
    """Connects to the TPU, as TensorFlow's guide 'Use TPUs' does: resolver, cluster, system, strategy.

    Untried on hardware. What is known: `--tpu_name=local` is a TPU VM's own TPU, and nothing is connected then; with
    another name the input pipeline and all files are on the TPU's hosts, which see `gs://` only, so that `folder:` and
    local directories do not work. `lbfgs` and `knn` fit on the coordinator; `contrastive`, which evaluates on one
    replica, and the export run on the host's processor. The tests lower the training step and the evaluation to XLA,
    so that there is no operation in them that XLA does not know; they cannot tell speed or memory.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=config.tpu_address, zone=config.tpu_zone, project=config.gcp_project)
        _check_reachable(resolver.master())
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as error:  # The resolver asks Google's services, which fail in many ways; the remedy is the same.
        raise UserError(f"--use_tpu: no TPU could be reached ({first_line(error)}); check --tpu_name, or leave "
                        "--use_tpu out") from error


def _check_reachable(address):
    """Raises OSError if nobody answers at grpc://host:port, where TensorFlow would wait for ever."""
    if address.startswith("grpc://"):
        host, _, port = address[len("grpc://"):].partition(":")
        socket.create_connection((host, int(port or _TPU_PORT)), timeout=_TPU_SECONDS).close()


def is_chief(strategy):
    """Whether this process's files are those that remain."""
    resolver = strategy.cluster_resolver
    if resolver is None or resolver.task_type in (None, "", "chief"):
        return True
    has_chief = "chief" in resolver.cluster_spec().jobs
    return resolver.task_type == "worker" and not resolver.task_id and not has_chief


def check_precision(config):
    """Whether the GPUs, if there are any, know the arithmetic that is asked for. Raises `UserError`."""
    if config.precision != "mixed_bfloat16" or config.use_tpu:
        return
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        if details.get("compute_capability", _BFLOAT16_CAPABILITY) < _BFLOAT16_CAPABILITY:
            raise UserError(f"--precision=mixed_bfloat16: {details.get('device_name', 'a GPU')} does not know "
                            "bfloat16 (compute capability 8.0 does): use mixed_float16 or float32")
