# y[9..16, 256] = x[9..16, 1536] @ w[256, 1536].T · uint4_g32_m · f16 · template=gemm block_m=16 block_n=64 block_k=64 unit=mma side=left scale_at=weight zero_at=weight convert_at=register x_at=register w_at=register split_k=4 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=4 ring=2 overlap=0
# made by: w4gen compile --m 16 --n 256 --k 1536 --format uint4_g32_m --dtype f16 --arch sm_80 --emit py
import triton
import triton.language as tl

N = tl.constexpr(256)  # outputs
K = tl.constexpr(1536)  # inputs
BLOCK_M = tl.constexpr(16)  # rows of x per program
BLOCK_N = tl.constexpr(64)  # outputs per program
BLOCK_K = tl.constexpr(64)  # inputs per step
TALL = tl.constexpr(4)  # stored blocks of 16 outputs
WIDE = tl.constexpr(1)  # stored blocks of 64 inputs
WORDS = tl.constexpr(128)  # words of a stored block
STEPS = tl.constexpr(24)  # steps along k
SPLIT = tl.constexpr(4)  # programs that share k


@triton.jit(do_not_specialize=["m_count"])
def gemm(
    parts_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for BLOCK_M rows of x, over every SPLIT-th step along k."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    j = tl.arange(0, BLOCK_K)
    magic = 0x4B000000 + (m_count >> 31)  # 0x4b000000, hidden from ptxas: and + or stay one LOP3
    parts = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(STEPS // SPLIT):
        step = turn * SPLIT + share
        k = step * BLOCK_K + j // 16 * 16 + j // 2 % 2 * 8 + j // 4 % 4 * 2 + j % 2
        tall = (tl.program_id(1) * TALL + tl.arange(0, TALL))[:, None, None]
        wide = (step * WIDE + tl.arange(0, WIDE))[None, :, None]
        w_at = tall * 3072 + wide * WORDS + tl.arange(0, WORDS)[None, None, :]
        w_tile = tl.load(codes_ptr + w_at, eviction_policy="evict_first")
        x_tile = tl.load(x_ptr + m[:, None] * 1536 + k[None, :], mask=m[:, None] < m_count, other=0.0)
        shift = tl.arange(0, 8) * 4
        w_codes = w_tile[:, :, :, None] >> shift[None, None, None, :]
        w_bits = (w_codes & 0xF) | magic
        w_float = w_bits.to(tl.float32, bitcast=True)
        w_value = w_float - 8388608.0
        w_value = w_value.reshape([TALL, WIDE, 8, 4, 2, 2, 2, 2, 2])
        w_value = w_value.permute([0, 8, 2, 1, 4, 5, 3, 7, 6]).reshape([BLOCK_N, BLOCK_K])
        scale_tile_at = n[:, None] // 16 * 768 + k[None, :] // 128 * 64
        scale_tile_at += n[:, None] % 8 * 8 + k[None, :] // 32 % 4 * 2 + n[:, None] // 8 % 2
        scale_tile = tl.load(scale_ptr + scale_tile_at)
        w_scaled = w_value * scale_tile.to(tl.float32)
        zero_tile_at = n[:, None] // 16 * 768 + k[None, :] // 128 * 64
        zero_tile_at += n[:, None] % 8 * 8 + k[None, :] // 32 % 4 * 2 + n[:, None] // 8 % 2
        zero_tile = tl.load(zero_ptr + zero_tile_at)
        w = (w_scaled - zero_tile.to(tl.float32)).to(tl.float16)
        part = tl.dot(w, tl.trans(x_tile))
        parts += part
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


PROBLEM = "m=9..16 n=256 k=1536 format=uint4(bits=4,step=1.0,origin=0.0,group=32,scale=f16,zero=f16,zero_mode=minimum) x=f16 y=f16 accumulate=f32 bias=0 layout=n8@512,n2@4,n16@98304,k2@16,k4@128,k2@8,k2@32,k2@64,k24@4096;4/32"
SCHEDULE = "template=gemm block_m=16 block_n=64 block_k=64 unit=mma side=left scale_at=weight zero_at=weight convert_at=register x_at=register w_at=register split_k=4 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=4 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
