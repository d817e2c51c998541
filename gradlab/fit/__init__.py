"""What stands behind `gradlab.microbatched` and `gradlab.Trainer`."""

import lazy_loader as _lazy

# Records of updates are read in processes that never import TensorFlow.
__getattr__, __dir__, __all__ = _lazy.attach(__name__, ["clipping"])
