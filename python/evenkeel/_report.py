"""How a report of surgery prints: dozens of equal norms, which differ in their numbers only, share a line."""


def text(replaced, skipped):
    """Of rows (name, class, what became of it); skipped: (name, class, reason)."""
    rows = [*replaced, *((name, kind, f"skipped: {reason}") for name, kind, reason in skipped)]
    table = [
        (shown(name), f"{count} x" if count > 1 else "", *what)
        for name, count, *what in compressed(rows)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([*lines, f"{len(replaced)} replaced, {len(skipped)} skipped"])


def set_class(module, new):
    """Past the __setattr__ of the module, which may do more than that."""
    object.__setattr__(module, "__class__", new)


def shown(name):
    return name or "(root)"


def compressed(rows):
    """Rows (name, *what) as (name, count, *what): one for those that differ in numbers only.

    The numbers at one place of the names are joined at a time, the last place first, so that what
    is written in braces is always all there: `a.{0..1}.b.{0..3}` stands for eight names.
    """
    joined = {(tuple(name.split(".")), tuple(what)): 1 for name, *what in rows}
    for place in reversed(range(max((len(parts) for parts, _ in joined), default=0))):
        groups = {}
        for (parts, what), count in joined.items():
            number = place < len(parts) and is_number(parts[place])
            key = (*parts[:place], None, *parts[place + 1 :]) if number else parts
            groups.setdefault((key, what, count), []).append(number and int(parts[place]))
        joined = {
            (tuple(braced(each) if part is None else part for part in key), what): count * len(each)
            for (key, what, count), each in groups.items()
        }
    return [(".".join(parts), count, *what) for (parts, what), count in joined.items()]


def is_number(part):
    return part.isdecimal() and str(int(part)) == part


def braced(numbers):
    """Numbers as text: 7, {0..3}, {0..3,5}."""
    spans = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in spans)
    return text if len(numbers) == 1 else f"{{{text}}}"
