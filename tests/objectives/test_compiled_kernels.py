"""Every kernel compiled for Hopper, where no GPU is: what the interpreter cannot see.

Values are right by `test_fused`; here are registers that spill, products that miss the matrix
units, tiles that are too large, and masks that cost instructions where they mask nothing.
"""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.objectives.kernel_cases import INTERPRETED, with_triton

LOGITS_PIPED = {128: 7.0, 256: 10.0}  # instructions an element of the plain sums, masks skipped


@with_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_no_kernel_spills_and_all_products_are_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("benchmarks.kernels")
    monkeypatch.delenv("HERON_PRECISION", raising=False)
    chosen = [v for v in kernels.variants([128, 256, 512], ["fp16"]) if kernels.telling(v)]
    chosen += [v for v in kernels.variants([256], ["bf16"]) if v.name == "pull of_x of_y tags"]
    names = {v.kernel.rpartition(".")[2] for v in chosen}
    assert names == {
        "sum_kernel", "pull_kernel", "label_sum_kernel", "label_gradient_kernel", "pair_kernel",
        "collect_kernel",
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")  # torch has threads: no fork
    with ProcessPoolExecutor(2, context) as pool:
        found = list(zip(chosen, pool.map(kernels.compiled, chosen), strict=True))
    for variant, made in found:
        line = kernels.line(variant, made)
        assert kernels.problem(variant, made) == "", line
        if variant.name == "sum tags" and variant.dim in LOGITS_PIPED:
            each = variant.tile.rows * variant.tile.columns / (32 * variant.tile.warps)
            assert made.loop / each < LOGITS_PIPED[variant.dim], line


@with_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_tile_that_is_too_large_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("benchmarks.kernels")
    from heron.losses.fused import layout

    too_large = dict.fromkeys(layout.BLOCKS, (layout.Tiling(128, 64, 4, 2),) * 3)
    monkeypatch.setattr(layout, "BLOCKS", too_large)
    (variant,) = [v for v in kernels.variants([128], ["fp16"]) if v.name == "pull of_x weights"]
    text = kernels.problem(variant, kernels.compiled(variant))
    assert re.fullmatch(r"spills \d+ B a thread", text)
