"""What the tests of the trainers share: what they need, the norms of a model, warnings, losses."""

import importlib.util
import warnings

import pytest
import torch


def needs(*packages):
    """A mark that skips where one of the packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


def norms(model):
    """The classes of the norms, in order."""
    return [type(module) for module in model.modules() if "Norm" in type(module).__name__]


def warned(*words, run):
    """The result of run(), and the texts of its warnings that have one of the words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    texts = [str(warning.message) for warning in caught]
    return result, [text for text in texts if any(word in text for word in words)]


def quietly(run):
    """Fails at a warning by evenkeel."""
    result, texts = warned("evenkeel", run=run)
    assert not texts
    return result


def close(losses, expected, tolerance=1e-5):
    assert len(losses) == len(expected) > 0
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance
    )
