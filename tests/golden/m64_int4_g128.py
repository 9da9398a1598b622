# y[33..64, 256] = x[33..64, 1536] @ w[256, 1536].T · int4_g128 · f16 · template=gemm block_m=64 block_n=64 block_k=128 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register split_k=6 warps=4 stages=3 maxnreg=0 vector=4
# made by: w4gen compile --m 64 --n 256 --k 1536 --format int4_g128 --dtype f16 --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(256)  # outputs
K = tl.constexpr(1536)  # inputs
BLOCK_M = tl.constexpr(64)  # rows of x per program
BLOCK_N = tl.constexpr(64)  # outputs per program
WORDS = tl.constexpr(16)  # words per step, 128 k in all
STEPS = tl.constexpr(12)  # steps along k
SPANS = tl.constexpr(1)  # stretches of a word's codes under one scale
CODES = tl.constexpr(8)  # codes of a stretch
WARPS = tl.constexpr(4)  # warps per program
REPEAT = tl.constexpr(1)  # instructions of a warp along n
VECTOR = tl.constexpr(4)  # neighbouring words of a lane
PER_HALF = tl.constexpr(4)  # codes in half a word
HALVES = tl.constexpr(2)  # half words of a stretch
IN_HALF = tl.constexpr(4)  # codes of a stretch in each half word
SPLIT = tl.constexpr(6)  # programs that share k


@triton.jit
def halves(bits):
    """The two halves of every 32-bit word as 16-bit floats, along a last axis."""
    low = (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = ((bits >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def words_of(codes_ptr, first, step):
    """The words of a step, [t, g, warp, r, v]: each lane's own part of the left operand of its matrix instructions."""
    t = tl.arange(0, 4)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None]
    r = tl.arange(0, REPEAT * 8 // VECTOR)[None, None, None, :, None]
    v = tl.arange(0, VECTOR)[None, None, None, None, :]
    n = first + r // (8 // VECTOR) * (16 * WARPS) + warp * 16 + r // (4 // VECTOR) % 2 * 8 + g
    word = step * WORDS + r % (4 // VECTOR) * 8 + t * VECTOR + v
    w_tile = tl.load(codes_ptr + n * 192 + word, eviction_policy="evict_first")
    return w_tile


@triton.jit(do_not_specialize=["m_count"])
def gemm(
    parts_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for BLOCK_M rows of x, over every SPLIT-th step along k."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    magic = 0x64006400 + (m_count >> 31)  # hidden from ptxas: and + or stay one LOP3
    parts = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    w_next = words_of(codes_ptr, tl.program_id(1) * BLOCK_N, share)
    for turn in range(STEPS // SPLIT):
        step = turn * SPLIT + share
        w_tile = w_next
        # asked for before x, or the compiler sinks these loads behind the dot
        w_next = words_of(codes_ptr, tl.program_id(1) * BLOCK_N, tl.minimum(step + SPLIT, STEPS - 1))
        for span in tl.static_range(SPANS):
            scale_at = tl.load(scale_ptr + n * 12 + step * WORDS // 16)
            k = step * (16 * SPANS * CODES) + span * (16 * CODES) + tl.arange(0, 16 * CODES)
            x_tile = tl.load(x_ptr + m[:, None] * 1536 + k[None, :], mask=m[:, None] < m_count, other=0.0)
            u, v = tl.split(w_tile.reshape([32 * WARPS, 4 * REPEAT, 2]))
            half = (span * CODES // PER_HALF + tl.arange(0, HALVES)) * 16
            low = (span * CODES % PER_HALF + tl.arange(0, IN_HALF)) * 4
            pair = ((u[:, :, None] >> half[None, None, :]) & 0xFFFF) | ((v[:, :, None] >> half[None, None, :]) << 16)
            w_bits = ((pair[:, :, :, None] >> low[None, None, None, :]) & 0x000F000F) | magic
            w_value = halves(w_bits) - 1032.0
            w_value = w_value.reshape([4, 8, WARPS, REPEAT, 2, 4 // VECTOR, VECTOR // 2, HALVES, IN_HALF, 2])
            w_value = w_value.permute([3, 2, 4, 1, 7, 8, 5, 0, 6, 9]).reshape([BLOCK_N, 16 * CODES])
            part = tl.dot(w_value, tl.trans(x_tile))
            scaled = part * scale_at[:, None].to(tl.float32)
            parts += scaled
    tl.store(parts_ptr + (share * m_count + m[None, :]) * N + n[:, None], parts, mask=(m[None, :] < m_count) & (n[:, None] < N))


@triton.jit(do_not_specialize=["m_count"])
def add_parts(
    y_ptr,
    parts_ptr,
    m_count,
):
    """Adds the SPLIT partial sums of every output, in order."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    inside = at < m_count * N
    acc = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for share in tl.static_range(1, SPLIT):
        acc += tl.load(parts_ptr + share * m_count * N + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, acc.to(tl.float16), mask=inside)


PROBLEM = "m=33..64 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n256@6144,k16@32,k8@4,k12@512;4/32"
SCHEDULE = "template=gemm block_m=64 block_n=64 block_k=128 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register split_k=6 warps=4 stages=3 maxnreg=0 vector=4"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
