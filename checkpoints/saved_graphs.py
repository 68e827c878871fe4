"""Reads the graphs of SavedModels as data, without executing them."""

from __future__ import annotations

import os
import re

import tensorflow as tf

# Names of the layers in the original, in TF1 and TF2.
_CLASSIFIER, _HEAD_LAYER = re.compile("(^|/)head_supervised/"), re.compile(r"(^|/)n?l_(\d+)/")


def head_input(directory: str) -> int | None:
    """Returns the number of projection head layers from which a SavedModel's classifier computes its output.

    None: the graph has no classifier that is named as in the original.
    """
    from google.protobuf import message
    from tensorflow.core.protobuf import saved_model_pb2

    try:
        serialized = tf.io.read_file(os.path.join(directory, "saved_model.pb")).numpy()
        content = saved_model_pb2.SavedModel.FromString(serialized)
    except (tf.errors.OpError, message.DecodeError):
        return None
    for meta_graph in content.meta_graphs:
        graph = meta_graph.graph_def
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            inputs = {
                node.name: [name.lstrip("^").partition(":")[0] for name in node.input]
                for node in nodes
            }
            queue = [
                node.name for node in nodes if node.op == "MatMul" and _CLASSIFIER.search(node.name)
            ]
            if queue:
                ancestors: set[str] = set()
                while queue:
                    name = queue.pop()
                    if name not in ancestors:
                        ancestors.add(name)
                        queue += inputs.get(name, [])
                matches = filter(None, map(_HEAD_LAYER.search, ancestors))
                return max((int(match[2]) + 1 for match in matches), default=0)
    return None
