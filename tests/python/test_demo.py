"""The demo and the convergence runs in tiny form: what they write is whole, and made of what they found."""

import csv
import html.parser
import json
import math
import pathlib
import re
import shutil
import statistics
import sys
import types

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import convergence
from demo import __main__ as demo
from demo import machine, norms, report, training
from evenkeel.bench import lines

TINY = ["--size=tiny", "--steps=20", "--device=cpu"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    assert demo.main([*TINY, f"--out={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "demo.json").read_text())


@pytest.fixture
def no_bench(monkeypatch, found):
    """The norms alone need not be measured again."""
    monkeypatch.setattr(norms, "measure", lambda settings, path: (found["bench"], True))


class Page(html.parser.HTMLParser):
    """Fails where tags do not match, and keeps what a browser would load, and the text."""

    VOID = ("meta", "img", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        names = ("src", "href", "srcset", "data", "action")
        self.loads += [value for name, value in attributes if name in names]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def words(text):
    return " ".join(text.split())


def test_the_page_is_one_file_that_loads_nothing(folder):
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert page.loads
    assert all(each.startswith("data:image/") for each in page.loads)
    assert not re.search(r"https?://|url\(|@import|<script", text)
    assert "$" not in page.text  # of a placeholder
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_a_page_with_an_open_tag_is_noticed():
    with pytest.raises(AssertionError):
        Page("<p><b>text</p>")


def test_numbers_on_the_page_come_from_the_run(folder, found):
    text = words(Page((folder / "index.html").read_text()).text)
    for name in (training.STOCK, training.FUSED):
        losses = found["losses"][name]
        assert len(losses) == found["steps"] == 20
        assert f"{statistics.fmean(losses[-training.LAST_STEPS :]):.4f}" in text
        assert f"{found['norms_ms'][name]:.2f}" in text
    for sentence in report.verdict(found):
        assert sentence in text
    for line in found["surgery"].splitlines():
        assert words(line) in text
    for each in json.loads((folder / "norms.json").read_text())["figures"]:
        assert f"{each['time_us']:.1f} µs, {each['of_limit']:.2f}" in text
    assert "the project's own sources and documents" in text
    assert "that is all there is to win" in text


def test_all_files_of_the_report(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.html", "demo.json", "norms.json", "loss.png", "loss.svg"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_norms_are_compared_with_torch(found):
    shown = norms.lines(found["bench"])
    assert {pass_ for _, pass_, _ in shown} == {"forward", "backward"}
    assert all(each.keys() == {"evenkeel", "torch"} for *_, each in shown)
    assert any(what.startswith("layer norm 64 x 32 ") for what, *_ in shown)  # the model's own


@pytest.mark.parametrize(("model", "norm"), [("gpt", "layer_norm"), ("conv", "group_norm")])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_shapes_of_every_device_are_those_of_bench(model, norm, kind, tmp_path):
    settings = training.Settings(model, torch.device(kind))
    words = norms.command(settings, tmp_path / "norms.json")
    shapes = [lines.parse_shape(w.partition("=")[2]) for w in words if w.startswith("--shape")]
    assert len(set(shapes)) == len(shapes) >= 2
    lines.Line(norm, settings.dtype, shapes[0])  # which checks it
    assert model != "conv" or {len(shape) for shape in shapes} == {4}


def test_a_run_that_learns_something_else_fails(monkeypatch, no_bench, tmp_path, capsys):
    prepare = training.prepare

    def broken(settings):
        runs, surgery = prepare(settings)
        runs[training.FUSED].rate = 0.0
        return runs, surgery

    monkeypatch.setattr(training, "prepare", broken)
    assert demo.main([*TINY, f"--out={tmp_path}"]) == 1
    assert "FAILED" in capsys.readouterr().out
    text = words(Page((tmp_path / "index.html").read_text()).text)
    assert "The losses differ" in text
    assert "more than the tolerance of 0.01" in text


def test_losses_that_are_no_numbers_fail(found):
    settings = training.Settings("gpt", CPU, "tiny", 20)
    runs, surgery = training.prepare(settings)
    for run in runs.values():
        run.losses, run.seconds = [math.nan] * 20, [1.0] * 20
    times = dict.fromkeys(runs, 1.0)
    assert not report.collect(settings, runs, surgery, times, 1.0)["same"]


def test_a_norm_without_a_figure_fails(monkeypatch, found, tmp_path):
    monkeypatch.setattr(norms, "measure", lambda settings, path: (found["bench"], False))
    assert demo.main([*TINY, f"--out={tmp_path}"]) == 1


@pytest.mark.parametrize("dtype", training.DTYPES)
@pytest.mark.parametrize("model", training.MODELS)
def test_every_model_learns_the_same(model, dtype):
    settings = training.Settings(model, CPU, "tiny", 20, dtype)
    runs, surgery = training.prepare(settings)
    assert surgery.replaced
    assert not surgery.skipped
    training.train(runs, settings, lambda *told: None)
    stock, fused = runs[training.STOCK], runs[training.FUSED]
    assert len(stock.losses) == len(fused.losses) == 20
    assert abs(stock.final_loss - fused.final_loss) <= training.TOLERANCE[dtype]
    inside, rest = training.times(runs, settings)
    assert min(*inside.values(), rest) > 0


def event(key, kind="CPU", device=0.0, cpu=0.0, count=1, annotation=False):
    return types.SimpleNamespace(
        key=key,
        device_type=getattr(torch.autograd.DeviceType, kind),
        is_user_annotation=annotation,
        self_device_time_total=device,
        device_time_total=device,
        self_cpu_time_total=cpu,
        cpu_time_total=cpu,
        count=count,
    )


def test_times_on_a_gpu_are_those_of_kernels():
    stock = [
        event("aten::native_layer_norm", device=1000, cpu=7),
        event("vectorized_layer_norm_kernel", "CUDA", 1000),
        event("aten::copy_", device=500, cpu=7, count=4),
        event("elementwise_kernel", "CUDA", 500),
        event("Optimizer.step#AdamW.step", "CUDA", 9000, annotation=True),
        event("gemm", "CUDA", 2500),
    ]
    assert training.add_up(stock, cuda=True) == (1.0, 3.0, 0.5, 4)
    fused = [
        event("evenkeel::forward", device=600, cpu=7),
        event("void evenkeel::cuda::rows_forward", "CUDA", 600),
        event("gemm", "CUDA", 2500),
    ]
    assert training.add_up(fused, cuda=True) == (0.6, 2.5, 0.0, 0)
    with pytest.raises(RuntimeError, match="seen nothing"):
        training.add_up([event("aten::mm", cpu=7)], cuda=True)


def test_copies_that_only_torch_needs_are_its_norms(monkeypatch):
    found = {"stock": (1.0, 3.0, 0.5, 4), "fused": (0.6, 2.5, 0.2, 2)}
    monkeypatch.setattr(training, "profile", lambda run, number: training.Times(*found[run]))
    settings = training.Settings("gpt", CPU, "tiny", 20)
    inside, rest = training.times({name: name for name in found}, settings)
    assert inside == pytest.approx({"stock": 1.3, "fused": 0.6})
    assert rest == 2.5


def test_the_loss_falls():
    settings = training.Settings("conv", CPU, "tiny", 60, "f32")
    run = training.Run(settings, settings.data())
    for number in range(60):
        run.turn([number])
    assert run.final_loss < statistics.fmean(run.losses[:10]) - 0.05


def test_a_busy_machine_is_named(found):
    quiet = found | {"busy": 0.1, "processors": 2}
    assert report.busy_sentence(quiet) == ""
    assert "1.6 of 2 processors" in report.busy_sentence(quiet | {"busy": 1.6})


def test_busy_processors():
    before = "cpu  100 0 10 1000 50 0 0 40 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
    after = "cpu  200 0 20 1250 70 0 0 60 5 5\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
    assert machine.busy_processors(before, after, 4) == pytest.approx(4 * 130 / 400)


def test_threads_leave_room_for_others(monkeypatch):
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    before = torch.get_num_threads()
    try:
        for busy, threads in ((0.2, min(before, 8)), (7.6, 1), (3.0, min(before, 5))):
            torch.set_num_threads(before)
            monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)
            monkeypatch.setattr(machine, "busy_processors", lambda *readings, busy=busy: busy)
            assert machine.make_room() == busy
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_model_that_kept_its_norms_is_named(found):
    assert "replaced no norm" in report.gain_sentence(found | {"replaced": 0})


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("--model=rnn", "conv"),
        ("--size=huge", "small"),
        ("--steps=5", "at least 20"),
        ("--steps=many", "at least 20"),
        ("--device=tpu", "cpu, cuda"),
        ("--dtype=f8", "bf16"),
    ],
)
def test_bad_options(option, allowed, capsys):
    with pytest.raises(SystemExit) as error:
        demo.main([option])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert option.partition("=")[2] in message
    assert allowed in message


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    path = tmp_path_factory.mktemp("convergence") / "convergence-tiny.csv"
    convergence.main(["--device=cpu", "--tiny", f"--csv={path}", "--commit=0"])
    return path


def test_convergence_writes_every_run(curves):
    with curves.open() as file:
        rows = list(csv.DictReader(file))
    runs = {(row["model"], row["variant"], row["seed"]) for row in rows}
    assert len(runs) == len(convergence.MODELS) * 2 * len(convergence.SEEDS)
    steps = [int(row["step"]) for row in rows if row["model"] == "vit" and row["seed"] == "2"]
    assert sorted(steps) == sorted(2 * list(range(5, 31, 5)))


def test_convergence_document_comes_from_the_file(curves, tmp_path):
    document = tmp_path / "convergence.md"
    shutil.copy(convergence.DOCUMENT, document)
    for _ in range(2):  # a second time changes nothing
        convergence.main([f"--report={curves}", f"--document={document}"])
        text = document.read_text()
        assert text.count("| seed | native | fused | fused - native |") == 2
    native, fused = (
        statistics.fmean(
            float(row["loss"])
            for row in csv.DictReader(curves.open())
            if (row["model"], row["variant"], row["seed"]) == ("gpt", variant, "1")
            and int(row["step"]) > 10
        )
        for variant in ("native", "fused")
    )
    assert f"| 1 | {native:.4f} | {fused:.4f} | {fused - native:+.4f} |" in text
    for model in convergence.MODELS:
        for kind in ("png", "svg"):
            assert (tmp_path / "images" / f"convergence-{model}.{kind}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "either --csv"),
        (["--csv=x.csv", "--device=cpu", "--steps=7"], "multiple of 5, at least 20"),
        (["--csv=x.csv", "--models=rnn"], "'rnn' is not one of gpt, vit"),
    ],
)
def test_bad_options_of_convergence(options, message, capsys):
    with pytest.raises(SystemExit) as error:
        convergence.main(options)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
