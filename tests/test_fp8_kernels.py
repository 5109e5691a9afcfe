"""The FP8 kernels in Triton's interpreter against plain torch, then their machine code for an H100, without a GPU."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import kernels as bench

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROOM = Path(__file__).resolve().parents[1] / "runtime" / "fp8_kernels.py"


def load():
    """The room anew under a name of its own: whether its kernels are interpreted is decided when it is imported."""
    spec = importlib.util.spec_from_file_location("fp8_kernels_under_test", ROOM)
    room = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(room)
    return room


@pytest.fixture
def kernels(monkeypatch):
    """The room, interpreted, with the interpreter's rounding to FP8 repaired.

    The interpreter (3.6 to 3.9) truncates subnormals, loses NaN and rounds some carries down. Hardware rounds as torch
    does, which test_the_machine_code asserts by instruction and the gpu tests by value. All else is the interpreter's.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton import language as tl
    from triton.runtime import interpreter
    theirs = interpreter._convert_float

    def convert(data, source, target, rounding):
        format = {"fp8e4nv": E4M3, "fp8e5": E5M2}.get(target.name)
        if format is None or source != tl.float32:
            return theirs(data, source, target, rounding)
        assert rounding is not None
        return torch.from_numpy(np.ascontiguousarray(data)).to(format).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    _watch_memory(monkeypatch, interpreter)
    with np.errstate(over="ignore", invalid="ignore"):
        yield load()


def _watch_memory(monkeypatch, interpreter):
    """Fail where an interpreted kernel touches what is not in its arguments: on a GPU it may be anybody's."""
    spans = []
    launch = interpreter.GridExecutor.__call__

    def recorded(self, *args, **options):
        spans[:] = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in args if isinstance(t, torch.Tensor)]
        return launch(self, *args, **options)

    def watched(access, place):
        def wrapper(self, pointers, *rest):
            mask = rest[place].data
            at = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.shape))[mask]
            assert sum(int(((first <= at) & (at < end)).sum()) for first, end in spans) == at.size, "outside the tensors"
            return access(self, pointers, *rest)
        return wrapper

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    builder = interpreter.InterpreterBuilder
    for name, place in (("create_masked_load", 0), ("create_masked_store", 1)):
        monkeypatch.setattr(builder, name, watched(getattr(builder, name), place))


def quantised(x, scale, format):
    largest = torch.finfo(format).max
    return (x.float() * scale).clamp(-largest, largest).to(format)


def same(a, b):
    """Equal bits, but for the sign of NaN, which torch keeps while Hopper's instruction drops it."""
    assert a.shape == b.shape and a.dtype == b.dtype
    nan = a.float().isnan()
    return bool((nan == b.float().isnan()).all() and (nan | (a.view(torch.uint8) == b.view(torch.uint8))).all())


def outputs(M, K, format, rows=True):
    poison = 0x55       # what no kernel wrote stays visible
    q = torch.full((M, K), poison, dtype=torch.uint8).view(format) if rows else None
    return q, torch.full((K, M), poison, dtype=torch.uint8).view(format)


def hostile(M, K, dtype=torch.bfloat16):
    """Values of every size, each special one somewhere; never symmetric under transposition."""
    torch.manual_seed(M * 1000 + K)
    x = torch.randn(M, K) * torch.exp2(torch.randint(-24, 12, (M, K)))
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 448.0, -448.0, 449.0, 464.0, 480.0, 57344.0,
                            61440.0, 65536.0, 3e38, -3e38, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-16, 2.0**-17, 1e-30, 1e-40])
    x.view(-1)[torch.randperm(M * K)[:len(special)]] = special
    return x.to(dtype)


