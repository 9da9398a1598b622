# y[2..16, 256] = x[2..16, 1536] @ w[256, 1536].T · uint4_g32_m · f16 · template=gemv block_m=16 block_n=32 block_k=128 unit=mma side=right scale_at=accumulator zero_at=accumulator convert_at=register split_k=1 warps=4 stages=3 maxnreg=0 vector=2
# made by: w4gen compile --m 16 --n 256 --k 1536 --format uint4_g32_m --dtype f16 --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(256)  # outputs
K = tl.constexpr(1536)  # inputs
BLOCK_M = tl.constexpr(16)  # rows of x per program
BLOCK_N = tl.constexpr(32)  # outputs per program
WORDS = tl.constexpr(16)  # words per step, 128 k in all
STEPS = tl.constexpr(12)  # steps along k
SPANS = tl.constexpr(4)  # stretches of a word's codes under one scale
CODES = tl.constexpr(2)  # codes of a stretch


@triton.jit(do_not_specialize=["m_count"])
def gemv(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for every row of x, walking along k."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        word = step * WORDS + tl.arange(0, WORDS)
        w_tile = tl.load(codes_ptr + n[:, None] * 192 + word[None, :])
        for span in tl.static_range(SPANS):
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            x_sum = tl.zeros([BLOCK_M, WORDS], tl.float32)
            for code in tl.static_range(span * CODES, span * CODES + CODES):
                w_codes = (w_tile >> code // 2 * 8).to(tl.int16)
                w_bits = (w_codes & (0xF << code % 2 * 4)) | 0x6400
                w_float = w_bits.to(tl.float16, bitcast=True) * (1.0 / (1 << code % 2 * 4))
                w_value = w_float - 1024.0 / (1 << code % 2 * 4)
                k = word // 16 * 128 + code * 16 + word % 16
                x_tile = tl.load(x_ptr + m[:, None] * 1536 + k[None, :], mask=m[:, None] < m_count, other=0.0)
                part = tl.dot(x_tile, tl.trans(w_value), part)
                x_sum += x_tile
            x_sums = tl.sum(x_sum, axis=1)
            scale_at = tl.load(scale_ptr + n * 48 + step * WORDS // 16 * 4 + span * CODES // 2)
            scaled = part * scale_at[None, :].to(tl.float32)
            zero_at = tl.load(zero_ptr + n * 48 + step * WORDS // 16 * 4 + span * CODES // 2)
            shifted = scaled - zero_at[None, :].to(tl.float32) * x_sums[:, None]
            acc += shifted
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16), mask=(m[:, None] < m_count) & (n[None, :] < N))


PROBLEM = "m=2..16 n=256 k=1536 format=uint4(bits=4,step=1.0,origin=0.0,group=32,scale=f16,zero=f16,zero_mode=minimum) x=f16 y=f16 accumulate=f32 bias=0 layout=n256@6144,k16@32,k8@4,k12@512;4/32"
SCHEDULE = "template=gemv block_m=16 block_n=32 block_k=128 unit=mma side=right scale_at=accumulator zero_at=accumulator convert_at=register split_k=1 warps=4 stages=3 maxnreg=0 vector=2"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
