"""Short listings in the compilers' own words: two warpgroups, one copies and one multiplies."""

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'block_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for block_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 79 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compile time = 45.492 ms
"""

SPILLED = """\
ptxas warning : Registers are spilled to local memory in function 'block_mosaic_gpu_kernel', \
508 bytes spill stores, 520 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'block_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for block_mosaic_gpu_kernel
    384 bytes stack frame, 508 bytes spill stores, 520 bytes spill loads
ptxas info    : Used 255 registers, used 16 barriers, 384 bytes cumulative stack size, 1 bytes smem
"""

RESOURCES = (
    "Resources(smem_scratch_bytes=108544, tmem_scratch_cols=0, tmem_collective_scratch_cols=0, "
    "barrier_counts=Counter({Barrier(arrival_count=1, num_barriers=3, orders_tensor_core=False): "
    "4, Barrier(arrival_count=1, num_barriers=1, orders_tensor_core=False): 1}), "
    "scoped_gmem_semaphores={})"
)

# A tile of 64 rows: 128 bytes for each thread, scales of 256 bytes by one thread.
PTX = """\
.version 9.5
.target sm_90a
.visible .entry block_mosaic_gpu_kernel(
	.param .u64 .ptr .align 256 block_mosaic_gpu_kernel_param_0
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<28>;
$L__func_begin0:
	.loc	1 106 0
	mov.b32 	%r5, 16;
	// begin inline asm
	mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r73], %r5;

	// end inline asm
	selp.b32 	%r9, 256, 0, %p26;
	mov.b32 	%r7, 128;
	mov.b32 	%r8, 0;
	@%p1 bra 	$L__BB0_2;
$L__BB0_1:
	// begin inline asm
	{
	.reg .pred       P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r94], %r95, %r96;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}

	// end inline asm
	// begin inline asm
	mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r99], %r7;

	// end inline asm
	// begin inline asm
	@%p26 cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes [%r98], \
[%rd23, {%r1,%r1,%r1,%r2,%r3}], [%r99];

	// end inline asm
	mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r99], %r9;
	@%p26 cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%r97], \
[%rd24, {%r1,%r2,%r3}], [%r99];
	// begin inline asm
	{
	.reg .pred       P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r94], %r95, %r96;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}

	// end inline asm
	add.s32 	%r8, %r8, 1;
	setp.ne.b32 	%p16, %r8, 7;
	@%p16 bra 	$L__BB0_1;
$L__BB0_2:
	{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 \
{%r1,%r2,%r3,%r4}, %rd95, %rd96, p, 1, 1, 1, 0; }
	ret;
$L__func_end0:
}
	.file	1 "decode.py"
"""

# Copies in the first loop; products in the second, with a wait that spins far behind, and a rare
# rewriting of a tile's edge.
SASS = """\
	.target	sm_90a
//--------------------- .text.block_mosaic_gpu_kernel --------------------------
        .type           block_mosaic_gpu_kernel,@function
.text.block_mosaic_gpu_kernel:
   -:-:1:Y:02        /*0000*/                   LDG.E R44, desc[UR6][R4.64]
   -:-:-:Y:05        /*0010*/               @P1 BRA `(.L_x_2)
.L_x_1:
   -:-:1:Y:02        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR9], R5
   -:-:-:Y:05        /*0030*/              @!P2 BRA `(.L_x_1)
   -:1:-:Y:01        /*0040*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR9], R7
   -:1:-:Y:01        /*0050*/                   @UP0 UTMALDG.5D [UR8], [UR20]
   -:-:-:Y:11        /*0060*/               @P3 BRA `(.L_x_1)
   -:-:-:Y:05        /*0070*/                   EXIT
.L_x_2:
   -:-:1:Y:02        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9], R5
   -:-:-:Y:05        /*0090*/              @!P1 BRA `(.L_x_9)
.L_x_3:
   -:-:-:Y:01        /*00a0*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24
   -:1:-:Y:01        /*00b0*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9], RZ
   -:-:-:Y:05        /*00c0*/              @!P5 BRA P4, `(.L_x_5)
   -:-:-:Y:01        /*00d0*/                   LDSM.16.M88.4 R40, [R48+0x800]
   -:-:-:Y:01        /*00e0*/                   STSM.16.M88.4 [R48+0x800], R40
.L_x_5:
   -:-:-:Y:01        /*00f0*/                   STS [R13], R14
   -:-:-:Y:01        /*0100*/                   FENCE.VIEW.ASYNC.S
   -:-:-:Y:01        /*0110*/                   BAR.SYNC.DEFER_BLOCKING R42, 0x80
   -:-:-:Y:01        /*0120*/                   HGMMA.64x8x16.F32.BF16 R28, gdesc[UR8], R28
   -:-:-:Y:11        /*0130*/               @P3 BRA `(.L_x_2)
   -:-:-:Y:01        /*0140*/              @!PT LDS RZ, [RZ]
   -:-:-:Y:01        /*0150*/                   STS [R13], R14
   -:-:-:Y:01        /*0160*/                   FENCE.VIEW.ASYNC.S
   -:-:-:Y:01        /*0170*/                   @UP0 UTMASTG.4D [UR8], [UR20]
   -:-:-:Y:05        /*0180*/                   EXIT
.L_x_9:
   1:-:-:Y:05        /*0190*/              @!P2 NANOSLEEP.SYNCS 0x989680
   -:-:1:Y:02        /*01a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9], R5
   -:-:-:Y:05        /*01b0*/              @!P1 BRA `(.L_x_9)
   -:-:-:Y:05        /*01c0*/                   BRA `(.L_x_3)
.L_x_30:
   -:-:-:-:00        /*01d0*/                   BRA `(.L_x_30)
   -:-:-:-:00        /*01e0*/                   NOP
   -:-:-:-:00        /*01f0*/                   NOP
.L_x_98:
"""
