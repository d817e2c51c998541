"""The lab of the notebooks: experiments, figures, an interactive widget and exercises, built on the
helper modules."""
