"""Checkers for the exercises of notebook 10."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close


@exercise
def best_block(answer: Any) -> None:
    """A function: layers -> how many of them a block of `keras.remat` should have."""
    for layers in (16, 64, 36, 18, 40, 1):
        got = filled(answer(layers))
        said = f"for {layers} layers"
        require(
            isinstance(got, int | np.integer) and got > 0 and layers % got == 0,
            f"{said}: {got!r} is not a whole number that divides {layers}",
        )
        kept = {
            block: layers // block + block for block in range(1, layers + 1) if not layers % block
        }
        fewest = min(kept.values())
        where = {
            1: "the input of each layer is kept, so nothing is saved",
            layers: "the only block has all layers, and while it is computed again all are kept",
        }.get(int(got), f"blocks of {got} keep {kept[int(got)]} outputs")
        require(kept[int(got)] == fewest, f"{said}: {where}. {fewest} outputs would do")


@exercise
def stalled_mean(answer: Any) -> None:
    """A number: the mean of 512 ones that were added up in bfloat16."""
    if answer is not ... and answer is not None and not isinstance(answer, str):
        require(answer != 1, "1 is what float32 gives")
        require(
            answer != 256,
            "256 is the sum at which it stalls. Divide it by the number of ones that were added",
        )
        require(answer != 0.25, "a quarter is what 1024 micro-batches gave")
    require_close(answer, 0.5, "the mean", "but look at what counting by ones gave in bfloat16")


@exercise
def largest_scale(answer: Any) -> None:
    """A function: the largest entry of a gradient -> the largest power of two that doesn't make it
    infinite in float16."""
    for largest, wanted in ((3.0, 2**14), (1.0, 2**15), (0.001, 2**25), (40_000.0, 1), (1e5, 0.5)):
        got = float(filled(answer(largest)))
        said = f"for a largest entry of {largest:g}"
        require(
            got > 0 and np.log2(got) == np.round(np.log2(got)),
            f"{said}: {got:g} is not a power of two",
        )
        require(
            got <= wanted,
            f"{said}: {got:g} times {largest:g} is {got * largest:,.0f}, and float16 ends at 65,504"
            + (". The scale may be below 1" if wanted < 1 else ""),
        )
        require(
            got >= wanted,
            f"{said}: {got:g} is safe, but {2 * got:g} is, too, and keeps smaller entries from "
            "becoming 0",
        )
