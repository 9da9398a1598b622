# y[129..256, 4096] = x[129..256, 4096] @ w[4096, 4096].T · int4_g128 · f16 · template=gemm_wgmma block_m=64 block_n=128 block_k=128 unit=mma side=left scale_at=weight zero_at=weight convert_at=register x_at=shared w_at=shared split_k=1 sum_at=global warps=4 teams=2 stages=2 maxnreg=0 vector=2 ring=8 overlap=1
# made by: w4gen compile --problem 'm=129..256 n=4096 k=4096 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 activation=silu_mul' --arch sm_90 --emit py
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

N = gl.constexpr(4096)  # outputs
K = gl.constexpr(4096)  # inputs
BLOCK_M = gl.constexpr(64)  # rows of x per program
BLOCK_K = gl.constexpr(128)  # inputs per step
TEAMS = gl.constexpr(2)  # times 64 outputs per program
PIECES = gl.constexpr(2)  # times 64 inputs in a step
QUADS = gl.constexpr(2)  # quads of 64 inputs in a step
FRAGMENTS = gl.constexpr(4)  # times 16 inputs in a quad
GROUPS = gl.constexpr(1)  # scales of an output in a step
ROW_SCALES = gl.constexpr(256)  # words of scales of 16 outputs
NEAR = gl.constexpr(1)  # groups whose scales a lane loads at once
SCALE_LOADS = gl.constexpr(1)  # loads of these for the groups of a step
SCALE_WORDS = gl.constexpr(1)  # words of a load
WORDS = gl.constexpr(128)  # words of a quad's 32 lanes
ROW_WORDS = gl.constexpr(8192)  # words of 16 outputs
WARPS = gl.constexpr(4)  # warps of a team
SPLIT = gl.constexpr(1)  # programs that share the steps along k
WORKERS = gl.constexpr(1)  # the same
STEPS = gl.constexpr(32)  # steps of a program
AHEAD = gl.constexpr(2)  # steps whose scales are asked for ahead
RING = gl.constexpr(8)  # steps of words and x in flight
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
FOUR = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0]))  # four neighbours a thread
PAIR = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")


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
def four_of(words):
    """The four words of each thread."""
    even, odd = gl.split(words.reshape([THREADS, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    a = gl.convert_layout(a, EACH, assert_trivial=True)
    b = gl.convert_layout(b, EACH, assert_trivial=True)
    c = gl.convert_layout(c, EACH, assert_trivial=True)
    d = gl.convert_layout(d, EACH, assert_trivial=True)
    return a, b, c, d


@gluon.jit
def words_at(codes_ptr, first, lane, worker):
    """Where the words of a thread begin."""
    at = first * ROW_WORDS + worker * (QUADS * WORDS) + lane * 4
    words = codes_ptr + each_of(at, FOUR) + gl.arange(0, 4, gl.SliceLayout(0, FOUR))[None, :]
    return words


SCALES = gl.constexpr(gl.BlockedLayout([1, SCALE_WORDS], [32, 1], [WARPS, 1], [1, 0]))  # the words of a thread's scales
SCALE = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}""")


@gluon.jit
def scales_at(scale_ptr, first, lane, worker, turn, part: gl.constexpr):
    """Where the scales of a thread's two outputs are, of a part of the groups of a step, as words."""
    at = first * ROW_SCALES + lane // 4 + worker * 8
    inside = gl.arange(0, SCALE_WORDS, gl.SliceLayout(0, SCALES))[None, :] + turn * (WORKERS * 8)
    scales = scale_ptr.to(gl.pointer_type(gl.int32)) + each_of(at, SCALES) + inside
    return scales


@gluon.jit
def scales_of(words):
    """The scales of a thread's two outputs, in f32, group after group."""
    w0 = gl.convert_layout(words.reshape([THREADS]), EACH, assert_trivial=True)
    kinds: gl.constexpr = (gl.float32, gl.float32)
    w0 = gl.inline_asm_elementwise(SCALE, "=&f,=&f,r", [w0], dtype=kinds, is_pure=True, pack=1)
    return w0


@gluon.jit
def pair_of(value):
    """An f32 in both halves of a word."""
    return gl.inline_asm_elementwise(PAIR, "=r,f", [value], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def fragments_of(words, zeros, full):
    """The left operands of a quad's matrix instructions, one for each 16 of k: pairs of n and n + 8, then of k + 8."""
    w = four_of(words)
    v0 = values_of(w[0])
    v1 = values_of(w[1])
    v2 = values_of(w[2])
    v3 = values_of(w[3])
    return v0, v1, v2, v3


HELD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))  # words as they are stored
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # 64 k of a row of x fill 128 bytes
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
PAIRS = gl.constexpr(gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1]))
SWAP = gl.constexpr("shfl.sync.bfly.b32 $0, $1, 4, 31, 0xffffffff;")


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
def step_of(TEAM: gl.constexpr, scale_ptr, zero_ptr, first, lane, share, step):
    """Ask for the scales and zeros of a step; its words wait in the ring."""
    words = ()
    scales = ()
    zeros = ()
    for part in gl.static_range(SCALE_LOADS):
        scales = scales + (gl.load(scales_at(scale_ptr, first, lane, share, step, part)),)
    return words, scales, zeros


