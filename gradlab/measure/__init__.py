"""Measurements: the noise of losses and gradients, the gradient noise scale, and peak memory."""

from gradlab.measure import noise as noise
