"""The demo and the convergence runs in tiny form: what they write is whole, and made of what they found."""

import csv
import functools
import html.parser
import json
import math
import pathlib
import random
import re
import shutil
import statistics
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import convergence
from demo import __main__ as demo
from demo import machine, norms, report, times, training
from evenkeel.bench import lines

TINY = ["--size=tiny", "--steps=20", "--device=cpu", "--dtype=f32"]
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


TILES = report.loss_tile, report.step_tile, report.norms_tile


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
        assert len(found["turns_ms"][name]) == 20
    for sentence in report.verdict(found):
        assert sentence in text
    for line in found["surgery"].splitlines():
        assert words(line) in text
    for figure, title, below in (f(found) for f in TILES):
        shown = f"{figure} {title} {below}"
        assert "".join(shown.split()) in "".join(text.split())
    for each in json.loads((folder / "norms.json").read_text())["figures"]:
        assert f"{each['time_us']:.1f} µs, {each['of_limit']:.2f}" in text
    assert "the project's own sources and documents" in text


def test_all_files_of_the_report(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"index.html", "demo.json", "norms.json", "loss.png", "loss.svg"}
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_norms_are_compared_with_torch(found):
    shown = norms.lines(found["bench"])
    assert {pass_ for _, pass_, _ in shown} == {"forward", "backward"}
    assert all(each.keys() == {"evenkeel", "torch"} for *_, each in shown)
    assert {what.rpartition(" ")[0] for what, *_ in shown} == {
        "rms norm 64 x 32"
    }  # the model's own


@pytest.mark.parametrize(("model", "norm"), norms.OPERATIONS.items())
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_shapes_of_every_device_are_those_of_bench(model, norm, kind, tmp_path):
    settings = training.Settings(model, torch.device(kind))
    words = norms.command(settings, tmp_path / "norms.json")
    shapes = [lines.parse_shape(w.partition("=")[2]) for w in words if w.startswith("--shape")]
    assert norms.OPERATIONS.keys() == training.MODELS.keys()
    assert norm in words
    assert len(set(shapes)) == len(shapes) == 2
    lines.Line(norm, settings.dtype, shapes[0])  # which checks it
    assert {len(shape) for shape in shapes} == {4 if model == "conv" else 2}


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
    runs[training.BARE] = training.bare(settings, runs[training.STOCK].data)
    for run in runs.values():
        run.losses, run.seconds = [math.nan] * 20, [1.0] * 20
    assert not report.collect(settings, runs, surgery)["same"]


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


