# y[9..16, 40] = x[9..16, 600] @ w[40, 600].T · int4_g50 · f16 · template=dequant block_m=1 block_n=4 block_k=512 unit=vendor side=right scale_at=weight zero_at=weight convert_at=global split_k=1 sum_at=global warps=4 stages=1 maxnreg=0 vector=2 ring=2 overlap=0
# made by: w4gen compile --m 16 --n 40 --k 600 --format int4_g50 --dtype f16 --arch portable --emit py
import triton
import triton.language as tl

N = tl.constexpr(40)  # outputs
K = tl.constexpr(600)  # inputs
BLOCK_N = tl.constexpr(4)  # outputs per program
BLOCK_K = tl.constexpr(512)  # inputs per program


@triton.jit
def dequant(
    dense_ptr,
    codes_ptr,
    scale_ptr,
):
    """Each program dequantizes a block of the weight; the vendor's matmul multiplies it."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    magic = 0x4B000000 + tl.num_programs(2) - 1  # 0x4b000000, hidden from ptxas: and + or stay one LOP3
    w_tile_at = n[:, None] * 76 + k[None, :] // 32 * 4 + k[None, :] % 4
    w_tile = tl.load(codes_ptr + w_tile_at, mask=k[None, :] < K, other=0) >> (k[None, :] // 4 % 8 * 4)
    scale_tile = tl.load(scale_ptr + n[:, None] * 13 + k[None, :] // 50, mask=k[None, :] < K, other=0.0)
    w_bits = (w_tile & 0xF) | magic
    w_float = w_bits.to(tl.float32, bitcast=True)
    w_value = w_float - 8388616.0
    w = (w_value * scale_tile.to(tl.float32)).to(tl.float16)
    tl.store(dense_ptr + n[:, None] * K + k[None, :], w.to(tl.float16), mask=(n[:, None] < N) & (k[None, :] < K))


PROBLEM = "m=9..16 n=40 k=600 format=int4(bits=4,step=1.0,origin=-8.0,group=50,scale=f16) x=f16 y=f16 accumulate=f32 bias=0 layout=n40@2432,k4@32,k8@4,k19@128;4/32"
SCHEDULE = "template=dequant block_m=1 block_n=4 block_k=512 unit=vendor side=right scale_at=weight zero_at=weight convert_at=global split_k=1 sum_at=global warps=4 stages=1 maxnreg=0 vector=2 ring=2 overlap=0"

if __name__ == "__main__":
    from w4gen.runtime.check import main

    raise SystemExit(main(__file__))
