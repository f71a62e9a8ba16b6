"""What fuse reports, how undo takes it back, and that a failure half-way changes nothing.

A restored model is compared with a snapshot of all its attributes by identity. Reports and trees of
modules with aliases are drawn at random too.
"""

import collections
import re
import warnings

import hypothesis
import pytest
import torch
from handwritten import HONEST, Gated, Llama, Renamed, Scaled
from hypothesis import strategies as st
from surgery_support import WIDTH, Block, add_hooks, every_device, net, snapshot, values
from torch import nn

import evenkeel.torch as ek

device = every_device

drawn = hypothesis.settings(
    deadline=None, max_examples=60, derandomize=True, database=None, print_blob=False
)

# ---- undo, and failure ----


def test_undo_restores_everything(device):
    model = net(device)
    model.again = model.blocks[0]
    add_hooks(model.final, [])
    x = values(device)
    y, text, before = model(x).detach(), repr(model), snapshot(model)
    report = ek.fuse(model)
    model(x).sum()
    assert snapshot(model) != before
    assert repr(model) != text
    report.undo()
    assert snapshot(model) == before
    assert repr(model) == text
    assert torch.equal(model(x), y)


def test_undo_is_idempotent_and_its_own(device):
    model = net(device)
    first = ek.fuse(model)
    first.undo()
    first.undo()
    plain = snapshot(model)
    second = ek.fuse(model)
    fused_state = snapshot(model)
    first.undo()
    assert snapshot(model) == fused_state
    second.undo()
    assert snapshot(model) == plain


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_undo_of_two_reports(order, device):
    model = net(device)
    before = snapshot(model)
    reports = [ek.fuse(model, include="blocks*"), ek.fuse(model)]
    for i in order:
        reports[i].undo()
    assert snapshot(model) == before


def test_undo_is_refused_after_another_change(device):
    class Other(nn.LayerNorm):
        pass

    model = net(device)
    report = ek.fuse(model)
    model.blocks[1].norm.__class__ = Other
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.norm"):
        report.undo()
    assert snapshot(model) == before
    model.blocks[1].norm.__class__ = ek.LayerNorm
    report.undo()
    assert type(model.blocks[1].norm) is nn.LayerNorm


def stubborn(error):
    """A norm that lets nobody change its class, though an empty object of its class does."""
    change = vars(object)["__class__"].__set__

    def refuse(self, new):
        if vars(self):
            raise error("hands off")
        change(self, new)

    class Stubborn(nn.LayerNorm):
        __class__ = property(type, refuse)

    return Stubborn(WIDTH)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_failure_half_way_changes_nothing(position, error, device):
    model = net(device)
    parent = {"first": model.blocks[0], "middle": model.blocks[1], "last": model.head}[position]
    parent.stubborn = stubborn(error).to(device)
    before = snapshot(model)
    with pytest.raises(error, match="hands off"):
        ek.fuse(model)
    assert snapshot(model) == before
    assert ek.fuse(model, exclude="*stubborn").replaced


# ---- the report ----


