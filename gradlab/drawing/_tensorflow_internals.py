"""The only private part of TensorFlow that gradlab uses. The tests run with the oldest and newest
supported version.

Checked with TensorFlow 2.18 to 2.21.
"""

import tensorflow as tf


def called_graph(operation: tf.Operation, attribute: str) -> tf.Graph:
    """The graph of the function that an attribute of an operation names, such as the body of a
    loop.

    The public API gives a function's definition as a protocol buffer, but not as a graph with
    operations.
    """
    return operation.graph._get_function(operation.get_attr(attribute).name).graph
