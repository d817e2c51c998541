"""The tables of embeddings whose gradients are kept as rows."""

from collections.abc import Sequence
from typing import Any

import keras

from gradlab import _checks


def check_sparse(sparse: Any, microbatch_size: int | str) -> None:
    """Raises ValueError unless it is a sequence of embeddings, whose micro-batches have a size."""
    _checks.sequence("sparse", sparse, "embeddings")
    for layer in sparse:
        if not isinstance(layer, keras.layers.Embedding):
            raise ValueError(
                f"sparse must be a list of keras.layers.Embedding. Received: {layer!r} in it"
            )
    if sparse and microbatch_size == "auto":
        raise ValueError(
            "microbatch_size must be a number with sparse embeddings, whose memory gradlab doesn't "
            'plan. Received: "auto"'
        )


def positions_of_tables(layers: Sequence[keras.layers.Embedding], variables: Sequence) -> list[int]:
    """The positions of the tables of embeddings among the variables that are trained.

    Args:
        layers: the embeddings.
        variables: the trained variables of Keras.

    Raises:
        ValueError: a layer trains something else than one table of the model, or regularizes it.
    """
    found = []
    for layer in layers:
        trained = {id(variable) for variable in layer.trainable_variables}
        positions = [i for i, variable in enumerate(variables) if id(variable) in trained]
        if len(trained) != 1 or len(positions) != 1:
            raise ValueError(
                "An embedding in sparse must be a layer of the model of which the table is "
                f"trained, and nothing else. Received: {layer.name}, of which {len(positions)} "
                "variables are trained here"
            )
        if variables[positions[0]].regularizer is not None:
            raise ValueError(
                "An embedding in sparse must not have a regularizer, whose gradient has all rows. "
                f"Received: {layer.name}"
            )
        found += positions
    return found
