"""AccumulationLab, the interactive lab of the notebooks, built from ipywidgets. The notebooks' other
widgets are in course/."""
