"""The GPUs that kernels are compiled for, as XLA's compiler describes them to itself."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65_536  # of a multiprocessor, of all three
SYSTEM_BYTES = 1_024  # of shared memory, that the system takes for each block


@dataclass(frozen=True)
class Target:
    """A GPU.

    Attributes:
      major, minor: compute capability.
      multiprocessors: how many it has.
      shared_bytes: shared memory of a multiprocessor.
      block_bytes: the most of it that one block may have.
      l2_bytes, memory_bytes: sizes.
      bandwidth: of the memory, in bytes a second.
      clock_ghz: of the multiprocessors.
    """

    major: int
    minor: int
    multiprocessors: int
    shared_bytes: int
    block_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: int
    clock_ghz: float

    @property
    def config(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        # From sm_90 on, what kernels use are instructions of one architecture alone (sm_90a).
        feature = "ACCELERATED_FEATURES" if self.major >= 9 else "NONE"
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes} threads_per_core_limit: 2048
  core_count: {self.multiprocessors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.block_bytes}
  cuda_compute_capability {{
    major: {self.major} minor: {self.minor} feature_extension: {feature}
  }}
  registers_per_core_limit: {REGISTERS} registers_per_block_limit: {REGISTERS}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "compiled for"
"""


TARGETS = {
    "a100": Target(8, 0, 108, 167_936, 166_912, 41_943_040, 80 * 10**9, 2_039 * 10**9, 1.41),
    "h100": Target(9, 0, 132, 233_472, 232_448, 52_428_800, 80 * 10**9, 3_352 * 10**9, 1.98),
    "b200": Target(10, 0, 148, 233_472, 232_448, 132_120_576, 180 * 10**9, 8_000 * 10**9, 1.96),
}
