# y[1, 256] = x[1, 1536] @ w[256, 1536].T · int4_g128 · f16 · template=gemv_half block_m=1 block_n=16 block_k=128 unit=halves side=right scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=3 sum_at=shared warps=4 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=1
# made by: w4gen compile --m 1 --n 256 --k 1536 --format int4_g128 --dtype f16 --arch sm_90 --emit py
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
WORKERS = gl.constexpr(12)  # warps that share the steps along k
STEPS = gl.constexpr(1)  # steps of a warp
LAST = gl.constexpr(12)  # warps that have a last step
AHEAD = gl.constexpr(1)  # steps whose words are asked for ahead
SPLIT = gl.constexpr(3)  # programs of a cluster
LOADS = gl.constexpr(1)  # 16-byte loads of x by a thread
RANGE = gl.constexpr(9)  # log2 of |x| up to which 8 products fit a half
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


BUFFER = gl.constexpr(".shared .align 16 .b8 x_part[2048];\nmov.u32 $0, x_part;")
STORE = gl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5};\nmov.u32 $0, 0;")
LARGER = gl.constexpr("{\n.reg .b32 a;\nabs.f16x2 a, $2;\nmax.f16x2 $0, $1, a;\n}")
LARGEST = gl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $1;
max.f16 a, a, b;
cvt.u32.u16 $0, a;
redux.sync.max.u32 $0, $0, 0xffffffff;
}""")
HALVES = gl.constexpr("""{
.reg .b16 a, b;
.reg .f32 f;
mov.b32 {a, b}, $1;
cvt.f32.f16 f, a;
cvt.f32.f16 $0, b;
add.f32 $0, $0, f;
}""")
OPEN = gl.constexpr(""".shared .align 16 .b8 slots[208];
{
.reg .b32 rank, thread;
.reg .pred chosen;
mov.u32 rank, %cluster_ctarank;
mov.u32 thread, %tid.x;
or.b32 rank, rank, thread;
setp.eq.u32 chosen, rank, 0;
mov.u32 $0, slots;
@chosen mbarrier.init.shared::cta.b64 [$0], 1;
@chosen mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], 192;
@chosen fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
}""")
MEET = gl.constexpr("""{
.reg .b32 rank, thread, at, there, barrier;
.reg .pred sends, adds, ready;
.reg .f32 other;
mov.u32 rank, %cluster_ctarank;
mov.u32 thread, %tid.x;
mad.lo.u32 at, rank, 64, $2;
mad.lo.u32 at, thread, 4, at;
add.u32 at, at, 16;
mapa.shared::cluster.u32 there, at, 0;
mapa.shared::cluster.u32 barrier, $2, 0;
setp.lt.u32 sends, thread, 16;
setp.eq.and.u32 adds, rank, 0, sends;
barrier.cluster.wait.acquire.aligned;
@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $1, [barrier];
mov.f32 $0, 0f00000000;
@!adds bra done;
wait: mbarrier.try_wait.parity.shared::cta.b64 ready, [$2], 0;
@!ready bra wait;
mad.lo.u32 at, thread, 4, $2;
ld.shared.f32 other, [at + 16];
add.f32 $0, $0, other;
ld.shared.f32 other, [at + 80];
add.f32 $0, $0, other;
ld.shared.f32 other, [at + 144];
add.f32 $0, $0, other;
done:
}""")


@gluon.jit
def fma2(a, b, c):
    """a * b + c of two halves."""
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def mul2(a, b):
    """a * b of two halves."""
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def keep(x_ptr, own, lane, worker):
    """Copy a warp's part of x to shared memory, times 2**-power, so that no chain of eight products leaves the range of a half."""
    PARTS: gl.constexpr = BLOCK_K // 8  # of 16 bytes in a step
    largest = gl.zeros([THREADS], gl.int32, EACH)
    held = ()
    for i in gl.static_range(LOADS):
        k = ((i * (32 // PARTS) + lane // PARTS) * WORKERS + worker) * BLOCK_K + lane % PARTS * 8
        x = x_ptr.to(gl.pointer_type(gl.int32)) + each_of(k // 2, FOUR) + gl.arange(0, 4, gl.SliceLayout(0, FOUR))[None, :]
        part = gl.load(x, mask=each_of(k < K, FOUR).broadcast_to(x.shape), other=0)
        held = held + (four_of(part),)
        for j in gl.static_range(4):
            largest = gl.inline_asm_elementwise(LARGER, "=r,r,r", [largest, held[i][j]], dtype=gl.int32, is_pure=True, pack=1)
    largest = gl.inline_asm_elementwise(LARGEST, "=r,r", [largest], dtype=gl.int32, is_pure=False, pack=1)
    power = gl.maximum(largest // 1024 - (14 + RANGE), 0)
    factor = 0x3C003C00 - power * 0x04000400
    for i in gl.static_range(LOADS):
        to = own + lane * 16 + i * 512
        a, b, c, d = held[i]
        parts = [to, mul2(a, factor), mul2(b, factor), mul2(c, factor), mul2(d, factor)]
        gl.inline_asm_elementwise(STORE, "=r,r,r,r,r,r", parts, dtype=gl.int32, is_pure=False, pack=1)
    run("bar.warp.sync 0xffffffff;")
    return power


@gluon.jit(do_not_specialize=["m_count"])
def gemv_half(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each cluster of SPLIT programs computes 16 outputs of one row of x. Warps share the steps along k; sums of 64 k are halves."""
    run("griddepcontrol.launch_dependents;")
    thread = gl.arange(0, THREADS, EACH)
    lane = thread % 32
    first = gl.program_id(0) // SPLIT
    share = gl.program_id(0) % SPLIT
    worker = share * WARPS + thread // 32
    slots = gl.inline_asm_elementwise(OPEN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    codes = words_at(codes_ptr, first, lane, worker)
    zero_ptr = scale_ptr  # no zeros
    steps = ()
    for turn in gl.static_range(AHEAD):
        steps = steps + (step_of(codes, scale_ptr, zero_ptr, first, lane, worker, turn),)
    full = 0
    run("griddepcontrol.wait;")  # weights may be read before the kernel in front ends, x may not
    own = gl.inline_asm_elementwise(BUFFER, "=r", [], dtype=gl.int32, is_pure=True, pack=1) + thread // 32 * (LOADS * 512)
    power = keep(x_ptr, own, lane, worker)
    none = gl.zeros([THREADS], gl.float32, EACH)
    acc = (none, none)
    for turn in gl.static_range(STEPS):
        words, scales, zeros = steps[0]
        part = (none, none)
        for j in gl.static_range(BLOCK_K // 16):
            if j % FRAGMENTS == 0:
                w = fragments_of(words[j // FRAGMENTS], zeros[0], full)
            if j % 2 == 0:
                # every thread gives the same row of a matrix: all lanes of a column get their pair of x
                x = matrices(own + lane // 8 * 16 + (turn * BLOCK_K * 2 + j * 32))
            x0, x1 = x[j % 2 * 2], x[j % 2 * 2 + 1]
            low = fma2(w[j % FRAGMENTS][0], x0, low) if j % 4 else mul2(w[j % FRAGMENTS][0], x0)
            high = fma2(w[j % FRAGMENTS][1], x0, high) if j % 4 else mul2(w[j % FRAGMENTS][1], x0)
            low = fma2(w[j % FRAGMENTS][2], x1, low)
            high = fma2(w[j % FRAGMENTS][3], x1, high)
            if j % 4 == 3:
                low = gl.inline_asm_elementwise(HALVES, "=f,r", [low], dtype=gl.float32, is_pure=True, pack=1)
                high = gl.inline_asm_elementwise(HALVES, "=f,r", [high], dtype=gl.float32, is_pure=True, pack=1)
                part = (part[0] + low, part[1] + high)
        a, b = scales_of(scales[0])
        scaled = (part[0] * a, part[1] * b)
        acc = (acc[0] + scaled[0], acc[1] + scaled[1])
        steps = steps[1:]
        if turn + AHEAD < STEPS:
            steps = steps + (step_of(codes, scale_ptr, zero_ptr, first, lane, worker, turn + AHEAD),)
    back = ((power + 127) << 23).to(gl.float32, bitcast=True)
    total = gl.sum(gl.join(acc[0] * back, acc[1] * back).reshape([WARPS, 8, 4, 2]), axis=2)
    SUMS: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    meet = gl.allocate_shared_memory(gl.float32, [WARPS, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    meet.store(total.permute([0, 2, 1]).reshape([WARPS, 16]))
    total = gl.sum(meet.load(SUMS), axis=0)
    n = first * 16 + gl.arange(0, 16, gl.SliceLayout(0, SUMS))
    total = gl.inline_asm_elementwise(MEET, "=&f,f,r", [total, slots], dtype=gl.float32, is_pure=False, pack=1)
    gl.store(y_ptr + n, total.to(gl.float16), mask=(n < N) & (share == 0))


PROBLEM = "m=1..1 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n8@512,n2@4,n16@98304,k2@16,k4@128,k2@8,k2@32,k2@64,k24@4096;4/32"
SCHEDULE = "template=gemv_half block_m=1 block_n=16 block_k=128 unit=halves side=right scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=3 sum_at=shared warps=4 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=1"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
