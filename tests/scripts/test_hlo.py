"""What makes arrays as large as a cache is found in XLA's programs, wherever it is."""

import pytest
from kernel_check.hlo import kernel_calls, large_results, read_hlo

# A cache of 64 MiB is written in place by a fusion, read by a kernel, and handed through a loop.
PROGRAM = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[4,8,8192,128]{3,2,1,0})->()}

%region_1.4 (reduce_sum.0: f32[], reduce_sum.1: f32[]) -> f32[] {
  %reduce_sum.0 = f32[] parameter(0)
  %reduce_sum.1 = f32[] parameter(1)
  ROOT %reduce_sum.2 = f32[] add(%reduce_sum.0, %reduce_sum.1)
}

%fused_update (param_0: bf16[4,8,8192,128], param_1: bf16[4,8,1,128], param_2: s32[]) -> \
(bf16[32,8192,128], s32[]) {
  %param_2 = s32[] parameter(2)
  %param_1 = bf16[4,8,1,128]{3,2,1,0} parameter(1)
  %param_0 = bf16[4,8,8192,128]{3,2,1,0} parameter(0)
  %dynamic-update-slice.1 = bf16[4,8,8192,128]{3,2,1,0} dynamic-update-slice(%param_0, %param_1, \
%param_2), metadata={op_name="jit(step)/scatter"}
  %bitcast.9 = bf16[32,8192,128]{2,1,0} bitcast(%dynamic-update-slice.1)
  ROOT %tuple.9 = (bf16[32,8192,128]{2,1,0}, s32[]) tuple(%bitcast.9, %param_2)
}

%fused_new (param_0.2: bf16[4,64,128]) -> bf16[4,8,1,128] {
  %param_0.2 = bf16[4,64,128]{2,1,0} parameter(0)
  ROOT %slice.1 = bf16[4,8,1,128]{3,2,1,0} slice(%param_0.2), slice={[0:4], [0:8], [0:1], [0:128]}
}

%wrapped_transpose_computation (param_0.1: bf16[4,8192,8,128]) -> bf16[4,8,128,8192] {
  %param_0.1 = bf16[4,8192,8,128]{3,2,1,0} parameter(0)
  ROOT %transpose.1 = bf16[4,8,128,8192]{3,2,1,0} transpose(%param_0.1), dimensions={0,2,3,1}
}

