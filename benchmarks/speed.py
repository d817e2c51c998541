"""The first table: milliseconds an update of every way, side by side, and the ratio to one big batch."""

import json
import statistics
import subprocess
import sys
import threading

from benchmarks.worker import SETTINGS

BIG_BATCH = "big batch"
SHAPES = {
    "lenet": ((1, 100), (5, 20), (10, 10), (20, 5), (100, 1)),
    "dense": ((1, 100), (5, 20), (10, 10), (20, 5), (100, 1)),
    "vgg16": ((1, 32), (8, 4), (32, 1)),
}
SECONDS = 0.1  # what one measurement should take at least
MOST_UPDATES, FIT_UPDATES = 30, 20
LIMIT = 60  # seconds for a measurement: a way that needs more is left out
LONG, HOPELESS = 0.3, 1.15  # where an update takes so many seconds, a setting so many times the way's best is left out


class Worker:
    """A process of `benchmarks.worker`, with one setting of one framework."""

    def __init__(self, setting: str):
        self.setting = setting
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.worker", self.setting]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._process = subprocess.Popen(command, text=True, **pipes)
        first = json.loads(self._process.stdout.readline() or '{"missing": "the process"}')
        self.ways, self.missing = first.get("ways", []), first.get("missing")

    def seconds(self, way: str, network: str, k: int, b: int, updates: int, limit: float = LIMIT) -> float:
        """What so many updates took. A process that has not answered after limit seconds is replaced by another."""
        wanted = dict(way=way, network=network, k=k, b=b, updates=updates, warm=_first_updates(network))
        late = threading.Timer(limit, self._process.kill)
        late.start()
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or "null")
        late.cancel()
        if answer is None:
            self.close()
            self._start()
            answer = {"error": f"the process ended, or took longer than {limit} s"}
        if "error" in answer:
            raise RuntimeError(f"{way}, {network}, {k} x {b}, {self.setting}: {answer['error']}")
        return answer["seconds"]

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(60)


def measure(network: str, rounds: int, say=print) -> tuple[list[dict], list[str]]:
    """Times every way in every setting, in turn, round after round.

    Args:
        network: "lenet", "dense" or "vgg16".
        rounds: how many.
        say: hears what is being done.

    Returns:
        The cells, a list of {"network", "way", "k", "b", "setting", "milliseconds", "spread", "ratio"}, the way's best
        setting each, and the frameworks that are not installed. milliseconds: the median over rounds; spread: the
        quartiles; ratio: the median over rounds of the ratio to the big batch's best setting in the same round.
    """
    workers = [Worker(setting) for setting in SETTINGS]
    order = list(dict.fromkeys(way for worker in workers for way in worker.ways))
    try:
        cells = []
        for k, b in SHAPES[network]:
            say(f"{network} {k} x {b}", flush=True)
            cells += _cells(network, k, b, *_rounds(workers, network, k, b, rounds, say), order)
        return cells, sorted({worker.missing for worker in workers if worker.missing})
    finally:
        for worker in workers:
            worker.close()


def _rounds(workers, network: str, k: int, b: int, repeats: int, say) -> tuple[dict, dict]:
    """{(way, setting): milliseconds in each round}, of the ways and of the big batch of k * b examples."""
    asked = {
        (way, worker.setting): (worker, 1 if way == BIG_BATCH else k, k * b if way == BIG_BATCH else b)
        for worker in workers
        for way in worker.ways
    }
    updates, first, first_updates = {}, {}, _first_updates(network)
    for key, (worker, *shape) in list(asked.items()):
        try:
            once = worker.seconds(key[0], network, *shape, first_updates) / first_updates
        except RuntimeError as error:
            say(str(error))
            del asked[key]
            continue
        first[key] = once
        # what a call of fit costs by itself is not an update's
        least = FIT_UPDATES if "in fit" in key[0] and network != "vgg16" else 1
        updates[key] = max(least, min(MOST_UPDATES, round(SECONDS / once)))
    for way, setting in list(asked):
        best = min(once for (other, _), once in first.items() if other == way)
        if first[way, setting] > max(LONG, HOPELESS * best):
            del asked[way, setting]
    found = {key: [] for key in asked}
    for number in range(repeats):
        for key in list(asked) if number % 2 else reversed(asked):
            worker, *shape = asked[key]
            found[key].append(1000 * worker.seconds(key[0], network, *shape, updates[key]) / updates[key])
    big = {key: values for key, values in found.items() if key[0] == BIG_BATCH}
    return found, big


def _first_updates(network: str) -> int:
    """How many updates a way makes before it is timed, and then to see how long they take."""
    return 1 if network == "vgg16" else 2


def _cells(network: str, k: int, b: int, found: dict, big: dict, order: list) -> list[dict]:
    reference = min(big.values(), key=statistics.median)
    best = {}
    for (way, setting), values in found.items():
        if way not in best or statistics.median(values) < statistics.median(best[way][1]):
            best[way] = setting, values
    return [
        {
            "network": network, "way": way, "k": k, "b": b, "setting": setting,
            "milliseconds": statistics.median(values),
            "spread": statistics.quantiles(values, n=4)[::2] if len(values) > 1 else [values[0]] * 2,
            "ratio": statistics.median(mine / theirs for mine, theirs in zip(values, reference)),
        }
        for way, (setting, values) in sorted(best.items(), key=lambda item: order.index(item[0]))
    ]  # fmt: skip


def as_table(cells: list[dict], network: str) -> str:
    """A network's cells as Markdown: a row a way, a column a shape; "-" where it failed or took too long."""
    shapes = SHAPES[network]
    by_cell = {(cell["way"], cell["k"], cell["b"]): cell for cell in cells if cell["network"] == network}
    ways = dict.fromkeys(way for way, *_ in by_cell)
    lines = ["| ms an update (ratio to one big batch) | " + " | ".join(f"{k} x {b}" for k, b in shapes) + " |"]
    lines += ["| --- |" + " --- |" * len(shapes)]
    for way in ways:
        row = [by_cell.get((way, *shape)) for shape in shapes]
        words = [f"{_digits(cell['milliseconds'])} ({cell['ratio']:.2f})" if cell else "-" for cell in row]
        lines.append(f"| {way} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