@pytest.mark.parametrize("dtype", training.DTYPES)
@pytest.mark.parametrize("model", training.MODELS)
def test_a_run_without_norms(model, dtype):
    """It has none, learns nothing, and its products are of the dtypes of the others."""
    settings = training.Settings(model, CPU, "tiny", 20, dtype)
    runs, surgery = training.prepare(settings)
    bare = training.bare(settings, runs[training.STOCK].data)
    passing = [m for m in bare.model.modules() if type(m) is training.PassOn]
    assert len(passing) == len(surgery.replaced)
    before = [parameter.detach().clone() for parameter in bare.model.parameters()]

    def dtypes(run):
        linear = [
            m for m in run.model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)
        ]
        seen = []
        hooks = [m.register_forward_hook(lambda m, i, o: seen.append(o.dtype)) for m in linear]
        run.turn([0])
        for hook in hooks:
            hook.remove()
        return seen

    assert dtypes(bare) == dtypes(runs[training.FUSED])
    after = list(bare.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert math.isfinite(bare.losses[-1])


def test_compiled_runs_are_compiled_apart(monkeypatch):
    without_inductor = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", without_inductor)
    settings = training.Settings("llama", CPU, "tiny", 20, "f32", compile=True)
    runs, _ = training.prepare(settings)
    runs[training.BARE] = training.bare(settings, runs[training.STOCK].data)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for run in runs.values():
        run.turn([0, 1])
    assert counters["stats"]["unique_graphs"] == len(runs)
    assert not counters["graph_break"]
    losses = [runs[name].losses for name in (training.STOCK, training.FUSED)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert runs[training.BARE].losses != pytest.approx(losses[0], abs=1e-3)


# ---- times, and when nothing is claimed of them ----


def turns(stock, fused, bare, noise, count=120, burst=0.0):
    """Seconds of a step, of each turn; noise is relative, bursts last a few turns and hit all runs alike."""
    chance = random.Random(1)
    found = {training.STOCK: [], training.FUSED: [], training.BARE: []}
    for number in range(count):
        slow = 1 + burst * (number // 6 % 2)
        for name, each in zip(found, (stock, fused, bare), strict=True):
            found[name].append(each * slow * (1 + noise * chance.gauss(0, 1)))
    return found


def test_times_agree_with_each_other():
    figures = times.compare(turns(0.120, 0.100, 0.095, noise=0.03, burst=0.5))
    value = {
        name: {run: each["value"] for run, each in figures[name].items()}
        for name in ("step", "norms")
    }
    rest = figures["rest"]["value"]
    for name in (training.STOCK, training.FUSED):
        assert value["step"][name] == pytest.approx(rest + value["norms"][name])
    stock, fused = (value["step"][name] for name in (training.STOCK, training.FUSED))
    assert figures["ratio"]["value"] == pytest.approx(stock / fused)
    assert figures["saved"]["value"] == pytest.approx(stock - fused)
    assert figures["share"]["value"] == pytest.approx(value["norms"][training.STOCK] / stock)
    for each in (figures["ratio"], figures["rest"], figures["norms"][training.STOCK]):
        assert each["low"] <= each["value"] <= each["high"]


def test_a_difference_beyond_the_noise_is_claimed(found):
    quiet = found | {"times": times.compare(turns(0.120, 0.100, 0.095, noise=0.03))}
    assert report.claim(quiet) == 1
    assert report.step_tile(quiet)[0] == f"{quiet['times']['ratio']['value']:.2f}x"
    assert "times as fast" in report.step_sentence(quiet)
    assert "ms won" in report.norms_sentence(quiet)
    slower = found | {"times": times.compare(turns(0.100, 0.120, 0.095, noise=0.03))}
    assert report.claim(slower) == -1
    assert "ms lost" in report.norms_sentence(slower)


@pytest.mark.parametrize("burst", [0.0, 1.0])
def test_nothing_is_claimed_within_the_noise(found, burst):
    noisy = found | {"times": times.compare(turns(0.101, 0.100, 0.099, noise=0.2, burst=burst))}
    assert report.claim(noisy) == 0
    assert report.step_tile(noisy)[0] == report.norms_tile(noisy)[0] == "no claim"
    sentences = report.step_sentence(noisy) + report.norms_sentence(noisy)
    assert "cannot tell" in sentences
    assert " won" not in sentences and " lost" not in sentences and "win" not in sentences
    assert report.step_bars(noisy) == ""


def test_a_run_beside_itself_is_no_faster():
    """Of a hundred such comparisons, by the level of the intervals about one may be wrong."""
    claims = 0
    for seed in range(100):
        chance = random.Random(seed)
        drift = [0.0]
        for _ in range(99):  # what disturbs a turn disturbs the next
            drift.append(0.8 * drift[-1] + 0.1 * chance.gauss(0, 1))
        seconds = {
            name: [
                math.exp(d + 0.03 * chance.gauss(0, 1))
                + (chance.random() < 0.3) * chance.expovariate(2)
                for d in drift
            ]
            for name in (training.STOCK, training.FUSED, training.BARE)
        }
        claims += not times.includes(times.compare(seconds)["ratio"], 1)
    assert claims <= 4


def test_what_is_no_number_is_no_claim():
    assert times.includes({"value": math.nan, "low": math.nan, "high": math.nan}, 1)


def test_the_first_turns_do_not_count():
    seconds = turns(0.120, 0.100, 0.095, noise=0.03)
    expected = times.compare(seconds)
    for each in seconds.values():
        each[:12] = [60.0] + 11 * [0.001]
    assert times.compare(seconds) == expected


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
    assert "replaced no norm" in report.step_sentence(found | {"replaced": 0})


def test_bf16_where_the_processor_has_it(monkeypatch):
    assert machine.has_bf16("flags\t\t: avx2 avx512_bf16 rdpid\n")
    assert not machine.has_bf16("flags\t\t: avx2 avx512f\n")
    for has, dtype in ((True, "bf16"), (False, "f32")):
        monkeypatch.setattr(machine, "has_bf16", lambda has=has: has)
        assert training.Settings("llama", CPU).dtype == dtype


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
