"""Helpers for TF_CONFIG values, Slurm variables and free local ports."""

import contextlib
import json
import socket


def tf_config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def worker_environments(count):
    """Returns the environment variables of each worker in a cluster on this machine."""
    addresses = free_addresses(count)
    return [{"TF_CONFIG": tf_config({"worker": addresses}, index=index)} for index in range(count)]


def slurm_variables(nodes, tasks_per_node, node, local_task, num_tasks, task=0, job=17):
    """Returns the variables that srun sets for one task. All values except the numbers are in Slurm's format."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(local_task),
        "SLURMD_NODENAME": node,
    }


def free_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free_socket in sockets:
            free_socket.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{free_socket.getsockname()[1]}" for free_socket in sockets]
