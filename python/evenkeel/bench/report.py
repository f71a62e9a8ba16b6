"""What was measured: CSV rows and a line on stderr at once, so that a run that is ended from outside
loses little; tables and JSON in the end.
"""

import sys

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from evenkeel.bench import command, timing
from evenkeel.bench.contenders import TITLES

COLUMNS = (
    "date commit machine torch triton op shape dtype pass library time_us ceiling_us of_limit gb_per_s"
).split()
LOW_SHARE = 0.7  # of the limit
BAR = 12  # characters of the limit; a longer bar ends at twice that


def triton_version():
    try:
        import triton
    except ImportError:
        return "-"
    return triton.__version__


def machine(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{command.cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def constants(device, commit):
    """What all rows of a run have in common."""
    return {
        "date": command.now(),
        "commit": commit or command.commit(),
        "machine": machine(device),
        "torch": torch.__version__,
        "triton": triton_version(),
    }


def complain(label, name, reason):
    print(f"{label}: {name}: {reason}", file=sys.stderr, flush=True)


def console():
    # In a pipe rich would fold everything into 80 columns.
    return Console(width=None if sys.stdout.isatty() else 110, highlight=False)


class Report:
    def __init__(self, shared, names, csv=None, quiet=False):
        self.constants, self.names, self.csv, self.quiet = shared, names, csv, quiet
        self.results = []

    def add(self, result):
        self.results.append(result)
        label = f"{result.line.label} {result.pass_}"
        for name, reason in result.reasons.items():
            complain(label, name, reason)
        if not self.quiet:  # a progress bar tells instead
            found = ", ".join(f"{n} {cell(t)}" for n, t in result.times.items())
            print(f"{label}: {found}", file=sys.stderr, flush=True)
        if self.csv:
            command.append(self.csv, COLUMNS, self.csv_rows(result))

    def csv_rows(self, result):
        line = result.line
        for name, time_ in result.times.items():
            if isinstance(time_, str):
                continue
            row = {"op": line.op, "shape": line.where, "dtype": line.dtype, "pass": result.pass_}
            row |= {"library": name, "time_us": f"{time_:.2f}"}
            if result.ceiling:
                row["ceiling_us"] = f"{result.ceiling:.2f}"
                row["of_limit"] = f"{result.of_limit(name):.3f}"
                row["gb_per_s"] = f"{result.gb_per_s(name):.0f}"
            yield self.constants | row

    def rows(self):
        """All that a CSV file would have."""
        return [row for result in self.results for row in self.csv_rows(result)]

    def content(self):
        """For JSON: the CSV's figures as numbers, and the reasons where there are none."""
        texts = {"op", "shape", "dtype", "pass", "library"}
        figures, missing = [], []
        for result in self.results:
            for row in self.csv_rows(result):
                own = {key: row[key] for key in row if key not in self.constants}
                figures.append({k: v if k in texts else float(v) for k, v in own.items()})
            label = f"{result.line.label} {result.pass_}"
            missing += [
                {"line": label, "library": name, "shown": result.times[name], "reason": reason}
                for name, reason in result.reasons.items()
                if name in result.times
            ]
        return {"figures": figures, "missing": missing}

    def print_title(self, what):
        c = self.constants
        versions = f"torch {c['torch']}, triton {c['triton']}, commit {c['commit']}"
        print(f"\n{c['machine']}, {versions}\n{what}")

    def print_table(self):
        """A row for every contender, with a bar as long as its share of the limit."""
        limited = any(result.ceiling for result in self.results)
        limit = "of limit: the time of a copy (backward: a sum) that moves the bytes of the pass / the time"
        self.print_title(
            limit if limited else "microseconds of one eager call, as its caller sees them"
        )
        table = Table(box=box.SIMPLE)
        table.add_column("", no_wrap=True)
        for name in ("time, µs", "GB/s", "of limit")[: 3 if limited else 1]:
            table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        if limited:
            table.add_column("", no_wrap=True)
        width = len(table.columns) - 1
        for result in self.results:
            table.add_row(f"{result.line.label} {result.pass_}", style="bold")
            for name in result.times:
                row = f"  {TITLES[name]}", *figures(result, name)[:width]
                table.add_row(*row, style=look(result, name))
            if result.ceiling:
                time_ = f"{result.ceiling:.1f}"
                rate = f"{result.line.gb_per_s(result.pass_, result.ceiling):.0f}"
                table.add_row("  limit", time_, rate, "1.00", "━" * BAR, style="dim")
        console().print(table)

    def print_rates(self):
        """As Triton's tutorial prints its benchmark: GB/s, a row for every row length."""
        self.print_title(f"layer norm {self.results[0].pass_}, GB/s")
        table = Table(box=box.SIMPLE)
        for name in ("N", *(TITLES[name] for name in self.names), "limit"):
            table.add_column(name, justify="right", no_wrap=True)
        for result in self.results:
            rates = [
                result.times[name]
                if result.gb_per_s(name) is None
                else f"{result.gb_per_s(name):.1f}"
                for name in self.names
            ]
            limit = timing.NO_FIGURE
            if result.ceiling:
                limit = f"{result.line.gb_per_s(result.pass_, result.ceiling):.1f}"
            table.add_row(str(result.line.cols), *rates, limit)
        console().print(table)

    def print_leads(self):
        """Against the best rival of each line; a line without a figure of ours is not led in."""
        ahead, behind = 0, []
        for result in self.results:
            ours = result.times.get("evenkeel")
            found = {
                name: time_
                for name, time_ in result.times.items()
                if name != "evenkeel" and not isinstance(time_, str)
            }
            if ours is None or not found:
                continue
            best = min(found, key=found.get)
            if not isinstance(ours, str) and ours < found[best]:
                ahead += 1
                continue
            lead = "" if isinstance(ours, str) else f", lead {found[best] / ours:.2f}"
            label = f"{result.line.label} {result.pass_}"
            behind.append(f"  {label}: {cell(ours)}, {TITLES[best]} {cell(found[best])}{lead}")
        if ahead or behind:
            print(f"evenkeel leads in {ahead} of {ahead + len(behind)} lines")
        if behind:
            print("it does not in (microseconds; lead: best rival's time / evenkeel's):")
            print("\n".join(behind))

    def fine(self):
        """Whether evenkeel has a figure wherever it was asked for one."""
        return not any(isinstance(result.times.get("evenkeel"), str) for result in self.results)


def figures_of_sweep(rows):
    """From a CSV's rows: {(op, shape, dtype, pass): (evenkeel's share of the limit, its lead over the best rival)}.

    A lead is the rival's time / evenkeel's, None where there is no rival. The last figure of a library counts.
    """
    times, shares = {}, {}
    for row in rows:
        key = row["op"], row["shape"], row["dtype"], row["pass"]
        times.setdefault(key, {})[row["library"]] = float(row["time_us"])
        if row["library"] == "evenkeel":
            shares[key] = float(row["of_limit"])
    found = {}
    for key, share in shares.items():
        rivals = [time_ for name, time_ in times[key].items() if name != "evenkeel"]
        found[key] = share, min(rivals) / times[key]["evenkeel"] if rivals else None
    return found


def print_sweep(rows):
    """How many lines of a sweep are behind, and below so much of the limit."""
    found = figures_of_sweep(rows)
    below = [key for key, (share, _) in found.items() if share < LOW_SHARE]
    behind = [key for key, (_, lead) in found.items() if lead is not None and lead < 1]
    print(
        f"sweep: {len(behind)} of {len(found)} lines are behind a rival, "
        f"{len(below)} are below {LOW_SHARE} of the limit"
    )
    for key in behind:
        print(f"  behind: {' '.join(key)}, lead {found[key][1]:.2f}")


def cell(time_):
    return time_ if isinstance(time_, str) else f"{time_:.1f}"


def figures(result, name):
    """Time, GB/s, of limit and the bar."""
    of_limit, rate = result.of_limit(name), result.gb_per_s(name)
    return (
        cell(result.times[name]),
        timing.NO_FIGURE if rate is None else f"{rate:.0f}",
        timing.NO_FIGURE if of_limit is None else f"{of_limit:.2f}",
        "" if of_limit is None else "━" * min(round(of_limit * BAR), 2 * BAR),
    )


def look(result, name):
    """The style of a contender's row."""
    if name == "evenkeel":
        return "bold cyan"
    return "red" if isinstance(result.times[name], str) else ""
