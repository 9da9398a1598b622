# y[33..64, 4096] = x[33..64, 4096] @ w[4096, 4096].T · int4_g128 · f16 · template=gemm block_m=64 block_n=128 block_k=128 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=4 sum_at=global warps=8 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=1
# made by: w4gen compile --m 64 --n 4096 --k 4096 --format int4_g128 --dtype f16 --arch sm_90 --emit py
import triton
import triton.language as tl

N = tl.constexpr(4096)  # outputs
K = tl.constexpr(4096)  # inputs
BLOCK_M = tl.constexpr(64)  # rows of x per program
BLOCK_N = tl.constexpr(128)  # outputs per program
BLOCK_K = tl.constexpr(128)  # inputs per step
TALL = tl.constexpr(8)  # stored blocks of 16 outputs
WIDE = tl.constexpr(2)  # stored blocks of 64 inputs
WORDS = tl.constexpr(128)  # words of a stored block
STEPS = tl.constexpr(32)  # steps along k
SPLIT = tl.constexpr(4)  # programs that share k


@triton.jit
def halves(bits):
    """The two halves of every 32-bit word as 16-bit floats, along a last axis."""
    low = (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = ((bits >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def wait():
    """Let the next kernel start, and wait for the end of the one in front."""
    text: tl.constexpr = "griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\nmov.u32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["m_count"])
def gemm(
    parts_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for BLOCK_M rows of x, over every SPLIT-th step along k."""
    wait()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(2)
    magic = 0x64006400 + (m_count >> 31)  # hidden from ptxas: and + or stay one LOP3
    parts = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in range(STEPS // SPLIT):
        step = turn * SPLIT + share
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        tall = (tl.program_id(1) * TALL + tl.arange(0, TALL))[:, None, None]
        wide = (step * WIDE + tl.arange(0, WIDE))[None, :, None]
        w_at = tall * 8192 + wide * WORDS + tl.arange(0, WORDS)[None, None, :]
        w_tile = tl.load(codes_ptr + w_at, eviction_policy="evict_first")
        x_tile = tl.load(x_ptr + m[:, None] * 4096 + k[None, :], mask=m[:, None] < m_count, other=0.0)
        scale_at = tl.load(scale_ptr + n // 16 * 512 + step * BLOCK_K // 128 * 16 + n % 8 * 2 + n // 8 % 2)
        shift = tl.arange(0, 4) * 4
        w_bits = ((w_tile[:, :, :, None] >> shift[None, None, None, :]) & 0x000F000F) | magic
        w_value = halves(w_bits) - 1032.0
        w_value = w_value.reshape([TALL, WIDE, 8, 4, 2, 2, 2, 2, 2])
        w_value = w_value.permute([0, 7, 2, 1, 4, 5, 6, 3, 8]).reshape([BLOCK_N, BLOCK_K])
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
    wait()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    inside = at < m_count * N
    acc = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for share in tl.static_range(1, SPLIT):
        acc += tl.load(parts_ptr + share * m_count * N + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, acc.to(tl.float16), mask=inside)


PROBLEM = "m=33..64 n=4096 k=4096 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n8@512,n2@4,n256@262144,k2@16,k4@128,k2@8,k2@32,k2@64,k64@4096;4/32"
SCHEDULE = "template=gemm block_m=64 block_n=128 block_k=128 unit=mma side=left scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=4 sum_at=global warps=8 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=1"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