def small(kernels, rows=32, columns=16, group=2):
    return kernels.Tile(rows, columns, 4, group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("M, K", [(16, 112), (48, 80), (112, 16)])
def test_both_layouts_hold_torchs_values(kernels, M, K, format, dtype):
    x = hostile(M, K, dtype)
    for scale in (torch.tensor(1.0), torch.tensor(0.37)):
        q, qt = outputs(M, K, format)
        kernels.cast_both(x, scale, format, q, qt, small(kernels))
        assert same(q, quantised(x, scale, format)) and same(qt, quantised(x, scale, format).t().contiguous())


def test_the_tiles_in_use_cover_shapes_that_are_no_multiples_of_them(kernels):
    x = hostile(144, 272)
    q, qt = outputs(144, 272, E4M3)
    kernels.cast_both(x, torch.tensor(3.0), E4M3, q, qt)
    assert same(q, quantised(x, 3.0, E4M3)) and same(qt, q.t().contiguous())
    only = outputs(144, 272, E4M3, rows=False)[1]
    kernels.cast_both(x, torch.tensor(3.0), E4M3, None, only)
    assert same(only, qt)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_every_tile_is_written_whatever_the_order(kernels, group):
    x = torch.randn(176, 48)
    q, qt = outputs(176, 48, E4M3)
    kernels.cast_both(x, torch.tensor(1.0), E4M3, q, qt, small(kernels, group=group))       # 6 tiles of rows
    assert same(q, quantised(x, 1.0, E4M3)) and same(qt, q.t().contiguous())


def test_torchaos_casts_give_the_same_bits(kernels):
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    for format, scales in ((E4M3, (1.0, 1e-6, 1e6)), (E5M2, (1.0, 1e-9))):
        for factor in scales:
            x = (torch.randn(64, 48) * factor).bfloat16()
            theirs = hp_tensor_to_float8_dynamic(x, format, LinearMMConfig(), scaling_granularity=ScalingGranularity.TENSORWISE)
            q, qt = outputs(64, 48, format)
            kernels.cast_both(x, theirs._scale, format, q, qt, small(kernels))
            assert same(q, theirs._data)


# --------------------------------------------------------------------------------------- the cross-entropy's gradient

def entropy_case(M=48, V=80, ignored=(3, 17)):
    torch.manual_seed(V)
    logits = (torch.randn(M, V) * 3).bfloat16()
    targets = torch.randint(0, V, (M,))
    targets[0], targets[1] = 0, V - 1
    targets[list(ignored)] = -100
    grad = torch.rand(M) / 500
    grad[5] = 0.0
    return logits, torch.logsumexp(logits.float(), 1), targets, grad, torch.tensor(2.0**17)


def entropy_grad(logits, lse, targets, grad, scale, format=E5M2):
    """By definition, in fp64, then rounded as torch rounds."""
    p = (logits.double() - lse.double()[:, None]).exp()
    hot = torch.arange(logits.shape[1])[None, :] == targets[:, None]
    value = (p - hot.double()) * (grad * scale).double()[:, None]
    return quantised(torch.where(targets[:, None] == -100, 0.0, value).float(), 1.0, format)


def steps_apart(a, b):
    """How many values of the format lie between a and b, elementwise: the bits of one sign are in order."""
    def order(x):
        bits = x.view(torch.uint8).int()
        return torch.where(bits > 127, 128 - bits, bits)
    return (order(a) - order(b)).abs()


@pytest.mark.parametrize("M, V", [(16, 16), (48, 80)])
def test_the_cross_entropys_gradient_is_that_of_its_definition(kernels, M, V):
    case = entropy_case(M, V, ignored=(3, 15))
    want = entropy_grad(*case)
    q, qt = outputs(M, V, E5M2)
    kernels.cross_entropy_grad(*case, q, qt, small(kernels))
    apart = steps_apart(q, want)
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3      # fp32 against fp64: a tie may fall the other way
    assert same(qt, q.t().contiguous())
    assert not q[[3, 15]].float().any() and not q[5].float().any()
    assert q.float()[0, 0] < 0 < q.float()[0, 1] and q.float()[1, V - 1] < 0


def test_autograd_agrees_with_the_cross_entropys_gradient(kernels):
    logits, lse, targets, grad, scale = entropy_case(144, 208)     # the tile in use, with masks
    leaf = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(leaf, targets, reduction="none", ignore_index=-100)
    (losses * grad).sum().backward()
    q, qt = outputs(144, 208, E5M2)
    kernels.cross_entropy_grad(logits, lse, targets, grad, scale, q, qt)
    back = q.float() / scale
    assert torch.allclose(back.double(), leaf.grad, rtol=0.126, atol=2.0**-16 / 2.0**17)    # E5M2: half a step is 1/8
    assert same(qt, q.t().contiguous())
    only = outputs(144, 208, E5M2, rows=False)[1]
    kernels.cross_entropy_grad(logits, lse, targets, grad, scale, None, only)
    assert same(only, qt)


def test_broken_logits_stay_broken_but_for_ignored_rows(kernels):
    logits, _, targets, grad, scale = entropy_case()
    logits[2, 7] = logits[3, 7] = float("nan")
    logits[4, 9] = float("inf")
    logits[6, 1] = -float("inf")       # a masked token, legal
    lse = torch.logsumexp(logits.float(), 1)
    grad[8] = float("inf")
    q, qt = outputs(48, 80, E5M2)
    kernels.cross_entropy_grad(logits, lse, targets, grad, scale, q, qt, small(kernels))
    assert q[2].float().isnan().all() and not q[3].float().any()
    assert q[4].float()[9].isnan()
    assert q[6].float().isfinite().all() and q[6, 1].float() == 0
    assert (q[8].float().abs() == 57344).all()                          # a cast saturates, as torchao's
    assert same(qt, q.t().contiguous())


@pytest.mark.parametrize("spoil", [
    lambda a: a.update(x=a["x"][:, :40]), lambda a: a.update(x=a["x"].half()), lambda a: a.update(x=a["x"].t()),
    lambda a: a.update(x=torch.randn(40, 48)), lambda a: a.update(q=a["q"].t()), lambda a: a.update(qt=a["q"]),
    lambda a: a.update(qt=a["qt"].view(E5M2)), lambda a: a.update(scale=torch.ones(48)), lambda a: a.update(format=E5M2),
    lambda a: a.update(qt=torch.zeros(96, 64).to(E4M3)[::2])])
def test_what_does_not_fit_is_refused_before_a_kernel_writes(kernels, spoil):
    q, qt = outputs(64, 48, E4M3)
    arguments = {"x": torch.randn(64, 48), "scale": torch.tensor(1.0), "format": E4M3, "q": q, "qt": qt}
    spoil(arguments)
    with pytest.raises(AssertionError):
        kernels.cast_both(**arguments)
    assert (q.view(torch.uint8) == 0x55).all()


def test_grids_stay_within_cudas_limits(kernels):
    assert kernels._grid(65536, 50304, kernels.Tile(128, 64, 8, 8)) == (8, 786, 64)
    assert kernels._grid(16, 16, kernels.Tile(128, 64, 8, 8)) == (1, 1, 1)
    with pytest.raises(AssertionError):
        kernels._grid(2**30, 16, kernels.Tile(16, 16, 4, 1))


# --------------------------------------------------------------------------------------- what is compiled for an H100

@pytest.fixture
def launched(monkeypatch, tmp_path):
    """(room, binaries): each launch of the room's kernels is compiled for sm_90, as on an H100, instead of run."""
    import triton
    from triton.backends.compiler import GPUTarget
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    class Hopper:
        get_current_device, get_current_stream = staticmethod(lambda: 0), staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    run, binaries = triton.runtime.jit.JITFunction.run, []
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, grid, warmup, **options: binaries.append(
        run(self, *args, grid=grid, warmup=True, **options)))
    return load(), binaries


