"""Every budget finds what exceeds it, and nothing else."""

from collections import Counter
from dataclasses import replace

import pytest
from kernel_check.budgets import check_codes, check_kernel, check_products, check_report
from kernel_check.expected import Expected, Planned, expected
from kernel_check.flow import Flow
from kernel_check.listing import read_ptx, read_sass
from kernel_check.machine_code import Kernel, Report
from kernel_check.targets import TARGETS
from scripts.machine_code_samples import PTX, SASS

from kvjax.kernels.mosaic_gpu.plan import Plan, Shape

H100 = TARGETS["h100"]
GOOD = Report(128, 0, 0, shared_bytes=115_712, threads=256)
WANTED = Expected({"HGMMA.64x8x16.F32": 2}, r"UTMALDG\b", 128 * 128 + 256, waits=2, scalars=0)


def kinds(faults) -> list[str]:
    return [fault.kind for fault in faults]


def code(sass: str = SASS, ptx: str = PTX) -> Kernel:
    return Kernel(GOOD, Flow(read_sass(sass)), Flow(read_ptx(ptx)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"registers": 129}, ["registers"]),
        ({"registers": 121}, []),  # as good as 128
        ({"shared_bytes": 115_713}, ["shared memory"]),
        ({"shared_bytes": 232_449}, ["shared memory", "shared memory"]),
        ({"spill_bytes": 4}, ["spill"]),
        ({"stack_bytes": 8}, ["spill"]),
    ],
)
def test_two_blocks_on_a_multiprocessor(change, found):
    assert kinds(check_report(replace(GOOD, **change), H100, residents=2)) == found


def test_registers_are_given_out_in_eights():
    three_warpgroups = replace(GOOD, threads=384)
    assert not [*check_report(replace(three_warpgroups, registers=168), H100, residents=1)]
    found = check_report(replace(three_warpgroups, registers=169), H100, residents=1)
    assert 169 * 384 < 65536
    assert kinds(found) == ["registers"]


def test_local_memory():
    assert not [*check_codes(Counter({"LDG.E": 1, "STS": 3}))]
    assert kinds(check_codes(Counter({"LDL.LU.64": 1}))) == ["spill"]


@pytest.mark.parametrize(
    ("products", "good"),
    [
        ({"HGMMA.64x8x16.F32.BF16": 2}, True),
        ({"HGMMA.64x8x16.F32": 4}, True),  # two tiles
        ({"HGMMA.64x8x16.F32.BF16": 3}, False),
        ({"HGMMA.64x80x16.F32": 2}, False),
        ({"HGMMA.64x8x16.F32": 2, "HMMA.16816.F32": 1}, False),
        ({}, False),
    ],
)
def test_products(products, good):
    assert kinds(check_products(Counter(products), WANTED)) == ([] if good else ["products"])


def test_several_kinds_of_products():
    both = replace(WANTED, products={"HGMMA.64x64x16.F32": 3, "HGMMA.64x128x16.F32": 1})
    one = Counter({"HGMMA.64x64x16.F32.BF16": 3, "HGMMA.64x128x16.F32.BF16": 1})
    assert not [*check_products(one, both)]
    assert kinds(check_products(one + Counter({"HGMMA.64x64x16.F32.BF16": 3}), both)) == [
        "products"
    ]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", []),
        ("UTMALDG.5D", "LDGSTS.E.BYPASS.128", ["loads"]),
        ("UTMALDG.5D", "MOV", ["loads"]),
        ("LDG.E R44", "LDG.E.128 R44", ["loads"]),
        ("HGMMA.64x8x16.F32.BF16 R24", "HGMMA.64x16x16.F32.BF16 R24", ["products"]),
        ("LDSM.16.M88.4", "LDS.U8", ["loads"]),
        ("LDSM.16.M88.4 R40, [R48+0x800]", "LDG.E R40, desc[UR6][R4.64]", ["loads"]),
        ("FENCE.VIEW.ASYNC.S", "NOP", ["fence"]),
    ],
)
def test_machine_code(old, new, found):
    faults = check_kernel(code(SASS.replace(old, new) if old else SASS), WANTED, H100, 1)
    assert sorted(set(kinds(faults))) == found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mov.b32 	%r7, 128;", "mov.b32 	%r7, 256;"),
        ("selp.b32 	%r9, 256, 0, %p26;", "selp.b32 	%r9, 512, 0, %p26;"),
        ("bra 	$L__BB0_1;", "bra 	$L__BB0_2;"),
    ],
)
def test_bytes_of_a_tile(old, new):
    assert old in PTX
    faults = check_kernel(code(ptx=PTX.replace(old, new)), WANTED, H100, 1)
    assert set(kinds(faults)) == {"bytes"}


def shape(**settings) -> Shape:
    given = {"key_dims": (128,), "value_dim": 128, "operand": "bfloat16", "stored": "bfloat16"}
    return Shape(batch=4, kv_heads=8, group=8, slots=8192, **{**given, **settings})


class TestExpected:
    def test_wgmma(self):
        wanted = expected(Planned(shape(), Plan("wgmma", 8, 8, 3)), None)
        # 128 / 16 of K, and 2 * 64 rows of V^T by 64 / 16.
        assert wanted.products == {"HGMMA.64x8x16.F32": 16}
        assert wanted.nbytes == 64 * 2 * 128 * 2
        assert (wanted.waits, wanted.scalars) == (2, 0)

    def test_pages_and_scales(self):
        codes = shape(stored="int8", token_scales=True)
        wanted = expected(Planned(codes, Plan("mma", 16, 8, 3)), 16)
        assert wanted.products == {"HMMA.16816.F32": 32}
        assert wanted.nbytes == 64 * (2 * 128 + 2 * 4)
        assert wanted.scalars == 4

    def test_values_that_are_not_whole(self):
        wanted = expected(Planned(shape(key_dims=(80,), value_dim=80), Plan("wgmma", 8, 8, 3)), 128)
        assert wanted.products == {"HGMMA.64x8x16.F32": 5 + 8}
        assert wanted.nbytes == 64 * (80 + 128) * 2
        assert wanted.scalars == 1

    def test_latents(self):
        latent = shape(key_dims=(512, 64), value_dim=0)
        wanted = expected(Planned(latent, Plan("wgmma", 16, 8, 2)), None)
        assert wanted.products == {"HGMMA.64x16x16.F32": 36 + 32}
        assert (wanted.nbytes, wanted.waits) == (64 * 576 * 2, 1)

    def test_many_latents(self):
        latent = shape(key_dims=(512, 64), value_dim=0)
        wanted = expected(Planned(latent, Plan("wgmma", 64, 8, 2), "latent"), 64)
        assert wanted.products == {"HGMMA.64x64x16.F32": 36, "HGMMA.64x256x16.F32": 8}
        assert (wanted.nbytes, wanted.waits, wanted.scalars) == (64 * 576 * 2, 0, 1)

    def test_without_tensor_copies(self):
        codes = shape(stored="int8", token_scales=True)
        wanted = expected(Planned(codes, Plan("mma", 8, 8, 2), "ampere"), 64)
        assert "LDGSTS" in wanted.copies
        assert (wanted.nbytes, wanted.waits, wanted.scalars) == (64 * 2 * 128, 0, 2 + 4)
