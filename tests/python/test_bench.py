"""`python -m evenkeel bench` on tiny shapes: what it prints, writes and draws, and what it says when something is off.

No time is judged here: only that there is one, and that everything that is made of it fits together.
"""

import contextlib
import csv
import functools
import gc
import importlib
import json
import pathlib
import re
import types
import weakref
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.nn.functional as F
from bench_lines import CPU, EVERY_KIND
from commands import run

import evenkeel.__main__
from evenkeel.bench import (
    contenders,
    lines,
    measure,
    plots,
    report,
    steps,
    surgery,
    tensors,
    timing,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMMITTED = ROOT / "benchmarks" / "results" / "gpu-h200-2026-11-16.csv"


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Figures need not be good here."""
    monkeypatch.setattr(timing, "QUICK", timing.Effort(timings=1, seconds=0.01))
    monkeypatch.setattr(timing, "HOST_CALLS", 50)
    monkeypatch.setattr(measure, "PAUSE", 0)
    monkeypatch.setattr(measure, "keep_pages", lambda: None)  # it is for good
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(capsys):
    """Runs the command; gives its exit code, stdout and stderr."""

    def run(*arguments):
        try:
            code = evenkeel.__main__.main(["bench", "--device", "cpu", "--quick", *arguments])
        except SystemExit as end:
            code = end.code
        return types.SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_table_csv_json_and_pictures(bench, tmp_path):
    result = bench(
        *("layer_norm", "--shape", "8x64", "--shape", "4,32", "--contenders", "evenkeel,torch"),
        *("--csv", str(tmp_path / "b.csv"), "--json", str(tmp_path / "b.json")),
        *("--plot", str(tmp_path / "plots"), "--commit", "abc"),
    )
    assert result.code == 0, result.err
    rows = read_csv(tmp_path / "b.csv")
    keys = [(row["shape"], row["pass"], row["library"]) for row in rows]
    assert keys == [
        (shape, pass_, name)
        for shape in ("8x64", "4x32")
        for pass_ in ("forward", "backward")
        for name in ("evenkeel", "torch")
    ]
    printed = [float(number) for number in re.findall(r"\d+\.\d", result.out)]
    for row in rows:
        time_, ceiling = float(row["time_us"]), float(row["ceiling_us"])
        moved = {"forward": 2, "backward": 3}[row["pass"]] * {"8x64": 2048, "4x32": 512}[
            row["shape"]
        ]
        assert float(row["of_limit"]) == pytest.approx(ceiling / time_, abs=0.02, rel=0.02)
        assert float(row["gb_per_s"]) == pytest.approx(moved / time_ / 1e3, abs=0.6)
        assert row["commit"] == "abc"
        assert row["dtype"] == "f32"
        assert min(abs(number - time_) for number in printed) < 0.06

    found = json.loads((tmp_path / "b.json").read_text())
    assert [figure["time_us"] for figure in found["figures"]] == [float(r["time_us"]) for r in rows]
    assert found["torch"] == torch.__version__
    assert not found["missing"]

    for pass_ in ("forward", "backward"):
        picture = tmp_path / "plots" / f"layer_norm-{pass_}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        drawing = ElementTree.parse(picture.with_suffix(".svg")).getroot()
        texts = " ".join(drawing.itertext())
        for word in ("evenkeel", "torch", "8x64 f32", "share of the limit"):
            assert word in texts
    assert "evenkeel leads in" in result.out


def test_csv_is_what_the_tables_are_made_from(bench, tmp_path, monkeypatch):
    path = tmp_path / "gpu-here.csv"
    result = bench("group_norm", "--shape", "2x32x4x4", "--activation", "silu", "--csv", str(path))
    assert result.code == 0, result.err
    with COMMITTED.open() as file:
        assert path.read_text().splitlines()[0] == next(file).strip()
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    text = importlib.import_module("table").gpu_markdown(path)
    for layout in lines.LAYOUTS:
        assert f"| group_norm 2x32x4x4 {layout} silu f32 backward |" in text
    assert "of 4 lines" in text


def test_all_norms_take_the_shapes_that_suit_them(bench, tmp_path):
    path = tmp_path / "b.csv"
    result = bench(
        *"--shape 4x32 --shape 1x32x2x2 --pass forward --contenders evenkeel --csv".split(),
        str(path),
    )
    assert result.code == 0, result.err
    found = {(row["op"], row["shape"], row["pass"]) for row in read_csv(path)}
    assert found == {
        ("layer_norm", "4x32", "forward"),
        ("rms_norm", "4x32", "forward"),
        ("group_norm", "1x32x2x2 nchw", "forward"),
        ("group_norm", "1x32x2x2 nhwc", "forward"),
    }


def test_dtype_of_preset_lines_is_replaced(bench, tmp_path, monkeypatch):
    small = lines.Preset("small", tuple(lines.rows("rms_norm", "f32", "4x32")))
    monkeypatch.setitem(lines.PRESETS, "cpu", small)
    path = tmp_path / "b.csv"
    assert bench("rms_norm", "--dtype", "bf16", "--csv", str(path)).code == 0
    assert {row["dtype"] for row in read_csv(path)} == {"bf16"}


def test_tutorial_is_the_tutorials_benchmark():
    preset = lines.PRESETS["triton-tutorial"]
    assert [line.cols for line in preset.lines] == list(range(1024, 15873, 512))
    assert {(line.op, line.rows, line.dtype) for line in preset.lines} == {
        ("layer_norm", 4096, "f16")
    }
    assert preset.passes == ("backward",)
    # 3 tensors of 4096 x 1024 x 2 bytes in 20 microseconds.
    assert preset.lines[0].gb_per_s("backward", 20) == pytest.approx(1258.2912)


def test_tutorial_on_a_cpu_says_so(bench, tmp_path, monkeypatch):
    short = tuple(lines.rows("layer_norm", "f16", "8x32 8x64 8x96"))
    monkeypatch.setitem(lines.PRESETS, lines.TUTORIAL, lines.Preset("", short, ("backward",)))
    result = bench(
        "--preset", "triton-tutorial", "--plot", str(tmp_path), "--csv", str(tmp_path / "b.csv")
    )
    assert result.code == 0, result.err
    assert "on the CPU in f32" in result.out
    rows = read_csv(tmp_path / "b.csv")
    assert {(row["pass"], row["dtype"]) for row in rows} == {("backward", "f32")}
    head = next(line for line in result.out.splitlines() if line.split()[:1] == ["N"])
    assert head.split() == ["N", "evenkeel", "torch", "limit"]
    texts = " ".join(ElementTree.parse(tmp_path / "layer_norm-backward.svg").getroot().itertext())
    assert "GB/s" in texts
    assert "N, the length of a row" in texts


def test_peers_are_the_committed_lines_and_the_group_norms():
    found = {(line.op, line.where, line.dtype) for line in lines.PRESETS["peers"].lines}
    committed = {
        (row["op"], row["shape"], row["dtype"])
        for row in read_csv(COMMITTED)
        if not row["pass"].startswith("host")
    }
    assert committed <= found
    groups = {key for key in found if key[0] == "group_norm"}
    assert len(groups) == 5 * 4
    assert ("group_norm", "1x128x512x512 nhwc silu", "f16") in groups


def test_residual_preset_measures_three_passes(bench, tmp_path, monkeypatch):
    small = lines.rows("rms_norm", "bf16+bf16", "8x64") + lines.rows(
        "layer_norm", "bf16+f32", "8x64"
    )
    preset = lines.PRESETS["residual"]
    monkeypatch.setitem(lines.PRESETS, "residual", lines.Preset("", tuple(small), preset.passes))
    path = tmp_path / "residual-here.csv"
    result = bench(
        *("--preset", "residual", "--csv", str(path), "--plot", str(tmp_path)),
        *("--contenders", "evenkeel,torch"),
    )
    assert result.code == 0, result.err
    rows = read_csv(path)
    passes = ("forward", "backward", "backward no dsum")
    assert [(row["op"], row["dtype"], row["pass"]) for row in rows[::2]] == [
        *(("rms_norm", "bf16+bf16", pass_) for pass_ in passes),
        *(("layer_norm", "bf16+f32", pass_) for pass_ in passes),
    ]
    assert "layer_norm 8x64 bf16+f32 backward no dsum" in result.out
    assert (tmp_path / "layer_norm-backward-no-dsum.png").exists()
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    text = importlib.import_module("table").TABLES["residual"](path)
    assert text.startswith("From `residual-here.csv`")
    assert "| rms_norm 8x64 bf16+bf16 backward no dsum |" in text
    assert "of 6 lines" in text


def test_residual_preset_has_the_shapes_of_its_rivals():
    found = {line.label for line in lines.PRESETS["residual"].lines}
    shapes = "4096x1024 4096x4096 16384x4096 4096x8192 25216x768 131072x512 8192x5120 4096x3001"
    for shape in shapes.split():
        assert {f"rms_norm {shape} bf16+bf16", f"layer_norm {shape} bf16+f32"} <= found
    for shape in ("4096x1024", "4096x4096"):
        assert {f"rms_norm {shape} f32+f32", f"layer_norm {shape} f32+f32"} <= found
    assert len(found) == 20


def test_modulation_preset(bench, tmp_path, monkeypatch):
    """A right result is asked of all, in both passes; libraries without such a norm say so."""
    preset = lines.PRESETS["modulation"]
    assert all(line.modulates for line in preset.lines)
    small = [lines.Line(op, "f32", (3, 4, 32)) for op in ("layer_norm", "rms_norm")]
    monkeypatch.setitem(lines.PRESETS, "modulation", lines.Preset("", tuple(small)))
    path = tmp_path / "modulation.csv"
    result = bench(
        *("--preset", "modulation", "--csv", str(path), "--contenders", "evenkeel,torch,compile")
    )
    assert result.code == 0, result.err
    assert "is off by" not in result.err
    rows = read_csv(path)
    labels = [(row["op"], row["pass"], row["library"]) for row in rows if row["library"] != "limit"]
    assert labels == [
        (op, pass_, library)
        for op in ("layer_norm", "rms_norm")
        for pass_ in ("forward", "backward")
        for library in ("evenkeel", "torch", "compile")
    ]
    line = small[0]
    assert (line.rows, line.cols, line.label) == (12, 32, "layer_norm 3x4x32 f32")
    assert line.moved_bytes("backward") == 3 * 3 * 4 * 32 * 4


def test_a_wrong_scale_is_found():
    """The reference knows which sample has which scale."""
    line = lines.Line("layer_norm", "f32", (3, 4, 32))
    s = tensors.make_set(line, torch.device("cpu"))
    expected = tensors.reference(line, s)["forward"]
    scale, shift = s.parameters
    norm = torch.nn.functional.layer_norm(s.x, (32,), eps=lines.EPS)
    tensors.check(True, line, [norm * (1 + scale[:, None]) + shift[:, None]], expected)
    with pytest.raises(tensors.WrongResultError, match="y is off"):
        tensors.check(True, line, [norm * (1 + scale.flip(0)[:, None]) + shift[:, None]], expected)


def test_residual_of_ones_own_shape(bench, tmp_path):
    path = tmp_path / "b.csv"
    result = bench("rms_norm", "--shape", "4x32", "--dtype", "f16+f32", "--csv", str(path))
    assert result.code == 0, result.err
    rows = read_csv(path)
    assert {(row["dtype"], row["pass"]) for row in rows} == {
        ("f16+f32", "forward"),
        ("f16+f32", "backward"),
    }
    result = bench("--preset", "host", "--dtype", "f32+f32", "--csv", str(path))
    assert result.code == 0, result.err


def test_sweep_is_drawn_from_its_seed():
    """The same lines from the same seed, on any machine; each size in three types; no favourites."""
    for device, (least, most) in lines.SWEEP_ELEMENTS.items():
        found = lines.sweep(3, device)
        assert found == lines.sweep(3, device)
        assert found != lines.sweep(4, device)
        sizes = {line.shape for line in found}
        assert len(sizes) == 60
        assert len(found) == 180
        assert {line.dtype for line in found} == {"f32", "bf16", "f16"}
        assert {line.op for line in found} == {"layer_norm", "rms_norm"}
        assert all(64 <= cols <= 20480 for _, cols in sizes)
        assert all(least - cols <= rows * cols <= most for rows, cols in sizes)
        assert any(cols % 2 for _, cols in sizes)


def test_sweep_in_parts_is_one_heat_map(bench, tmp_path, monkeypatch):
    sizes = [(8, 64), (4, 96)]
    small = tuple(
        lines.Line("rms_norm", dtype, shape) for shape in sizes for dtype in ("f32", "bf16")
    )
    monkeypatch.setattr(lines, "sweep", lambda seed, device: small if seed == 5 else ())
    path = tmp_path / "sweep.csv"
    for pass_ in lines.PASSES:
        result = bench(
            *("--preset", "sweep", "--seed", "5", "--pass", pass_),
            *("--contenders", "evenkeel,torch", "--csv", str(path), "--plot", str(tmp_path)),
        )
        assert result.code == 0, result.err
    assert re.search(r"sweep: \d of \d lines are behind a rival, \d are below 0.7", result.out)
    found = report.figures_of_sweep(read_csv(path))
    assert {key[3] for key in found} == set(lines.PASSES)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    texts = " ".join(ElementTree.parse(tmp_path / "sweep.svg").getroot().itertext())
    for (op, shape, *_), figures in found.items():
        assert f"{shape}  {op.split('_')[0]}" in texts
        for figure in figures:
            assert f"{figure:.2f}" in texts


def test_figures_of_a_sweep(capsys):
    """The best rival leads or follows, and the last measurement counts."""

    def row(library, time_us, of_limit=0.8, cols=64):
        line = {"op": "rms_norm", "shape": f"8x{cols}", "dtype": "f32", "pass": "forward"}
        return line | {"library": library, "time_us": str(time_us), "of_limit": str(of_limit)}

    rows = [row("evenkeel", 9), row("evenkeel", 10), row("torch", 30), row("compile", 8)]
    rows.append(row("evenkeel", 10, 0.69, cols=96))
    assert list(report.figures_of_sweep(rows).values()) == [(0.8, 0.8), (0.69, None)]
    report.print_sweep(rows)
    out = capsys.readouterr().out
    assert "1 of 2 lines are behind a rival, 1 are below 0.7" in out
    assert "behind: rms_norm 8x64 f32 forward, lead 0.80" in out


def test_host_preset_counts_eager_calls(bench, tmp_path):
    path = tmp_path / "b.csv"
    result = bench("--preset", "host", "--csv", str(path))
    assert result.code == 0, result.err
    rows = read_csv(path)
    assert {row["pass"] for row in rows} == {"host forward", "host forward+backward"}
    assert {row["library"] for row in rows} == {"evenkeel", "torch"}
    assert all(row["ceiling_us"] == "" for row in rows)


def test_wrong_result_is_shown_as_wrong(bench, monkeypatch, tmp_path):
    doubled = contenders.ThroughAutograd(
        lambda x, weight, bias: 2 * F.layer_norm(x, (32,), weight, bias)
    )
    monkeypatch.setitem(contenders.MAKERS, "torch", lambda line: doubled)
    path = tmp_path / "b.json"
    result = bench(
        "layer_norm", "--shape", "4x32", "--contenders", "evenkeel,torch", "--json", str(path)
    )
    assert result.code == 0  # a rival's mistake is not ours
    assert "torch: y is off by" in result.err
    found = json.loads(path.read_text())
    assert {figure["library"] for figure in found["figures"]} == {"evenkeel"}
    assert [(m["library"], m["shown"]) for m in found["missing"]] == [("torch", "wrong")] * 2
    assert any(line.split()[:2] == ["torch", "wrong"] for line in result.out.splitlines())


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (lambda x, r, w: (F.rms_norm(x + r, (32,), w, lines.EPS), x + 0 * r), "sum is off by"),
        # The gradient that arrives at the sum is lost.
        (
            lambda x, r, w: (
                F.rms_norm(x + r, (32,), w, lines.EPS),
                (x + r).detach() + 0 * x,
            ),
            "dx is off by",
        ),
        (lambda x, r, w: (F.rms_norm(x + r, (32,), w, lines.EPS),), "there is no sum"),
    ],
)
def test_wrong_sums_are_shown_as_wrong(bench, monkeypatch, norm, message):
    wrong = contenders.WithResidual(norm)
    monkeypatch.setitem(contenders.MAKERS, "torch", lambda line: wrong)
    options = "--shape 4x32 --dtype f32+f32 --contenders evenkeel,torch".split()
    result = bench("rms_norm", *options)
    assert f"torch: {message}" in result.err


def test_wrong_result_of_ours_fails(bench, monkeypatch):
    shifted = contenders.ThroughAutograd(
        lambda x, weight: F.rms_norm(x, (32,), weight, lines.EPS) * 1.001
    )
    monkeypatch.setitem(contenders.MAKERS, "evenkeel", lambda line: shifted)
    result = bench("rms_norm", "--shape", "4x32", "--contenders", "evenkeel,torch")
    assert result.code == 1
    assert "evenkeel: y is off by 1.0e-03, allowed is 1e-04" in result.err


def test_contender_that_fails_leaves_the_others_alone(bench, monkeypatch):
    def make(line):
        raise RuntimeError("no kernel today")

    monkeypatch.setitem(contenders.MAKERS, "torch", make)
    result = bench("layer_norm", "--shape", "4x32", "--contenders", "torch,evenkeel")
    assert result.code == 0
    assert "layer_norm 4x32 f32 forward: torch: RuntimeError: no kernel today" in result.err
    assert any(line.split()[:2] == ["torch", "-"] for line in result.out.splitlines())


def test_missing_contender_is_named(bench):
    result = bench("rms_norm", "--shape", "4x32", "--contenders", "evenkeel,liger")
    assert result.code == 0
    assert "liger: for GPUs only" in result.err
    result = bench("rms_norm", "--shape", "4x32", "--pass", "forward")
    assert "not compared: triton (tutorial's design), Apex" in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("batch_norm", ["batch_norm", "layer_norm", "surgery"]),
        ("--preset fast", ["--preset", "fast", "triton-tutorial", "peers"]),
        ("--dtype f8", ["--dtype", "f8", "bf16/f32w"]),
        ("--contenders evenkeel,onednn", ["--contenders", "onednn", "flash-attn"]),
        ("--shape 4096", ["shape 4096", "rows x columns"]),
        ("--shape 4ox96", ["--shape", "4ox96", "4096x1024"]),
        ("layer_norm --shape 0x96", ["shape 0x96", "rows x columns"]),
        ("group_norm --shape 2x30x4x4", ["shape 2x30x4x4", "multiple of 32"]),
        ("rms_norm --layout nhwc", ["--layout", "group_norm", "rms_norm"]),
        ("rms_norm --preset triton-tutorial", ["no rms_norm"]),
        ("--preset peers --shape 4x4", ["--shape", "--preset"]),
        ("--preset host --pass forward", ["--pass forward", "host forward"]),
        ("--preset residual --dtype bf16", ["--dtype bf16", "bf16+f32"]),
        ("group_norm --shape 2x64x4x4 --dtype f32+f32", ["dtype f32+f32", "no residual"]),
        ("layer_norm --shape 2x3x4 --dtype f32+f32", ["shape 2x3x4", "samples x rows x columns"]),
        ("surgery --shape 4x4", ["--shape", "surgery"]),
        ("surgery --dtype f64", ["--dtype f64", "bf16"]),
    ],
)
def test_bad_arguments_name_what_is_allowed(bench, arguments, words):
    result = bench(*arguments.split())
    assert result.code == 2
    for word in words:
        assert word in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_gpu_is_named(capsys):
    with pytest.raises(SystemExit):
        evenkeel.__main__.main(["bench", "--device", "cuda"])
    assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_package_names_the_extra(tmp_path, package):
    program = f"""
import sys
sys.modules[{package!r}] = None  # as if it were not installed
import evenkeel.__main__
sys.exit(evenkeel.__main__.main(["bench", "--plot", {str(tmp_path)!r}, "--shape", "4x4"]))
"""
    result = run("-c", program)
    assert result.returncode in (1, 2)
    assert package in result.stderr
    assert "evenkeel[bench]" in result.stderr


def test_graphs_take_turns_in_one_memory_and_name_failures(monkeypatch):
    order, pools, failures = [], [], {}

    class Fake:
        def __init__(self, calls, pool):
            self.name, self.found = calls[0](), [5.0, 1.0, 2.0]
            pools.append(pool)

        def time(self):
            order.append(self.name)
            return self.found.pop()

    def broken():
        raise RuntimeError("lost")

    monkeypatch.setattr(timing, "Graph", Fake)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    prepared = {"a": lambda: [lambda: "a"], "b": broken, "c": lambda: [lambda: "c"]}
    times = timing.times_by_graphs(prepared, timing.Effort(3, 0), failures.__setitem__)
    assert times == {"a": 2.0, "c": 2.0}
    assert order == ["a", "c"] * 3
    assert len(pools) == 2 and pools[0] is pools[1]
    assert str(failures["b"]) == "lost"


def test_what_a_graph_reads_stays(monkeypatch):
    """A capture empties torch's cache, and a replay would read memory that is no longer there."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    operand = torch.zeros(1)
    there = weakref.ref(operand)
    graph = timing.Graph([functools.partial(torch.clone, operand)], pool=None)
    del operand
    gc.collect()
    assert there() is not None, graph


def test_every_contender_has_a_title_a_maker_and_a_colour():
    assert contenders.TITLES.keys() == contenders.MAKERS.keys()
    assert contenders.TITLES.keys() <= plots.COLORS.keys()
    assert len(set(plots.COLORS.values())) == len(plots.COLORS)
    assert plots.COLORS["evenkeel"] == "#0f766e"


def test_pictures_show_who_took_part(tmp_path):
    line = EVERY_KIND[2]
    times = {"evenkeel": 2.0, "torch": "wrong", "triton": "-"}
    result = timing.Result(line, "forward", 1.0, times, {})
    plots.draw([result], list(times), tmp_path, "here")
    texts = " ".join(ElementTree.parse(tmp_path / "rms_norm-forward.svg").getroot().itertext())
    for word in ("evenkeel", "0.50", "torch", "wrong", "here"):
        assert word in texts
    assert "triton" not in texts
    nobody = result._replace(times=dict.fromkeys(times, "-"))
    assert plots.draw([nobody], list(times), tmp_path / "none", "here") == []


def test_surgery_compares_steps(bench, tmp_path, monkeypatch):
    sizes = {"texts": 2, "length": 8, "layers": 1, "width": 32, "heads": 2}
    monkeypatch.setattr(surgery, "CPU_GPT", sizes)
    monkeypatch.setattr(surgery, "CPU_IMAGE", (2, 32, 4, 4))
    monkeypatch.setattr(surgery, "CPU_BLOCKS", 2)
    monkeypatch.setattr(surgery, "QUICK_ROUNDS", 1)
    path = tmp_path / "b.csv"
    result = bench(
        "surgery", "--csv", str(path), "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path)
    )
    assert result.code == 0, result.err
    rows = read_csv(path)
    assert len(rows) == surgery.COUNT * len(steps.VARIANTS)
    assert [row["variant"] for row in rows[:3]] == list(steps.VARIANTS)
    found = json.loads((tmp_path / "b.json").read_text())["steps"]
    assert [step["batch"] for step in found] == ["2x8", "2x32x4x4", "2x32x4x4"]
    for step in found:
        assert step["fused"]["loss"] == pytest.approx(step["native"]["loss"], rel=1e-3)
        assert step["none"]["loss"] != pytest.approx(step["native"]["loss"], rel=1e-3)
    assert (tmp_path / "surgery.png").exists()


def test_without_norms_the_activation_stays():
    model, _ = surgery.models.conv_net((1, 32, 4, 4), CPU, 1, "nhwc")
    body = model.blocks[0].body
    with steps.surgery(model, "none"):
        assert [type(part) for part in body][1:] == [steps.PassOn, torch.nn.SiLU]
    with steps.surgery(model, "fused"):
        assert type(body[1]).__name__ == "GroupNormSiLU"
    assert [type(part) for part in body][1:] == [torch.nn.GroupNorm, torch.nn.SiLU]


def test_loss_that_surgery_changes_is_no_figure(monkeypatch, capsys):
    model, image = surgery.models.conv_net((1, 32, 4, 4), CPU, 1, "nchw")
    monkeypatch.setattr(steps, "TOLERANCE", -1.0)
    training = steps.Training(model, lambda model: model(image), CPU, None)
    figures = steps.measure("net", training, 1, compiled=False)
    assert set(figures) == {"native", "none"}
    assert "fused: the loss is off by" in capsys.readouterr().err


def test_report_keeps_what_a_line_could_not_give():
    line = EVERY_KIND[0]
    result = timing.Result(line, "forward", None, {"evenkeel": "-"}, {})
    shared = report.constants(CPU, "abc")
    found = report.Report(shared, ["evenkeel"])
    found.add(result)
    found.print_table()
    assert not found.fine()
    assert list(found.csv_rows(result)) == []
