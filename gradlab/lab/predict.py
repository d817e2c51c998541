"""predict and ask, by the path that the notebooks show."""

from gradlab.lab.widget.course.predict import ask as ask
from gradlab.lab.widget.course.predict import predict as predict
