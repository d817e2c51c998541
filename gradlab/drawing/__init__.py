"""TensorFlow graphs as diagrams."""
