# y[2..8, 256] = x[2..8, 1536] @ w[256, 1536].T · int4_g128 · f16 · template=gemv_mma block_m=8 block_n=16 block_k=128 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=8 overlap=1
# made by: w4gen compile --m 8 --n 256 --k 1536 --format int4_g128 --dtype f16 --arch sm_90 --emit py
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

N = gl.constexpr(256)  # outputs
K = gl.constexpr(1536)  # inputs
ROWS = gl.constexpr(1)  # times 16 outputs of a warp
BLOCK_K = gl.constexpr(128)  # inputs per step, under one scale
QUADS = gl.constexpr(2)  # quads of 64 inputs in a step
FRAGMENTS = gl.constexpr(4)  # times 16 inputs in a quad
WORDS = gl.constexpr(128)  # words of a quad's 32 lanes
ROW_WORDS = gl.constexpr(3072)  # words of 16 outputs
ROW_SCALES = gl.constexpr(96)  # words of scales of 16 outputs
NEAR = gl.constexpr(1)  # groups whose scales a lane loads at once
SCALE_LOADS = gl.constexpr(1)  # loads of these for the groups of a step
SCALE_WORDS = gl.constexpr(1)  # words of a load
WARPS = gl.constexpr(4)  # warps per program
WORKERS = gl.constexpr(4)  # warps that share the steps along k
STEPS = gl.constexpr(3)  # steps of a warp
LAST = gl.constexpr(4)  # warps that have a last step
AHEAD = gl.constexpr(3)  # steps whose words are asked for ahead
TILES = gl.constexpr(1)  # times 8 rows of x
TEAMS = gl.constexpr(1)  # times the outputs of a warp, all with the same rows of x
PIECES = gl.constexpr(2)  # times 64 inputs in a step
RING = gl.constexpr(7)  # pieces of x in flight
PAST = gl.constexpr(0)  # last steps that go past the inputs there are
FAR = gl.constexpr(5)  # steps before the end, up to which all are alike
GROUPS = gl.constexpr(1)  # scales of an output in a step
CHAINS = gl.constexpr(2)  # sums of the instructions under one scale
TOGETHER = gl.constexpr(2)  # times 16 inputs multiplied by one text
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
def fragments_of(words, zeros, full):
    """The left operands of a quad's matrix instructions, one for each 16 of k: pairs of n and n + 8, then of k + 8."""
    w = four_of(words)
    v0 = values_of(w[0])
    v1 = values_of(w[1])
    v2 = values_of(w[2])
    v3 = values_of(w[3])
    return v0, v1, v2, v3


MATRICES = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];")


@gluon.jit
def load(pointers, worker, layout: gl.constexpr, turn: gl.constexpr):
    """Load what a thread's pointers point to, where its warp has the turn."""
    if turn + 1 == STEPS and LAST != WORKERS:
        there = each_of(worker < LAST, layout).broadcast_to(pointers.shape)
        return gl.load(pointers, mask=there, other=0, cache_modifier=".cg")
    else:
        return gl.load(pointers, cache_modifier=".cg")


@gluon.jit
def step_of(codes, scale_ptr, zero_ptr, first, lane, worker, turn: gl.constexpr):
    """Ask for a step of a worker: its words, and the scales and zeros that go with them for each 16 outputs."""
    words = ()
    scales = ()
    zeros = ()
    for row in gl.static_range(ROWS):
        for quad in gl.static_range(QUADS):
            at = (turn * WORKERS * QUADS + quad) * WORDS + row * ROW_WORDS
            words = words + (load(codes + at, worker, FOUR, turn),)
        for part in gl.static_range(SCALE_LOADS):
            at = scales_at(scale_ptr, first, lane, worker, turn, part) + row * ROW_SCALES
            scales = scales + (load(at, worker, SCALES, turn),)
        zeros = zeros + (0,)
    return words, scales, zeros


@gluon.jit
def matrices(at):
    """Four 8 x 8 matrices from shared memory; a thread gives the address of a row and gets a pair of each."""
    kinds: gl.constexpr = (gl.int32, gl.int32, gl.int32, gl.int32)
    return gl.inline_asm_elementwise(MATRICES, "=r,=r,=r,=r,r", [at], dtype=kinds, is_pure=False, pack=1)


