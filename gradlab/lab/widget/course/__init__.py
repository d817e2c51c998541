"""The notebooks' other widgets and their questions: what teaches one notebook's idea on its page, and
nothing that the lab needs.

A drawing or a page that several widgets use is in the folder above. What a checker of an exercise
alone needs is in `gradlab.lab.exercises`.
"""
