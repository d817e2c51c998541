"""Measurements: the noise of losses and gradients, and memory."""

from gradlab.measure import noise as noise
