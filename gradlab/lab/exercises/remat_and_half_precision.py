"""Checkers for the exercises of notebook 10."""

from typing import Any

import numpy as np

from gradlab.lab.exercises import exercise, filled, require, require_close


@exercise
def best_block(answer: Any) -> None:
    """A function: layers -> how many of them a block of `keras.remat` should have."""
    for layers in (16, 64, 36, 18, 40, 1):
        got = filled(answer(layers))
        if isinstance(got, float | np.floating) and float(got).is_integer():
            got = int(got)
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
    """A number: the mean of 512 threes that were added up in bfloat16."""
    if answer is not ... and answer is not None and not isinstance(answer, str):
        require(answer != 3, "3 is what float32 gives")
        require(
            answer != 1024,
            "1,024 is the sum at which it stalls. Divide it by the number of threes that were added",
        )
        require(
            answer not in (0.5, 1, 1.5),
            f"{answer} would be right if the sum stalled at {512 * answer:g}. There the numbers of "
            "bfloat16 are at most 4 apart, so adding 3 still raises the sum",
        )
    require_close(answer, 2, "the mean", "but add threes in bfloat16, and look where the sum stays")


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
