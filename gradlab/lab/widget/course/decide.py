"""Decide: how many micro-batches of which size, at which learning rate, and why."""

import html
import math
from dataclasses import dataclass, replace
from typing import Any

import ipywidgets

from gradlab import _checks
from gradlab.lab.widget.page import below_controls
from gradlab.lab.widget.saved_page import image, standalone

EFFICIENCY = 0.8  # the share of computing time that is wanted of several devices
LOWEST_BETA_2 = 0.9  # below it, Adam's average holds a handful of updates
RULES = "SGD", "Adam"
LEFT, WIDTH, DECADES = 90, 550, 5  # of the drawing's axes, in its units and in powers of ten


@dataclass(frozen=True)
class Situation:
    """What is known before a training run.

    Attributes:
        fits: the most examples whose activations fit on a device.
        devices: the number of devices.
        noise_scale: that of the network and its data, in examples.
        examples_per_second: what one device computes, forward and backward.
        gradient_mb: the size of one gradient, in MB.
        gigabits: what the slowest link between two devices carries, in Gbit/s.
        optimizer: "SGD" or "Adam".
        batch, rate, beta_2: with which it was tuned; beta_2 is Adam's.
        is_recipe: whether that batch has to be kept, with all its hyperparameters.

    Raises:
        ValueError: a number is not positive, or beta_2 is not between 0 and 1.
    """

    fits: int = 8
    devices: int = 1
    noise_scale: float = 1000.0
    examples_per_second: float = 100.0
    gradient_mb: float = 400.0
    gigabits: float = 10.0
    optimizer: str = "Adam"
    batch: int = 256
    rate: float = 0.001
    beta_2: float = 0.999
    is_recipe: bool = False

    def __post_init__(self):
        for name in ("fits", "devices", "batch"):
            _checks.positive_integer(name, getattr(self, name))
        for name in ("noise_scale", "examples_per_second", "gradient_mb", "gigabits", "rate"):
            _checks.positive_number(name, getattr(self, name))
        _checks.one_of("optimizer", self.optimizer, RULES)
        if not 0 < self.beta_2 < 1:
            raise ValueError(f"beta_2 must be between 0 and 1. Received: {self.beta_2!r}")


@dataclass(frozen=True)
class Decision:
    """What to train with.

    Attributes:
        b: the micro-batch size.
        k: the micro-batches of a device in one update.
        batch: the examples of an update, on all devices.
        rate, beta_2: the learning rate, and Adam's beta_2; with SGD it has no meaning.
        efficiency: the share of the time in which the devices compute.
        reasons: one for each of "b", "k", "batch", "rate" and "beta_2".
    """

    b: int
    k: int
    batch: int
    rate: float
    beta_2: float
    efficiency: float
    reasons: dict[str, str]


def decide(known: Situation) -> Decision:
    """The rules of the notebooks 12 and 14, in one place.

    - b is what fits, unless one micro-batch on each device would exceed the noise scale.
    - k is 1 on one device; on several, it is the smallest at which they compute for 80% of the
      time, as long as the batch does not exceed the noise scale. A recipe's batch is kept.
    - The rate follows the noise-scale paper for SGD (https://arxiv.org/abs/1812.06162) and the
      square-root rule for Adam (https://arxiv.org/abs/2205.10287); beta_2 keeps its half-life in
      examples (https://arxiv.org/abs/2507.07101).

    Example:
        >>> one = decide(Situation(fits=8, devices=1, batch=256, rate=0.001))
        >>> one.b, one.k, one.batch, round(one.rate, 6)
        (8, 1, 8, 0.000177)
        >>> decide(Situation(fits=8, batch=256, is_recipe=True)).k
        32
    """
    if known.is_recipe:
        return _recipe(known)
    b, why_b = _size(known)
    k, why_k = _steps(known, b)
    batch = known.devices * k * b
    rate, why_rate = _rate(known, batch)
    beta_2, why_beta_2 = _beta_2(known, batch)
    reasons = {
        "b": why_b,
        "k": why_k,
        "batch": "devices x k x b",
        "rate": f"{why_rate}: try a few near it",
        "beta_2": why_beta_2,
    }
    return Decision(b, k, batch, rate, beta_2, _efficiency(known, b, k), reasons)


