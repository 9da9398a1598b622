# dx[257..512, 1536] = dy[257..512, 256] @ w[256, 1536] · int4_g128 · f16 · template=dgrad_wgmma block_m=64 block_n=128 block_k=128 unit=mma side=left scale_at=weight zero_at=weight convert_at=register x_at=shared w_at=register split_k=1 sum_at=global warps=4 teams=2 stages=2 maxnreg=0 vector=2 ring=6 overlap=1
# made by: w4gen compile --problem 'm=257..512 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 gradient=1' --arch sm_90 --emit py
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

N = gl.constexpr(256)  # outputs, columns of x
K = gl.constexpr(1536)  # inputs, columns of y
BLOCK_M = gl.constexpr(64)  # rows of x per program
BLOCK_N = gl.constexpr(128)  # outputs per step
TEAMS = gl.constexpr(2)  # times 64 inputs per program
PIECES = gl.constexpr(2)  # times 64 outputs in a step
BLOCKS = gl.constexpr(8)  # times 16 outputs in a step
ROW_SCALES = gl.constexpr(96)  # pairs of scales of 16 outputs
ROW_WORDS = gl.constexpr(3072)  # words of 16 outputs
WARPS = gl.constexpr(4)  # warps of a team
SPLIT = gl.constexpr(1)  # programs that share the steps
STEPS = gl.constexpr(2)  # steps of a program
AHEAD = gl.constexpr(2)  # steps whose words are asked for ahead
RING = gl.constexpr(6)  # steps of x in flight
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # 64 n of a row of x fill 128 bytes
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
THREADS = gl.constexpr(32 * WARPS)
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))  # one element a thread
DECODE = gl.constexpr("""{
.reg .b32 t, a, b;
lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
mov.b32 b, 0xe408e408;
add.f16x2 $0, $0, b;
lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
mov.b32 b, 0xd480d480;
mov.b32 a, 0x2c002c00;
fma.rn.f16x2 $1, $1, a, b;
shr.u32 t, $4, 8;
lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
mov.b32 b, 0xe408e408;
add.f16x2 $2, $2, b;
lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
mov.b32 b, 0xd480d480;
mov.b32 a, 0x2c002c00;
fma.rn.f16x2 $3, $3, a, b;
}""")
TWO = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0]))  # two neighbours a thread
SCALES = gl.constexpr("""prmt.b32 $0, $2, $3, 0x5410;
prmt.b32 $1, $2, $3, 0x7632;""")
TURN = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
MUL = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")
PARTS = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.jit
def mul2(a, b):
    """Products of pairs."""
    return gl.inline_asm_elementwise(MUL, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def halves_of(pair):
    """The two halves of a pair, along a last axis."""
    low, high = gl.inline_asm_elementwise(PARTS, "=h,=h,r", [pair], dtype=(gl.float16, gl.float16), is_pure=True, pack=1)
    return gl.join(low, high)


@gluon.jit
def each_of(value, layout: gl.constexpr):
    """A value of each thread, as a column of tensors in `layout`."""
    return gl.convert_layout(value, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]


@gluon.jit
def values_of(word):
    """The values of a word's codes in pairs of neighbouring k."""
    kinds: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    return gl.inline_asm_elementwise(DECODE, "=&r,=&r,=&r,=&r,r", [word], dtype=kinds, is_pure=True, pack=1)


@gluon.jit
def run(text: gl.constexpr):
    """An instruction without operands."""
    gl.inline_asm_elementwise(text + "\nmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def two_at(ptr, lane):
    """Where two words of each thread begin: those of outputs 2 (lane % 4) and the next, and of the two 8 further."""
    return ptr + each_of(lane % 4 * 2, TWO) + gl.arange(0, 2, gl.SliceLayout(0, TWO))[None, :]


@gluon.jit
def two_of(words):
    """The two words of each thread."""
    a, b = gl.split(words)
    return gl.convert_layout(a, EACH, assert_trivial=True), gl.convert_layout(b, EACH, assert_trivial=True)


@gluon.jit
def step_of(codes, scale_ptr, zero_ptr, first, lane, share, step):
    """Ask for a step: of every 16 outputs the word with a thread's codes, and the scales and zeros of its outputs."""
    words = ()
    scales = ()
    zeros = ()
    codes += step * (BLOCKS * ROW_WORDS)
    scale_ptr += step * (BLOCKS * ROW_SCALES)
    for block in gl.static_range(BLOCKS):
        words = words + (gl.load(codes + block * ROW_WORDS),)
        scales = scales + (two_of(gl.load(scale_ptr + block * ROW_SCALES)),)
    return words, scales, zeros


@gluon.jit
def fragment_of(word, scales):
    """16 k by 16 outputs, scaled: axes thread, pair, n // 8, k // 8.

    A word has the codes of n, n + 8 and k, k + 8 for two neighbours in k, one in each half: turned, for two in n.
    """
    word = gl.inline_asm_elementwise(TURN, "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)
    w = values_of(word)
    kinds: gl.constexpr = (gl.int32, gl.int32)
    a, b = gl.inline_asm_elementwise(SCALES, "=&r,=&r,r,r", [scales[0], scales[1]], dtype=kinds, is_pure=True, pack=1)
    w = (mul2(w[0], a), mul2(w[1], b), mul2(w[2], a), mul2(w[3], b))
    return gl.join(gl.join(halves_of(w[0]), halves_of(w[1])), gl.join(halves_of(w[2]), halves_of(w[3])))


@gluon.jit
def left_of(words, scales, zeros, piece: gl.constexpr):
    """The left operand of 64 k by 64 outputs, in the registers that the matrix cores read it from."""
    own = ()
    for j in gl.static_range(piece * 4, piece * 4 + 4):
        own = own + (fragment_of(words[j], scales[j]),)
    tile = gl.join(gl.join(own[0], own[1]), gl.join(own[2], own[3]))  # thread, pair, n // 8, k // 8, n // 16 % 2, n // 32
    tile = tile.reshape([WARPS, 8, 4, 2, 2, 2, 2, 2]).permute([0, 5, 1, 7, 6, 4, 2, 3])
    return gl.convert_layout(tile.reshape([64, 64]), LEFT, assert_trivial=True)


@gluon.jit
def rings():
    """What x waits in, and the barriers of its slots: filled, and drained."""
    ring = gl.allocate_shared_memory(gl.float16, [RING * PIECES, BLOCK_M, 64], TILE)
    filled = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(RING):
        hopper.mbarrier.init(filled.index(slot), count=THREADS)
        hopper.mbarrier.init(drained.index(slot), count=TEAMS)
    hopper.fence_async_shared()
    return ring, filled, drained


@gluon.jit
def bring(x_ptr, ring, filled, drained, m_count):
    """Copy x into the ring, a step of [BLOCK_M, BLOCK_N] at a time. Rows and n beyond the end become zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = BLOCK_M if BLOCK_M < 8 * WARPS else 8 * WARPS  # that a copy brings, 16 bytes a thread at a time
    m = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))[:, None]
    # what is made of m here is not made before warps part, and spilled
    m = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [m], dtype=gl.int32, is_pure=False, pack=1)
    n = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    share = gl.program_id(2)
    first = gl.program_id(0) * BLOCK_M
    x = x_ptr + first.to(gl.int64) * N + (m * N + n)
    run("griddepcontrol.wait;")  # weights may be read before the kernel in front ends, x may not
    for step in range(STEPS):
        slot = step % RING
        hopper.mbarrier.wait(drained.index(slot), ((step // RING) & 1) ^ 1)
        for piece in gl.static_range(PIECES):
            tile = ring.index(slot * PIECES + piece)
            at = (step * SPLIT + share) * BLOCK_N + piece * 64
            for row in gl.static_range(0, BLOCK_M, ROWS):
                there = m < m_count - first - row
                if N % BLOCK_N:
                    there = there & (n < N - at)
                hopper.async_copy.async_copy_global_to_shared(tile.slice(row, ROWS), x + (row * N + at), mask=there)
        hopper.async_copy.mbarrier_arrive(filled.index(slot), increment_count=False)


@gluon.jit
def one_step(acc, asked, step, ring, filled, drained, codes, scale_ptr, zero_ptr, first, lane, share):
    """Add the products of a step to the sums, and ask for the words of another.

    What the matrix cores read is decoded before they are asked, and nothing is decoded until they are done: a register they read
    is never written while they may.
    """
    words, scales, zeros = asked
    slot = step % RING
    hopper.mbarrier.wait(filled.index(slot), (step // RING) & 1)
    left = ()
    for piece in gl.static_range(PIECES):
        left = left + (left_of(words, scales, zeros, piece),)
    hopper.fence_async_shared()
    for piece in gl.static_range(PIECES):
        acc = hopper.warpgroup_mma(left[piece], ring.index(slot * PIECES + piece).permute((1, 0)), acc, is_async=True)
    asked = step_of(codes, scale_ptr, zero_ptr, first, lane, share, gl.minimum(step + AHEAD, STEPS - 1))
    done = hopper.warpgroup_mma_wait(0, deps=[acc, left[0], left[1]])
    acc = done[0]
    hopper.mbarrier.arrive(drained.index(slot), count=1)
    return acc, asked


@gluon.jit
def sums_of(ring, filled, drained, codes, scale_ptr, zero_ptr, first, lane, share):
    """The sums of a team over all steps, a lap at a time: so no register has to move while what is loaded to it is on the way."""
    steps = ()
    for turn in gl.static_range(AHEAD):
        steps = steps + (step_of(codes, scale_ptr, zero_ptr, first, lane, share, turn),)
    acc = gl.zeros([64, BLOCK_M], gl.float32, PRODUCT)
    for lap in range(STEPS // AHEAD):
        for i in gl.static_range(AHEAD):
            step = lap * AHEAD + i
            acc, asked = one_step(acc, steps[i], step, ring, filled, drained, codes, scale_ptr, zero_ptr, first, lane, share)
            steps = steps[:i] + (asked,) + steps[i + 1 :]
    for turn in gl.static_range(STEPS % AHEAD):
        step = STEPS // AHEAD * AHEAD + turn
        acc, asked = one_step(acc, steps[turn], step, ring, filled, drained, codes, scale_ptr, zero_ptr, first, lane, share)
    return acc


@gluon.jit
def multiply(ring, filled, drained, out_ptr, codes_ptr, scale_ptr, zero_ptr, m_count, TEAM: gl.constexpr):
    """Multiply 64 columns of the weight with the rows in the ring."""
    thread = gl.arange(0, THREADS, EACH)
    lane = thread % 32
    share = gl.program_id(2)
    column = gl.program_id(1) * TEAMS + TEAM
    codes = codes_ptr + (column * 128 + lane * 4 + thread // 32)
    scales = two_at(scale_ptr.to(gl.pointer_type(gl.int32)) + column * 64 // 128 * 8, lane)
    zeros = scales
    acc = sums_of(ring, filled, drained, codes, scales, zeros, column, lane, share)
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    start = gl.program_id(0) * BLOCK_M
    k = column * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))[:, None]
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORE))[None, :]
    at = start.to(gl.int64) * K + (m * K + k)
    gl.store(out_ptr + at, gl.convert_layout(acc.to(gl.float16), STORE), mask=(m < m_count - start) & (k < K))


@gluon.jit(do_not_specialize=["m_count"])
def dgrad_wgmma(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each program computes 64 TEAMS columns of dX for BLOCK_M rows, from rows x of dY, in steps along the outputs.

    A team of WARPS warps multiplies 64 columns of the weight; one more brings x.
    """
    run("griddepcontrol.launch_dependents;")
    ring, filled, drained = rings()
    zero_ptr = scale_ptr  # no zeros
    gl.warp_specialize(
        [
            (multiply, (ring, filled, drained, y_ptr, codes_ptr, scale_ptr, zero_ptr, m_count, 0)),
            (multiply, (ring, filled, drained, y_ptr, codes_ptr, scale_ptr, zero_ptr, m_count, 1)),
            (bring, (x_ptr, ring, filled, drained, m_count)),
        ],
        [WARPS] * TEAMS,
        [224, 56],
    )


PROBLEM = "m=257..512 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 gradient=1 layout=n8@512,n2@4,n16@98304,k2@16,k4@128,k2@8,k2@32,k2@64,k24@4096;4/32"
SCHEDULE = "template=dgrad_wgmma block_m=64 block_n=128 block_k=128 unit=mma side=left scale_at=weight zero_at=weight convert_at=register x_at=shared w_at=register split_k=1 sum_at=global warps=4 teams=2 stages=2 maxnreg=0 vector=2 ring=6 overlap=1"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
