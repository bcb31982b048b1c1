"""The figures and tables of the page, in its order."""

from simulator.paper.figure import Figure
from simulator.paper.figures.ablations import FIGURE_18, FIGURE_19
from simulator.paper.figures.batches import CALIBRATED, FIGURE_13
from simulator.paper.figures.memory import FIGURE_2, FIGURE_11, TABLE_1
from simulator.paper.figures.serving import FIGURE_12, FIGURE_14, FIGURE_16, FIGURE_17
from simulator.paper.figures.sharing import FIGURE_15
from simulator.paper.figures.small import REAL

_IN_ORDER = (
    TABLE_1,
    FIGURE_2,
    FIGURE_11,
    FIGURE_12,
    FIGURE_13,
    CALIBRATED,
    FIGURE_14,
    FIGURE_15,
    FIGURE_16,
    FIGURE_17,
    FIGURE_18,
    FIGURE_19,
    REAL,
)
FIGURES: dict[str, Figure] = {figure.name: figure for figure in _IN_ORDER}