def _size(known: Situation) -> tuple[int, str]:
    """The micro-batch size, and why."""
    p, noise = known.devices, known.noise_scale
    if p > noise:
        return (
            1,
            f"{p} devices with one example each exceed the noise scale of {noise:,g}: use fewer",
        )
    most = int(noise // p)
    if most < known.fits:
        devices = "one device" if p == 1 else f"{p} devices"
        return most, f"{devices} with more than {most} would exceed the noise scale of {noise:,g}"
    return known.fits, f"the most that fits on a device is {known.fits}"


def _steps(known: Situation, b: int) -> tuple[int, str]:
    """The micro-batches of a device in one update, and why."""
    p, noise = known.devices, known.noise_scale
    if p == 1:
        return 1, "on one device accumulation saves no time: stay at 1 while training is stable"
    wanted = _steps_for(known, b, EFFICIENCY)
    most = max(1, int(noise // (p * b)))
    k = min(wanted, most)
    reached = _efficiency(known, b, k)
    why = f"the devices then compute {reached:.0%} of the time, and send the rest"
    if wanted > most:
        why = (
            f"{EFFICIENCY:.0%} of computing time would take k = {wanted:,}, a batch beyond the noise "
            f"scale of {noise:,g}; so they compute {reached:.0%} of the time: use fewer devices or "
            "a faster link"
        )
    return k, f"{why}. This is slower than one device alone" if p * reached < 1 else why


def _rate(known: Situation, batch: int) -> tuple[float, str]:
    """The learning rate for a batch, and why."""
    noise = known.noise_scale
    if known.optimizer == "SGD":
        rate = known.rate * (1 + noise / known.batch) / (1 + noise / batch)
        return rate, f"in proportion to 1 / (1 + {noise:,g} / batch)"
    why = f"the tuned one times the square root of {batch:,} / {known.batch:,}"
    return known.rate * math.sqrt(batch / known.batch), why


def _beta_2(known: Situation, batch: int) -> tuple[float, str]:
    """Adam's beta_2 for a batch, and why."""
    if known.optimizer == "SGD":
        return known.beta_2, "SGD has none"
    kept = known.beta_2 ** (batch / known.batch)
    lowest = min(LOWEST_BETA_2, known.beta_2)
    if kept < lowest:
        return lowest, "the same half-life would be shorter than a few updates"
    power = f"the tuned one to the power of {batch:,} / {known.batch:,}"
    return kept, f"{power}: the same half-life"


def _recipe(known: Situation) -> Decision:
    """The decision where the batch and all hyperparameters are kept."""
    share = -(-known.batch // known.devices)  # the examples of a device, at most
    k = -(-share // known.fits)
    b = -(-share // k)
    reached = _efficiency(known, b, k)
    idle = known.devices - known.batch
    reasons = {
        "b": "a device's share of the batch" if k == 1 else f"{k} parts of a device's {share:,}",
        "k": f"the fewest parts of at most {known.fits}",
        "batch": "the recipe's"
        if idle <= 0
        else f"the recipe's; {idle} devices have nothing to do",
        "rate": "the recipe's",
        "beta_2": "the recipe's" if known.optimizer == "Adam" else "SGD has none",
    }
    if known.devices > 1:
        reasons["k"] += f"; the devices compute {reached:.0%} of the time, and send the rest"
    return Decision(b, k, known.batch, known.rate, known.beta_2, reached, reasons)


def _all_reduce_seconds(known: Situation) -> float:
    p = known.devices
    return 2 * (p - 1) / p * known.gradient_mb * 8e6 / (known.gigabits * 1e9)


def _efficiency(known: Situation, b: int, k: int) -> float:
    computing = k * b / known.examples_per_second
    return computing / (computing + _all_reduce_seconds(known))


def _steps_for(known: Situation, b: int, efficiency: float) -> int:
    """The fewest micro-batches with which a device computes for so large a share of the time."""
    computing = efficiency / (1 - efficiency) * _all_reduce_seconds(known)
    # A quotient that rounding lifted above an integer is that integer
    return max(1, math.ceil(computing * known.examples_per_second / b - 1e-9))


def svg(known: Situation) -> str:
    """One update's time, and its batch beside the noise scale, as SVG in the page's colors.

    Args:
        known: the situation.
    """
    found = decide(known)
    computing = WIDTH * found.efficiency
    place = {
        "batch": found.batch,
        "noise scale": known.noise_scale,
        "tuned batch": known.batch,
    }
    x = {name: LEFT + WIDTH * math.log10(value) / DECADES for name, value in place.items()}
    ticks = "".join(
        f'<path d="M{LEFT + WIDTH * power / DECADES:.1f} 112v5" stroke="currentColor"/>'
        f'<text x="{LEFT + WIDTH * power / DECADES:.1f}" y="130" text-anchor="middle">'
        f"{10**power:,}</text>"
        for power in range(DECADES + 1)
    )
    words = html.escape(
        f"The devices compute for {found.efficiency:.0%} of an update. Its batch of {found.batch:,} "
        f"stands beside a noise scale of {known.noise_scale:,.0f} and the tuned batch of "
        f"{known.batch:,}.",
        quote=True,
    )
    return (
        f'<svg viewBox="0 0 672 172" role="img" aria-label="{words}" fill="currentColor" '
        'style="max-width: 52em; width: 100%; font: 13px sans-serif">'
        f'<text x="{LEFT - 10}" y="31" text-anchor="end">time</text>'
        f'<rect x="{LEFT}" y="14" width="{computing:.1f}" height="26" fill="#56B4E9"/>'
        f'<rect x="{LEFT + computing:.1f}" y="14" width="{WIDTH - computing:.1f}" height="26" '
        'fill="#E69F00"/>'
        f'<text x="{LEFT + 8}" y="32" fill="#000">{found.efficiency:.0%} of an update: computing'
        f"{', the rest: sending' if known.devices > 1 else ''}</text>"
        f'<text x="{LEFT - 10}" y="116" text-anchor="end">examples</text>'
        f'<path d="M{LEFT} 112h{WIDTH}" stroke="currentColor"/>{ticks}'
        f'<path d="M{x["noise scale"]:.1f} 92v20" stroke="#D55E00" stroke-width="3"/>'
        f'<text x="{x["noise scale"]:.1f}" y="87" text-anchor="middle">noise scale</text>'
        f'<circle cx="{x["tuned batch"]:.1f}" cy="112" r="6" fill="none" stroke="currentColor" '
        f'stroke-width="2"><title>tuned batch</title></circle>'
        f'<circle cx="{x["batch"]:.1f}" cy="112" r="5" fill="#0072B2"/>'
        f'<text x="{x["batch"]:.1f}" y="150" text-anchor="middle">'
        f'<tspan fill="#0072B2">●</tspan> this batch: {found.batch:,}</text>'
        f'<text x="{x["tuned batch"]:.1f}" y="167" text-anchor="middle">○ tuned batch: {known.batch:,}</text></svg>'
    )


_POWERS = [2**power for power in range(14)]
_CHOICES: dict[str, tuple[str, list]] = {
    "fits": ("b that fits", _POWERS[:11]),
    "devices": ("devices", _POWERS[:8]),
    "noise_scale": ("noise scale", [20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000]),
    "examples_per_second": ("examples/s", [1, 10, 50, 100, 500, 1000, 5000, 10_000]),
    "gradient_mb": ("gradient, MB", [1, 10, 60, 100, 400, 1000, 5000, 28_000]),
    "gigabits": ("link, Gbit/s", [1, 10, 25, 100, 400, 3600]),
    "optimizer": ("optimizer", list(RULES)),
    "batch": ("tuned batch", _POWERS),
    "rate": ("tuned rate", [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3]),
    "beta_2": ("tuned beta_2", [0.95, 0.98, 0.99, 0.999]),
}
_STYLE = {"description_width": "90px"}
_LAYOUT = {"width": "320px"}


class Decide:
    """Controls for a `Situation`, and the `Decision` as a table with its reasons.

    Args:
        **known: fields of `Situation`, each one of the values that its control has.

    Attributes:
        decision: the decision that is shown.
        controls: the ipywidgets by the name of what they set.
        view: the widgets, as one ipywidgets box.

    Raises:
        ValueError: an unknown field, or a value that its control does not have.

    Example:
        >>> Decide(devices=8, gigabits=100, optimizer="SGD")
        b = 8: the most that fits on a device is 8
        k = 3: the devices then compute 81% of the time, and send the rest
        batch = 192: devices x k x b
        rate = 0.00079: in proportion to 1 / (1 + 1,000 / batch): try a few near it
    """

    def __init__(self, **known: Any):
        for name in known:
            _checks.one_of("a setting", name, [*_CHOICES, "is_recipe"])
        situation = replace(Situation(), **known)
        self.controls: dict[str, Any] = {}
        for name, (label, choices) in _CHOICES.items():
            value = getattr(situation, name)
            _checks.one_of(name, value, choices)
            kind = ipywidgets.SelectionSlider if len(choices) > 4 else ipywidgets.Dropdown
            self.controls[name] = kind(
                options=choices, value=value, description=label, style=_STYLE, layout=_LAYOUT
            )
        self.controls["is_recipe"] = ipywidgets.Checkbox(
            value=bool(situation.is_recipe),
            description="keep the tuned batch: I follow a recipe",
            indent=False,
            layout=_LAYOUT,
        )
        self._html = ipywidgets.HTML()
        for control in self.controls.values():
            control.observe(self._draw, "value")
        self.view = below_controls(list(self.controls.values()), self._html)
        self._draw()

    def _draw(self, change: dict | None = None) -> None:
        self._known = Situation(**{name: one.value for name, one in self.controls.items()})
        self.decision = decide(self._known)
        self._html.value = self._page(svg(self._known))

    def _rows(self) -> list[tuple[str, str, str]]:
        """The name of each number that was decided, its value, and the reason."""
        found = self.decision
        rows = [
            ("b", f"{found.b:,}", found.reasons["b"]),
            ("k", f"{found.k:,}", found.reasons["k"]),
            ("batch", f"{found.batch:,}", found.reasons["batch"]),
            ("rate", f"{found.rate:.3g}", found.reasons["rate"]),
        ]
        if self.controls["optimizer"].value == "Adam":
            rows.append(("beta_2", f"{found.beta_2:.7g}", found.reasons["beta_2"]))
        return rows

    def _page(self, drawing: str) -> str:
        """The decision and a drawing as HTML without scripts."""
        body = "".join(
            f'<tr><th scope="row" style="text-align: left">{name}</th>'
            f'<td style="text-align: right"><b>{value}</b></td><td style="text-align: left">'
            f"{html.escape(reason)}</td></tr>"
            for name, value, reason in self._rows()
        )
        return (
            f'<div style="max-width: 52em"><table aria-live="polite" style="color: inherit; '
            f'border-spacing: 14px 2px"><tbody>{body}</tbody></table>{drawing}</div>'
        )

    def __repr__(self) -> str:
        return "\n".join(f"{name} = {value}: {reason}" for name, value, reason in self._rows())

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A page without a kernel shows the HTML; others the SVG or the text.
        drawing = svg(self._known)
        return dict(self.view._repr_mimebundle_(**kwargs)) | {
            "text/html": self._page(image(drawing)),
            "image/svg+xml": standalone(drawing),
            "text/plain": repr(self),
        }