def expanded(name):
    """All names that a compressed one stands for."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if braces is None:
        return [name]
    numbers = []
    for part in braces[1].split(","):
        first, _, last = part.strip().partition("..")
        numbers += range(int(first), int(last or first) + 1)
    assert numbers == sorted(set(numbers)), name
    head, tail = name[: braces.start()], name[braces.end() :]
    return [whole for number in numbers for whole in expanded(f"{head}{number}{tail}")]


def rows_of(report):
    """The lines of the table that are about modules, as (name, class, rest)."""
    classes = {e.original.__name__ for e in (*report.replaced, *report.skipped)}
    pattern = re.compile(rf"^\s*(\S+(?:, ?\S+)*?)\s+.*?\b({'|'.join(classes)})\b(.*)$")
    found = [pattern.match(line) for line in str(report).splitlines()[:-1]]
    return [match.groups() for match in found if match]


def test_report_of_a_deep_model(device):
    model = nn.Module()
    model.embed = nn.LayerNorm(8)
    model.layers = nn.ModuleList(Block() for _ in range(12))
    model.layers[3].norm = Scaled(8)
    model.gate = Gated(8)
    report = ek.fuse(model.to(device))
    text = str(report)
    lines = text.splitlines()
    assert lines[-1].strip() == "24 replaced, 2 skipped"
    assert len(lines) <= 12, text
    assert not any(line != line.rstrip() for line in lines)
    names = [name for row in rows_of(report) for name in expanded(row[0])]
    assert sorted(names) == sorted(e.name for e in (*report.replaced, *report.skipped))
    (written,) = [line for line in lines if "written" in line]
    assert "layers.{0..11}.written" in written
    assert re.search(r"\b12\b", written.replace("layers.{0..11}.written", ""))
    (gate,) = [line for line in lines if "Gated" in line]
    assert "its forward takes other arguments: gate" in gate
    (scaled,) = [line for line in lines if "Scaled" in line]
    assert "layers.3.norm" in scaled and "no candidate reproduces it" in scaled
    classes = [re.search(r"\s(LayerNorm|Llama|Gated|Scaled)\b", line) for line in lines[:-1]]
    assert len({match.start() for match in classes}) == 1, text


def test_report_of_the_root(device):
    report = ek.fuse(nn.LayerNorm(8).to(device))
    lines = str(report).splitlines()
    assert any("(root)" in line and "LayerNorm" in line for line in lines)
    assert lines[-1].strip() == "1 replaced, 0 skipped"


@pytest.mark.filterwarnings("ignore:evenkeel")
def test_report_of_nothing(device):
    report = ek.fuse(nn.Linear(2, 2).to(device))
    assert str(report).splitlines()[-1].strip() == "0 replaced, 0 skipped"


def test_report_entries_are_frozen(device):
    report = ek.fuse(net(device), exclude="final")
    for entry in (report.replaced[0], report.skipped[0]):
        with pytest.raises(AttributeError):
            entry.name = "other"


@drawn
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, unique=True),
    st.sets(st.integers(0, 12)),
)
def test_report_names_exactly_what_it_lists(places, off):
    """However names are compressed, each line stands for the names of its kind, and no others."""
    model = nn.ModuleDict()
    for block, layer in places:
        if str(block) not in model:
            model[str(block)] = nn.ModuleDict()
        model[str(block)][str(layer)] = nn.LayerNorm(4) if layer % 3 else nn.RMSNorm(4)
    excluded = [f"*.{layer}" for layer in off]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = ek.fuse(model, exclude=excluded)
    rows = rows_of(report)
    listed = collections.Counter()
    for name, cls, rest in rows:
        listed.update((each, cls, "excluded" in rest) for each in expanded(name))
    expected = collections.Counter(
        (entry.name, entry.original.__name__, hasattr(entry, "reason"))
        for entry in (*report.replaced, *report.skipped)
    )
    assert listed == expected, str(report)


# ---- drawn trees ----

LEAVES = {
    "layer": lambda: nn.LayerNorm(4),
    "rms": lambda: nn.RMSNorm(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "renamed": lambda: Renamed(4),
    "llama": lambda: Llama(4),
    "liar": lambda: Scaled(4),
    "plain": lambda: HONEST["PlainRmsNorm"].make(4),
    "gated": lambda: Gated(4),
    "ours": lambda: ek.LayerNorm(4),
    "linear": lambda: nn.Linear(4, 4),
}


@st.composite
def drawn_tree(draw):
    """A module whose descendants may have several names, and parameters several owners."""
    pool = [LEAVES[name]() for name in draw(st.lists(st.sampled_from(list(LEAVES)), min_size=1))]
    for _ in range(draw(st.integers(0, 5))):
        children = draw(st.lists(st.sampled_from(pool), max_size=4))
        container = nn.Sequential(*children) if draw(st.booleans()) else nn.ModuleList(children)
        pool.append(container)
    norms = [m for m in pool if isinstance(m, (nn.LayerNorm, nn.RMSNorm))]
    if draw(st.booleans()) and norms:
        norms[0].weight = norms[-1].weight
    for module in draw(st.lists(st.sampled_from(pool), max_size=2)):
        module.eval().requires_grad_(False)
    return nn.ModuleList(pool[draw(st.integers(0, len(pool) - 1)) :])


@drawn
@hypothesis.given(drawn_tree(), st.booleans())
def test_drawn_trees_come_back(model, twice):
    def described():
        return [(name, id(p), p.requires_grad) for name, p in named_parameters(model)]

    before, parameters, keys = snapshot(model), described(), list(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reports = [ek.fuse(model), *([ek.fuse(model)] if twice else [])]
    assert described() == parameters
    assert list(model.state_dict()) == keys
    fused = {id(entry.module): entry for entry in reports[0].replaced}
    listed = {id(entry.module): entry for entry in reports[0].skipped} | fused
    names = collections.defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
        kept = before[name][1]
        assert (type(module) is not kept) == (id(module) in fused), name
        assert isinstance(module, kept)
        assert (id(module) in listed) == (kept not in (nn.Linear, nn.Sequential, nn.ModuleList))
    for identity, entry in listed.items():
        assert entry.names == tuple(names[identity]) and entry.name == entry.names[0]
    for report in reports:
        report.undo()
    assert snapshot(model) == before


def named_parameters(model):
    return model.named_parameters(remove_duplicate=False)
