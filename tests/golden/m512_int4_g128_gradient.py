# dx[257..512, 1536] = dy[257..512, 256] @ w[256, 1536] · int4_g128 · f16 · template=dgrad block_m=64 block_n=64 block_k=64 unit=mma side=right scale_at=weight zero_at=weight convert_at=register x_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=0
# made by: w4gen compile --problem 'm=257..512 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 gradient=1' --arch sm_90 --emit py
import triton
import triton.language as tl

N = tl.constexpr(256)  # outputs, columns of dY
K = tl.constexpr(1536)  # inputs, columns of dX
BLOCK_M = tl.constexpr(64)  # rows of dY per program
BLOCK_N = tl.constexpr(64)  # outputs per step
BLOCK_K = tl.constexpr(64)  # inputs per program
STEPS = tl.constexpr(4)  # steps along n
STAGES = tl.constexpr(3)  # steps asked for ahead
TOGETHER = tl.constexpr(8)  # columns of programs that run through the rows of dY together
TALL = tl.constexpr(4)  # stored blocks of 16 outputs
WIDE = tl.constexpr(1)  # stored blocks of 64 inputs
WORDS = tl.constexpr(128)  # words of a stored block


@triton.jit
def halves(bits):
    """The two halves of every 32-bit word as 16-bit floats, along a last axis."""
    low = (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = ((bits >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit(do_not_specialize=["m_count"])
def dgrad(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each program computes a block of dX, from rows of dY and columns of the weight, which it decodes as it goes along n."""
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    left = place // (TOGETHER * tl.num_programs(0)) * TOGETHER
    place = place - left * tl.num_programs(0)
    together = tl.minimum(tl.num_programs(1) - left, TOGETHER)
    column = left + place % together
    row = place // together
    magic = 0x64006400 + (m_count >> 31)  # hidden from ptxas: and + or stay one LOP3
    first = row.to(tl.int64) * BLOCK_M
    x_ptr += first * N
    y_ptr += first * K
    m_count = (m_count - first).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    k = column * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        n = tl.arange(0, BLOCK_N) + step * BLOCK_N
        tall = (tl.arange(0, TALL) + step * TALL)[:, None, None]
        wide = (column * WIDE + tl.arange(0, WIDE))[None, :, None]
        w_at = tall * 3072 + wide * WORDS + tl.arange(0, WORDS)[None, None, :]
        w_tile = tl.load(codes_ptr + w_at)
        x_tile = tl.load(x_ptr + m[:, None] * 256 + n[None, :], mask=m[:, None] < m_count, other=0.0)
        tall = (tl.arange(0, TALL) + step * TALL)[:, None]
        at = tall * 192 + column * BLOCK_K // 128 * 16 + tl.arange(0, 16)[None, :]
        scale_at = tl.load(scale_ptr + at)
        scale_at = scale_at.reshape([TALL, 8, 2]).permute([0, 2, 1]).reshape([BLOCK_N])
        w_4_0 = tl.join(w_tile, w_tile >> 8)
        w_4_1 = tl.join(w_tile >> 4, w_tile >> 12)
        w_moved = tl.join(w_4_0, w_4_1)
        w_bits = (w_moved & 0x000F000F) | magic
        w_value = halves(w_bits) - 1032.0
        w_value = w_value.reshape([TALL, WIDE, 8, 4, 2, 2, 2, 2, 2])
        w_value = w_value.permute([0, 7, 2, 1, 4, 5, 6, 3, 8]).reshape([BLOCK_N, BLOCK_K])
        w = w_value * scale_at[:, None]
        part = tl.dot(x_tile, w)
        acc += part
    tl.store(y_ptr + m[:, None] * K + k[None, :], acc.to(tl.float16), mask=(m[:, None] < m_count) & (k[None, :] < K))


PROBLEM = "m=257..512 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 gradient=1 layout=n8@512,n2@4,n16@98304,k2@16,k4@128,k2@8,k2@32,k2@64,k24@4096;4/32"
SCHEDULE = "template=dgrad block_m=64 block_n=64 block_k=64 unit=mma side=right scale_at=weight zero_at=weight convert_at=register x_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
