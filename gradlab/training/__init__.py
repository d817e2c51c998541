"""What stands behind `gradlab.microbatched` and `gradlab.Trainer`."""

from gradlab.training import clipping as clipping
