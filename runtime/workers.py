"""Training with multiple workers (TF_CONFIG or Slurm): checks, rendezvous and communication."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import re
import socket
import time

import numpy as np
import tensorflow as tf

from runtime import child_processes, console
from runtime.errors import UserError, first_line

_PROBE_INTERVAL, _PROBE_TIMEOUT = 0.5, 2  # These values are in seconds.
_PROBES = 20  # A worker sends this many messages before it stops waiting for those of the others.
_MAX_MESSAGE = 1024  # Size, in bytes, of an address and a word.
# Variables that are set if Slurm assigns GPUs to tasks. Any of them may also be "none".
_SLURM_GPUS_OF_TASKS = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")
# Their values may contain "gres/gpu".
_SLURM_RESOURCES_OF_TASKS = ("SLURM_TRES_PER_TASK", "SLURM_TRES_BIND")
# The first port of a Slurm job is in the range from 20000 to 31999, and its last port is below
# 32768, where Linux's range of ephemeral ports starts.
_FIRST_SLURM_PORT, _SLURM_PORTS = 20000, 12000


def use_slurm_cluster() -> None:
    """Sets TF_CONFIG to the cluster of this Slurm job step. With a single task, TF_CONFIG remains unset.

    Each task of the step is a worker. If several tasks run on this node and Slurm does not assign
    GPUs to tasks, the function also sets CUDA_VISIBLE_DEVICES to this task's share of the GPUs.
    Call this function before TensorFlow's runtime starts.

    Raises:
      UserError: this process is not a task of a Slurm job step, Slurm's variables are not
        supported, TF_CONFIG is already set to a different value, or the tasks of this node cannot
        share its GPUs equally.
    """
    try:
        num_tasks = int(os.environ["SLURM_STEP_NUM_TASKS"])
        node, local_task = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_LOCALID"])
        port = _first_slurm_port()
        # With the default arguments, the resolver fails on nodes without GPUs, and replaces Slurm's
        # choice of GPUs with the first GPUs of the node. The numbers of GPUs that are passed here
        # only ensure that no task is omitted.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=port, gpus_per_node=num_tasks, gpus_per_task=1, auto_set_gpu=False
        )
        workers = resolver.cluster_spec().as_dict()["worker"]
        address = f"{node}:{port + local_task}"
        # The index is not SLURM_PROCID: the resolver sorts nodes by name, so that node10 precedes
        # node9, and assumes that consecutive tasks run on the same node, which is not the case with
        # --distribution=cyclic. `index` raises ValueError if the address is not in the list.
        task = {"type": "worker", "index": workers.index(address)}
    except (KeyError, RuntimeError, ValueError) as error:
        raise UserError(
            "--cluster=slurm: Slurm's variables of a job step are missing or not supported"
            f" ({first_line(error)}). Start the program with srun, or set TF_CONFIG instead."
        ) from error
    tf_config = json.dumps({"cluster": {"worker": workers}, "task": task}) if num_tasks > 1 else ""
    previous = os.environ.get("TF_CONFIG", "")
    if previous not in ("", tf_config):
        raise UserError(
            "--cluster=slurm: TF_CONFIG is also set. Unset TF_CONFIG, or remove the flag."
        )
    if previous != tf_config:  # Otherwise, there is one task, or this function was called before.
        _share_gpus(local_task, sum(worker.startswith(f"{node}:") for worker in workers))
        os.environ["TF_CONFIG"] = tf_config
        console.log(f"TF_CONFIG from Slurm: worker {task['index']} of {num_tasks}, {address}")


def _first_slurm_port() -> int:
    """Returns the port of the first task on each node. Consecutive jobs of the same shape use different ports."""
    # The format is 2(x3),1.
    counts = re.findall(r"(?:^|,)([0-9]+)", os.environ["SLURM_STEP_TASKS_PER_NODE"])
    tasks_per_node = max(map(int, counts), default=1)
    return _FIRST_SLURM_PORT + int(os.environ["SLURM_JOB_ID"]) * tasks_per_node % _SLURM_PORTS


def _share_gpus(local_task: int, local_tasks: int) -> None:
    """Restricts this process to its share of the GPUs, if `local_tasks` processes on this node see the same GPUs.

    Raises:
      UserError: the GPUs cannot be shared equally.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if (
        not visible
        or any(os.environ.get(name, "none") != "none" for name in _SLURM_GPUS_OF_TASKS)
        or any("gres/gpu" in os.environ.get(name, "") for name in _SLURM_RESOURCES_OF_TASKS)
    ):
        return
    num_gpus = len(visible.split(","))
    if num_gpus % local_tasks:
        raise UserError(
            f"--cluster=slurm: {local_tasks} tasks cannot share {num_gpus} GPUs equally. Start one"
            " task per machine, or one task per GPU."
        )
    if local_tasks > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = child_processes.device_share(
            visible, local_task, local_tasks
        )


def count_workers() -> int:
    """Returns the number of workers (1 without TF_CONFIG). Raises `UserError` if TF_CONFIG is invalid."""
    return 1 + len(_read_tf_config()[1])


def is_lost_worker(error: Exception) -> bool:
    """Returns whether an error from a collective operation indicates that another worker was lost."""
    return (
        isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError))
        and count_workers() > 1
    )


