# y[9..16, 256] = x[9..16, 1536] @ w[256, 1536].T · nf4_g64 · f16 · template=gemm block_m=16 block_n=64 block_k=64 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register split_k=4 sum_at=global warps=4 stages=3 maxnreg=0 vector=4 ring=2 overlap=0
# made by: w4gen compile --m 16 --n 256 --k 1536 --format nf4_g64 --dtype f16 --arch sm_80 --emit py
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


@triton.jit
def look_up(table, codes):
    """table[codes], through the registers of a warp."""
    return tl.gather(table, codes.reshape([codes.numel]), 0).reshape(codes.shape)


@triton.jit(do_not_specialize=["m_count"])
def gemm(
    parts_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    codebook_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for BLOCK_M rows of x, over every SPLIT-th step along k."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    j = tl.arange(0, BLOCK_K)
    codebook_tile = tl.load(codebook_ptr + tl.arange(0, 16))
    parts = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(STEPS // SPLIT):
        step = turn * SPLIT + share
        k = step * BLOCK_K + j // 16 * 16 + j // 2 % 2 * 8 + j // 4 % 4 * 2 + j % 2
        tall = (tl.program_id(1) * TALL + tl.arange(0, TALL))[:, None, None]
        wide = (step * WIDE + tl.arange(0, WIDE))[None, :, None]
        w_at = tall * 3072 + wide * WORDS + tl.arange(0, WORDS)[None, None, :]
        w_tile = tl.load(codes_ptr + w_at, eviction_policy="evict_first")
        x_tile = tl.load(x_ptr + m[:, None] * 1536 + k[None, :], mask=m[:, None] < m_count, other=0.0)
        scale_at = tl.load(scale_ptr + n // 16 * 384 + step * BLOCK_K // 64 * 16 + n % 8 * 2 + n // 8 % 2)
        shift = tl.arange(0, 8) * 4
        w_codes = w_tile[:, :, :, None] >> shift[None, None, None, :]
        w_value = look_up(codebook_tile, w_codes & 0xF).to(tl.float16)
        w_value = w_value.reshape([TALL, WIDE, 8, 4, 2, 2, 2, 2, 2])
        w_value = w_value.permute([0, 7, 2, 1, 4, 5, 3, 6, 8]).reshape([BLOCK_N, BLOCK_K])
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


PROBLEM = "m=9..16 n=256 k=1536 format=nf4(bits=4,step=1.0,origin=0.0,codebook=[-1.0,-0.6961928009986877,-0.5250730514526367,-0.39491748809814453,-0.28444138169288635,-0.18477343022823334,-0.09105003625154495,0.0,0.07958029955625534,0.16093020141124725,0.24611230194568634,0.33791524171829224,0.44070982933044434,0.5626170039176941,0.7229568362236023,1.0],group=64,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n8@512,n2@8,n16@98304,k2@4,k4@128,k2@16,k2@32,k2@64,k24@4096;4/32"
SCHEDULE = "template=gemm block_m=16 block_n=64 block_k=64 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register split_k=4 sum_at=global warps=4 stages=3 maxnreg=0 vector=4 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