%body (arg: (s32[], bf16[4,8,8192,128])) -> (s32[], bf16[4,8,8192,128]) {
  %arg = (s32[], bf16[4,8,8192,128]{3,2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %cache = bf16[4,8,8192,128]{3,2,1,0} get-tuple-element(%arg), index=1
  ROOT %again = (s32[], bf16[4,8,8192,128]{3,2,1,0}) tuple(%i, %cache)
}

%condition (arg.1: (s32[], bf16[4,8,8192,128])) -> pred[] {
  %arg.1 = (s32[], bf16[4,8,8192,128]{3,2,1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main.8 (q.1: bf16[4,64,128], k.1: bf16[4,8,8192,128], n.1: s32[]) -> bf16[4,8,8192,128] {
  %n.1 = s32[]{:T(128)} parameter(2), sharding={replicated}
  %k.1 = bf16[4,8,8192,128]{3,2,1,0} parameter(1), metadata={op_name="k"}
  %q.1 = bf16[4,64,128]{2,1,0} parameter(0)
  %new = bf16[4,8,1,128]{3,2,1,0} fusion(%q.1), kind=kLoop, calls=%fused_new
  %update = (bf16[32,8192,128]{2,1,0}, s32[]) fusion(%k.1, %new, %n.1), kind=kLoop, \
calls=%fused_update
  %kernel = (f32[8,4,8,8,128]{4,3,2,1,0}, f32[8,4,8,8]{3,2,1,0}) custom-call(%q.1, %k.1), \
custom_call_target="mosaic_gpu_v2", operand_layout_constraints={bf16[4,64,128]{2,1,0}}
  %start = (s32[], bf16[4,8,8192,128]{3,2,1,0}) tuple(%n.1, %k.1)
  %while.3 = (s32[], bf16[4,8,8192,128]{3,2,1,0}) while(%start), condition=%condition, body=%body
  ROOT %out = bf16[4,8,8192,128]{3,2,1,0} get-tuple-element(%while.3), index=1
}
"""
MIB = 2**20
NEW = "  %new = "


def test_an_update_in_place_makes_nothing():
    assert large_results(PROGRAM, 64 * MIB) == []


def test_smaller_arrays_are_listed_when_asked_for():
    # The kernel's outputs, of 1 MiB, are never: what is left to be merged is a temporary.
    assert large_results(PROGRAM, 2**16) == []
    # 4 * 8 * 128 of two bytes.
    assert large_results(PROGRAM, 2**13) == ["fusion new"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%copy.1 = bf16[4,8,8192,128]{2,3,1,0} copy(%k.1)", "copy copy.1"),
        ("%convert.1 = f32[4,8,8192,128]{3,2,1,0} convert(%k.1)", "convert convert.1"),
        (
            "%wrapped = bf16[4,8,128,8192]{3,2,1,0} fusion(%k.1), kind=kInput, "
            "calls=%wrapped_transpose_computation",
            "fusion wrapped",
        ),
        (
            "%cs = (bf16[4,8,8192,128]{3,2,1,0}, bf16[4,8,8192,128]{3,2,1,0}, u32[]) "
            "copy-start(%k.1)",
            "copy-start cs",
        ),
        (
            '%cc = bf16[4,8,8192,128]{3,2,1,0} custom-call(%k.1), custom_call_target="x"',
            "custom-call cc",
        ),
    ],
)
@pytest.mark.parametrize("place", ["entry", "loop"])
def test_copies_are_found(line, found, place):
    if place == "entry":
        program = PROGRAM.replace(NEW, f"  {line}\n{NEW}")
    else:
        program = PROGRAM.replace("  ROOT %again", f"  {line}\n  ROOT %again")
    assert large_results(program, 64 * MIB) == [found]


def test_what_is_fused_is_not_made():
    line = "  %wide = f32[4,8,8192,128]{3,2,1,0} convert(%param_0)\n"
    inside = PROGRAM.replace("  %dynamic-update-slice.1", f"{line}  %dynamic-update-slice.1")
    assert large_results(inside, 64 * MIB) == []


def test_a_fusion_of_an_update_and_a_copy_is_found():
    both = PROGRAM.replace(
        "(bf16[32,8192,128]{2,1,0}, s32[]) tuple(%bitcast.9, %param_2)",
        "(bf16[32,8192,128]{2,1,0}, bf16[4,8,8192,128]{3,2,1,0}) tuple(%bitcast.9, %negate.1)",
    ).replace(
        "  ROOT %tuple.9",
        "  %negate.1 = bf16[4,8,8192,128]{3,2,1,0} negate(%param_0)\n  ROOT %tuple.9",
    )
    assert large_results(both, 64 * MIB) == ["fusion update"]


def test_kernels_are_counted():
    assert kernel_calls(PROGRAM) == 1
    assert kernel_calls(PROGRAM.replace("mosaic_gpu_v2", "cublas")) == 0


def test_bytes_of_types():
    text = "ENTRY %e (p: pred[]) -> pred[] {\n  ROOT %a = (%s) parameter(0)\n}\n"
    for shape, nbytes in {
        "pred[3]": 3,
        "s4[5]": 3,
        "f8e4m3fn[2,3]{1,0}": 6,
        "bf16[2]": 4,
        "f32[]": 4,
        "f64[2], (s8[99], u32[1])": 99,
    }.items():
        entry, computations = read_hlo(text.replace("%s", shape))
        assert computations[entry][0].largest == nbytes


def test_a_text_without_entry_is_an_error():
    with pytest.raises(ValueError, match="no entry"):
        read_hlo("HloModule x")