def _read_tf_config() -> tuple[str | None, list[str]]:
    """Returns the address of this worker (None without TF_CONFIG) and a list with the addresses of the other workers.

    Raises:
      UserError: TensorFlow rejects TF_CONFIG, or TF_CONFIG does not name this worker.
    """
    if not os.environ.get("TF_CONFIG"):
        return None, []
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        cluster = resolver.cluster_spec()
        if not {"chief", "worker"}.issuperset(cluster.jobs):
            raise ValueError("the only supported jobs are chief and worker")
        # Fails if there are no workers.
        own_address = cluster.task_address(resolver.task_type, resolver.task_id)
        addresses = [
            cluster.task_address(job, index)
            for job in cluster.jobs
            for index in cluster.task_indices(job)
        ]
        for address in addresses:
            _split_address(address)
        addresses.remove(own_address)
    except Exception as error:
        # The resolver raises exceptions of many types for malformed values.
        raise UserError(
            f"TF_CONFIG={os.environ['TF_CONFIG'][:80]!r}: the value does not name this worker in a"
            f" cluster of workers ({type(error).__name__}: {first_line(error)}). See"
            " docs/accelerators.md."
        ) from error
    return own_address, addresses


def _split_address(address: str) -> tuple[str, int]:
    """Returns the host (without brackets) and the port from "host:port". Raises ValueError if there is no port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def wait_for_workers(has_gpu: bool) -> None:
    """Waits for all workers in TF_CONFIG, and logs the addresses of missing workers.

    TensorFlow's own rendezvous blocks in native code. It does not report missing workers, and it
    ignores SIGTERM and Ctrl-C. Each worker sends its address and `has_gpu` to all others, and listens
    until it has received those of all others.

    Args:
      has_gpu: whether TensorFlow found a GPU on this machine.

    Raises:
      UserError: this worker's port cannot be used, for example because another program uses it, or
        only some of the workers have GPUs, which TensorFlow does not support.
    """
    own_address, peers = _read_tf_config()
    if not peers:
        return
    console.log(
        "warning: multiple workers: TensorFlow listens on all network interfaces without"
        " authentication. Use trusted networks only."
    )
    missing, logged, probes, have_gpus = peers, None, _PROBES, {own_address: str(has_gpu)}
    send = functools.partial(_send, f"{own_address} {has_gpu}")
    with _listen(own_address) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        # A worker that was restarted receives nothing from workers that no longer wait.
        while missing or (probes and not have_gpus.keys() >= {*peers}):
            missing = [peer for peer, sent in zip(peers, pool.map(send, peers)) if not sent]
            if missing not in ([], logged):
                console.log(f"{own_address}: waiting for {', '.join(missing)} (TF_CONFIG)")
                logged = missing
            with contextlib.suppress(BlockingIOError):
                while True:
                    address, _, value = _receive(server.accept()[0]).rpartition(" ")
                    have_gpus[address] = value
            probes -= not missing
            time.sleep(_PROBE_INTERVAL)
    console.log(f"all {1 + len(peers)} workers are reachable")
    without = [address for address, value in have_gpus.items() if value == "False"]
    if without and "True" in have_gpus.values():
        raise UserError(
            f"TF_CONFIG: {', '.join(without)} found no GPU, but other workers have GPUs. Correct the"
            " installation there, or set CUDA_VISIBLE_DEVICES=-1 on all workers."
        )


def _listen(address: str) -> socket.socket:
    """Returns a socket that listens on the port of `address`, so that other workers can probe the port."""
    port, dual_stack = _split_address(address)[1], socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual_stack else socket.AF_INET,
            dualstack_ipv6=dual_stack,
            backlog=socket.SOMAXCONN,
        )
    except (OSError, OverflowError) as error:
        raise UserError(
            f"TF_CONFIG: port {port} of this machine cannot be used ({first_line(error)}). Stop the"
            " program that uses it, or choose another port (with --cluster=slurm, submit the job"
            " again)."
        ) from error
    server.setblocking(False)
    return server


def _send(text: str, address: str) -> bool:
    """Sends a text to host:port. Returns whether it was possible, which is not the case for invalid addresses."""
    try:
        with socket.create_connection(_split_address(address), timeout=_PROBE_TIMEOUT) as peer:
            peer.sendall(text.encode())
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _receive(connection: socket.socket) -> str:
    """Returns the text that a peer sends. It is empty if the connection is not one of `_send`."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_PROBE_TIMEOUT)
        return connection.recv(_MAX_MESSAGE).decode(errors="replace")
    return ""


def gather_integers(values: list[int], strategy: tf.distribute.Strategy) -> np.ndarray:
    """Gathers integers from all replicas into an array [replicas, len(values)]. All workers must call this function."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return np.array([values])
    gathered = _gather_function(strategy)(tf.constant([values], tf.int64))
    return strategy.experimental_local_results(gathered)[0].numpy()


def broadcast(text: str, strategy: tf.distribute.Strategy) -> str:
    """Returns the text of the only worker whose text is not empty. All workers must call this function."""
    values = list(text.encode())
    length = int(gather_integers([len(values)], strategy).max())
    gathered = gather_integers(values + [0] * (length - len(values)), strategy)
    return bytes(gathered.max(0).tolist()).decode()


def barrier(strategy: tf.distribute.Strategy) -> None:
    """Waits until all workers have called this function."""
    gather_integers([0], strategy)


@functools.cache  # Tracing `gather` again would create additional collectives.
def _gather_function(strategy: tf.distribute.Strategy) -> tf.types.experimental.PolymorphicFunction:
    @tf.function(autograph=False, reduce_retracing=True)
    def gather(values):
        # tf.identity places a copy on the replica's device.
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_gather(tf.identity(values), axis=0)
        )

    return gather
