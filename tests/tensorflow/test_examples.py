"""examples/keras_fit.py runs as it stands; the others are tests/python/test_examples.py's."""

import runpy

from documents import ROOT


def test_keras_fit(capsys, cudnn):
    scope = runpy.run_path(str(ROOT / "examples" / "keras_fit.py"))
    assert len(scope["report"].replaced) == 2
    assert "2 replaced, 0 skipped" in capsys.readouterr().out