def machine_code(binary, tmp_path):
    """Instructions by name, with their counts, and registers, stack and shared memory, from the cubin."""
    import triton
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    (tmp_path / "k.cubin").write_bytes(binary.asm["cubin"])

    def tool(*command):
        return subprocess.run([str(tools / command[0]), *command[1:]], cwd=tmp_path, capture_output=True, text=True,
                              check=True).stdout

    counts = {}
    for name in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", tool("nvdisasm", "-c", "k.cubin")):
        counts[name] = counts.get(name, 0) + 1
    usage = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "-res-usage", "k.cubin"))
    return counts, int(usage[1]), int(usage[2])


KERNELS = {     # source, format, rows, most instructions a value, fewest warps on an SM; the last is the loss's gradient
    "x": (torch.bfloat16, E4M3, True, 10, 32), "x_transposed": (torch.bfloat16, E4M3, False, 10, 32),
    "grad": (torch.bfloat16, E5M2, True, 10, 32), "weight": (torch.float32, E4M3, True, 10, 24),
    "loss": (torch.bfloat16, E5M2, True, 20, 32)}


@pytest.mark.parametrize("name", KERNELS)
def test_the_machine_code(name, launched, tmp_path):
    """Wide accesses only, hardware's saturating rounding, no spills, enough warps to hide the memory's latency."""
    room, binaries = launched
    source, format, rows, most, warps = KERNELS[name]
    q, qt = outputs(48, 80, format, rows)
    if name == "loss":
        tile = room.GRAD_TILE
        room.cross_entropy_grad(*entropy_case(48, 80), q, qt)
    else:
        tile = room.CAST_TILE
        room.cast_both(torch.zeros(48, 80, dtype=source), torch.tensor(1.0), format, q, qt)
    binary, = binaries
    counts, registers, stack = machine_code(binary, tmp_path)
    ptx, values = binary.asm["ptx"], tile.rows * tile.columns // (32 * tile.warps)     # a thread

    instruction = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}[format]
    assert ptx.count(instruction) in range(values // 2, values // 2 + values // 8 + 1), "each value is rounded once"
    assert counts["LDG.E.128"] == values * source.itemsize // 16
    assert {name for name in counts if name.startswith("STG")} == {"STG.E.128"}
    assert counts["STG.E.128"] == values * (2 if rows else 1) // 16
    assert stack == 0 and not [name for name in counts if name.startswith(("LDL", "STL"))]
    assert not [name for name in counts if re.match(r"(LDS|STS)\.(U8|S8|U16)", name)], "bytes pass shared memory one by one"
    assert sum(counts.values()) - counts["NOP"] <= most * values
    assert 65536 // (-(-registers // 8) * 8 * 32) >= warps and registers <= 128
    assert binary.metadata.shared <= tile.rows * tile.columns

    assert sum(n for name, n in counts.items() if name.startswith("FMNMX.NAN")) == values, "the clamp must let NaN through"

    # 65,536 tokens of logits are more than 2^31 values: where a tile begins is counted in 64 bits.
    assert re.findall(r"arith\.muli .* : (i\d+)", binary.asm["ttir"]).count("i64") == 2
    corners = re.findall(r"tt\.addptr .* : !tt\.ptr<\w+>, (i\d+)", binary.asm["ttir"])
    assert corners == ["i64"] * (3 if rows else 2)


# --------------------------------------------------------------------------------------------------- bench/kernels.py

def test_the_bench_rehearses_on_a_cpu(kernels, capsys, tmp_path):
    out = tmp_path / "kernels.json"
    assert bench.bench(bench.Options(out=str(out)), kernels, torch.device("cpu")) == 0
    assert "4 of 4 cases right in Triton's interpreter" in capsys.readouterr().out
    assert json.loads(out.read_text())["rows"] == []        # a CPU's times are nobody's


@pytest.mark.parametrize("kernel, at", [("cast_both", 4), ("cross_entropy_grad", 6)])
@pytest.mark.parametrize("spoil", [lambda q, qt: qt.view(torch.uint8)[5, 7].bitwise_xor_(1),
                                   lambda q, qt: [t.view(torch.uint8).fill_(0x3C) for t in (q, qt) if t is not None]])
def test_the_bench_finds_wrong_kernels(kernels, monkeypatch, capsys, kernel, at, spoil):
    right = getattr(kernels, kernel)

    def wrong(*arguments):
        right(*arguments)
        spoil(arguments[at - 1], arguments[at])

    monkeypatch.setattr(kernels, kernel, wrong)
    monkeypatch.setattr(bench, "TILES", dict.fromkeys(bench.TILES, ()))
    assert bench.bench(bench.Options(), kernels, torch.device("cpu")) == 1
    assert "the kernel is wrong" in capsys.readouterr().out


def test_one_tile_that_does_not_compile_costs_neither_other_tiles_nor_other_cases(kernels, monkeypatch, capsys):
    from triton.runtime.errors import OutOfResources  # no RuntimeError
    right, tried = kernels.cast_both, []

    def broken(*arguments):
        tried.append(arguments[-1])
        if len(tried) == 2:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return right(*arguments)

    monkeypatch.setattr(kernels, "cast_both", broken)
    monkeypatch.setattr(bench, "TILES", {"cast_both": ((16, 32, 4, 1), (32, 16, 4, 1)), "cross_entropy_grad": ()})
    assert bench.bench(bench.Options(), kernels, torch.device("cpu")) == 1
    said = capsys.readouterr().out
    assert [*map(tuple, tried[:3])] == [tuple(kernels.CAST_TILE), (16, 32, 4, 1), (32, 16, 4, 1)] and len(tried) == 9
    assert "16x32x4x1 FAILED: " in said and "x: FAILED: 1 of 3 tiles" in said and "3 of 4 cases right" in said


@pytest.mark.parametrize("arguments, sentence", [
    (["repeats=0"], "repeats=0 must be between"), (["out=no/such/folder/k.json"], "must lie in a folder that exists"),
    (["tiles=3"], "there is no key 'tiles'")])
def test_the_bench_refuses_mistakes(capsys, monkeypatch, arguments, sentence):
    assert bench.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_step_is_counted_across_zero():
    case = bench.Case("cross_entropy_grad", "", 16, 16, torch.bfloat16, E5M2)
    inputs = bench._inputs(case, torch.device("cpu"))
    want = bench._reference(case, inputs)
    bench._check(case, inputs, want, want.t().contiguous(), exact=True)
    for value, steps in ((0x01, 1), (0x81, 1), (0x02, 2), (0x82, 2)):
        q = want.clone()
        q.view(torch.uint8)[0, 3] = value                    # row 0 is ignored, all zeros
        if steps > 1:
            with pytest.raises(RuntimeError, match="2 steps"):
                bench._check(case, inputs, q, q.t().contiguous(), exact=True)
        else:
            with pytest.raises(RuntimeError, match="1 of 256 values are one step off"):
                bench._check(case, inputs, q, q.t().contiguous(), exact=True)


# ------------------------------------------------------------------------------------------------------ on a real GPU

@pytest.mark.gpu
@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hardware_rounds_every_value_as_torch_does(format, dtype):
    room = load()
    if dtype == torch.bfloat16:     # each of them
        x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    else:
        x = torch.randint(-2**31, 2**31 - 1, (512, 2**11), dtype=torch.int32).view(torch.float32)
    x = x.cuda()
    for scale in (1.0, 0.37, 2.0**-100, 2.0**100):
        s = torch.tensor(scale, device="cuda")
        q, qt = torch.empty(x.shape, dtype=format, device="cuda"), torch.empty(x.t().shape, dtype=format, device="cuda")
        room.cast_both(x, s, format, q, qt)
        want = quantised(x, s, format)
        assert same(q.cpu(), want.cpu()) and same(qt.cpu(), want.t().contiguous().cpu())


@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_hardware():
    room = load()
    M, V = 43008, 50304             # 2^31 values and a few
    x = torch.randn(M, V, device="cuda", dtype=torch.bfloat16)
    q, qt = torch.empty(M, V, dtype=E5M2, device="cuda"), torch.empty(V, M, dtype=E5M2, device="cuda")
    room.cast_both(x, torch.tensor(100.0, device="cuda"), E5M2, q, qt)
    for rows in (slice(0, 64), slice(M - 64, M)):
        want = quantised(x[rows], 100.0, E5M2).view(torch.uint8)
        assert torch.equal(q[rows].view(torch.uint8), want) and torch.equal(qt[:, rows].t().view(torch.uint8), want)


@pytest.mark.gpu
def test_the_cross_entropys_gradient_on_hardware():
    room = load()
    for M, V in ((48, 80), (144, 208), (1024, 50304)):
        case = [t.cuda() for t in entropy_case(M, V)]
        q, qt = torch.empty(M, V, dtype=E5M2, device="cuda"), torch.empty(V, M, dtype=E5M2, device="cuda")
        room.cross_entropy_grad(*case, q, qt)
        apart = steps_apart(q.cpu(), entropy_grad(*(t.cpu() for t in case)))
        assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3
        assert same(qt.cpu(), q.t().contiguous().cpu())
