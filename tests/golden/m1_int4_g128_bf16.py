# y[1, 256] = x[1, 1536] @ w[256, 1536].T · int4_g128 · bf16 · template=gemv block_m=1 block_n=1 block_k=2048 unit=lanes side=right scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=2 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=0
# made by: w4gen compile --m 1 --n 256 --k 1536 --format int4_g128 --dtype bf16 --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(256)  # outputs
K = tl.constexpr(1536)  # inputs
BLOCK_M = tl.constexpr(1)  # rows of x per program
BLOCK_N = tl.constexpr(1)  # outputs per program
LANES = tl.constexpr(64)  # lanes per step, 2048 k in all
QUAD = tl.constexpr(4)  # words of a lane
STEPS = tl.constexpr(1)  # steps along k
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
    quad = tl.arange(0, QUAD)
    magic = 0x4B000000 + tl.num_programs(2) - 1  # 0x4b000000, hidden from ptxas: and + or stay one LOP3
    acc = tl.zeros([LANES, BLOCK_N], tl.float32)
    for step in range(STEPS):
        lane = step * LANES + tl.arange(0, LANES)
        inside = lane[:, None, None] < 48
        w_tile_at = n[None, :, None] * 192 + lane[:, None, None] * 4 + quad[None, None, :]
        w_tile = tl.load(codes_ptr + w_tile_at, mask=inside, other=0, eviction_policy="evict_first")
        for span in tl.static_range(SPANS):
            part = tl.zeros([LANES, BLOCK_N, QUAD], tl.float32)
            for code in tl.static_range(span * CODES, span * CODES + CODES):
                w_codes = w_tile >> code // 5 * 12
                w_bits = (w_codes & (0xF << code * 4 - code // 5 * 12)) | magic
                w_float = w_bits.to(tl.float32, bitcast=True) * (1.0 / (1 << code * 4 - code // 5 * 12))
                w_value = w_float - (8388608.0 / (1 << code * 4 - code // 5 * 12) + 8.0)
                k = lane[:, None] // 4 * 128 + code * 16 + lane[:, None] % 4 * 4 + quad[None, :]
                x_tile = tl.load(x_ptr + k, mask=lane[:, None] < 48, other=0.0)
                x_value = x_tile.to(tl.float32)
                part += w_value * x_value[:, None, :]
            sums = tl.sum(part, axis=2)
            scale_at = tl.load(scale_ptr + n[None, :] * 12 + lane[:, None] // 4, mask=lane[:, None] < 48, other=0.0)
            scaled = sums * scale_at.to(tl.float32)
            acc += scaled
    total = tl.sum(acc, axis=0)
    tl.store(y_ptr + n, total.to(tl.bfloat16), mask=n < N)


PROBLEM = "m=1..1 n=256 k=1536 format=int4(bits=4,step=1.0,origin=-8.0,group=128,scale=f16) x=bf16 y=bf16 accumulate=f32 bias=0 layout=n256@6144,k16@32,k8@4,k12@512;4/32"
SCHEDULE = "template=gemv block_m=1 block_n=1 block_k=2048 unit=lanes side=right scale_at=accumulator zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=2 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
