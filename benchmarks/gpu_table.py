"""The figures of gpu_decode.py: parts as JSON, lines as they come, one table of all parts."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

HEADINGS = (
    "shape", "context", "tok/s", "mlx-lm", "ratio", "TB/s", "% of copy",
    "verify 2 / 4 / 8 over 1", "prefill, x mlx-lm", "greedy tokens",
)  # fmt: skip


@dataclass
class Rate:
    """One comparison: milliseconds of a step or a pass for both, and their ratio."""

    kind: str
    """decode, verify or prefill."""
    count: int
    """Rows of a pass."""
    context: int
    ours_ms: float
    theirs_ms: float | None
    """None where mlx-lm was left out."""
    gbytes: float = 0.0
    grown_gb: float = 0.0
    """By which memory in use grew at most while our rounds ran."""

    @property
    def ratio(self) -> str:
        return "-" if self.theirs_ms is None else f"{self.theirs_ms / self.ours_ms:.2f}x"

    @property
    def terabytes(self) -> float:
        """Of a second: GB / ms."""
        return self.gbytes / self.ours_ms

    def line(self, bandwidth: float) -> str:
        what = f"{self.kind} {self.count} @{self.context}"
        rate = 1e3 * self.count / self.ours_ms
        share = f"{self.terabytes:5.2f} TB/s {100 * self.terabytes / bandwidth:3.0f} %"
        beside = ""
        if self.theirs_ms is not None:
            beside = f"  mlx-lm {self.theirs_ms:9.3f} ms  {self.ratio:>6s}"
        return (
            f"  {what:18s} {self.ours_ms:9.3f} ms {rate:10.1f} tok/s{beside}  "
            f"{share if self.gbytes else ''}"
            f"{f'  memory grew by {self.grown_gb:.2f} GB' if self.gbytes else ''}"
        ).rstrip()


@dataclass
class Part:
    """The figures of one shape."""

    shape: str
    device: str
    date: str
    command: str
    versions: dict[str, str]
    environment: dict[str, str]
    bandwidth: float
    bodies: dict[str, int]
    rates: list[Rate] = field(default_factory=list)
    verdict: str = ""
    peak_gb: float = 0.0
    stopped: str = ""
    """Why figures are missing, if any are."""

    @classmethod
    def read(cls, path: Path) -> "Part":
        values = json.loads(path.read_text())
        values["rates"] = [Rate(**rate) for rate in values["rates"]]
        return cls(**values)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.shape}.json").write_text(json.dumps(asdict(self), indent=1))

    def add(self, rate: Rate) -> None:
        """Keep a figure and print it."""
        self.rates.append(rate)
        cost = self.cost(rate)
        over = "" if cost is None else f"  {cost:.2f}x of one row"
        print(rate.line(self.bandwidth) + over, flush=True)

    def cost(self, rate: Rate) -> float | None:
        """A verify's time over that of one row at the same context."""
        ones = [r for r in self.rates if r.kind == "decode" and r.context == rate.context]
        return rate.ours_ms / ones[0].ours_ms if rate.kind == "verify" and ones else None

    def rows(self) -> Iterable[list[str]]:
        """Cells of the table, a row a context."""
        wide = [r for r in self.rates if r.kind == "prefill"]
        prefill = ", ".join(
            f"{r.count}: {1e3 * r.count / r.ours_ms:.0f} tok/s, {r.ratio}" for r in wide
        )
        for place, rate in enumerate(r for r in self.rates if r.kind == "decode"):
            costs = [self.cost(r) for r in self.rates if r.context == rate.context]
            verify = " / ".join(f"{cost:.2f}" for cost in costs if cost is not None)
            yield [
                self.shape,
                str(rate.context),
                f"{1e3 / rate.ours_ms:.1f}",
                "-" if rate.theirs_ms is None else f"{1e3 / rate.theirs_ms:.1f}",
                rate.ratio,
                f"{rate.terabytes:.2f}",
                f"{100 * rate.terabytes / self.bandwidth:.0f}",
                verify,
                *((prefill, self.verdict) if place == 0 else ("", "")),
            ]


def markdown(parts: Iterable[Part]) -> str:
    """One table of all parts, headed by what they were measured on and with."""
    parts = list(parts)
    heads: dict[str, list[str]] = {}
    for part in parts:
        versions = ", ".join(f"{name} {version}" for name, version in part.versions.items())
        extra = "".join(f", {name}={value}" for name, value in part.environment.items())
        head = f"{part.date}, {part.device}, {versions}{extra}"
        heads.setdefault(head, []).append(part.command)
    lines = []
    for head, commands in heads.items():
        lines += [f"{head}.", "", *(f"    {command}" for command in dict.fromkeys(commands)), ""]
    copies = [part.bandwidth for part in parts]
    lines.append(f"Copy bandwidth {min(copies):.2f} to {max(copies):.2f} TB/s in these runs.")
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + " --- |" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for part in parts for row in part.rows()]
    lines += ["", *(f"- {part.shape}: {part.stopped}" for part in parts if part.stopped)]
    return "\n".join(lines).rstrip() + "\n"
