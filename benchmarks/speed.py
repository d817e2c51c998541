"""The first table: milliseconds per update for every way, and their ratio to one big batch."""

import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

from benchmarks.worker import SETTINGS

REFERENCES = "big batch in fit", "big batch"
SHAPES = {
    "lenet": ((1, 100), (5, 20), (10, 10), (20, 5), (100, 1)),
    "dense": ((1, 100), (5, 20), (10, 10), (20, 5), (100, 1)),
    "vgg16": ((1, 32), (8, 4), (32, 1)),
    "transformer": ((1, 64), (4, 16), (16, 4)),
    "resnet": ((1, 64), (4, 16), (16, 4)),
}
SECONDS = 0.5
LIMIT, FIRST_LIMIT = (
    60,
    180,
)  # seconds that a measurement may take, and the first one; a way that needs more is left out
# After the first measurement, of a fifth of that time, a variant or setting that takes more than so
# many times as long as the fastest one of its way is left out. Of VGG-16 only the fastest one is
# kept: its variants filled 24 GiB.
HOPELESS: dict[str, float] = {"vgg16": 1.0}
USUALLY_HOPELESS = 1.25


class EndedError(RuntimeError):
    """The process of a `Worker` ended, or was ended because it took too long."""


class Worker:
    """A process that runs `benchmarks.worker` with one setting of one framework.

    Args:
        setting: a key of `benchmarks.worker.SETTINGS`.

    Attributes:
        setting: the setting.
        ways: the pairs (way, variant) that the process can time.
        missing: the module that is not installed, in which case there are no ways; else None.
    """

    def __init__(self, setting: str):
        self.setting = setting
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.worker", self.setting]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
        )
        first = json.loads(self._process.stdout.readline() or '{"missing": "the process"}')
        self.ways, self.missing = (
            [tuple(pair) for pair in first.get("ways", [])],
            first.get("missing"),
        )

    def seconds(
        self,
        way: str,
        variant: str,
        network: str,
        k: int,
        b: int,
        updates: int,
        limit: float = LIMIT,
    ) -> float:
        """Times updates in the process.

        Args:
            way, variant: the names of the way and of its variant.
            network: the name of the network.
            k: the micro-batches per update.
            b: the examples per micro-batch.
            updates: the number of updates to time.
            limit: the seconds after which a process that has not answered is replaced by a new one.

        Returns:
            The seconds that the updates took.

        Raises:
            EndedError: the process ended, or took too long. A new one is there.
            RuntimeError: the way failed.
        """
        wanted = dict(way=way, variant=variant, network=network, k=k, b=b, updates=updates, warm=2)
        killed = threading.Event()

        def kill() -> None:
            killed.set()  # first: the kill ends the wait for the answer
            self._process.kill()

        late = threading.Timer(limit, kill)
        late.start()
        self._send(wanted)
        answer = json.loads(self._process.stdout.readline() or "null")
        late.cancel()
        name = f"{way} {variant}, {network}, {k} x {b}, {self.setting}"
        if answer is None:
            self.close()
            reason = f"it took longer than {limit:g} s" if killed.is_set() else "it ended by itself"
            self._said.seek(0)
            last = self._said.read().decode(errors="replace").strip().rpartition("\n")[2]
            code = self._process.returncode
            self._start()
            raise EndedError(f"{name}: {reason}, with return code {code}. Its last line: {last}")
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer["seconds"]

    def forget(self, way: str, variant: str) -> None:
        """Frees the memory of a variant that is not timed again."""
        self._send(dict(forget=True, way=way, variant=variant))

    def _send(self, request: dict) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process ended: then there is no answer
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)


def measure(
    network: str,
    rounds: int,
    shapes: Sequence[tuple[int, int]] | None = None,
    settings: Sequence[str] = tuple(SETTINGS),
    seconds: float = SECONDS,
    say: Callable[..., None] = print,
) -> tuple[list[dict], list[str]]:
    """Times every way in every setting. In each round they take turns; every second round has the
    reverse order.

    Args:
        network: a key of `SHAPES`.
        rounds: the number of rounds.
        shapes: the pairs (k, b) to measure. None: those of `SHAPES`.
        settings: the keys of `benchmarks.worker.SETTINGS` to measure in.
        seconds: the least time that one measurement should take.
        say: called with each line of progress, as `print` would be.

    Returns:
        The cells, and the names of the modules that are not installed. A cell is {"network", "way",
        "k", "b", "setting", "milliseconds", "spread", "ratio"}, and there is one for each way and
        shape, in the way's best setting. milliseconds is the median over the rounds, spread the
        quartiles, and ratio the median over the rounds of the ratio to the big batch in the same
        way of calling (`reference_of`), in its best setting, in the same round.
    """
    # What took too long once is not tried again
    cells, missing, too_slow = [], set[str](), set[tuple[str, str]]()
    for k, b in SHAPES[network] if shapes is None else shapes:
        say(f"{network} {k} x {b}", flush=True)
        # New processes for each shape: TensorFlow gives back little of what a way has used, and
        # VGG-16 uses gigabytes.
        workers = [Worker(setting) for setting in settings]
        try:
            order = list(dict.fromkeys(way for worker in workers for way, _ in worker.ways))
            cells += _cells(
                network,
                k,
                b,
                _rounds(workers, network, k, b, rounds, seconds, say, too_slow),
                order,
            )
            missing |= {worker.missing for worker in workers if worker.missing}
        finally:
            for worker in workers:
                worker.close()
    return cells, sorted(missing)


