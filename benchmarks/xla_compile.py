"""Compiles programs for H100 and TPUs, which this machine need not have, with JAX's plugins.

    python benchmarks/xla_compile.py PLATFORM TOPOLOGY [CHIP_CONFIG]

Reads lines that contain the path of an HLO module and its number of replicas. For each line, writes
the compiled module as text to PATH.txt, and prints a JSON line with the bytes of memory per device:
`temporary`, and `total`, which also contains the arguments and the code. This module does not
import TensorFlow.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys

# JAX looks for no device, and other processes may also use libtpu.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax, xla_client

# Properties of an H100 (SXM, 80 GB), as CUDA reports them
_H100 = """
    gpu_device_info {
      cuda_compute_capability { major: 9 }
      threads_per_block_limit: 1024
      threads_per_warp: 32
      threads_per_core_limit: 2048
      core_count: 132
      fpus_per_core: 128
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      shared_memory_per_block: 49152
      shared_memory_per_block_optin: 232448
      shared_memory_per_core: 233472
      registers_per_block_limit: 65536
      registers_per_core_limit: 65536
      memory_bandwidth: 3352320000000
      l2_cache_size: 52428800
      clock_rate_ghz: 1.98
      device_memory_size: 84978434048
    }
    platform_name: "CUDA"
    dnn_version_info { major: 9 minor: 8 }
    runtime_version { major: 12 minor: 9 }
    device_description_str: "NVIDIA H100 80GB HBM3"
"""


def main(platform: str, topology: str, *chip_config: str) -> None:
    """Compiles the modules that the standard input lists."""
    options = dict(topology=topology, target_config=_H100) if platform == "cuda" else {}
    options |= zip(["chip_config_name"], chip_config)
    devices = topologies.get_topology_desc(topology, platform, **options).devices
    for line in sys.stdin:
        path, replicas = line.split()
        with mlir.make_ir_context():
            hlo = pathlib.Path(path).read_bytes()
            text = str(ir.Module.parse(_jax.mlir.hlo_to_stablehlo(hlo)))
            # StableHLO has no copies. XLA inserts those that are needed.
            text = re.sub(r"mhlo.copy (\S+) : (\S+)", r"stablehlo.reshape \1 : (\2) -> \2", text)
            executable = devices[0].client.compile(
                ir.Module.parse(text),
                xla_client.DeviceList(tuple(devices[: int(replicas)])),
                compiler.get_compile_options(int(replicas), 1),
            )
        pathlib.Path(f"{path}.txt").write_text(executable.hlo_modules()[0].to_string())
        memory = executable.get_compiled_memory_stats()
        # The new values of variables replace the arguments.
        total = memory.argument_size_in_bytes + memory.generated_code_size_in_bytes
        total += memory.temp_size_in_bytes
        print(json.dumps(dict(temporary=memory.temp_size_in_bytes, total=total)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
