"""The fourth table: whole trainings of the lab. A part of the published experiment, and several
seeds together."""

import statistics
from collections.abc import Callable

from benchmarks import speed

SETTINGS = ("tensorflow-auto", "tensorflow-default")
# For each training: the network, k, b and the number of updates.
TRAININGS = {
    "training, microbatched": ("lenet", 20, 5, 100),
    "training, placeholders": ("lenet", 20, 5, 100),
    "training, 1 seed": ("dense", 5, 20, 100),
    "training, 5 seeds": ("dense", 5, 20, 100),
}


def measure(rounds: int, say: Callable[..., None] = print) -> dict:
    """Times the trainings in turn, each in its best thread setting.

    Args:
        rounds: the number of rounds.
        say: called with each line of progress, as `print` would be.

    Returns:
        {"milliseconds": the median milliseconds per update of each training, "placeholders over
        microbatched" and "5 seeds over 1": the median over the rounds of the ratio of these times
        within a round}.
    """
    workers = [speed.Worker(setting) for setting in SETTINGS]
    found: dict[str, dict[str, list[float]]] = {
        way: {setting: [] for setting in SETTINGS} for way in TRAININGS
    }
    try:
        for _ in range(rounds):
            for way, (network, k, b, updates) in TRAININGS.items():
                for worker in workers:
                    say(f"{way}, {worker.setting}")
                    seconds = worker.seconds(way, "", network, k, b, updates)
                    found[way][worker.setting].append(1000 * seconds / updates)
    finally:
        for worker in workers:
            worker.close()
    best = {way: min(settings.values(), key=statistics.median) for way, settings in found.items()}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(best[one], best[other]))

    return {
        "milliseconds": {way: statistics.median(values) for way, values in best.items()},
        "placeholders over microbatched": ratio("training, placeholders", "training, microbatched"),
        "5 seeds over 1": ratio("training, 5 seeds", "training, 1 seed"),
    }


def as_sentence(found: dict) -> str:
    """Writes the ratios as a Markdown sentence.

    Args:
        found: what `measure` returned.
    """
    return (
        "**Whole trainings**: the published experiment, 20 x 5, takes "
        f"{found['placeholders over microbatched']:.1f} times as long with placeholders as with "
        "`microbatched`. Five seeds of the dense network, trained together, take "
        f"{found['5 seeds over 1']:.2f} times as long as one."
    )
