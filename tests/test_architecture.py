"""The map of the house, enforced: who may import whom, nothing at import, files that can be read in one sitting."""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

LEVEL_0 = {"model", "runtime.annotations", "runtime.tokenizer", "runtime.order", "runtime.shards", "prepare.harvest",
           "runtime.quantize", "runtime.speed", "runtime.sections", "runtime.rows", "runtime.dashboards", "runtime.reader",
           "runtime.stop", "prepare.source", "prepare.progress", "prepare.locks"}
SCALING = {f"scaling.{room}" for room in (
    "command", "records", "points", "forms", "solver", "laws", "chinchilla", "isoflop", "bootstrap", "robustness", "groups",
    "tables", "fit", "forecast", "frozen", "predict", "budget", "design", "published", "precision", "equivalence", "gap_tables",
    "gap_figure", "figures", "panels", "curves", "captions", "probes", "dynamics", "gap", "run_figure", "report", "report_tables",
    "report_figure", "files", "pairs", "null", "ranking", "publish", "trials", "learning_rate", "rate_figure", "results",
    "results_tables", "results_runs", "results_laws", "results_limits")}
# Which of our modules each module may import; arrows go down only, and rooms of one level are strangers.
ALLOWED = {
    **dict.fromkeys(LEVEL_0, set()),
    **dict.fromkeys(SCALING, SCALING),
    "scaling.predict": SCALING | {"scaling.study"},
    "scaling.study": {"model", "runtime.config"},
    "runtime.config": {"model", "runtime.annotations", "runtime.tokenizer", "runtime.sections"},
    **{f"runtime.{room}": LEVEL_0 | {"runtime.config"}
       for room in ("fp8", "parallel", "optim", "checkpoint", "metrics", "guard", "probe",
                    "folder", "machine", "diagnosis", "watchdog", "profiler", "meter")},
    # Those of prepare_data.py: without runtime.config, which loads torch.
    **{f"prepare.{room}": LEVEL_0
       for room in ("installed", "twins", "packing", "hub_faults", "copies", "pieces", "contamination", "inventory")},
    "prepare.encoder": LEVEL_0,
    "prepare.pool": LEVEL_0 | {"prepare.encoder"},
    "prepare.assemble": LEVEL_0 | {"prepare.copies"},
    "prepare.documents": LEVEL_0 | {"prepare.packing"},
    "prepare.hub_files": LEVEL_0 | {"prepare.packing", "prepare.hub_faults"},
    "prepare.hub": LEVEL_0 | {"prepare.hub_files", "prepare.hub_faults"},
    "prepare.parts": LEVEL_0 | {"prepare.pieces"},
    "prepare.job": LEVEL_0 | {f"prepare.{room}" for room in ("parts", "contamination", "assemble", "inventory")},
    "prepare.options": LEVEL_0 | {"prepare.job"},
    "prepare.phases": LEVEL_0 | {f"prepare.{room}" for room in ("job", "parts", "pool", "assemble", "inventory")},
    "eval.loss": LEVEL_0 | {"runtime.config"},
    "eval.batches": set(),
    "eval.curve": {"runtime.rows"},
    "eval.hf_layout": {"model", "runtime.annotations"},
    "bench.turns": set(),
    "runtime.windows": LEVEL_0,
    "runtime.data": LEVEL_0 | {"runtime.config", "runtime.windows"},
    "runtime.begin": LEVEL_0 | {"runtime.config", "runtime.checkpoint", "runtime.optim"},
    "runtime.gather": {"model"},
    "runtime.build": {"model", "runtime.config", "runtime.fp8", "runtime.optim", "runtime.parallel"},
    "runtime.micro_batch": LEVEL_0 | {"model"} | {f"runtime.{room}" for room in (
        "config", "build", "fp8", "checkpoint", "data", "folder", "machine", "parallel")},
    "runtime.fp8_kernels": set(),
    "runtime.fp8_linear": {"model", "runtime.quantize", "runtime.fp8_kernels"},
    "runtime.measured": {"runtime.config", "runtime.metrics", "runtime.rows"},
    "runtime.plan": {"model", "runtime.config", "runtime.fp8", "runtime.metrics", "runtime.measured"},
    "runtime.summary": {"runtime.tokenizer", "runtime.config", "runtime.metrics", "runtime.optim", "eval.loss"},
    # The throughput command's rooms, from those that know nothing of each other to the one that starts them all.
    **dict.fromkeys(("bench.children", "bench.clocks", "bench.buckets", "bench.compiled", "bench.speed_rows"), set()),
    "bench.journal": {"runtime.config", "runtime.rows"},
    "bench.ceilings": {"runtime.rows"},
    "bench.suites": {"model", "runtime.config", "bench.peers"},
    "bench.bookkeeping": {"bench.clocks", "bench.journal", "bench.suites", "runtime.metrics"},
    "bench.measure": {"bench.ceilings", "bench.children", "bench.suites"},
    "bench.evidence": {"bench.step_model"},
    "bench.group": {f"bench.{room}" for room in ("suites", "bookkeeping", "children", "clocks", "measure")},
    "bench.loop": {"bench.children", "bench.suites", "runtime.rows", "runtime.shards", "runtime.tokenizer"},
    "bench.throughput": {f"bench.{room}" for room in (
        "ceilings", "loop", "suites", "bookkeeping", "children", "clocks", "group", "journal", "peers", "speed_table",
        "speed_figure")} | {"eval.options", "runtime.annotations", "runtime.config", "runtime.rows"},
    "bench.start_up": {"bench.children", "bench.suites", "eval.options"} | {
        f"runtime.{room}" for room in ("annotations", "config", "metrics", "rows")},
    "bench.subject": {f"runtime.{room}" for room in ("build", "config", "fp8", "optim", "parallel")},
    "bench.peers": {"bench.subject", "runtime.annotations", "runtime.config"},
    "bench.orders": {"bench.buckets", "bench.compiled", "bench.subject", "bench.peers", "runtime.fp8", "runtime.config"},
    "bench.cell": {"bench.orders", "bench.subject", "runtime.config", "runtime.rows"},
    "bench.speed_table": {"bench.speed_rows"},
    "bench.speed_figure": {"bench.speed_rows", "runtime.rows", "scaling.figures"},
    "bench.step_model": {"model"},
    "bench.fleet_model": {"bench.step_model"},
    "bench.roofline": {"model", "bench.evidence", "bench.step_model", "bench.fleet_model", "bench.suites", "eval.options"} | {
        f"runtime.{room}" for room in ("annotations", "config", "metrics", "rows")},
    "runtime.saver": LEVEL_0 | {"runtime.config", "runtime.checkpoint"},
    "runtime.parallel": LEVEL_0 | {"runtime.config", "runtime.gather"},
    "runtime.fp8": LEVEL_0 | {"runtime.config", "runtime.gather", "runtime.fp8_linear"},
    "runtime.probe": LEVEL_0 | {"runtime.gather"},
}
TOP = {"train", "prepare_data", *(f"eval.{room}" for room in (
    "options", "lm", "held_out", "harness", "task_list", "task_data", "ranks", "results", "public", "table", "scores",
    "table_figure", "published", "sample", "run_tokenizer",
    "streaming", "serve", "server", "precision", "weights", "export", "model_card",
    "hf_tokenizer", "float8", "from_hf"))}
