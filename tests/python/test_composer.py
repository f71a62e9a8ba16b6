"""evenkeel's algorithms in the real Trainer of Composer, which has an environment of its own.

Composer refuses mixed precision without a GPU. Where that is tested, benchmarks/composer_fits.py
replaces its two functions for it by what they would do for a CPU.
"""

import importlib.util
import pickle
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from documents import ROOT, api_names, python_blocks, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainers_support import close, norms, warned

if importlib.util.find_spec("composer") is None:
    pytest.skip(
        "needs Composer: scripts/setup puts it into .venv-composer", allow_module_level=True
    )

sys.path.insert(0, str(ROOT / "benchmarks"))
import composer_fits  # isort: skip
import composer.algorithms
from composer import Algorithm, Callback, ComposerModel, Event, Trainer

import evenkeel.composer
import evenkeel.torch as ek
from evenkeel.composer import FusedLayerNorm, LowPrecisionGroupNorm, LowPrecisionLayerNorm

ALGORITHMS = [FusedLayerNorm, LowPrecisionLayerNorm, LowPrecisionGroupNorm]
BATCHES = 4  # an epoch


class Tiny(ComposerModel):
    """Two norms get x as it comes, in f32; by dropout a resumed run needs its random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.group = nn.LayerNorm(16), nn.GroupNorm(4, 8)
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(0.1)
        self.last, self.head = nn.LayerNorm((8, 16)), nn.Linear(128, 5)

    def forward(self, batch):
        x = self.dropout(self.linear(self.first(batch[0]) + self.group(batch[0])))
        return self.head(self.last(x).flatten(1))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self(batch)


class Losses(Callback):
    def __init__(self):
        self.values = []

    def after_loss(self, state, logger):
        self.values.append(state.loss.item())


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * BATCHES, 8, 16, generator=generator)
    y = torch.randint(5, (4 * BATCHES,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def start(*algorithms, model=None, callbacks=(), **options):
    """A trainer, with the losses that it will see."""
    model = model or Tiny()
    losses = Losses()
    trainer = Trainer(
        model=model,
        train_dataloader=loader(),
        max_duration="2ep",
        optimizers=torch.optim.Adam(model.parameters(), lr=1e-2),
        algorithms=list(algorithms),
        callbacks=[losses, *callbacks],
        progress_bar=False,
        seed=3,
        device="cpu",
        **options,
    )
    return trainer, losses.values


def fit(*algorithms, **options):
    trainer, losses = start(*algorithms, **options)
    trainer.fit()
    trainer.close()
    return trainer.state.model, losses


def quietly(function, *arguments, **options):
    """Fails at a warning by evenkeel, or by Composer about algorithms."""
    result, texts = warned("evenkeel", "algorithm", run=lambda: function(*arguments, **options))
    assert not texts
    return result


LAYER_NORMS_REPLACED = [ek.LayerNorm, nn.GroupNorm, ek.LayerNorm]
REPLACED = {
    FusedLayerNorm: LAYER_NORMS_REPLACED,
    LowPrecisionLayerNorm: LAYER_NORMS_REPLACED,
    LowPrecisionGroupNorm: [nn.LayerNorm, ek.GroupNorm, nn.LayerNorm],
}
UNTOUCHED = [nn.LayerNorm, nn.GroupNorm, nn.LayerNorm]  # in the order of the attributes


@pytest.fixture(scope="module")
def unfused():
    """Losses without surgery."""
    return fit()[1]


@pytest.fixture
def mixed(monkeypatch):
    """Lets mixed precision be used on the CPU."""
    composer_fits.allow_amp_on_cpu(monkeypatch.setattr)


def test_fused_run_has_the_losses_of_the_unfused(unfused):
    algorithm = FusedLayerNorm()
    model, losses = quietly(fit, algorithm)
    assert norms(model) == LAYER_NORMS_REPLACED
    assert [entry.name for entry in algorithm.report.replaced] == ["first", "last"]
    assert len(unfused) == 2 * BATCHES
    close(losses, unfused)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_mixed_precision_runs_the_norms_in_bf16(kind, mixed):
    model, dtypes = Tiny(), {"first": set(), "group": set()}
    for name, seen in dtypes.items():
        hook = partial(lambda seen, module, x, y: seen.add((x[0].dtype, y.dtype)), seen)
        model.get_submodule(name).register_forward_hook(hook)
    algorithm = kind()
    model, losses = quietly(fit, algorithm, model=model, precision="amp_bf16")
    assert norms(model) == REPLACED[kind]
    lowered = {entry.name for entry in algorithm.report.replaced} - {"last"}
    assert lowered == {"group" if kind is LowPrecisionGroupNorm else "first"}
    for name, seen in dtypes.items():
        # torch's own norm gives f32 for f32 under autocast.
        assert seen == {(torch.float32, torch.bfloat16 if name in lowered else torch.float32)}
    close(losses, fit(precision="amp_bf16")[1], tolerance=0.05)


@pytest.mark.parametrize("kind", [LowPrecisionLayerNorm, LowPrecisionGroupNorm])
def test_low_precision_has_no_effect_in_fp32(kind, unfused):
    algorithm = kind()
    model, losses = quietly(fit, algorithm)
    assert norms(model) == UNTOUCHED
    assert losses == unfused
    assert not algorithm.report.replaced
    assert {entry.reason for entry in algorithm.report.skipped} == {
        "precision fp32 is not mixed: nothing to lower"
    }


def test_fp8_is_left_to_run_time():
    """Composer refuses it without a GPU, so the algorithm is called as its engine calls it."""
    algorithm, model = LowPrecisionLayerNorm(), Tiny()
    state = SimpleNamespace(
        model=model,
        optimizers=[],
        algorithms=[algorithm],
        precision=composer.core.Precision.AMP_FP8,
    )
    quietly(algorithm.apply, Event.INIT, state, None)
    assert norms(model) == LAYER_NORMS_REPLACED


# ---- when ----


@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, "after_load"])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_surgery_is_done_at_its_event(kind, event, mixed):
    seen = {}

    class Watch(Callback):
        def run_event(self, event, state, logger):
            seen[event] = norms(state.model)

    trainer, _ = start(kind(apply_at=event), callbacks=[Watch()], precision="amp_bf16")
    trainer.close()
    events = [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD]
    done = events.index(Event(event))
    # Callbacks see INIT before the algorithms do, and the others after.
    assert seen[Event.INIT] == UNTOUCHED
    assert seen[Event.BEFORE_LOAD] == (REPLACED[kind] if done <= 1 else UNTOUCHED)
    assert seen[Event.AFTER_LOAD] == REPLACED[kind]


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("event", [Event.FIT_START, Event.BATCH_END, "no_event"])
def test_other_events_are_refused(kind, event):
    with pytest.raises(
        ValueError, match=r"Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD|no_event"
    ):
        kind(apply_at=event)


def test_norms_that_other_algorithms_add_are_replaced_too():
    class Add(Algorithm):
        def match(self, event, state):
            return event == Event.INIT

        def apply(self, event, state, logger):
            state.model.head.append(nn.LayerNorm(5))

    model = Tiny()
    model.head = nn.Sequential(model.head)
    fit(FusedLayerNorm(), Add(), model=model)
    assert norms(model) == [*LAYER_NORMS_REPLACED, ek.LayerNorm]


def test_model_without_norms_is_warned_about_once():
    class Plain(Tiny):
        def __init__(self):
            super().__init__()
            self.first = self.group = self.last = nn.Identity()

    _, texts = warned("no norm was replaced", run=lambda: fit(FusedLayerNorm(), model=Plain()))
    assert len(texts) == 1


# ---- checkpoints ----


def save(folder, *algorithms, **options):
    """A whole run that leaves a checkpoint after every batch."""
    _, losses = fit(*algorithms, save_folder=str(folder), save_interval="1ba", **options)
    return losses


def checkpoint(folder, batch):
    (path,) = folder.glob(f"ep*-ba{batch}-rank0.pt")
    return str(path)


def resumed(folder, batch, *algorithms, **options):
    return fit(*algorithms, load_path=checkpoint(folder, batch), **options)


@pytest.mark.parametrize("batch", [3, 4])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_resumed_run_continues_bit_by_bit(kind, batch, mixed, tmp_path):
    losses = save(tmp_path, kind(), precision="amp_bf16")
    model, rest = quietly(resumed, tmp_path, batch, kind(), precision="amp_bf16")
    assert norms(model) == REPLACED[kind]
    assert rest == losses[batch:]


@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD])
def test_checkpoint_saved_without_loads_with(event, unfused, tmp_path):
    save(tmp_path)
    algorithm = FusedLayerNorm(event)
    (model, rest), texts = warned("evenkeel", run=lambda: resumed(tmp_path, 3, algorithm))
    # Composer says so of every algorithm, with a state or without.
    assert texts == [
        "evenkeel.composer.FusedLayerNorm is not in the state_dict. Its state will not be restored."
    ]
    assert norms(model) == LAYER_NORMS_REPLACED
    assert len(algorithm.report.replaced) == 2
    close(rest, unfused[3:])


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_checkpoint_saved_with_loads_without(kind, mixed, tmp_path):
    losses = save(tmp_path, kind(), precision="amp_bf16")
    model, rest = quietly(resumed, tmp_path, 3, precision="amp_bf16")
    assert norms(model) == UNTOUCHED
    close(rest, losses[3:], tolerance=0.05)


@pytest.mark.parametrize("event", [Event.INIT, Event.AFTER_LOAD])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_checkpoint_of_composers_own_algorithm_loads_with_evenkeels(kind, event, mixed, tmp_path):
    """Composer adds its own to the run, whose modules would take the place of evenkeel's."""
    own = "LowPrecisionGroupNorm" if kind is LowPrecisionGroupNorm else "LowPrecisionLayerNorm"
    losses = save(tmp_path, getattr(composer.algorithms, own)(event), precision="amp_bf16")
    algorithm = kind()
    model, rest = resumed(tmp_path, 3, algorithm, precision="amp_bf16")
    assert norms(model) == REPLACED[kind]
    assert set(norms(algorithm.report.model)) == set(REPLACED[kind])
    assert algorithm.report.replaced
    close(rest, losses[3:], tolerance=0.05)


