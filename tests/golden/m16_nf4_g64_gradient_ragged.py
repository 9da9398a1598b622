# dx[9..16, 1000] = dy[9..16, 37] @ w[37, 1000] · nf4_g64 · f16 · template=dgrad block_m=16 block_n=64 block_k=64 unit=mma side=right scale_at=weight zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=0
# made by: w4gen compile --problem 'm=9..16 n=37 k=1000 format=nf4(bits=4,step=1.0,origin=0.0,codebook=[-1.0,-0.6961928009986877,-0.5250730514526367,-0.39491748809814453,-0.28444138169288635,-0.18477343022823334,-0.09105003625154495,0.0,0.07958029955625534,0.16093020141124725,0.24611230194568634,0.33791524171829224,0.44070982933044434,0.5626170039176941,0.7229568362236023,1.0],group=64,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 gradient=1' --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(37)  # outputs, columns of dY
K = tl.constexpr(1000)  # inputs, columns of dX
BLOCK_M = tl.constexpr(16)  # rows of dY per program
BLOCK_N = tl.constexpr(64)  # outputs per step
BLOCK_K = tl.constexpr(64)  # inputs per program
STEPS = tl.constexpr(1)  # steps along n
STAGES = tl.constexpr(3)  # steps asked for ahead
TOGETHER = tl.constexpr(8)  # columns of programs that run through the rows of dY together


@triton.jit
def look_up(table, codes):
    """table[codes], through the registers of a warp."""
    return tl.gather(table, codes.reshape([codes.numel]), 0).reshape(codes.shape)


@triton.jit(do_not_specialize=["m_count"])
def dgrad(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    codebook_ptr,
    m_count,
):
    """Each program computes a block of dX, from rows of dY and columns of the weight, which it decodes as it goes along n."""
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    left = place // (TOGETHER * tl.num_programs(0)) * TOGETHER
    place = place - left * tl.num_programs(0)
    together = tl.minimum(tl.num_programs(1) - left, TOGETHER)
    column = left + place % together
    row = place // together
    codebook_tile = tl.load(codebook_ptr + tl.arange(0, 16))
    first = row.to(tl.int64) * BLOCK_M
    x_ptr += first * N
    y_ptr += first * K
    m_count = (m_count - first).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    k = column * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        n = tl.arange(0, BLOCK_N) + step * BLOCK_N
        w_tile_at = n[:, None] * 128 + k[None, :] // 128 * 16 + k[None, :] % 16
        w_tile = tl.load(codes_ptr + w_tile_at, mask=n[:, None] < N, other=0) >> (k[None, :] // 16 % 8 * 4)
        inside = (m[:, None] < m_count) & (n[None, :] < N)
        x_tile = tl.load(x_ptr + m[:, None] * 37 + n[None, :], mask=inside, other=0.0)
        scale_at = tl.load(scale_ptr + n * 16 + column * BLOCK_K // 64, mask=n < N, other=0.0)
        w_value = look_up(codebook_tile, w_tile & 0xF)
        w = (w_value * scale_at[:, None].to(tl.float32)).to(tl.float16)
        part = tl.dot(x_tile, w)
        acc += part
    tl.store(y_ptr + m[:, None] * K + k[None, :], acc.to(tl.float16), mask=(m[:, None] < m_count) & (k[None, :] < K))


PROBLEM = "m=9..16 n=37 k=1000 format=nf4(bits=4,step=1.0,origin=0.0,codebook=[-1.0,-0.6961928009986877,-0.5250730514526367,-0.39491748809814453,-0.28444138169288635,-0.18477343022823334,-0.09105003625154495,0.0,0.07958029955625534,0.16093020141124725,0.24611230194568634,0.33791524171829224,0.44070982933044434,0.5626170039176941,0.7229568362236023,1.0],group=64,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 gradient=1 layout=n37@4096,k16@32,k8@4,k8@512;4/32"
SCHEDULE = "template=dgrad block_m=16 block_n=64 block_k=64 unit=mma side=right scale_at=weight zero_at=weight convert_at=register x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=3 maxnreg=0 vector=2 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
