"""Training on several hosts (TF_CONFIG): checks, rendezvous, and communication."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import ipaddress
import json
import os
import re
import socket
import time

import numpy as np
import tensorflow as tf

from runtime import console
from runtime.errors import UserError, first_line

_ASK_SECONDS, _ANSWER_SECONDS = 0.5, 2
_JOBS = ("chief", "worker")  # of TF_CONFIG, in the order of their replicas
_HOST_LABEL = re.compile("[A-Za-z0-9_-]{1,63}")
_LONGEST_HOST = 253  # characters


# ---------------------------------------------------------------------------------------------------------- hosts


def count_hosts() -> int:
    """Returns the number of training hosts, 1 without TF_CONFIG. Raises `UserError` if TF_CONFIG cannot work."""
    return sum(len(addresses) for addresses in _read_tf_config()[0].values()) or 1


def is_lost_host(error: Exception) -> bool:
    """Returns whether an error of a step, or of another collective operation, means that another host has ended."""
    return isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)) and count_hosts() > 1


def _read_tf_config():
    """Returns the cluster (job -> addresses, {} if there is none) and the task (dict) of TF_CONFIG.

    Raises:
      UserError: TF_CONFIG is malformed; everything that TensorFlow would reject, or read differently, is refused here.
    """
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        text.encode()  # Environment variables may hold bytes that are not UTF-8.
        content = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _malformed(text, first_line(error)) from error
    for name, value in (("it", content), *((f'"{name}"', content.get(name, {})) for name in ("cluster", "task")
                                           if isinstance(content, dict))):
        if not isinstance(value, dict):
            raise _malformed(text, f"{name} must be an object, {{...}}")
    cluster, task = content.get("cluster", {}), content.get("task", {})
    _check_cluster(cluster)
    cluster = {job: addresses for job, addresses in cluster.items() if addresses}
    if cluster:
        _check_task(cluster, task)
    return cluster, task


def _malformed(text, reason):
    return UserError(f"TF_CONFIG={text[:80]} is not the JSON that TensorFlow expects ({reason}). See "
                     "docs/accelerators.md.")


def _unique_keys(pairs):
    """Returns the dict of a JSON object. Raises ValueError for a repeated key, of which JSON libraries choose one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def _check_cluster(cluster):
    """Raises `UserError` for a cluster that has other jobs, malformed addresses, or the same address twice."""
    for job, addresses in cluster.items():
        if job not in _JOBS:
            raise UserError(f"TF_CONFIG: the cluster has {job!r}, which is not used here: name all machines as worker "
                            "(--mode=eval runs on one more machine without TF_CONFIG)")
        if not isinstance(addresses, list):
            raise UserError(f'TF_CONFIG: {job} must be a list of addresses, such as ["host1:2222", "host2:2222"]')
    seen = set()
    for address in (address for job in _JOBS for address in cluster.get(job, [])):
        host, port = _split_address(address)
        if (host.lower(), port) in seen:
            raise UserError(f"TF_CONFIG: {address} is listed twice: give every process its own address")
        seen.add((host.lower(), port))
    if len(cluster.get("chief", [])) > 1:
        raise UserError("TF_CONFIG: the cluster has several chiefs: name one, and the others as worker")


