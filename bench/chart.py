"""The picture: how much faster a queue drains, and how it holds out while the horizon is pinned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.lab import Findings

WIDTH, HEIGHT = 960, 420
INK, SOFT, GRID, PAPER = "#1f2933", "#616e7c", "#e4e7eb", "#fcfcfa"
OURS, OURS_SOFT, THEIRS = "#1d5b8f", "#7fb0d8", "#c2571a"
TIMES = "\N{MULTIPLICATION SIGN}"
STYLE = f"""
  text {{ font-family: system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: {INK}; }}
  .title {{ font-size: 16px; font-weight: 600; }}
  .note {{ font-size: 12px; fill: {SOFT}; }}
  .label {{ font-size: 12px; }}
  .strong {{ font-size: 12px; font-weight: 600; }}
  .white {{ font-size: 12px; font-weight: 600; fill: white; }}
"""


@dataclass(frozen=True, slots=True)
class Plot:
    """A rectangle on the page in which values have their places."""

    left: float
    top: float
    width: float
    height: float
    most: float

    def y(self, value: float) -> float:
        """Where a value lies."""
        return self.top + self.height * (1 - value / self.most)

    def x(self, share: float) -> float:
        """Where a share of the width lies."""
        return self.left + self.width * share


def draw(found: Mapping[str, Findings]) -> str:
    """The chart as SVG, of what was measured; a panel without measurements stays empty."""
    series = {name: values for findings in found.values() for name, values in findings.series.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Bartleby compared with a classic queue table</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>',
    ]
    if "drain batch" in series:
        parts += ratios(series)
    if f"drain, {PIN}, bartleby" in series:
        parts += pinned(series)
    return "\n".join([*parts, "</svg>"]) + "\n"


def ratios(series: Mapping[str, Sequence[float]]) -> list[str]:
    """Bars: times the throughput of the classic table, by batch size."""
    groups = (("1 client", OURS, series["drain ratio, 1"]), ("2 clients", OURS_SOFT, series["drain ratio, 2"]))
    highest = max(value for _, _, values in groups for value in values)
    plot = Plot(70, 96, 350, 246, max(4.0, highest * 1.12))
    parts = heading(plot, "Draining a full queue", "times the throughput of a classic queue table")
    for value in range(int(plot.most) + 1):
        parts += gridline(plot, value, f"{value}{TIMES}")
    baseline = line(plot.left, plot.y(1), plot.left + plot.width, plot.y(1), THEIRS, 2)
    labels: list[str] = []
    share = 1 / len(series["drain batch"])
    for place, batch in enumerate(series["drain batch"]):
        middle = plot.x(share * (place + 0.5))
        parts.append(text(middle, plot.top + plot.height + 20, f"{batch:.0f}"))
        for number, (_, colour, values) in enumerate(groups):
            kind = "white" if number == 0 else "strong"
            left, top = middle - 31 + 32 * number, plot.y(values[place])
            height = plot.top + plot.height - top
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="30" height="{height:.1f}" rx="2" fill="{colour}"/>'
            )
            labels.append(text(left + 15, top + 17, f"{values[place]:.1f}", kind))
    parts += [baseline, *labels]
    parts.append(text(plot.x(0.5), plot.top + plot.height + 40, "messages per claim", "note"))
    entries = [*((name, colour) for name, colour, _ in groups), (f"classic table = 1{TIMES}", THEIRS)]
    return parts + legend(plot.left, plot.top + plot.height + 62, entries)


PIN = "xid"
LINES = (
    ("bartleby: drain", "drain", "bartleby", OURS, ""),
    ("retry storm", "retry storm", "bartleby", OURS_SOFT, ""),
    ("classic: drain", "drain", "classic", THEIRS, ""),
    ("retry storm", "retry storm", "classic", THEIRS, "5 4"),
)


def pinned(series: Mapping[str, Sequence[float]]) -> list[str]:
    """Lines: the share of the offered load that is done in each second."""
    plot = Plot(540, 96, 390, 246, 110)
    rates = {name: series[f"{name}, offered"][0] for name in ("drain", "retry storm")}
    note = f"% of offered load done: drain {rates['drain']:,.0f} msg/s, retry storm {rates['retry storm']:,.0f} msg/s"
    parts = heading(plot, "While another transaction stays open", note)
    for value in range(0, 101, 25):
        parts += gridline(plot, value, f"{value} %")
    seconds = len(series[f"drain, {PIN}, bartleby"])
    for second in range(0, seconds + 1, 10):
        parts.append(text(plot.x(second / seconds), plot.top + plot.height + 20, str(second)))
    for _, load, contestant, colour, dash in reversed(LINES):
        values = smooth(series[f"{load}, {PIN}, {contestant}"])
        points = " ".join(
            f"{plot.x((place + 0.5) / seconds):.1f},{plot.y(min(plot.most, 100 * value / rates[load])):.1f}"
            for place, value in enumerate(values)
        )
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"'
            f' stroke-linejoin="round"{dashes}/>'
        )
    parts.append(text(plot.x(0.5), plot.top + plot.height + 40, "seconds with a pinned xmin horizon", "note"))
    entries = [(name, colour) for name, _, _, colour, _ in LINES]
    styles = [dash for *_, dash in LINES]
    below = plot.top + plot.height + 62
    return (
        parts
        + legend(plot.left - 35, below, entries[:2], styles[:2])
        + legend(plot.left + 205, below, entries[2:], styles[2:])
    )


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of three seconds: a batch counts in the second in which it ends."""
    return [
        sum(values[max(0, place - 1) : place + 2]) / len(values[max(0, place - 1) : place + 2])
        for place in range(len(values))
    ]


def heading(plot: Plot, title: str, note: str) -> list[str]:
    left = plot.left - 30
    return [text(left, 38, title, "title", "start"), text(left, 60, note, "note", "start")]


def gridline(plot: Plot, value: float, label: str) -> list[str]:
    return [
        line(plot.left, plot.y(value), plot.left + plot.width, plot.y(value), GRID, 1),
        text(plot.left - 8, plot.y(value) + 4, label, "note", "end"),
    ]


def legend(
    left: float, top: float, entries: Sequence[tuple[str, str]], dashes: Sequence[str] | None = None
) -> list[str]:
    parts: list[str] = []
    for (name, colour), dash in zip(entries, dashes or [""] * len(entries), strict=True):
        parts.append(line(left, top - 4, left + 18, top - 4, colour, 4, dash))
        parts.append(text(left + 23, top, name, "label", "start"))
        left += 30 + 6.1 * len(name)
    return parts


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dash: str = "") -> str:  # noqa: PLR0917
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        f' stroke="{colour}" stroke-width="{width}"{dashes}/>'
    )


def text(x: float, y: float, words: str, kind: str = "label", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'
