"""AccumulationLab, the interactive lab of the notebooks, built from ipywidgets."""
