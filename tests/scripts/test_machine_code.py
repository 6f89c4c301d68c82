"""Listings are read as what they do: their loops, copies, products and fences."""

from collections import Counter

import pytest
from kernel_check.flow import Flow
from kernel_check.listing import read_ptx, read_sass
from kernel_check.machine_code import Copies, Kernel, Report, read_kernel, read_report
from scripts.machine_code_samples import PTX, PTXAS, RESOURCES, SASS, SPILLED


def kernel(sass: str = SASS, ptx: str = PTX) -> Kernel:
    report = read_report(PTXAS, RESOURCES, ptx)
    return Kernel(report, Flow(read_sass(sass)), Flow(read_ptx(ptx)))


def without(text: str, part: str, *, at: int = 0) -> str:
    """The text without the line that has the part for the at-th time."""
    lines = text.splitlines(keepends=True)
    having = [i for i, line in enumerate(lines) if part in line]
    del lines[having[at]]
    return "".join(lines)


class TestListing:
    def test_sass(self):
        program = read_sass(SASS)
        assert len(program) == 29  # but for what never runs, and the filling at the end
        assert [i.code for i in program[:2]] == ["LDG.E", "BRA"]
        branch = program[1]
        assert (branch.guard, branch.target, branch.conditional) == ("P1", ".L_x_2", True)
        assert program[2].labels == (".L_x_1",)
        assert program[5].code == "UTMALDG.5D"
        assert program[5].guard == "UP0"

    def test_a_jump_with_a_predicate_among_its_operands(self):
        [jump] = (i for i in read_sass(SASS) if i.operands.startswith("P4"))
        assert jump.target == ".L_x_5"
        unguarded = SASS.replace("@!P5 BRA P4", "     BRA P4")
        [jump] = (i for i in read_sass(unguarded) if i.operands.startswith("P4"))
        assert jump.guard is None
        assert jump.conditional

    def test_several_functions_are_refused(self):
        with pytest.raises(ValueError, match="2 functions"):
            read_sass(SASS + SASS)
        with pytest.raises(ValueError, match="2 entries"):
            read_ptx(PTX + PTX)
        with pytest.raises(ValueError, match="no instruction"):
            read_sass("")

    def test_ptx(self):
        program = read_ptx(PTX)
        assert not any(i.code.startswith((".", "/")) for i in program)
        assert sum(i.name == "wgmma" for i in program) == 1
        spins = [i for i in program if i.code == "bra.uni" and "LAB_WAIT" in (i.target or "")]
        assert len({i.target for i in spins}) == 2  # one for each time that the label is there


class TestFlow:
    def test_loops(self):
        flow = kernel().sass
        [copies], [products] = kernel().copy_loops, kernel().product_loops
        assert flow.instructions(copies)[0].labels == (".L_x_1",)
        # The wait that spins behind the end belongs to the loop that it is a part of.
        assert any(i.name == "NANOSLEEP" for i in flow.instructions(products))
        assert not any(i.name == "EXIT" for i in flow.instructions(products))

    def test_the_shortest_way_neither_waits_nor_rewrites(self):
        code = kernel()
        everything = code.loop_codes(code.product_loops).total()
        assert everything == 16
        assert code.step_instructions == everything - len(("LDSM", "STSM")) - 4  # of the spin

    def test_the_shortest_way_goes_past_all_products(self):
        skipped = SASS.replace("@!P5 BRA P4, `(.L_x_5)", "@!P5 BRA `(.L_x_7)").replace(
            "   -:-:-:Y:11        /*0130*/", ".L_x_7:\n   -:-:-:Y:11        /*0130*/"
        )
        assert kernel(skipped).step_instructions == kernel().step_instructions + 2

    def test_what_is_never_reached_is_in_no_loop(self):
        flow = Flow(read_sass(SASS))
        dead = next(i for i, b in enumerate(flow.blocks) if ".L_x_30" in b[0].labels)
        assert dead not in flow.order
        assert all(dead not in loop.blocks for loop in flow.loops)


