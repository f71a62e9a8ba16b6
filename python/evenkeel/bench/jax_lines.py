"""What a line of `python -m evenkeel bench-jax` is called and says; without JAX, for the tables made of it later."""

EVENKEEL, FORMULAS, FLAX, PALLAS = "evenkeel", "formulas, jit", "flax", "Pallas"
PASSES = ("forward", "forward + backward")


def speedup(found):
    """The best rival's row, and how many times as long as evenkeel that takes, round by round."""
    rivals = [row for row in found if row["contender"] != EVENKEEL]
    best = min(rivals, key=lambda row: float(row["time_us"]))
    return best, float(best["speedup"])


def title(row):
    added = " + residual" if int(row["residual"]) else ""
    return f"{row['op']}{added} {row['shape']} {row['dtype']}"


def sentence(found):
    best, lead = speedup(found)
    times = ", ".join(f"{row['contender']} {row['time_us']} us" for row in found)
    return f"{title(found[0])} {found[0]['pass']}: {times}; {lead:.2f} x {best['contender']}"


def shown(microseconds):
    return f"{microseconds / 1000:.2f} ms" if microseconds >= 1000 else f"{microseconds:.1f} us"
