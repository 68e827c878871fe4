"""TF_CONFIG, and free ports of this machine."""

import contextlib
import json
import socket


def tf_config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def free_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
