"""What stands behind `gradlab.microbatched`, `gradlab.Trainer` and `gradlab.value_and_gradients`.

A batch of `fit` comes into `microbatched`, whose `train_step` hands it to `program.update`: there,
the window program (`program.window_program`) computes it micro-batch by micro-batch in the loop of
`gradlab.window`, and applies nothing; then one method applies what it gives. What a trace of the
model shows beforehand is in `program.tracing`. Evaluation is the same program without the update.

The rooms, each of which uses those before it: `keras_private`, `replicas`, `losses`, `variables`,
`metrics`, `program`, `sizes` (microbatch_size="auto"), `run` (what only `Trainer.fit` needs).
"""

import lazy_loader as _lazy

# Records of updates are read in processes that never import TensorFlow.
__getattr__, __dir__, __all__ = _lazy.attach(__name__, ["clipping"])
