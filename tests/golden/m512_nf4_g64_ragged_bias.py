# y[257..512, 37] = x[257..512, 1000] @ w[37, 1000].T · nf4_g64 · f16 · template=dequant block_m=1 block_n=4 block_k=512 unit=vendor side=right scale_at=weight zero_at=weight convert_at=global x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=0
# made by: w4gen compile --m 512 --n 37 --k 1000 --format nf4_g64 --dtype f16 --bias --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(37)  # outputs
K = tl.constexpr(1000)  # inputs
BLOCK_N = tl.constexpr(4)  # outputs per program
BLOCK_K = tl.constexpr(512)  # inputs per program


@triton.jit
def look_up(table, codes):
    """table[codes], through the registers of a warp."""
    return tl.gather(table, codes.reshape([codes.numel]), 0).reshape(codes.shape)


@triton.jit
def dequant(
    dense_ptr,
    codes_ptr,
    scale_ptr,
    codebook_ptr,
):
    """Each program dequantizes a block of the weight; the vendor's matmul multiplies it."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    codebook_tile = tl.load(codebook_ptr + tl.arange(0, 16))
    w_tile_at = n[:, None] * 128 + k[None, :] // 128 * 16 + k[None, :] % 16
    w_tile = tl.load(codes_ptr + w_tile_at, mask=n[:, None] < N, other=0) >> (k[None, :] // 16 % 8 * 4)
    scale_tile = tl.load(scale_ptr + n[:, None] * 16 + k[None, :] // 64, mask=n[:, None] < N, other=0.0)
    w_value = look_up(codebook_tile, w_tile & 0xF)
    w = (w_value * scale_tile.to(tl.float32)).to(tl.float16)
    tl.store(dense_ptr + n[:, None] * K + k[None, :], w.to(tl.float16), mask=(n[:, None] < N) & (k[None, :] < K))


PROBLEM = "m=257..512 n=37 k=1000 format=nf4(bits=4,step=1.0,origin=0.0,codebook=[-1.0,-0.6961928009986877,-0.5250730514526367,-0.39491748809814453,-0.28444138169288635,-0.18477343022823334,-0.09105003625154495,0.0,0.07958029955625534,0.16093020141124725,0.24611230194568634,0.33791524171829224,0.44070982933044434,0.5626170039176941,0.7229568362236023,1.0],group=64,scale=f16) x=f16 y=f16 accumulate=f32 bias=1 layout=n37@4096,k16@32,k8@4,k8@512;4/32"
SCHEDULE = "template=dequant block_m=1 block_n=4 block_k=512 unit=vendor side=right scale_at=weight zero_at=weight convert_at=global x_at=register w_at=register split_k=1 sum_at=global warps=4 teams=1 stages=1 maxnreg=0 vector=2 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
