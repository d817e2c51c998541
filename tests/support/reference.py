"""An independent reference in NumPy, float64: a two-layer network, its gradients written by hand,
and four optimizers.

It uses neither TensorFlow nor gradlab, so agreement with it is agreement with an independent
computation.
"""

import numpy as np

SHAPES = {
    "hidden/kernel": (4, 5),
    "hidden/bias": (5,),
    "logits/kernel": (5, 3),
    "logits/bias": (3,),
}

# Numbers that float32 represents exactly, because Keras and tf.compat.v1 round some hyperparameters
# to float32.
HYPERPARAMETERS = dict(
    momentum=0.875, beta_1=0.875, beta_2=0.984375, epsilon=2.0**-10, weight_decay=2.0**-6
)


def initial_weights(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(0, 0.5, shape) for name, shape in SHAPES.items()}


def batch(examples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(examples, 4)), generator.integers(0, 3, examples)


def loss_and_gradients(w, x, labels, weights) -> tuple[float, dict[str, np.ndarray]]:
    """The weighted mean cross-entropy of softmax(tanh(x W1 + b1) W2 + b2), and its gradients."""
    share = weights / weights.sum()
    hidden = np.tanh(x @ w["hidden/kernel"] + w["hidden/bias"])
    logits = hidden @ w["logits/kernel"] + w["logits/bias"]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = odds / odds.sum(axis=1, keepdims=True)
    loss = -(share * np.log(probabilities[np.arange(len(labels)), labels])).sum()

    d_logits = (probabilities - np.eye(3)[labels]) * share[:, np.newaxis]
    d_hidden = d_logits @ w["logits/kernel"].T * (1 - hidden**2)
    return loss, {
        "hidden/kernel": x.T @ d_hidden,
        "hidden/bias": d_hidden.sum(axis=0),
        "logits/kernel": hidden.T @ d_logits,
        "logits/bias": d_logits.sum(axis=0),
    }


class Trainer:
    """Trains on whole batches: one update for each batch."""

    def __init__(self, optimizer: str, w: dict[str, np.ndarray], clip_norm: float | None = None):
        self.w = {name: value.copy() for name, value in w.items()}
        self.optimizer, self.clip_norm, self.t = optimizer, clip_norm, 0
        self.m = {name: np.zeros_like(value) for name, value in w.items()}
        self.v = {name: np.zeros_like(value) for name, value in w.items()}

    def update(self, x, labels, weights, learning_rate: float) -> float:
        loss, gradients = loss_and_gradients(self.w, x, labels, weights)
        if self.clip_norm is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
            gradients = {name: g * min(1.0, self.clip_norm / norm) for name, g in gradients.items()}
        self.t += 1
        h = HYPERPARAMETERS
        for name, g in gradients.items():
            if self.optimizer == "sgd":
                self.w[name] -= learning_rate * g
            elif self.optimizer == "momentum":
                self.m[name] = h["momentum"] * self.m[name] - learning_rate * g
                self.w[name] += self.m[name]
            else:
                if self.optimizer == "adamw":
                    self.w[name] -= learning_rate * h["weight_decay"] * self.w[name]
                self.m[name] = h["beta_1"] * self.m[name] + (1 - h["beta_1"]) * g
                self.v[name] = h["beta_2"] * self.v[name] + (1 - h["beta_2"]) * g**2
                rate = (
                    learning_rate * np.sqrt(1 - h["beta_2"] ** self.t) / (1 - h["beta_1"] ** self.t)
                )
                self.w[name] -= rate * self.m[name] / (np.sqrt(self.v[name]) + h["epsilon"])
        return loss
