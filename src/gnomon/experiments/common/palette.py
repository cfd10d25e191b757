"""The colours of all drawings: each optimizer and each method has one colour, on light and on dark pages.

People with any of the three kinds of colour blindness can tell the nine hues apart. Each hue has a contrast of at least
3 to the page on which it is drawn. A test measures both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Color:
    """A colour in its two forms. Pages refer to it by a variable of CSS, so that it changes with the scheme."""

    name: str
    light: str
    """The form on a white ground. Picture files have it."""
    dark: str
    """The form on a dark page."""

    @property
    def variable(self) -> str:
        return f"var(--{self.name})"


BLUE = Color("blue", "#2b6cca", "#4381ec")
ORANGE = Color("orange", "#d37b09", "#ef8d3f")
GREEN = Color("green", "#148948", "#a2f4bf")
PURPLE = Color("purple", "#54286c", "#9362a9")
GREY = Color("grey", "#80949e", "#b3bccb")
RED = Color("red", "#d71c36", "#d34b47")
SKY = Color("sky", "#2d9ccc", "#2cbffa")
PINK = Color("pink", "#9b3d62", "#b6597a")
OLIVE = Color("olive", "#514c00", "#f7d329")
HUES = (BLUE, ORANGE, GREEN, PURPLE, GREY, RED, SKY, PINK, OLIVE)

INK = Color("ink", "#1f2733", "#dbe2ea")
SOFT = Color("soft", "#5d6878", "#97a3b3")
LINE = Color("line", "#dfe4ea", "#323b47")
PAGE = Color("page", "#ffffff", "#12161c")
PANEL = Color("panel", "#f6f8fa", "#1a2028")
ACCENT = Color("accent", "#1f6feb", "#6aa8ff")
THEME = (INK, SOFT, LINE, PAGE, PANEL, ACCENT)
"""The colours of text, rules and grounds."""

ON_DARK, ON_LIGHT = "#fefefe", "#010101"
"""Text on cells of a heat map, which have the same colours on light and on dark pages."""

OURS, OTHER = BLUE, SOFT
"""This library's own method, and whatever has no colour of its own."""

OPTIMIZERS = {
    "ingd": OURS,
    "kfac": PURPLE,
    "sgd": GREY,
    "adam": OLIVE,
    "adamw": ORANGE,
    "lion": SKY,
    "soap": GREEN,
    "muon": PINK,
    "singd": RED,
}
"""The colours of optimizers of networks."""

METHODS = {
    "ours": OURS,
    "structured NGD": ORANGE,
    "RGD": GREY,
    "Alimisis 2020": PURPLE,
    "Alimisis 2021": GREEN,
    "Ahn & Sra 2020": RED,
    "Adam": OPTIMIZERS["adam"],
    "L-BFGS (SciPy)": SKY,
    "BFGS (SciPy)": PINK,
}
"""The colours of methods on manifolds, and of those that minimize Rosenbrock's function."""


def of_optimizer(name: str) -> Color:
    """Return the colour of an optimizer. Its variants, such as "INGD dense" and "ingd-paper", have the same colour."""
    first = re.match("[a-z]*", name.lower())
    return OPTIMIZERS.get(first[0] if first else "", OTHER)


def of_method(name: str) -> Color:
    """Return the colour of a method. What follows a comma names a variant, which has the same colour."""
    return METHODS.get(name.partition(",")[0], OTHER)


def variables() -> str:
    """Return the rules of CSS that define all colours, for light and for dark pages."""
    light, dark = (
        " ".join(f"--{color.name}: {getattr(color, form)};" for color in (*THEME, *HUES)) for form in ("light", "dark")
    )
    in_the_dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return f":root {{ color-scheme: light dark; {light} }}\n{in_the_dark}"


def with_variables(svg: str) -> str:
    """Return a drawing whose colours, in their light form, are replaced by the variables of a page."""
    known = {color.light: color.variable for color in (*THEME, *HUES)}
    return re.sub("#[0-9a-f]{6}", lambda found: known.get(found[0], found[0]), svg)
