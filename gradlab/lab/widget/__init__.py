"""AccumulationLab: the lab that notebooks show."""
