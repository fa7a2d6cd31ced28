"""Times of terms against their floors, of what else computes them, and of other tiles."""

import math
import os
import time

import torch

from benchmarks.gpu.common import (
    DEVICE,
    DRY,
    FIVE,
    chosen,
    clock,
    measured_rates,
    numbered,
    say,
    sync,
    told,
    unit,
)
from benchmarks.objectives import forward_backward
from benchmarks.table import Case
from benchmarks.workloads import TERMS, Draw
from heron.losses import fused
from heron.losses.fused import layout
from heron.losses.fused.layout import Tiling

Timed = tuple[str, int, int, str, str]  # term, N, d, precision, method
TILES = {
    512: [Tiling(64, 32, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 2)],
    256: [Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 2), Tiling(64, 128, 4, 2),
          Tiling(128, 128, 8, 2), Tiling(64, 64, 4, 3)],
    128: [Tiling(64, 64, 4, 3), Tiling(128, 64, 8, 3), Tiling(128, 128, 8, 3),
          Tiling(64, 128, 4, 3), Tiling(64, 128, 4, 2)],
}  # fmt: skip


def ours() -> list[Timed]:
    if DRY:
        return [("nt_xent", 64, 32, "bf16", "ours"), ("nt_xent", 64, 32, "bf16", "dense")]
    large, small, further = 65_536, 8_192, ("nt_xent", "supcon", "weighted_unsupervised")
    cases = [(t, large, 256, "bf16", "ours") for t in FIVE]
    cases += [("nt_xent", large, d, "bf16", "ours") for d in (512, 128, 768)]
    cases += [("weighted_supervised", large, 768, "bf16", "ours")]
    cases += [(t, small, 256, "bf16", m) for t in FIVE for m in ("ours", "dense")]
    cases += [(t, large, 256, "fp16", "ours") for t in FIVE]
    cases += [(f"weighted_{t}supervised", large, 512, "bf16", "ours") for t in ("un", "")]
    cases += [("nt_xent", n, 256, "bf16", "ours") for n in (16_384, 32_768, 4_096, 1_024)]
    return cases + [(t, 16_384, 256, "bf16", "dense") for t in further]


def others() -> list[Timed]:
    if DRY:
        return [("nt_xent", 64, 32, "bf16", "ours")]
    cases = []
    for n in (8_192, 65_536):
        cases += [("nt_xent", n, 256, "bf16", "siglip-kernel"), ("cmc", n, 256, "bf16", "ours")]
        cases += [("cmc", n, 256, "fp16", "inf-cl")]
    terms = "nt_xent", "supcon", "weighted_unsupervised"
    return cases + [(t, 8_192, 256, "bf16", "compiled") for t in terms]


def fast(first: int) -> None:
    timed(ours(), first)


def peers(first: int) -> None:
    timed(others(), first)


def timed(cases: list[Timed], first: int) -> None:
    """Times forward and backward of each case, and says the ratio to its floor and its memory."""
    made = measured_rates()
    for name, size, dim, precision, method in numbered(cases, first):
        if not chosen(name, dim):
            continue
        row = dict(what="fast", term=name, n=size, d=dim, precision=precision, method=method)
        os.environ["HERON_PRECISION"] = precision
        # A run leaves float32 products in float32; the peers are given what their papers use.
        torch.set_float32_matmul_precision("highest" if method == "ours" else "high")
        with told(**row):
            term = TERMS[name]
            case = Case(name, method, size, dim, precision, DEVICE, 1, None)
            work = forward_backward(case, term.draw(Draw(size, dim, DEVICE)))
            start = time.time()
            work()
            sync()
            warm_up = time.time() - start
            base = top = 0
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            seconds = clock(work)
            if DEVICE == "cuda":
                top = torch.cuda.max_memory_allocated()
            anchors, keys = case.shape
            flops, floor = 2.0 * dim * term.products * anchors * keys, math.nan
            if made:
                exponentials = anchors * keys * term.exponentials
                floor = flops / made[precision] + exponentials / made["exp"]
            say(**row, ms=seconds * 1e3, floor_ms=floor * 1e3, ratio=seconds / floor,
                tflops=flops / seconds / 1e12, peak_mib=(top - base) / 2**20,
                first_s=round(warm_up, 1))  # fmt: skip


def tiles(first: int) -> None:
    """Other tiles of the sums and their gradient than `layout` chooses."""
    n = 64 if DRY else 32_768
    tag = torch.arange(n, device=DEVICE, dtype=torch.int32)
    listed = [(d, tile) for d, options in TILES.items() for tile in options]
    for d, tile in numbered([(32, TILES[128][0])] if DRY else listed, first):
        a, k, up = unit(n, d), unit(n, d), torch.rand(n, 1, device=DEVICE)
        row = dict(what="tile", d=d, **vars(tile))
        if not DRY:
            layout.choose_tile = lambda *_, tile=tile: tile
        with told(**row):
            seconds = clock(
                lambda a=a, k=k: fused.exponential_sums(  # type: ignore[misc]
                    a, k, anchor_tag=tag, key_tag=tag, precision="bf16"
                ),
                0.15,
            )
            pull = clock(
                lambda a=a, k=k, up=up: fused.mutual_operands(  # type: ignore[misc]
                    a, k, anchor_tag=tag, key_tag=tag, precision="bf16"
                ).gradient((up, up), bound=up.amax() * 8),
                0.15,
            )
            flops = 2 * n * n * d
            say(**row, sum_ms=seconds * 1e3, sum_tflops=flops / seconds / 1e12,
                pull_ms=pull * 1e3, pull_tflops=2 * flops / pull / 1e12)  # fmt: skip
