"""What an experiment may choose from, and what must be known of each before anything is built,
without TensorFlow."""

from gradlab import _checks

# The methods that can split their work over several towers
STATIC_GRAPHS = ("towers", "placeholders", "variables")
METHODS = ("large_batch", *STATIC_GRAPHS, "microbatched")
MODELS = ("lenet", "dense", "vgg")
SEVERAL_SEEDS = ("dense",)  # the models whose seeds can be trained in one computation
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


def takes_towers(method: str) -> bool:
    """Whether a method can split its work over several towers."""
    return method in STATIC_GRAPHS


def check_towers(method: str, towers: int) -> None:
    """Raises ValueError unless the method can use this number of towers."""
    _checks.positive_integer("towers", towers)
    if towers > 1 and not takes_towers(method):
        raise ValueError(
            f'towers must be 1 for method "{method}", which runs on one device. Received: {towers}'
        )