class TestKernel:
    def test_counts(self):
        code = kernel()
        assert code.products == Counter({"HGMMA.64x8x16.F32.BF16": 2})
        assert code.loop_codes(code.copy_loops)["UTMALDG.5D"] == 1

    def test_bytes_of_all_threads_and_of_one(self):
        assert kernel().copies == [Copies(128 * 128 + 256, waits=2)]

    def test_bytes_that_are_not_constant_are_refused(self):
        varying = PTX.replace("mov.b32 	%r8, 0;", "mov.b32 	%r7, 64;")
        with pytest.raises(ValueError, match="%r7 bytes"):
            _ = kernel(ptx=varying).copies

    def test_bytes_of_asynchronous_copies(self):
        copies = "cp.async.cg.shared.global [%r1], [%rd1], 16;\n\tcp.async.commit_group;\n"
        ptx = PTX.replace(
            "	add.s32 	%r8, %r8, 1;", f"	{copies}	add.s32 	%r8, %r8, 1;"
        )
        assert kernel(ptx=ptx).copies == [Copies(128 * 128 + 256 + 16 * 128, waits=2)]

    def test_fences(self):
        assert not kernel().unfenced
        assert not kernel().unfenced_releases
        assert not kernel().unsynchronised

    def test_a_product_without_a_fence(self):
        # On the way round the loop also the first product comes behind the store.
        assert kernel(without(SASS, "FENCE")).unfenced == ["HGMMA.64x8x16.F32.BF16"] * 2

    def test_a_copy_out_without_a_fence(self):
        assert kernel(without(SASS, "FENCE", at=1)).unfenced == ["UTMASTG.4D"]

    def test_a_fence_that_not_all_run_is_none(self):
        guarded = SASS.replace("        FENCE", "    @P0 FENCE", 1)
        assert len(kernel(guarded).unfenced) == 2

    def test_a_store_on_a_rare_way_counts(self):
        """Without the store that always runs, the fence is still needed for the other."""
        rare = without(without(SASS, "STS [R13]"), "FENCE")
        assert kernel(rare).unfenced

    def test_a_release_without_a_fence(self):
        loaded = SASS.replace("STS [R13], R14", "LDS R14, [R13]", 1)
        assert not kernel(loaded).unfenced_releases
        unfenced = without(loaded, "FENCE")
        assert kernel(unfenced).unfenced_releases == ["SYNCS.ARRIVE.TRANS64.A1T0"]

    def test_an_arrival_that_announces_bytes_releases_nothing(self):
        wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR9], R5"
        copying = SASS.replace(wait, "LDS R5, [UR9]", 1)
        assert "LDS R5" in copying
        assert not kernel(copying).unfenced_releases

    def test_a_load_without_a_barrier(self):
        line = next(line for line in SASS.splitlines() if "BAR.SYNC" in line)
        loads = line.replace("BAR.SYNC.DEFER_BLOCKING R42, 0x80", "LDS R1, [R2]")
        assert not kernel(SASS.replace(line, f"{line}\n{loads}")).unsynchronised
        assert kernel(SASS.replace(line, loads)).unsynchronised == ["LDSM.16.M88.4", "LDS"]


class TestReport:
    def test_figures(self):
        report = read_report(PTXAS, RESOURCES, PTX)
        assert report == Report(79, 0, 0, shared_bytes=108544 + 8 * 13, threads=256)

    def test_spills_are_counted_once(self):
        report = read_report(SPILLED, RESOURCES, PTX)
        assert (report.registers, report.stack_bytes, report.spill_bytes) == (255, 384, 1028)

    def test_a_missing_figure_is_an_error(self):
        with pytest.raises(ValueError, match="registers"):
            read_report(without(PTXAS, "Used"), RESOURCES, PTX)

    def test_a_dump(self, tmp_path):
        with pytest.raises(ValueError, match="0 files"):
            read_kernel(tmp_path)
        parts = {"ptx": PTX, "ptxas": PTXAS, "sass_ctrl": SASS, "resources.txt": RESOURCES}
        for i, (suffix, text) in enumerate(parts.items()):
            (tmp_path / f"block_{i}.{suffix}").write_text(text)
        assert read_kernel(tmp_path).report.registers == 79
        (tmp_path / "block_9.ptx").write_text(PTX)
        with pytest.raises(ValueError, match="2 files"):
            read_kernel(tmp_path)
