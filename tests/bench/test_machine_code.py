"""bench/machine_code.py: bytes are followed from their stores back to a float8 conversion, and a
kernel that is known to be assembled wrongly is seen."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench.machine_code import (
    Argument,
    Proof,
    arguments_of,
    check_code,
    check_kernel,
    compiled_for_hopper,
)
from tests.conftest import ROOT

# At 0x210 float8 is read, at 0x218 and 0x220 it is stored, at 0x228 fp32.
ARGUMENTS = [
    Argument("copied", 0, 8, is_pointer=True, is_float8=True, is_output=False),
    Argument("q", 8, 8, is_pointer=True, is_float8=True, is_output=False),
    Argument("qt", 16, 8, is_pointer=True, is_float8=True, is_output=False),
    Argument("sums", 24, 8, is_pointer=True, is_float8=False, is_output=False),
]
CONVERT = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
WORD = f"{CONVERT} R8, R3, R2, RZ; {CONVERT} R8, R3, R2, R8"  # four conversions in R8
STORE = "LDC.64 R4, c[0x0][0x218]; STG.E desc[UR4][R4.64], R8"


def checked(*code: str, arguments: Sequence[Argument] = ARGUMENTS) -> Proof:
    """Of instructions as cuobjdump prints them, sixteen bytes each, apart at semicolons."""
    lines = "; ".join(code).split("; ")
    text = [f"        /*{16 * n:04x}*/  {line} ;" for n, line in enumerate([*lines, "EXIT"])]
    return check_code("\n".join(text), arguments)


# ------------------------------------------------------------------------------ what is proven

MOVED = {
    "as it is": "",
    "a move": "MOV R9, R8; IMAD.MOV.U32 R8, RZ, RZ, R9.reuse",
    "through uniform registers": "R2UR UR6, R8; UMOV UR7, UR6; IMAD.U32 R8, RZ, RZ, UR7",
    "bytes in another order": "PRMT R8, R8, 0x0123, RZ",
    "from two words": f"{CONVERT} R9, R3, R2, RZ; PRMT R8, R8, 0x5410, R9",
    "by a selector from a register": (
        "SEL R10, 0x3210, 0x2301, P0; MOV R9, R8; PRMT R8, R8, R10, R9"
    ),
    "masks": (
        "LOP3.LUT R9, R8, 0xff00ff, RZ, 0xc0, !PT; LOP3.LUT R10, R8, 0xff00ff00, RZ, 0xc0, !PT;"
        " LOP3.LUT R8, R9, R10, RZ, 0xfc, !PT"
    ),
    "a mask and a sum in one": (
        "LOP3.LUT R9, R8, 0xff00, RZ, 0xc0, !PT; LOP3.LUT R8, R9, 0xffff00ff, R8, 0xf8, !PT"
    ),
    "shifts": (
        "IMAD.SHL.U32 R9, R8, 0x1000000, RZ; SHF.R.U32.HI R8, RZ, 0x8, R8; IADD3 R8, R8, R9, RZ"
    ),
    "a signed shift": "SHF.R.S32.HI R9, RZ, 0x8, R8; PRMT R8, R9, 0x7210, R8",
    "a funnel": "SHF.L.W.U32.HI R8, R8, 0x10, R8",
    "a product with a sum": (
        "LOP3.LUT R9, R8, 0xffff, RZ, 0xc0, !PT; IMAD.U32 R8, R8, 0x10000, R9"
    ),
    "a vote beside it": "VOTEU.ANY UP0, P0; VOTE.ANY R9, PT, P0",
    "another lane": "SHFL.BFLY PT, R8, R8, 0x10, 0x1f",
    "a select": f"{CONVERT} R9, R3, R2, RZ; {CONVERT} R9, R3, R2, R9; SEL R8, R8, R9, !P1",
    "shared memory": "STS [R20], R8; BAR.SYNC.DEFER_BLOCKING 0x0; LDS R8, [R21+0x10]",
    "shared memory, other words before": (
        "STS [R20], R3; BAR.SYNC.DEFER_BLOCKING 0x0; LDS R2, [R20]; STS [R20], R8;"
        " BAR.SYNC.DEFER_BLOCKING 0x0; LDS R8, [R21]"
    ),
    "a mask of zeros": "LOP3.LUT R9, R1, RZ, R8, 0xea, !PT; MOV R8, R9",
}


@pytest.mark.parametrize("how", MOVED)
def test_conversions_are_followed_through(how: str) -> None:
    moves = [MOVED[how]] if MOVED[how] else []
    assert checked(WORD, *moves, STORE) == Proof(4)


def test_both_formats_are_conversions() -> None:
    assert checked(WORD.replace("E4M3", "E5M2"), STORE) == Proof(4)


@pytest.mark.parametrize(
    "size, code",
    [
        (1, "STG.E.U8 desc[UR4][R4.64], R8"),
        (2, "STG.E.U16 desc[UR4][R4.64], R8"),
        (8, "MOV R9, R8; STG.E.64 desc[UR4][R4.64+0x8], R8"),
    ],
)
def test_as_many_bytes_as_a_store_writes_are_looked_at(size: int, code: str) -> None:
    """Of narrow stores the rest of the register may hold anything."""
    word = WORD if size > 2 else f"{CONVERT} R8, R3, R2, R30"
    assert checked(word, "LDC.64 R4, c[0x0][0x220]", code) == Proof(size)


def test_float8_is_stored_again_with_zeros_where_nothing_was_read() -> None:
    load = "LDC.64 R2, c[0x0][0x210]; MOV R8, RZ; @P0 LDG.E R8, desc[UR4][R2.64]"
    assert checked(load, STORE) == Proof(4)


def test_other_stores_are_not_looked_at() -> None:
    assert checked("LDC.64 R4, c[0x0][0x228]; STG.E desc[UR4][R4.64], R3") == Proof()


# --------------------------------------------------------------------------- what is not proven

NOT_PROVEN = {
    "R30, which was never written": f"{CONVERT} R8, R3, R2, R30",
    "R1, the stack pointer": f"LDC R1, c[0x0][0x28]; {CONVERT} R8, R3, R2, R1",
    "0": f"{CONVERT} R8, R3, R2, RZ",
    "F2FP.BF16.F32.PACK_AB at": "F2FP.BF16.F32.PACK_AB R8, R3, R2",
    "F2FP.F16.E4M3.UNPACK_B at": "F2FP.F16.E4M3.UNPACK_B R8, R8",
    "FMUL at": "FMUL R8, R3, R2",
    "LOP3.LUT at": "LOP3.LUT R8, R8, 0x7f7f7f7f, RZ, 0xc0, !PT",
    "SHF.R.U32.HI at": "SHF.R.U32.HI R8, RZ, 0x4, R8",
    "SHF.R.S32.HI at": "SHF.R.S32.HI R8, RZ, 0x8, R8",
    "PRMT at": "PRMT R8, R8, 0xba98, RZ",  # signs
    "IADD3 at": "IADD3 R8, R8, R8, RZ",
    "the operand -R8": "IADD3 R8, -R8, RZ, RZ",
    "LDG.E at": "LDC.64 R2, c[0x0][0x228]; LDG.E R8, desc[UR4][R2.64]",
    "R9, which was never written": "SEL R8, R8, R9, P0",
    "MUFU.EX2 at": "@!P3 MUFU.EX2 R8, R8",  # done or not
    "IMAD.WIDE at": "IMAD.WIDE R8, R2, 0x1, R10",
    "IMAD.WIDE.U32 at": "IMAD.WIDE.U32 R7, R2, 0x1, RZ; BAR.SYNC 0x0",  # its upper half is R8
    "R3, which was never written": "STS [R20], R3; STS [R20], R8; BAR.SYNC 0x0; LDS R8, [R20]",
    "LDS at": "LDS R8, [R20]",
    "DADD at": "DADD R7, R2, R10; NOP",  # R8 is its upper half
    "SGXT at": "SGXT R8, R8, 0x10",
}


@pytest.mark.parametrize("origin", NOT_PROVEN)
def test_a_byte_from_elsewhere_is_named(origin: str) -> None:
    problems = checked(WORD, NOT_PROVEN[origin], STORE).problems
    assert problems
    assert all(", to q, comes from" in problem and origin in problem for problem in problems)


def test_what_is_mended_under_a_predicate_alone_is_not_proven() -> None:
    """The word from before it is stored where the predicate is false."""
    code = [WORD, "MOV R9, R8", "FMUL R8, R3, R2"]
    assert checked(*code, "MOV R8, R9", STORE) == Proof(4)
    problems = checked(*code, "@P0 MOV R8, R9", STORE).problems
    assert len(problems) == 4
    assert all("comes from FMUL at 0x0030" in problem for problem in problems)


@pytest.mark.parametrize("before", ["FMUL R8, R3, R2", "MOV R8, 0x7f"])
def test_float8_that_is_read_excuses_no_other_byte_than_zero(before: str) -> None:
    """Where the load is masked, the word from before it is stored."""
    load = f"LDC.64 R2, c[0x0][0x210]; {before}; @P0 LDG.E R8, desc[UR4][R2.64]"
    problems = checked(load, STORE).problems
    assert problems
    assert "byte 0 of STG.E at 0x0040, to q, comes from" in problems[0]


def test_each_byte_is_named_by_itself() -> None:
    problems = checked(WORD, "LOP3.LUT R8, R8, 0xffff00ff, RZ, 0xc0, !PT", STORE).problems
    assert problems == ["byte 1 of STG.E at 0x0040, to q, comes from 0"]


@pytest.mark.parametrize(
    "jump, is_proven",
    [("@P0 BRA 0x40", False), ("BRA 0x40", True), ("BSYNC B0", False), ("EXIT", False)],
)
def test_every_way_through_the_code_counts(jump: str, is_proven: bool) -> None:
    """Around an instruction that spoils the word, and not around it."""
    code = [WORD, jump, "FMUL R8, R3, R3", "LDC.64 R4, c[0x0][0x218]"]
    store = "STG.E desc[UR4][R4.64], R8"
    if jump == "BSYNC B0":
        code = [WORD, "BSSY B0, 0x40", jump, "FMUL R8, R3, R3"]
        store = f"LDC.64 R4, c[0x0][0x218]; {store}"
    if jump == "EXIT":
        code[1] = "@P1 EXIT"
    assert (checked(*code, store).problems == []) == is_proven


def test_threads_meet_where_the_last_bssy_on_their_way_says() -> None:
    """Not where a later one that takes the same barrier register does, behind the conversion."""
    first = "FMUL R8, R3, R3; BSSY B0, 0x30; BSYNC B0"
    assert checked(first, WORD, "BSSY B0, 0x70; BSYNC B0", STORE).problems == []


def test_threads_may_meet_where_either_of_two_bssy_on_their_ways_says() -> None:
    """R8 is a conversion on one way, spoiled on the other."""
    before = f"{WORD}; BSSY B0, 0x60; @P0 BRA 0x50; BSSY B0, 0x70; BSYNC B0"
    problems = checked(before, "FMUL R8, R3, R3; NOP; LDC.64 R4, c[0x0][0x218]", STORE).problems
    assert len(problems) == 4 and all("FMUL" in problem for problem in problems)


def test_a_loop_is_followed_until_nothing_changes() -> None:
    """R8 becomes R9, R9 R10: wrong after the second time round."""
    loop = "MOV R8, R9; MOV R9, R10; FMUL R10, R3, R3; @P0 BRA 0x60"
    setting = f"{WORD}; MOV R9, R8; MOV R10, R8; LDC.64 R4, c[0x0][0x218]; NOP"
    problems = checked(setting, loop, "STG.E desc[UR4][R4.64], R8").problems
    assert len(problems) == 4 and all("FMUL" in problem for problem in problems)


def test_a_subroutine_returns_to_its_call() -> None:
    """Two calls, of which the first is made with a word that is no conversion."""
    before = "FMUL R8, R3, R3; CALL.REL.NOINC 0x80"
    after = f"{WORD}; CALL.REL.NOINC 0x80; {STORE}; EXIT"
    assert checked(before, after, "FMUL R20, R3, R3; RET.REL.NODEC R22 0x0").problems == []
    spoiled = checked(before, after, "FMUL R8, R3, R3; RET.REL.NODEC R22 0x0").problems
    assert len(spoiled) == 4 and all("FMUL at 0x0080" in problem for problem in spoiled)


@pytest.mark.parametrize(
    "code, words",
    [
        ("HGMMA.64x8x16.F32 R24, gdesc[UR4], R24", "HGMMA.64x8x16.F32 at 0x0020 is not known"),
        ("WARPSYNC.COLLECTIVE R5, 0x0", "WARPSYNC.COLLECTIVE at 0x0020 is not known"),
        ("UTMASTG.2D [UR4], [UR6]", "UTMASTG.2D at 0x0020 is not known"),
    ],
)
def test_what_cannot_be_followed_is_a_problem(code: str, words: str) -> None:
    (problem,) = checked(WORD, code, STORE).problems
    assert problem.startswith(words)


def test_a_store_to_an_unknown_address_must_be_proven_too() -> None:
    store = "LDG.E.64 R4, desc[UR4][R6.64]; STG.E desc[UR4][R4.64], R3"
    (first, *_) = checked(store).problems
    assert "to an unknown address, comes from R3" in first


def test_a_store_to_one_of_two_arguments_must_be_proven_too() -> None:
    address = "LDC.64 R4, c[0x0][0x218]; LDC.64 R6, c[0x0][0x228]; SEL R4, R4, R6, P0"
    (first, *_) = checked(address, "STG.E desc[UR4][R4.64], R3").problems
    assert "to q or sums" in first


def test_an_output_that_nothing_is_stored_to_is_a_problem() -> None:
    q, *others = ARGUMENTS[1:]
    output = Argument("q", 8, 8, is_pointer=True, is_float8=True, is_output=True)
    assert checked(WORD, STORE, arguments=[output, *others]).problems == []
    assert checked(WORD, arguments=[output, *others]).problems == ["no store to q was found"]


def test_arguments_lie_where_their_sizes_say() -> None:
    ptx = (
        ".visible .entry k(\n .param .u64 .ptr .global .align 1 k_param_0,\n .param .u32 k_param_1,"
        "\n .param .u64 .ptr .global .align 1 k_param_2,\n .param .u64 .ptr .global .align 1 k_3\n)"
    )
    signature = {"out_ptr0": "*fp8e4nv", "N": "i32", "BLOCK": "constexpr", "bytes": "*u8"}
    arguments = arguments_of(ptx, signature, ("bytes",))
    assert [(a.name, a.offset, a.is_float8, a.is_output) for a in arguments] == [
        ("out_ptr0", 0, True, True),
        ("N", 8, False, False),
        ("bytes", 16, True, True),
        ("Triton's own pointer 3", 24, False, False),
    ]


# ----------------------------------------------------------------------------- the known fault

BYTES_AND_PAIRS = [
    Argument("x", 0, 8, is_pointer=True, is_float8=False, is_output=False),
    Argument("q", 8, 8, is_pointer=True, is_float8=True, is_output=True),
    Argument("pairs", 16, 8, is_pointer=True, is_float8=True, is_output=True),
]


def test_the_stored_faulty_kernel_is_seen_though_it_counts_as_right() -> None:
    """Eight conversions of two values for sixteen values a thread, none repeated: half of the bytes
    of the transposed copy are read from registers before these are written."""
    text = (ROOT / "tests/bench/faulty_kernel.sass").read_text()
    assert text.count("F2FP.SATFINITE.E4M3") == 8
    proof = check_code(text, BYTES_AND_PAIRS)
    assert proof.n_bytes == 32 and len(proof.problems) == 16
    assert all(", to pairs, comes from R23, which was never" in line for line in proof.problems)


def assembler_version() -> tuple[int, int]:
    """Of the ptxas that Triton runs for sm_90."""
    from triton.backends.nvidia.compiler import get_ptxas

    version = subprocess.check_output([get_ptxas(90).path, "--version"], text=True)
    major, minor = re.search(r"release (\d+)\.(\d+)", version).groups()
    return int(major), int(minor)


def proof_of(form: str, size: int, warps: int) -> Proof:
    """Of both_layouts(), compiled by this Triton."""
    from tests.helpers.both_layouts import both_layouts

    x = torch.zeros(2 * size, size)
    q, pairs = x.to(torch.uint8), torch.zeros(size, size, dtype=torch.int16)
    with compiled_for_hopper() as kernels:
        both_layouts[(1,)](x, q, pairs, SIZE=size, FORM=form, num_warps=warps)
    proof = check_kernel(kernels[0], ("q", "pairs"))
    assert proof.n_bytes == 2 * q.numel() // (32 * warps)
    return proof


TILES = pytest.mark.parametrize("size, warps", [(16, 1), (64, 4)])


@TILES
@pytest.mark.parametrize("form", ["as it is", "maximum", "reversed"])
def test_a_value_used_twice_is_seen_where_this_assembler_is_wrong(
    form: str, size: int, warps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    is_wrong = assembler_version() < (13, 0)
    assert bool(proof_of(form, size, warps).problems) == is_wrong


@TILES
@pytest.mark.parametrize("form", ["repaired", "moved"])
def test_what_we_write_is_assembled_rightly(
    form: str, size: int, warps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert proof_of(form, size, warps).problems == []