# Those rooms of scaling/ that start train.py as a process, or count what it would cost.
STARTERS = {f"scaling.{room}" for room in (
    "sweep", "runner", "grid", "costs", "data_check", "slice", "calls", "provenance", "plan")}
LONGEST = {"train.py": 400, "model.py": 350}


def sources():
    done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"], cwd=ROOT,
                          capture_output=True, text=True)
    files = [ROOT / f for f in done.stdout.split()] or list(ROOT.rglob("*.py"))
    return [p for p in files if p.exists() and p.relative_to(ROOT).parts[0] in
            ("model.py", "train.py", "prepare_data.py", "runtime", "prepare", "eval", "scaling", "configs", "bench")]


def module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


OURS = {module(p) for p in sources()}


def imports(path):
    """Our modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {n for n in names if n in OURS}


@pytest.mark.parametrize("path", sources(), ids=module)
def test_imports_go_down(path):
    name, used = module(path), imports(path)
    if name.startswith("configs."):
        allowed = {"model", "runtime.config", "prepare.hub", "scaling.study"} | {m for m in OURS if m.startswith("configs.")}
    elif name in TOP:
        allowed = {m for m in OURS if m.startswith("runtime.") or m in ("model", "eval.loss")}
        if name.startswith("eval."):
            allowed |= {m for m in OURS if m.startswith("eval.")} | {
                f"scaling.{room}" for room in ("figures", "run_figure", "records", "captions", "tables")}     # how results look
        if name == "prepare_data":
            allowed |= {"configs.mixture", "configs.sources"} | {m for m in OURS if m.startswith("prepare.")}
    elif name in STARTERS:
        allowed = {m for m in OURS if m.startswith(("runtime.", "scaling.")) or m == "model"}
    elif name.startswith("bench.") and name not in ALLOWED:
        allowed = {m for m in OURS if m.startswith(("runtime.", "prepare.", "configs.")) or
                   m in ("model", "bench.turns", "bench.data_scale", "bench.data_plan", "bench.raw", "eval.options")}
        allowed |= {m for m in OURS if m.startswith("eval.") and name == "bench.harness"}
    else:
        assert name in ALLOWED, f"{name} is not on the map: add it to the README's file tree and to this test"
        allowed = ALLOWED[name]
    assert used <= allowed, f"{name} may not import {used - allowed}"


@pytest.mark.parametrize("path", sources(), ids=module)
def test_files_can_be_read_in_one_sitting(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= LONGEST.get(path.name, 300), "what can go, or which concern wants a room of its own?"


@pytest.mark.parametrize("path", sources(), ids=module)
def test_every_file_begins_with_one_sentence(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc, "no docstring"
    assert re.match(r"\w.*[.:]$", doc.split("\n")[0]), doc.split("\n")[0]


@pytest.mark.parametrize("path", sources(), ids=module)
def test_nothing_happens_at_import(path):
    """Top level: definitions, constants, imports, the main guard; a config may build its value."""
    for node in ast.parse(path.read_text()).body:
        guard = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert guard or docstring or isinstance(node, kinds), f"line {node.lineno}: {ast.unparse(node)[:80]}"


def test_scaling_reads_without_torch():
    code = "import sys, scaling.fit; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_preparing_data_loads_neither_torch_nor_datasets():
    """Each process that tokenises imports the command again: that must cost little time and memory."""
    code = "import sys, prepare_data; sys.exit(bool({'torch', 'datasets', 'pyarrow', 'tiktoken'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_model_imports_torch_alone():
    roots = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0]
             for n in ast.walk(ast.parse((ROOT / "model.py").read_text())) if isinstance(n, ast.Import | ast.ImportFrom)}
    assert roots - set(sys.stdlib_module_names) == {"torch"}
    assert "fp8" not in (ROOT / "model.py").read_text().split('"""', 2)[2].lower().replace("fp8 pays on wide outputs", "")


@pytest.mark.parametrize("path", sources(), ids=module)
def test_nothing_untrusted_is_unpickled_or_executed(path):
    text = path.read_text()
    for pattern in (r"\bexec\(", r"(?<![.\w])eval\(", r"pickle\.loads?\(", r"torch\.load\(", r"allow_pickle=True",
                    r"trust_remote_code"):
        assert not re.search(pattern, text), pattern


def test_the_readme_names_every_room_and_nothing_else():
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"```\n(model\.py .*?)```", readme, re.S)
    assert tree, "the README has a file tree that begins with model.py"
    for path in sources():
        if path.parent.name != "configs":
            assert re.search(rf"(?<![\w]){re.escape(path.name)}\b", tree[1]), f"{path.name} is missing from the README's tree"
    there = {path.name for path in sources()}
    for name in re.findall(r"(\w+\.py)\b", tree[1]):
        assert name in there, f"the README's tree names {name}, which is not there"


def test_root_files_stay_small():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250
