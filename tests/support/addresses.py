"""Helpers for TF_CONFIG values and free local ports."""

import contextlib
import json
import socket


def tf_config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def free_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free_socket in sockets:
            free_socket.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{free_socket.getsockname()[1]}" for free_socket in sockets]
