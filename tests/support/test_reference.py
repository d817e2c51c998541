"""The reference itself: its hand-written gradients are compared with differences of its loss."""

import numpy as np
import reference


def test_gradients_are_those_of_the_loss():
    w, (x, labels) = reference.initial_weights(), reference.batch(7)
    weights = np.linspace(0.5, 2, 7)
    _, gradients = reference.loss_and_gradients(w, x, labels, weights)
    for name, gradient in gradients.items():
        for place in np.ndindex(gradient.shape):
            losses = []
            for step in (1e-6, -1e-6):
                moved = {key: value.copy() for key, value in w.items()}
                moved[name][place] += step
                losses.append(reference.loss_and_gradients(moved, x, labels, weights)[0])
            assert abs((losses[0] - losses[1]) / 2e-6 - gradient[place]) < 1e-8