def test_weights_alone_load_both_ways(tmp_path):
    save(tmp_path, FusedLayerNorm())
    path = checkpoint(tmp_path, BATCHES)
    loaded = {}
    for name, algorithms in {"with": [FusedLayerNorm()], "without": []}.items():
        trainer, _ = start(*algorithms, load_path=path, load_weights_only=True)
        trainer.close()
        loaded[name] = trainer.state.model.state_dict()
    weights = torch.load(path, weights_only=False)["state"]["model"]
    assert loaded["with"].keys() == loaded["without"].keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded["with"][name], weight)
        assert torch.equal(loaded["without"][name], weight)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_algorithms_can_be_pickled(kind):
    copy = pickle.loads(pickle.dumps(kind(Event.BEFORE_LOAD)))
    assert type(copy) is kind
    assert repr(copy) == f"{kind.__name__}(apply_at=Event.BEFORE_LOAD)"


# ---- docs/trainers.md ----


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_snippet_of_the_guide(kind):
    found = python_blocks(ROOT / "docs" / "trainers.md", "composer")
    (block,) = [block for block in found if f"{kind.__name__}()" in block.text]
    given = {"model": Tiny(), "train_dataloader": loader(), "eval_dataloader": loader()}
    run(block, given)
    trainer = given["trainer"]
    trainer.close()
    assert trainer.state.timestamp.batch == BATCHES
    # Without a GPU the precision is fp32, with one it is mixed.
    replaced = kind is FusedLayerNorm or torch.cuda.is_available()
    assert norms(trainer.state.model) == (REPLACED[kind] if replaced else UNTOUCHED)


def test_api_page_has_every_name():
    assert api_names("evenkeel.composer") == set(evenkeel.composer.__all__)
