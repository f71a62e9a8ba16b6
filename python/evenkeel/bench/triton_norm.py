"""Layer norm in Triton, in the design of Triton's layer norm tutorial.

One program has a whole row in registers. In backward it adds its share of dweight and dbias to one of
a few buffers, each under a lock, and a second kernel sums the buffers.
"""

import torch
import triton
import triton.language as tl

from evenkeel.bench.lines import EPS

MAX_ROW_BYTES = 65536
TILE_ROWS, TILE_COLS = 32, 128


@triton.jit
def forward_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, cols, eps, block: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < cols
    start = row.to(tl.int64) * cols
    x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / cols
    centered = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=0) / cols + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + at, centered * rstd * weight + bias, mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def backward_kernel(
    x_ptr,
    dy_ptr,
    dx_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dweight_ptr,
    dbias_ptr,
    lock_ptr,
    cols,
    groups: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, block)
    inside = at < cols
    start = row.to(tl.int64) * cols
    x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    normalized = tl.where(inside, (x - mean) * rstd, 0.0)
    scaled = dy * weight
    slope = tl.sum(scaled * normalized, axis=0) / cols
    level = tl.sum(scaled, axis=0) / cols
    dx = (scaled - level - normalized * slope) * rstd
    tl.store(dx_ptr + start + at, dx, mask=inside)

    group = row % groups
    lock = lock_ptr + group
    dweight_at = dweight_ptr + group * cols + at
    dbias_at = dbias_ptr + group * cols + at
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    # The buffers start uninitialized; a word for each says whether somebody has written to it.
    filled = tl.atomic_xchg(lock + groups, 1, sem="relaxed")
    present = inside & (filled == 1)
    dweight = dy * normalized + tl.load(dweight_at, mask=present, other=0.0).to(tl.float32)
    dbias = dy + tl.load(dbias_at, mask=present, other=0.0).to(tl.float32)
    tl.store(dweight_at, dweight, mask=inside)
    tl.store(dbias_at, dbias, mask=inside)
    # One thread opens the lock, but all warps have stored.
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def sum_kernel(
    partial_dweight_ptr,
    partial_dbias_ptr,
    dweight_ptr,
    dbias_ptr,
    groups,
    cols,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
):
    at = tl.program_id(0) * tile_cols + tl.arange(0, tile_cols)
    dweight = tl.zeros((tile_rows, tile_cols), dtype=tl.float32)
    dbias = tl.zeros((tile_rows, tile_cols), dtype=tl.float32)
    for first in range(0, groups, tile_rows):
        group = first + tl.arange(0, tile_rows)
        inside = (group[:, None] < groups) & (at[None, :] < cols)
        place = group[:, None] * cols + at[None, :]
        dweight += tl.load(partial_dweight_ptr + place, mask=inside, other=0.0).to(tl.float32)
        dbias += tl.load(partial_dbias_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(dweight_ptr + at, tl.sum(dweight, axis=0), mask=at < cols)
    tl.store(dbias_ptr + at, tl.sum(dbias, axis=0), mask=at < cols)


class TritonPair:
    def __init__(self, line):
        if line.op != "layer_norm" or line.mixed:
            raise ValueError("only layer norm, with parameters in x's dtype")
        if line.cols * line.x_dtype.itemsize > MAX_ROW_BYTES:
            raise ValueError("a row is longer than 64 KB")
        self.rows, self.cols = line.rows, line.cols
        self.block = triton.next_power_of_2(line.cols)
        self.warps = min(max(self.block // 256, 1), 8)
        # Longer rows have fewer buffers, so that these stay in the L2 cache.
        groups = next((g for n, g in ((1024, 256), (4096, 128), (8192, 96)) if line.cols <= n), 64)
        self.groups = min(groups, line.rows)

    def forward(self, s):
        """(y, mean, rstd)"""
        x, weight, bias = s.inputs
        y = torch.empty_like(x)
        mean, rstd = (torch.empty(self.rows, device=x.device) for _ in range(2))
        forward_kernel[(self.rows,)](
            x, y, weight, bias, mean, rstd, self.cols, EPS, block=self.block, num_warps=self.warps
        )
        return y, mean, rstd

    keep = forward

    def backward(self, s, kept):
        x, weight, bias = s.inputs
        _, mean, rstd = kept
        locks = torch.zeros(2 * self.groups, dtype=torch.int32, device=x.device)
        partial_dweight, partial_dbias = (x.new_empty(self.groups, self.cols) for _ in range(2))
        dx, dweight, dbias = (torch.empty_like(v) for v in (x, weight, bias))
        backward_kernel[(self.rows,)](
            x,
            s.dy,
            dx,
            weight,
            mean,
            rstd,
            partial_dweight,
            partial_dbias,
            locks,
            self.cols,
            groups=self.groups,
            block=self.block,
            num_warps=self.warps,
        )
        sum_kernel[(triton.cdiv(self.cols, TILE_COLS),)](
            partial_dweight,
            partial_dbias,
            dweight,
            dbias,
            self.groups,
            self.cols,
            tile_rows=TILE_ROWS,
            tile_cols=TILE_COLS,
        )
        return dx, dweight, dbias
