from . import accumulator as accumulator
from . import cluster as cluster
from . import static_graph as static_graph
from . import window as window
from .accumulator import GradientAccumulator as GradientAccumulator
from .averaging import average_gradients as average_gradients
from .drawing.graph_view import Diagram as Diagram
from .drawing.graph_view import draw_graph as draw_graph
from .lab.experiments.experiment import Experiment as Experiment
from .lab.experiments.result import Result as Result
from .lab.experiments.run import run as run
from .lab.experiments.sweep import sweep as sweep
from .lab.widget.accumulation_lab import AccumulationLab as AccumulationLab
from .measure import noise as noise
from .measure.noise_scale import NoiseScale as NoiseScale
from .measure.noise_scale import gradient_noise_scale as gradient_noise_scale
from .runtime import Runtime as Runtime
from .runtime import setup as setup
from .tokens import token_batches as token_batches
from .training import clipping as clipping
from .training.model import microbatched as microbatched
from .training.own_steps import value_and_gradients as value_and_gradients
from .training.step import Step as Step
from .training.trainer import Trainer as Trainer
from .training.whole_batch import WholeBatch as WholeBatch

__version__: str
