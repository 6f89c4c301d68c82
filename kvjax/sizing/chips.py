"""Published peak figures of chips, each with its source.

NVIDIA and AMD print capacities in GB (1e9 bytes) and many matrix rates with 2:4 sparsity; the rates
here are the dense ones, half of those. Google prints the HBM capacity of TPUs in GiB.

Exponentials a second are printed for NVIDIA's newer chips. For its older ones they are
multiprocessors x 16 results a clock (the special-function throughput of the CUDA programming guide,
table "Throughput of Native Arithmetic Instructions") x the boost clock of the matrix rates, as the
FlashAttention-3 paper counts them (Shah et al. 2024, section 3.2: 3.9 T/s for an H100). AMD and
Google print none, nor does Google a rate of the TPUs' vector units.
"""

from kvjax.sizing.roofline import Chip

_GB, _GIB, _TERA = 10**9, 2**30, 1e12


def _gpu(
    name: str,
    memory_gb: int,
    tb_per_second: float,
    bf16: float,
    fp8: float | None,
    vector: float,
    exponentials: float | None,
    source: str,
) -> Chip:
    """A GPU from GB, TB/s, dense TFLOP/s (bf16 and fp8 matrix, f32 vector) and 1e12 exp/s."""
    return Chip(
        name,
        memory_gb * _GB,
        tb_per_second * _TERA,
        bf16 * _TERA,
        None if fp8 is None else fp8 * _TERA,
        source,
        vector * _TERA,
        None if exponentials is None else exponentials * _TERA,
    )


def _tpu(
    name: str, memory_gib: int, gb_per_second: float, bf16: float, fp8: float | None, source: str
) -> Chip:
    """A TPU chip from GiB, GB/s and TFLOP/s (TPUs have no sparse rate)."""
    return Chip(
        name,
        memory_gib * _GIB,
        gb_per_second * _GB,
        bf16 * _TERA,
        None if fp8 is None else fp8 * _TERA,
        source,
    )


def _special(multiprocessors: int, boost_ghz: float) -> float:
    """1e12 special-function results a second of a GPU that has 16 a clock and multiprocessor."""
    return multiprocessors * 16 * boost_ghz / 1000


_A100 = (
    "NVIDIA A100 Tensor Core GPU datasheet, SXM; exponentials: A100 architecture whitepaper, 108 "
    "multiprocessors, 1.41 GHz"
)
_H100 = (
    "NVIDIA H100 Tensor Core GPU datasheet (matrix rates halved: printed with sparsity); "
    "exponentials: H100 architecture whitepaper, "
)
_H100_SXM = _H100 + "132 multiprocessors, 1.83 GHz, as FlashAttention-3 counts them"
_H100_PCIE = _H100 + "114 multiprocessors, 1.62 GHz"
_H200 = (
    "NVIDIA H200 Tensor Core GPU datasheet, SXM (matrix rates halved: printed with sparsity); "
    "exponentials: as H100 SXM, whose multiprocessors and rates it has"
)
_B200 = (
    "NVIDIA DGX B200 datasheet (1,440 GB and 64 TB/s over 8 GPUs); matrix rates: NVIDIA HGX "
    "platform page, 36 PFLOP/s bf16 and 72 PFLOP/s fp8 with sparsity over 8 GPUs, halved; f32: "
    "NVIDIA Blackwell Architecture Technical Brief, HGX B200; exponentials: NVIDIA technical blog "
    "'Inside NVIDIA Blackwell Ultra', Blackwell"
)
_B300 = (
    "NVIDIA technical blog 'Inside NVIDIA Blackwell Ultra' (288 GB, 8 TB/s, exponentials); matrix "
    "rates: NVIDIA HGX platform page, 36 PFLOP/s bf16 and 72 PFLOP/s fp8 with sparsity over 8 "
    "GPUs, halved; f32: NVIDIA Blackwell Architecture Technical Brief, HGX B300"
)
_MI300X = "AMD Instinct MI300X accelerator data sheet"
_TPU_V4 = "Google Cloud documentation 'TPU v4'"
_TPU_V5E = "Google Cloud documentation 'TPU v5e'"
_TPU7X = "Google Cloud documentation 'TPU7x (Ironwood)', comparison table"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu("A100-40", 40, 1.555, 312, None, 19.5, _special(108, 1.41), _A100),
        _gpu("A100-80", 80, 2.039, 312, None, 19.5, _special(108, 1.41), _A100),
        _gpu("H100-SXM", 80, 3.35, 989.5, 1979, 67, _special(132, 1.83), _H100_SXM),
        _gpu("H100-PCIe", 80, 2.0, 756.5, 1513, 51, _special(114, 1.62), _H100_PCIE),
        _gpu("H200", 141, 4.8, 989.5, 1979, 67, _special(132, 1.83), _H200),
        _gpu("B200", 180, 8.0, 2250, 4500, 75, 5.0, _B200),
        _gpu("B300", 288, 8.0, 2250, 4500, 75, 10.7, _B300),
        _gpu("MI300X", 192, 5.3, 1307.4, 2614.9, 163.4, None, _MI300X),
        _tpu("TPU-v4", 32, 1200, 275, None, _TPU_V4),
        _tpu("TPU-v5e", 16, 819, 197, None, _TPU_V5E),
        _tpu("TPU-v5p", 95, 2765, 459, 459, _TPU7X),
        _tpu("TPU-v6e", 32, 1638, 918, 918, _TPU7X),
        _tpu("TPU-7x", 192, 7380, 2307, 4614, _TPU7X),
    )
}


def chip(name: str | Chip) -> Chip:
    """The chip of that name.

    Raises:
        ValueError: no chip has that name.
    """
    if isinstance(name, Chip):
        return name
    if not isinstance(name, str) or name not in CHIPS:
        raise ValueError(f"chip: got {name!r}; accepted: {', '.join(CHIPS)}")
    return CHIPS[name]