def _rounds(
    workers: list[Worker],
    network: str,
    k: int,
    b: int,
    rounds: int,
    seconds: float,
    say: Callable,
    too_slow: set[tuple[str, str]],
) -> dict[tuple, list[float]]:
    """{(way, variant, setting): the milliseconds per update in each round}. Adds what takes too
    long to `too_slow`."""
    asked = {
        (way, variant, worker.setting): (worker, *((1, k * b) if way in REFERENCES else (k, b)))
        for worker in workers
        for way, variant in worker.ways
        # Its users call gradlab.setup
        if not (way.startswith("gradlab") and worker.setting == "tensorflow-default")
    }
    first = {}
    for key, (worker, *shape) in list(asked.items()):
        if key[:2] in too_slow:
            del asked[key]
            continue
        try:
            rough = worker.seconds(*key[:2], network, *shape, updates=2, limit=FIRST_LIMIT) / 2
            updates = _updates(key[0], seconds / 5, rough)
            first[key] = worker.seconds(*key[:2], network, *shape, updates=updates) / updates
        except RuntimeError as error:
            say(str(error))
            del asked[key]
            if isinstance(error, EndedError):
                too_slow.add(key[:2])
        of_way = {
            other: once for other, once in first.items() if other[0] == key[0] and other in asked
        }
        most = HOPELESS.get(network, USUALLY_HOPELESS) * min(of_way.values(), default=0.0)
        for other, once in of_way.items():
            if once > most:  # a variant of VGG-16 keeps half a gigabyte
                asked.pop(other)[0].forget(*other[:2])
    found: dict[tuple, list[float]] = {key: [] for key in asked}
    for number in range(rounds):
        for key in list(asked)[:: 1 if number % 2 else -1]:
            worker, *shape = asked[key]
            updates = _updates(key[0], seconds, first[key])
            try:
                found[key].append(
                    1000 * worker.seconds(*key[:2], network, *shape, updates=updates) / updates
                )
            except EndedError as error:  # such as by the operating system, for its memory
                say(str(error))
                del asked[key], found[key]
    return found


def _updates(way: str, seconds: float, once: float) -> int:
    """The number of updates that take at least so many seconds; in `fit` a multiple of ten, if
    there are several."""
    updates = max(1, math.ceil(seconds / once))
    return updates if updates == 1 or "in fit" not in way else 10 * math.ceil(updates / 10)


def _cells(network: str, k: int, b: int, found: dict, order: list) -> list[dict]:
    """The cells of one shape, in the order of the ways."""
    best: dict[str, tuple] = {}
    for (way, *how), values in found.items():
        if way not in best or statistics.median(values) < statistics.median(best[way][1]):
            best[way] = ", ".join(filter(None, reversed(how))), values
    return [
        {
            "network": network, "way": way, "k": k, "b": b, "setting": setting,
            "milliseconds": statistics.median(values),
            "spread": statistics.quantiles(values, n=4)[::2] if len(values) > 1 else [values[0]] * 2,
            "ratio": statistics.median(mine / theirs for mine, theirs in zip(values, best[reference_of(way)][1])),
        }
        for way, (setting, values) in sorted(best.items(), key=lambda item: order.index(item[0]))
    ]  # fmt: skip


def reference_of(way: str) -> str:
    """The big batch in the same way of calling, to which a way is compared."""
    return REFERENCES[0] if "in fit" in way or way == "gradlab.Trainer" else REFERENCES[1]


def as_table(cells: Sequence[dict], network: str) -> str:
    """Writes a network's cells as a Markdown table.

    Args:
        cells: cells as `measure` returns them, in the order of the shapes.
        network: the name of the network.

    Returns:
        A table with a row for each way and a column for each shape, and "-" where a way failed or
        took too long.
    """
    by_cell = {
        (cell["way"], cell["k"], cell["b"]): cell for cell in cells if cell["network"] == network
    }
    shapes = list(dict.fromkeys((k, b) for _, k, b in by_cell))
    lines = [
        "| ms per update (ratio to one big batch) | "
        + " | ".join(f"{k} x {b}" for k, b in shapes)
        + " |"
    ]
    lines += ["| --- |" + " --- |" * len(shapes)]
    for way in dict.fromkeys(way for way, *_ in by_cell):
        row = [by_cell.get((way, *shape)) for shape in shapes]
        words = [
            f"{digits(cell['milliseconds'])} ({cell['ratio']:.2f})" if cell else "-" for cell in row
        ]
        lines.append(f"| {way} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def digits(milliseconds: float) -> str:
    """Writes a time with three significant digits, or in whole milliseconds from 100 on."""
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