def _split_address(address):
    """Returns the host (without brackets) and the port of "host:port". Raises `UserError`."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (re.fullmatch("[0-9]+", port) and _is_host(host)):
        raise UserError(f"TF_CONFIG: {address!r:.80} is not an address: write host:port, such as host1:2222 or "
                        "[fe80::1]:2222")
    if len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise UserError(f"TF_CONFIG: {address!r:.80}: ports are from 1 to 65535")
    return host.strip("[]"), int(port)


def _is_host(text):
    """Returns whether a text is a host name, an IPv4 address, or an IPv6 address in brackets."""
    if text.startswith("[") and text.endswith("]"):
        try:
            return bool(ipaddress.IPv6Address(text[1:-1]))
        except ValueError:
            return False
    return len(text) <= _LONGEST_HOST and all(map(_HOST_LABEL.fullmatch, text.removesuffix(".").split(".")))


def _check_task(cluster, task):
    """Raises `UserError` for a task that is not in the cluster."""
    if not {"type", "index"} <= set(task):
        raise UserError('TF_CONFIG: the task is missing: add "task": {"type": "worker", "index": 0}, with a different '
                        "index on every host")
    job, index = task["type"], task["index"]
    if not isinstance(job, str) or job not in cluster:
        raise UserError(f"TF_CONFIG: the task's type {job!r:.80} is not in the cluster: use {' or '.join(cluster)}")
    if isinstance(index, bool) or not re.fullmatch("[0-9]+", str(index)):
        raise UserError(f"TF_CONFIG: the task's index {index!r:.80} is not a whole number: use 0 for the first {job}")
    if len(str(index)) > 9 or int(index) >= len(cluster[job]):
        raise UserError(f"TF_CONFIG: the task's index {str(index):.80} is beyond the {len(cluster[job])} addresses of "
                        f"{job}: indices begin at 0, and all hosts need the whole list")


def check_multi_host_settings(use_tpu: bool, mode: str, seed: int | None) -> None:
    """Rejects settings that training on several hosts does not support, before the hosts wait for each other.

    Args:
      use_tpu: `--use_tpu`.
      mode: `--mode`.
      seed: `--seed`, or None if it is not set.

    Raises:
      UserError: TF_CONFIG names several hosts, and one of the settings does not work with them.
    """
    if count_hosts() == 1:
        return
    if use_tpu:
        raise UserError("--use_tpu: one process drives a TPU of any size. Remove TF_CONFIG.")
    if mode == "eval":
        raise UserError("--mode=eval runs on one host. Remove TF_CONFIG, or use --mode=train_then_eval, which "
                        "evaluates on all hosts.")
    if seed is None:
        raise UserError("--seed must be given with several hosts, the same for all. Add --seed=1.")


def wait_for_hosts() -> None:
    """Blocks until all hosts of TF_CONFIG are reachable, logging the missing ones.

    TensorFlow waits, too, but in native code: without naming them, and ignoring SIGTERM and Ctrl-C.

    Raises:
      UserError: the port of this host cannot be used, for example because another program uses it.
    """
    cluster, task = _read_tf_config()
    if count_hosts() == 1:
        return
    own = cluster[task["type"]][int(task["index"])]
    others = [address for addresses in cluster.values() for address in addresses if address != own]
    console.log("warning: several hosts (TF_CONFIG): TensorFlow listens on all network interfaces without "
                 "authentication: trusted networks only")
    logged = None
    with _listen(own) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        while missing := [address for address, answers in zip(others, pool.map(_answers, others)) if not answers]:
            if missing != logged:
                console.log(f"{task['type']} {task['index']}: waiting for {', '.join(missing)} (TF_CONFIG)")
                logged = missing
            with contextlib.suppress(BlockingIOError):
                while True:  # Drain the accept queue; peers only probe whether the port is open.
                    server.accept()[0].close()
            time.sleep(_ASK_SECONDS)
    console.log(f"all {count_hosts()} hosts are there")


def _listen(address):
    """Returns a socket that listens at the port of `address`, until TensorFlow takes it over."""
    port, both = _split_address(address)[1], socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET,
                                      dualstack_ipv6=both, backlog=socket.SOMAXCONN)
    except OSError as error:
        raise UserError(f"TF_CONFIG: port {port} of this host cannot be used ({error.strerror}). Stop the program that "
                        "uses it, or name another port.") from error
    server.setblocking(False)
    return server


def _answers(address):
    """Returns whether host:port can be connected to now."""
    try:
        socket.create_connection(_split_address(address), timeout=_ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def gather_integers(numbers: list[int], strategy: tf.distribute.Strategy) -> np.ndarray:
    """Returns the integers of every replica, [replicas, len(numbers)], once all hosts have called this function."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return np.array([numbers])
    gathered = _gather_function(strategy)(tf.constant([numbers], tf.int64))
    return strategy.experimental_local_results(gathered)[0].numpy()


def barrier(strategy: tf.distribute.Strategy) -> None:
    """Returns once all hosts have called this function."""
    gather_integers([0], strategy)


@functools.cache  # Traced once: each trace has its own collectives.
def _gather_function(strategy):
    @tf.function(autograph=False, reduce_retracing=True)
    def gather(numbers):
        # A copy, which has the replica's device.
        return strategy.run(lambda: tf.distribute.get_replica_context().all_gather(tf.identity(numbers), axis=0))
    return gather