PIECE = gl.constexpr(TILES * 1024)  # bytes of 64 k of x
WAIT = gl.constexpr("cp.async.wait_group 5;\nbar.warp.sync 0xffffffff;")
BUFFER = gl.constexpr(".shared .align 128 .b8 x_ring[28672];\nmov.u32 $0, x_ring;")
FETCH = gl.constexpr("cp.async.cg.shared.global [$1], [$2], 16, $3;\nmov.u32 $0, 0;")
MMA = gl.constexpr("""mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$16, $17}, {$20, $21, $22, $23};
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
{$4, $5, $6, $7}, {$12, $13, $14, $15}, {$18, $19}, {$24, $25, $26, $27};""")
PLACES = gl.constexpr(",".join(["=&f"] * 4 * CHAINS + ["r"] * 6 * TOGETHER + ["f"] * 4 * CHAINS))
SUMS = gl.constexpr((gl.float32,) * 4 * CHAINS)


@gluon.jit
def fetch(x, places, sizes, k, piece, past: gl.constexpr):
    """Ask for a piece of x, [8 TILES, 64]: a thread copies 16 bytes of every fourth row. Rows and k beyond the end become zeros.

    Like the turn, the piece is a tensor that is folded later: a constant would have Triton read this text for each.
    """
    from_k = piece // PIECES * (WORKERS * BLOCK_K) + piece % PIECES * 64
    slot = piece % RING * PIECE
    for j in gl.static_range(0, 2 * TILES, TEAMS):
        size = sizes[j // TEAMS]
        if past:
            size = gl.where(k < K - from_k, size, 0)
        operands = [places[j % 2] + (slot + 512 * j), x + (from_k + 4 * j * K), size]
        gl.inline_asm_elementwise(FETCH, "=r,r,l,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mma(w, x, odd: gl.constexpr, sums):
    """TOGETHER times w [16 n, 16 k] times x [8 m, 16 k], added to sums [16 n, 8 m] in turn; x is in pairs, from the odd one on."""
    operands = ()
    for i in gl.static_range(TOGETHER):
        operands = operands + w[i]
    for i in gl.static_range(odd, odd + TOGETHER):
        operands = operands + x[i // 2][i % 2 * 2 : i % 2 * 2 + 2]
    return gl.inline_asm_elementwise(MMA, PLACES, operands + sums, dtype=SUMS, is_pure=True, pack=1)


@gluon.jit
def turn_of(steps, acc, full, x, places, sizes, k, rows, worker, turn, left: gl.constexpr):
    """A step of a warp: its products, added to acc, while x is asked for. Returns the steps whose words are, and the sums.

    `left` steps are to come with this one, FAR or more of them alike. Sums go round: the first is added to, and comes last then.
    """
    zero = gl.zeros([THREADS], gl.float32, EACH)
    none = (zero,) * (4 * CHAINS)
    pairs = ()
    for i in gl.static_range(PIECES):
        piece = turn * PIECES + i
        run(WAIT)
        if i + RING - 1 < left * PIECES:
            fetch(x, places, sizes, k, piece + RING - 1, left - (i + RING - 1) // PIECES <= PAST)
        run("cp.async.commit_group;")
        for half in gl.static_range(2):
            for tile in gl.static_range(TILES):
                pairs = pairs + (matrices(rows[half] + (piece % RING * PIECE + tile * 1024)),)
    words, scales, zeros = steps[0]
    for row in gl.static_range(ROWS):
        sums, acc = acc[:TILES], acc[TILES:]
        for group in gl.static_range(GROUPS):
            parts = ()
            for _ in gl.static_range(TILES):
                parts = parts + (none,)
            for j in gl.static_range(group * BLOCK_K // (16 * GROUPS), (group + 1) * BLOCK_K // (16 * GROUPS), TOGETHER):
                if j % FRAGMENTS == 0:
                    w = fragments_of(words[row * QUADS + j // FRAGMENTS], zeros[row], full)
                for tile in gl.static_range(TILES):  # even and odd fragments have sums of their own: two chains of instructions
                    x_of = pairs[j // 2 * TILES + tile : (j + TOGETHER + 1) // 2 * TILES : TILES]
                    parts = parts[1:] + (mma(w[j % FRAGMENTS : j % FRAGMENTS + TOGETHER], x_of, j % 2, parts[0]),)
            each = scales_of(scales[row * SCALE_LOADS + group // NEAR])
            a, b = each[group % NEAR * 2], each[group % NEAR * 2 + 1]
            for tile in gl.static_range(TILES):
                both = parts[tile]
                part = (both[0] + both[4], both[1] + both[5], both[2] + both[6], both[3] + both[7])
                scaled = (part[0] * a, part[1] * a, part[2] * b, part[3] * b)
                old = sums[0]
                sums = sums[1:] + ((old[0] + scaled[0], old[1] + scaled[1], old[2] + scaled[2], old[3] + scaled[3]),)
        acc = acc + sums
    return steps[1:], acc


@gluon.jit(do_not_specialize=["m_count"])
def gemv_mma(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each program computes 16 ROWS outputs for 8 TILES rows of x.

    Its warps share the steps along k, each with a ring of x.
    """
    run("griddepcontrol.launch_dependents;")
    thread = gl.arange(0, THREADS, EACH)
    lane = thread % 32
    worker = thread // 32
    own = lane // 8
    first = gl.program_id(0) * ROWS
    block = first
    base = gl.program_id(1) * (8 * TILES)
    ring = gl.inline_asm_elementwise(BUFFER, "=r", [], dtype=gl.int32, is_pure=True, pack=1) + worker * (RING * PIECE)
    codes = words_at(codes_ptr, first, lane, worker)
    zero_ptr = scale_ptr  # no zeros
    steps = ()
    for turn in gl.static_range(AHEAD):
        steps = steps + (step_of(codes, scale_ptr, zero_ptr, first, lane, worker, turn),)
    full = 0
    run("griddepcontrol.wait;")  # weights may be read before the kernel in front ends, x may not
    x = x_ptr + ((base + own) * K + worker * BLOCK_K + lane % 8 * 8)
    # the eight 16-byte parts of a row are turned by its number, so that eight rows of one part fill all banks
    places = ring + (own * 128 + ((lane % 8) ^ own) * 16), ring + (own * 128 + ((lane % 8) ^ (own + 4)) * 16)
    k = worker * BLOCK_K + lane % 8 * 8
    sizes = ()
    for j in gl.static_range(0, 2 * TILES, TEAMS):
        sizes = sizes + (gl.where(base + own + 4 * j < m_count, 16, 0),)
    for piece in gl.static_range(RING - 1):
        fetch(x, places, sizes, k, gl.to_tensor(piece), STEPS - piece // PIECES <= PAST)
        run("cp.async.commit_group;")
    zero = gl.zeros([THREADS], gl.float32, EACH)
    none = (zero, zero, zero, zero)
    acc = ()
    for _ in gl.static_range(ROWS * TILES):
        acc = acc + (none,)
    row = ring + lane % 8 * 128
    rows = row + ((lane // 8) ^ (lane % 8)) * 16, row + ((lane // 8 + 4) ^ (lane % 8)) * 16
    for turn in gl.static_range(0, STEPS):
        at, left = gl.to_tensor(turn), FAR if STEPS - turn > FAR else STEPS - turn
        steps, acc = turn_of(steps, acc, full, x, places, sizes, k, rows, worker, at, left)
        if turn + AHEAD < STEPS:
            steps = steps + (step_of(codes, scale_ptr, zero_ptr, first, lane, worker, turn + AHEAD),)
    # the sums of the warps meet in shared memory
    MET: gl.constexpr = gl.BlockedLayout([WORKERS, 1, 1], [1, 2, 16], [1, WARPS, 1], [2, 1, 0])
    meet = gl.allocate_shared_memory(gl.float32, [ROWS * TILES, WARPS, 8, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    for i in gl.static_range(ROWS * TILES):
        each = gl.join(gl.join(acc[i][0], acc[i][2]), gl.join(acc[i][1], acc[i][3]))  # thread, n // 8, m % 2
        meet.index(i).store(each.reshape([WARPS, 8, 4, 2, 2]).permute([0, 2, 4, 3, 1]).reshape([WARPS, 8, 16]))
    for i in gl.static_range(TEAMS * ROWS * TILES):
        total = gl.sum(meet.index(i % (ROWS * TILES)).slice(i // (ROWS * TILES) * WORKERS, WORKERS).load(MET), axis=0)
        m = base + i % TILES * 8 + gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(0, MET)))[:, None]
        n = (block + i // TILES) * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, MET)))[None, :]
        gl.store(y_ptr + m * N + n, total.to(gl.float16), mask=(m < m_count) & (n < N))


PROBLEM = "m=2..8 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n8@512,n2@4,n16@98304,k2@16,k4@128,k2@8,k2@32,k2@64,k24@4096;4/32"
SCHEDULE = "template=gemv_mma block_m=8 block_n=16 block_k=128 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=8 overlap=1"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
