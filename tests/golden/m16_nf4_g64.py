# y[2..16, 256] = x[2..16, 1536] @ w[256, 1536].T · nf4_g64 · f16 · template=gemv block_m=16 block_n=32 block_k=128 unit=mma side=right scale_at=accumulator zero_at=weight convert_at=register split_k=1 warps=4 stages=3 maxnreg=0 vector=2
# made by: w4gen compile --m 16 --n 256 --k 1536 --format nf4_g64 --dtype f16 --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(256)  # outputs
K = tl.constexpr(1536)  # inputs
BLOCK_M = tl.constexpr(16)  # rows of x per program
BLOCK_N = tl.constexpr(32)  # outputs per program
WORDS = tl.constexpr(16)  # words per step, 128 k in all
STEPS = tl.constexpr(12)  # steps along k
SPANS = tl.constexpr(2)  # stretches of a word's codes under one scale
CODES = tl.constexpr(4)  # codes of a stretch


@triton.jit
def look_up(table, codes):
    """table[codes], through the registers of a warp."""
    return tl.gather(table, codes.reshape([codes.numel]), 0).reshape(codes.shape)


@triton.jit(do_not_specialize=["m_count"])
def gemv(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    codebook_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for every row of x, walking along k."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    codebook_tile = tl.load(codebook_ptr + tl.arange(0, 16))
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        word = step * WORDS + tl.arange(0, WORDS)
        w_tile = tl.load(codes_ptr + n[:, None] * 192 + word[None, :])
        for span in tl.static_range(SPANS):
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for code in tl.static_range(span * CODES, span * CODES + CODES):
                w_codes = w_tile >> code * 4
                w_value = look_up(codebook_tile, w_codes & 0xF).to(tl.float16)
                k = word // 16 * 128 + code * 16 + word % 16
                x_tile = tl.load(x_ptr + m[:, None] * 1536 + k[None, :], mask=m[:, None] < m_count, other=0.0)
                part = tl.dot(x_tile, tl.trans(w_value), part)
            scale_at = tl.load(scale_ptr + n * 24 + step * WORDS // 16 * 2 + span * CODES // 4)
            scaled = part * scale_at[None, :].to(tl.float32)
            acc += scaled
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16), mask=(m[:, None] < m_count) & (n[None, :] < N))


PROBLEM = "m=2..16 n=256 k=1536 format=nf4(bits=4,step=1.0,origin=0.0,codebook=[-1.0,-0.6961928009986877,-0.5250730514526367,-0.39491748809814453,-0.28444138169288635,-0.18477343022823334,-0.09105003625154495,0.0,0.07958029955625534,0.16093020141124725,0.24611230194568634,0.33791524171829224,0.44070982933044434,0.5626170039176941,0.7229568362236023,1.0],group=64,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n256@6144,k16@32,k8@4,k12@512;4/32"
SCHEDULE = "template=gemv block_m=16 block_n=32 block_k=128 unit=mma side=right scale_at=accumulator zero_at=weight convert_at=register split_k=1 warps=4 stages=3 maxnreg=0 vector=2"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
