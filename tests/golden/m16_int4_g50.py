# y[9..16, 40] = x[9..16, 600] @ w[40, 600].T · int4_g50 · f16 · template=gemv block_m=16 block_n=32 block_k=128 unit=mma side=right scale_at=weight zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=0
# made by: w4gen compile --m 16 --n 40 --k 600 --format int4_g50 --dtype f16 --arch sm_80 --emit py
import triton
import triton.language as tl

N = tl.constexpr(40)  # outputs
K = tl.constexpr(600)  # inputs
BLOCK_M = tl.constexpr(16)  # rows of x per program
BLOCK_N = tl.constexpr(32)  # outputs per program
WORDS = tl.constexpr(16)  # words per step, 128 k in all
STEPS = tl.constexpr(5)  # steps along k
SPANS = tl.constexpr(1)  # stretches of a word's codes under one scale
CODES = tl.constexpr(8)  # codes of a stretch


@triton.jit(do_not_specialize=["m_count"])
def gemv(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for every row of x, walking along k."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    magic = 0x4B000000 + tl.num_programs(2) - 1  # 0x4b000000, hidden from ptxas: and + or stay one LOP3
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        word = step * WORDS + tl.arange(0, WORDS)
        inside = (n[:, None] < N) & (word[None, :] < 76)
        w_tile = tl.load(codes_ptr + n[:, None] * 76 + word[None, :], mask=inside, other=0)
        for span in tl.static_range(SPANS):
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for code in tl.static_range(span * CODES, span * CODES + CODES):
                w_codes = w_tile >> code // 5 * 12
                w_bits = (w_codes & (0xF << code * 4 - code // 5 * 12)) | magic
                w_float = w_bits.to(tl.float32, bitcast=True) * (1.0 / (1 << code * 4 - code // 5 * 12))
                w_value = w_float - (8388608.0 / (1 << code * 4 - code // 5 * 12) + 8.0)
                g = (word // 4 * 32 + code * 4 + word % 4) // 50
                inside = (n[:, None] < N) & (word[None, :] < 76)
                scale_tile = tl.load(scale_ptr + n[:, None] * 13 + g[None, :], mask=inside, other=0.0)
                w = (w_value * scale_tile.to(tl.float32)).to(tl.float16)
                k = word // 4 * 32 + code * 4 + word % 4
                inside = (m[:, None] < m_count) & (word[None, :] < 76) & (k[None, :] < K)
                x_tile = tl.load(x_ptr + m[:, None] * 600 + k[None, :], mask=inside, other=0.0)
                part = tl.dot(x_tile, tl.trans(w), part)
            acc += part
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16), mask=(m[:, None] < m_count) & (n[None, :] < N))


PROBLEM = "m=9..16 n=40 k=600 format=int4(bits=4,step=1.0,origin=-8.0,group=50,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n40@2432,k4@32,k8@4,k19@128;4/32"
SCHEDULE = "template=gemv block_m=16 block_n=32 block_k=128 unit=mma side=right scale_at=weight zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