@gluon.jit
def fragment_of(w, scales, group: gl.constexpr):
    """16 outputs by 16 k, scaled: axes thread, pair, n // 8, k // 8."""
    each = scales_of(scales[group // NEAR])
    a, b = each[group % NEAR * 2], each[group % NEAR * 2 + 1]
    a, b = pair_of(a), pair_of(b)
    w = (mul2(w[0], a), mul2(w[1], b), mul2(w[2], a), mul2(w[3], b))
    return gl.join(gl.join(halves_of(w[0]), halves_of(w[1])), gl.join(halves_of(w[2]), halves_of(w[3])))


@gluon.jit
def left_of(words, scales, zeros, piece: gl.constexpr):
    """The left operand of 64 outputs by 64 k, in the registers that the matrix cores read it from."""
    full = 0
    w = ()
    for quad in gl.static_range(piece * 4 // FRAGMENTS, (piece * 4 + 3) // FRAGMENTS + 1):
        w = w + fragments_of(words[quad], 0, full)
    own = ()
    for j in gl.static_range(4):
        own = own + (fragment_of(w[piece * 4 % FRAGMENTS + j], scales, (piece * 4 + j) * 16 * GROUPS // BLOCK_K),)
    tile = gl.join(gl.join(own[0], own[1]), gl.join(own[2], own[3]))  # thread, pair, n // 8, k // 8, k // 32, k // 16 % 2
    tile = tile.reshape([WARPS, 8, 4, 2, 2, 2, 2, 2]).permute([0, 4, 1, 7, 6, 5, 2, 3])
    return gl.convert_layout(tile.reshape([64, 64]), LEFT, assert_trivial=True)


@gluon.jit
def rings():
    """What x and words wait in, and the barriers of its slots: filled, and drained."""
    held = gl.allocate_shared_memory(gl.int32, [RING, TEAMS * QUADS * THREADS, 4], HELD)
    ring = gl.allocate_shared_memory(gl.float16, [RING * PIECES, BLOCK_M, 64], TILE)
    filled = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(RING):
        hopper.mbarrier.init(filled.index(slot), count=THREADS)
        hopper.mbarrier.init(drained.index(slot), count=TEAMS)
    hopper.fence_async_shared()
    return held, ring, filled, drained


@gluon.jit
def bring_words(words, held, slot, step):
    """Copy the words of a step, 4 KB a team for 128 k."""
    for quad in gl.static_range(QUADS):
        for team in gl.static_range(TEAMS):
            there = words + step * (SPLIT * QUADS * WORDS) + (quad * WORDS + team * (WARPS * ROW_WORDS))
            hopper.async_copy.async_copy_global_to_shared(held.index(slot).slice((team * QUADS + quad) * THREADS, THREADS), there)


@gluon.jit
def bring(x_ptr, codes_ptr, held, ring, filled, drained, m_count):
    """Copy x and words into the ring, a step of [BLOCK_M, BLOCK_K] at a time. Rows and k beyond the end become zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = BLOCK_M if BLOCK_M < 8 * WARPS else 8 * WARPS  # that a copy brings, 16 bytes a thread at a time
    m = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))[:, None]
    # what is made of m here is not made before warps part, and spilled
    m = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [m], dtype=gl.int32, is_pure=False, pack=1)
    k = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    share = gl.program_id(2)
    first = gl.program_id(0) * BLOCK_M
    x = x_ptr + first.to(gl.int64) * K + (m * K + k)
    thread = gl.arange(0, THREADS, EACH)
    words = words_at(codes_ptr, gl.program_id(1) * (TEAMS * WARPS) + thread // 32, thread % 32, share)
    bring_words(words, held, 0, 0)  # more would have to be here too before the first step begins
    run("griddepcontrol.wait;")  # weights may be read before the kernel in front ends, x may not
    for step in range(STEPS):
        slot = step % RING
        hopper.mbarrier.wait(drained.index(slot), ((step // RING) & 1) ^ 1)
        if step > 0:
            bring_words(words, held, slot, step)
        for piece in gl.static_range(PIECES):
            tile = ring.index(slot * PIECES + piece)
            at = (step * SPLIT + share) * BLOCK_K + piece * 64
            for row in gl.static_range(0, BLOCK_M, ROWS):
                there = m < m_count - first - row
                if K % BLOCK_K:
                    there = there & (k < K - at)
                hopper.async_copy.async_copy_global_to_shared(tile.slice(row, ROWS), x + (row * K + at), mask=there)
        hopper.async_copy.mbarrier_arrive(filled.index(slot), increment_count=False)


@gluon.jit
def one_step(acc, asked, step, held, ring, filled, drained, TEAM: gl.constexpr, scale_ptr, zero_ptr, first, lane, share):
    """Add the products of a step to the sums, and ask for the words of another.

    What the matrix cores read is decoded before they are asked, and nothing is decoded until they are done: a register they read
    is never written while they may.
    """
    words, scales, zeros = asked
    slot = step % RING
    hopper.mbarrier.wait(filled.index(slot), (step // RING) & 1)
    for quad in gl.static_range(QUADS):
        words = words + (held.index(slot).slice((TEAM * QUADS + quad) * THREADS, THREADS).load(FOUR),)
    left = ()
    for piece in gl.static_range(PIECES):
        left = left + (left_of(words, scales, zeros, piece),)
    hopper.fence_async_shared()
    for piece in gl.static_range(PIECES):
        acc = hopper.warpgroup_mma(left[piece], ring.index(slot * PIECES + piece).permute((1, 0)), acc, is_async=True)
    asked = step_of(TEAM, scale_ptr, zero_ptr, first, lane, share, gl.minimum(step + AHEAD, STEPS - 1))
    done = hopper.warpgroup_mma_wait(0, deps=[acc, left[0], left[1]])
    acc = done[0]
    hopper.mbarrier.arrive(drained.index(slot), count=1)
    return acc, asked


@gluon.jit
def sums_of(held, ring, filled, drained, TEAM: gl.constexpr, scale_ptr, zero_ptr, first, lane, share):
    """The sums of a team over all steps, a lap at a time: so no register has to move while what is loaded to it is on the way."""
    steps = ()
    for turn in gl.static_range(AHEAD):
        steps = steps + (step_of(TEAM, scale_ptr, zero_ptr, first, lane, share, turn),)
    acc = gl.zeros([64, BLOCK_M], gl.float32, PRODUCT)
    for lap in range(STEPS // AHEAD):
        for i in gl.static_range(AHEAD):
            step = lap * AHEAD + i
            acc, asked = one_step(acc, steps[i], step, held, ring, filled, drained, TEAM, scale_ptr, zero_ptr, first, lane, share)
            steps = steps[:i] + (asked,) + steps[i + 1 :]
    for turn in gl.static_range(STEPS % AHEAD):
        step = STEPS // AHEAD * AHEAD + turn
        acc, asked = one_step(acc, steps[turn], step, held, ring, filled, drained, TEAM, scale_ptr, zero_ptr, first, lane, share)
    return acc


@gluon.jit
def multiply(held, ring, filled, drained, out_ptr, scale_ptr, zero_ptr, bias_ptr, m_count, TEAM: gl.constexpr):
    """Multiply 64 outputs with the rows in the ring."""
    thread = gl.arange(0, THREADS, EACH)
    lane = thread % 32
    share = gl.program_id(2)
    row = gl.program_id(1) * TEAMS + TEAM
    first = row * 4 + thread // 32
    acc = sums_of(held, ring, filled, drained, TEAM, scale_ptr, zero_ptr, first, lane, share)
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    start = gl.program_id(0) * BLOCK_M
    a, b = gl.split(acc.reshape([64, BLOCK_M // 16, 2, 8]).permute([0, 1, 3, 2]))
    row_of = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, a.type.layout)))
    first = (row_of % 2 == 0)[:, None, None]
    kept, sent = gl.where(first, a, b), gl.where(first, b, a)
    taken = gl.inline_asm_elementwise(SWAP, "=f,f", [sent], dtype=gl.float32, is_pure=True, pack=1)
    gate, up = gl.where(first, kept, taken), gl.where(first, taken, kept)
    acc = gate / (1.0 + gl.exp(-gate)) * up
    acc = gl.convert_layout(acc.to(gl.float16).reshape([64, BLOCK_M // 2]), STORE)
    pairs = gl.split(acc.reshape([32, 2, BLOCK_M // 2]).permute([0, 2, 1]))
    n = row * 32 + gl.arange(0, 32, gl.SliceLayout(1, PAIRS))[:, None]
    m = gl.arange(0, BLOCK_M // 2, gl.SliceLayout(0, PAIRS))[None, :]
    for i in gl.static_range(2):
        m_of = m // 8 * 16 + m % 8 + 8 * i
        at = start.to(gl.int64) * (N // 2) + (m_of * (N // 2) + n)
        y = gl.convert_layout(pairs[i], PAIRS, assert_trivial=True)
        gl.store(out_ptr + at, y, mask=(m_of < m_count - start) & (n < (N // 2)))


@gluon.jit(do_not_specialize=["m_count"])
def gemm_wgmma(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each program computes 64 TEAMS outputs for BLOCK_M rows of x, over every SPLIT-th step along k.

    A team of WARPS warps multiplies 64 outputs; one more brings x and words.
    """
    run("griddepcontrol.launch_dependents;")
    held, ring, filled, drained = rings()
    zero_ptr = scale_ptr  # no zeros
    bias_ptr = scale_ptr  # no bias
    gl.warp_specialize(
        [
            (multiply, (held, ring, filled, drained, y_ptr, scale_ptr, zero_ptr, bias_ptr, m_count, 0)),
            (multiply, (held, ring, filled, drained, y_ptr, scale_ptr, zero_ptr, bias_ptr, m_count, 1)),
            (bring, (x_ptr, codes_ptr, held, ring, filled, drained, m_count)),
        ],
        [WARPS] * TEAMS,
        [224, 56],
    )


PROBLEM = "m=129..256 n=4096 k=4096 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 activation=silu_mul layout=n8@512,n2@4,n256@262144,k2@16,k4@128,k2@8,k2@32,k2@64,k64@4096;4/32"
SCHEDULE = "template=gemm_wgmma block_m=64 block_n=128 block_k=128 unit=mma side=left scale_at=weight zero_at=weight convert_at=register x_at=shared w_at=shared split_k=1 sum_at=global warps=4 teams=2 stages=2 maxnreg=0 vector=2 ring=8 overlap=1"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
