"""The tables of embeddings whose gradients are kept as rows."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from gradlab import _checks
from gradlab.averaging import variable_name
from gradlab.fit import keras_private as internals


def checked_sparse(sparse: Any, microbatch_size: int | str) -> tuple[keras.layers.Embedding, ...]:
    """The embeddings, of which there may be none.

    Raises:
        ValueError: something else, or embeddings with micro-batches of an automatic size.
    """
    _checks.sequence("sparse", sparse, "embeddings")
    layers = tuple(sparse)
    for layer in layers:
        if not isinstance(layer, keras.layers.Embedding):
            raise ValueError(
                f"sparse must be a list of keras.layers.Embedding. Received: {layer!r} in it"
            )
    if layers and microbatch_size == "auto":
        raise ValueError(
            'microbatch_size must be a number or "given" with sparse embeddings, whose memory '
            'gradlab doesn\'t plan. Received: "auto"'
        )
    return layers


def check_still_rows(gradients: Sequence, more: Sequence, variables: Sequence, of: str) -> None:
    """Raises ValueError for gradients of rows to which others, of all rows, are to be added.

    Args:
        gradients: for each variable that of the micro-batches, or None.
        more: for each variable the gradient of something else, or None.
        variables: the variables.
        of: what that is.
    """
    for gradient, other, variable in zip(gradients, more, variables):
        if isinstance(gradient, tf.IndexedSlices) and other is not None:
            raise ValueError(
                f"The table of an embedding in sparse must only be looked up. Received: {of} that "
                f"reads {variable_name(variable)}"
            )


def positions_of_tables(
    model: keras.Model, layers: Sequence[keras.layers.Embedding], variables: Sequence
) -> list[int]:
    """The positions of the tables of embeddings among the variables that are trained. A frozen
    table has none.

    Args:
        model: the model, built.
        layers: the embeddings.
        variables: the trained variables of Keras.

    Raises:
        ValueError: a layer isn't one of the model, trains more than its table, or regularizes it.
    """
    found = []
    for layer in layers:
        if not any(layer is one for one in internals.layers_of(model)):
            raise ValueError(f"sparse must be layers of the model. Received: {layer.name}")
        own = {id(variable) for variable in layer.variables}
        positions = [i for i, variable in enumerate(variables) if id(variable) in own]
        if len(positions) > 1:
            raise ValueError(
                "An embedding in sparse must train its table and nothing else. Received: "
                f"{layer.name}, of which {len(positions)} variables are trained"
            )
        if any(variables[i].regularizer is not None for i in positions):
            raise ValueError(
                "An embedding in sparse must not have a regularizer, whose gradient has all rows. "
                f"Received: {layer.name}"
            )
        found += positions
    return found
