"""Counts kernels, memory traffic, memory and all-reduces of training steps, without an accelerator.

What XLA compiles, a step (`--jit_compile`) or a function within a step, is compiled for the
accelerator by `xla_compile`, and the kernels are counted in the result. Of all other operations, each
counts as a kernel, except for those that return their inputs, access variables, or run on the host.
A kernel reads its inputs and writes its outputs. What caches save, and what libraries such as cuDNN
need in addition, is not counted.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute import one_device_strategy
from tensorflow.python.eager import context

import config as config_lib
import train
from benchmarks import programs
from runtime import replicas as replicas_lib

Cost = collections.Counter  # kernels, bytes and all-reduces; temporary: bytes

_ALIASES = re.compile(
    "IdentityN?|StopGradient|PreventGradient|Reshape|Squeeze|ExpandDims|Bitcast|ReadVariableOp"
)
_WITHOUT_KERNEL = re.compile(
    f"{_ALIASES.pattern}|Const|Placeholder|NoOp|Assert|AssignVariableOp|ShapeN?|Size|Rank|BroadcastGradientArgs|ConcatOffset"
)
_WITHOUT_LAUNCH = re.compile(
    "parameter|constant|(get-)?tuple(-element)?|bitcast|after-all|.*-id|.*-done|.*-update"
)
_NAME = re.compile(r"%([\w.-]+)")


def hlo_cost(text: str) -> Cost:
    """Returns the cost of a module that XLA compiled for a GPU, without its temporary memory.

    Each instruction of the entry computation is a kernel, and so are those of loops, calls and
    branches. Those of a loop count as often as XLA knows that they are executed, or once.
    """
    text = re.sub(r"/\*.*?\*/", "", text)
    computations = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", text, re.M | re.S))

    def cost(computation):
        total, sizes = Cost(), {}
        for name, shape, opcode, operands, attributes in re.findall(
            r"%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*?)\)(.*)", computation
        ):
            sizes[name] = sum(
                int(bits or 8) // 8 * math.prod(map(int, filter(None, sides.split(","))))
                for bits, sides in re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", shape)
            )
            if opcode in ("while", "call", "conditional"):
                trips = int((re.findall(r'trip_count":{"n":"(\d+)', attributes) or [1])[0])
                for called in _NAME.findall(attributes):
                    for key, value in cost(computations.get(called, "")).items():
                        total[key] += value * trips
            elif not _WITHOUT_LAUNCH.fullmatch(opcode):
                total["kernels"] += 1
                total["bytes"] += sum(map(sizes.get, {name, *_NAME.findall(operands)}))
                total["all-reduces"] += opcode.startswith("all-reduce")
        return total

    return cost(computations[re.search(r"^ENTRY %(\S+)", text, re.M)[1]])


def graph_cost(graph: tf.Graph, compiled: Callable, device: str = "") -> Cost:
    """Returns the cost of the operations of a function on one device.

    The temporary memory is the largest total size of the tensors that exist at the same time, if the
    operations are executed in the order of the graph.

    Args:
      graph: graph of the function. The size of tensors of unknown shape, such as the space reserved
        by cuDNN, is taken as 0.
      compiled: receives an operation that calls a function that XLA compiles, and the function.
        Returns the cost.
      device: end of the names of the devices to count; by default, all.
    """
    total, changes, sizes, buffers, last_use = Cost(), Cost(), {}, {}, {}
    constants = set()
    for index, operation in enumerate(graph.get_operations()):
        inputs, outputs = (
            {tensor.name: tensor for tensor in tensors}
            for tensors in (operation.inputs, operation.outputs)
        )
        is_alias = _ALIASES.fullmatch(operation.type)
        same = (buffers[tensor.name] for tensor in operation.inputs)
        buffers.update(zip(outputs, same if is_alias else outputs))
        last_use.update((buffers[name], index) for name in (*inputs, *outputs))
        # TensorFlow evaluates operations on small constants in advance.
        is_small = sum(map(_bytes, outputs.values())) < 1e5 and operation.type != "Placeholder"
        if is_small and constants.issuperset(inputs) and not operation.op_def.is_stateful:
            constants.update(outputs)
            continue
        if not operation.device.endswith(device):
            continue
        cost = Cost()
        for attribute in operation.node_def.attr.values():
            if attribute.func.name:
                function = graph._get_function(attribute.func.name)
                is_compiled = "_XlaMustCompile" in function.definition.attr
                cost += (
                    compiled(operation, function)
                    if is_compiled
                    else graph_cost(function.graph, compiled)
                )
        if not cost and _has_kernel(operation):
            cost.update(kernels=1, bytes=sum(map(_bytes, {**inputs, **outputs}.values())))
            cost["all-reduces"] = operation.type.startswith("CollectiveReduce")
        if cost:
            sizes.update((name, _bytes(tensor)) for name, tensor in outputs.items())
            changes[index] += sum(map(sizes.get, outputs)) + cost["temporary"]
            changes[index + 1] -= cost.pop("temporary", 0)
            total.update(cost)
    last_use.update((buffers[tensor.name], index) for tensor in graph.outputs)
    for name, size in sizes.items():
        changes[last_use[name] + 1] -= size
    total["temporary"] = max(itertools.accumulate(changes[i] for i in range(index + 1)))
    return total


def _has_kernel(operation: tf.Operation) -> bool:
    types = {tensor.dtype for tensor in (*operation.inputs, *operation.outputs)}
    # Tensors in int32 usually are shapes, with which the host computes.
    on_host = types <= {tf.int32, tf.string, tf.resource}
    return not (on_host or _WITHOUT_KERNEL.fullmatch(operation.type))


def _bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def start_compiler(graph: tf.Graph, replicas: int, *target: str) -> Callable:
    """Starts `xla_compile` for a target, and returns a function for `graph_cost` that compiles each function once.

    The function's results also contain the `total` memory. Functions may take variables after other
    arguments, if `graph` contains the operation that calls them.
    """
    script = pathlib.Path(__file__).with_name("xla_compile.py")
    process = subprocess.Popen(
        [os.environ.get("SIMCLR_JAX_PYTHON", ".venv-jax/bin/python"), script, *target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    directory, costs = tempfile.TemporaryDirectory(), {}
    variables = {inside.name: outside for outside, inside in graph.captures}

    def compiled(operation, function):
        name = function.definition.signature.name
        inputs = [tensor for tensor in operation.inputs if tensor.dtype != tf.resource]
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
        if name not in costs:
            module = pathlib.Path(directory.name, "module")
            module.write_bytes(
                context.context().get_compiler_ir(
                    device_name=tf.config.list_logical_devices()[0].name,
                    platform_name=None,
                    function_name=name,
                    flat_args=specs,
                    captured_inputs=[
                        variables[tensor.name]
                        for tensor in operation.inputs
                        if tensor.dtype == tf.resource
                    ],
                    stage="hlo_serialized",
                )
            )
            print(module, replicas, file=process.stdin, flush=True)
            memory = json.loads(process.stdout.readline())
            costs[name] = hlo_cost(module.with_suffix(".txt").read_text()) + Cost(memory)
        return costs[name]

    return compiled


class Slice(tf.distribute.Strategy):
    """Strategy of which the program of one replica can be compiled by XLA. TPUStrategy requires TPUs."""

    def __init__(self, replicas: int):
        """Creates the strategy for a number of replicas."""

        class Context(one_device_strategy._OneDeviceReplicaContext):
            replica_id_in_sync_group = property(lambda self: gen_xla_ops.xla_replica_id())

        class Extended(one_device_strategy.OneDeviceExtended):
            _num_replicas_in_sync = replicas

            def _use_merge_call(self):
                return False

            def _call_for_each_replica(self, fn, args, kwargs):
                with Context(self._container_strategy()):
                    return fn(*args, **kwargs)

            def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
                group = [list(range(replicas))]
                sums = [
                    gen_xla_ops.xla_all_reduce(each, group, "Add", "CrossReplica") for each in value
                ]
                is_sum = reduce_op == tf.distribute.ReduceOp.SUM
                return sums if is_sum else [each / replicas for each in sums]

        super().__init__(Extended(self, "cpu:0"))


def step(flags: list[str], batch: int, replicas: int, target: list[str]) -> programs.Implementation:
    """Counts a training step with `batch` images per replica. `target` are the arguments of `xla_compile`."""
    strategy, device = tf.distribute.get_strategy(), ""
    if target[0] == "tpu":
        strategy = Slice(replicas)
    elif replicas > 1:
        cpus = [tf.config.LogicalDeviceConfiguration()] * replicas
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
        names = [f"CPU:{replica}" for replica in range(replicas)]
        strategy, device = tf.distribute.MirroredStrategy(names), names[-1]
        # The same functions within the step are compiled as on GPUs.
        vars(replicas_lib)["are_gpus"] = lambda strategy: True
    config = config_lib.from_arguments([*flags, f"--train_batch_size={batch * replicas}"])
    with strategy.scope():
        train_step = train.TrainStep(*programs.build(config), config, strategy)
    function, views = train_step.compiled(train_step), [batch, *[config.image_size] * 2, 3]
    specs = [(tf.TensorSpec(views),) * 2, tf.TensorSpec([batch], tf.int64)]
    if config.augment_on == "device":
        specs.append(tf.TensorSpec([batch, 2], tf.int64))

    @tf.function(autograph=False)
    def run(*inputs):
        results = strategy.run(function, inputs).values()
        return [strategy.experimental_local_results(result)[-1] for result in results]

    graph = run.get_concrete_function(*specs).graph
    cost = graph_cost(graph, start_compiler(graph, replicas, *target), device)
    return lambda calls: {
        "kernels": cost["kernels"],
        "all-reduces": cost["all-reduces"],
        "MB/view": cost["bytes"] / batch / 2e6,
        "temporary MB/view": cost["temporary"] / batch / 2e6,
        "GiB/core": cost["total"] / 2**30,
    }
