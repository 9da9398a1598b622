# y[1, 37] = x[1, 1000] @ w[37, 1000].T · nf4_g64 · f16 · template=gemv block_m=1 block_n=2 block_k=1024 unit=lanes side=right scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=1 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=0
# made by: w4gen compile --m 1 --n 37 --k 1000 --format nf4_g64 --dtype f16 --bias --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(37)  # outputs
K = tl.constexpr(1000)  # inputs
BLOCK_M = tl.constexpr(1)  # rows of x per program
BLOCK_N = tl.constexpr(2)  # outputs per program
LANES = tl.constexpr(32)  # lanes per step, 1024 k in all
QUAD = tl.constexpr(4)  # words of a lane
STEPS = tl.constexpr(1)  # steps along k
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
    bias_ptr,
    m_count,
):
    """Each program computes BLOCK_N outputs for every row of x, walking along k."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    quad = tl.arange(0, QUAD)
    codebook_tile = tl.load(codebook_ptr + tl.arange(0, 16))
    acc = tl.zeros([LANES, BLOCK_N], tl.float32)
    for step in range(STEPS):
        lane = step * LANES + tl.arange(0, LANES)
        inside = n[None, :, None] < N
        w_tile_at = n[None, :, None] * 128 + lane[:, None, None] * 4 + quad[None, None, :]
        w_tile = tl.load(codes_ptr + w_tile_at, mask=inside, other=0, eviction_policy="evict_first")
        for span in tl.static_range(SPANS):
            part = tl.zeros([LANES, BLOCK_N, QUAD], tl.float32)
            for code in tl.static_range(span * CODES, span * CODES + CODES):
                w_codes = w_tile >> code * 4
                w_value = look_up(codebook_tile, w_codes & 0xF)
                k = lane[:, None] // 4 * 128 + code * 16 + lane[:, None] % 4 * 4 + quad[None, :]
                x_tile = tl.load(x_ptr + k, mask=k < K, other=0.0)
                x_value = x_tile.to(tl.float32)
                part += w_value * x_value[:, None, :]
            sums = tl.sum(part, axis=2)
            scale_at_at = n[None, :] * 16 + lane[:, None] // 4 * 2 + span * CODES // 4
            scale_at = tl.load(scale_ptr + scale_at_at, mask=n[None, :] < N, other=0.0)
            scaled = sums * scale_at.to(tl.float32)
            acc += scaled
    total = tl.sum(acc, axis=0)
    bias_tile = tl.load(bias_ptr + n, mask=n < N, other=0.0)
    total += bias_tile.to(tl.float32)
    tl.store(y_ptr + n, total.to(tl.float16), mask=n < N)


PROBLEM = "m=1..1 n=37 k=1000 format=nf4(bits=4,step=1.0,origin=0.0,codebook=[-1.0,-0.6961928009986877,-0.5250730514526367,-0.39491748809814453,-0.28444138169288635,-0.18477343022823334,-0.09105003625154495,0.0,0.07958029955625534,0.16093020141124725,0.24611230194568634,0.33791524171829224,0.44070982933044434,0.5626170039176941,0.7229568362236023,1.0],group=64,scale=f16) x=f16 y=f16 accumulate=f32 bias=1 layout=n37@4096,k16@32,k8@4,k8@512;4/32"
SCHEDULE = "template=gemv block_m=1 block_n=2 block_k=1024 unit=lanes side=right scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=1 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
