"""The figure of what takes the memory of a training."""

import keras
import numpy as np
import pytest

from gradlab.lab.figures.memory_figure import memory_plan
from gradlab.measure.memory import MEBIBYTE, plan


def test_the_bars_add_up_to_the_plan_and_are_told_in_words():
    model = keras.Sequential(
        [keras.Input([100]), keras.layers.Dense(200, "relu"), keras.layers.Dense(10)]
    )
    planned = plan(model, "mse", "adam", (np.zeros([1, 100]), np.zeros([1, 10])))
    drawn = memory_plan(planned, [1, 512], memory=256 * MEBIBYTE)
    words = f"b = 512: {planned.total(512) / MEBIBYTE:.0f} MiB; the limit is 256 MiB."
    assert drawn.get_label().endswith(words)
    heights = [patch.get_height() for patch in drawn.axes[0].patches]
    assert len(heights) == 12 and sum(heights[1::2]) == pytest.approx(planned.total(512) / MEBIBYTE)
