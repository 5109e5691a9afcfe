"""bench/machine_code.py: bytes are followed from their stores back to a float8 conversion, and a
kernel that is known to be assembled wrongly is seen."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.machine_code import (
    Argument,
    Proof,
    arguments_of,
    check_code,
    check_kernel,
    compiled_for_hopper,
    disassemble,
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
FRAME = "LDC R1, c[0x0][0x28]; VIADD R1, R1, 0xfffffff0"  # of sixteen bytes


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
    "conversions from fp64 beside it": "F2F.F32.F64 R7, R2; F2I.F64.TRUNC R7, R2",
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
    "F2F.F64.F32 at": "F2F.F64.F32 R7, R2; NOP",  # R8 is its upper half
    "F2I.S64.TRUNC at": "F2I.S64.TRUNC R7, R2; NOP",
    "HFMA2.MMA at": "HFMA2.MMA R8, -RZ, RZ, 0, 5.9604644775390625e-08",
    "LDS.S8 at": "STS [R20], R8; LDS.S8 R8, [R20]",  # copies of the sign
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


FP32_ADDRESS = "LDC.64 R4, c[0x0][0x228]"  # of "sums"
PERHAPS_FP32 = {
    "by a guard": f"MOV R4, R20; @P0 {FP32_ADDRESS}",
    "by a branch": f"MOV R4, R20; @P0 BRA 0x30; {FP32_ADDRESS}",
    "in a loop": f"NOP; MOV R4, R6; {FP32_ADDRESS.replace('R4', 'R6')}; @P0 BRA 0x10",
    "by a select": f"{FP32_ADDRESS}; SEL R4, R4, R20, P0",
    "by a select of uniform registers": (
        "ULDC.64 UR6, c[0x0][0x228]; USEL UR6, UR6, UR8, UP0; MOV R4, UR6"
    ),
    "by a select of floats": f"{FP32_ADDRESS}; FSEL R4, R4, R20, P0",
    "from the stack, by a guard": (
        f"{FRAME}; {FP32_ADDRESS}; @P0 STL.64 [R1], R4; LDL.64 R4, [R1]"
    ),
    "from the stack, in part": (
        f"{FRAME}; {FP32_ADDRESS}; STL.64 [R1], R4; STL.U8 [R1], R20; LDL.64 R4, [R1]"
    ),
}


@pytest.mark.parametrize("how", PERHAPS_FP32)
def test_a_store_whose_address_is_an_argument_on_one_way_alone_must_be_proven(how: str) -> None:
    """On the other way it may go to float8."""
    (first, *_) = checked(PERHAPS_FP32[how], "STG.E desc[UR4][R4.64], R3").problems
    assert "to an unknown address or sums, comes from R3" in first


def test_a_load_whose_address_is_an_argument_on_one_way_alone_is_none_of_float8() -> None:
    load = "MOV R2, R20; @P0 LDC.64 R2, c[0x0][0x210]; LDG.E R8, desc[UR4][R2.64]"
    (first, *_) = checked(load, STORE).problems
    assert "comes from LDG.E at 0x0020" in first


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


# ----------------------------------------------------------------------------------- the stack

SAVED = f"{FRAME}; STL [R1+0x8], R8; FMUL R8, R3, R3"

THROUGH_THE_STACK = {
    "a word": f"{SAVED}; LDL R8, [R1+0x8]",
    "the last load": f"{SAVED}; LDL.LU R8, [R1+0x8]",
    "by another register": f"{SAVED}; IADD3 R12, R1, 0xc, RZ; MOV R13, R12; LDL R8, [R13+-0x4]",
    "by a move that multiplies": f"{SAVED}; IMAD.MOV.U32 R12, RZ, RZ, R1; LDL R8, [R12+0x8]",
    "by the pointer itself": f"MOV R12, c[0x0][0x28]; {SAVED}; LDL R8, [R12+-0x8]",
    "by an address that two ways compute": (
        f"{SAVED}; VIADD R12, R1, 0x10; VIADD R12, R12, 0xfffffff0; @P0 MOV R1, R12;"
        " LDL R8, [R1+0x8]"
    ),
    "half of a store of two": (
        f"{FRAME}; FMUL R9, R3, R3; MOV R10, R8; STL.64 [R1], R9; LDL R8, [R1+0x4]"
    ),
    "half of a load of two": f"{SAVED}; STL [R1+0xc], R3; LDL.64 R8, [R1+0x8]",
    "single bytes": (
        f"{FRAME}; STL.U8 [R1], R8; LDL.U8 R9, [R1]; PRMT R9, R9, 0x3210, R3; PRMT R8, R9, 0x0, R9"
    ),
    "one half, in two bytes": (
        f"{FRAME}; STL.U8 [R1], R8; STL.U8 [R1+0x1], R8; LDL.U16 R8, [R1]; PRMT R8, R8, 0x1010, R8"
    ),
    "under one predicate, other words before": (
        f"{FRAME}; STL [R1], R8; @P0 STL [R1], R8; LDL R8, [R1]"
    ),
    "behind a store elsewhere": f"{SAVED}; STL [R1+0x4], R3; STL [R1+0xc], R3; LDL R8, [R1+0x8]",
    "behind a store to an argument": (
        f"{SAVED}; LDC.64 R20, c[0x0][0x228]; ST.E [R20.64], R3; LDL R8, [R1+0x8]"
    ),
}


@pytest.mark.parametrize("how", THROUGH_THE_STACK)
def test_conversions_are_followed_through_the_stack(how: str) -> None:
    assert checked(WORD, THROUGH_THE_STACK[how], STORE) == Proof(4)


WRONG_FROM_THE_STACK = [
    # a place that was not written, or not on every way
    ("byte -4, never written", f"{SAVED}; LDL R8, [R1+0xc]"),
    ("byte -8, never written", f"{FRAME}; LDL R8, [R1+0x8]"),
    ("byte -8, never written", f"{FRAME}; @P0 STL [R1+0x8], R8; LDL R8, [R1+0x8]"),
    ("byte -8, never written", f"{FRAME}; @P0 BRA 0x60; STL [R1+0x8], R8; LDL R8, [R1+0x8]"),
    ("byte -6, never written", f"{FRAME}; STL.U16 [R1+0x8], R8; LDL R8, [R1+0x8]"),
    ("byte 0, never written", f"{SAVED}; LDL R8, [R1+0x10]"),
    # another value at the right place
    ("R3, which was never written", f"{SAVED}; STL.U8 [R1+0xb], R3; LDL R8, [R1+0x8]"),
    ("R3, which was never written", f"{SAVED}; STL.64 [R1+0x4], R2; LDL R8, [R1+0x8]"),
    ("R3, which was never written", f"{SAVED}; @P0 STL [R1+0x8], R3; LDL R8, [R1+0x8]"),
    ("R9, which was never written", f"{FRAME}; STL.64 [R1+0x8], R8; LDL.64 R7, [R1+0x8]; NOP"),
    ("LDL.LU at 0x0060 gave up", f"{SAVED}; LDL.LU R9, [R1+0x8]; LDL R8, [R1+0x8]"),
    ("LDL.LU at 0x0060 gave up", f"{SAVED}; @P0 LDL.LU R9, [R1+0x8]; LDL R8, [R1+0x8]"),
    # bytes that are not those of the memory
    ("LDL.S8 at", f"{SAVED}; LDL.S8 R8, [R1+0x8]"),
    ("comes from 0", f"{SAVED}; LDL.U8 R8, [R1+0x8]"),
    ("FMUL at", f"{SAVED}; @P0 LDL R8, [R1+0x8]"),
    # an address that is not known
    ("LDL at", f"{SAVED}; LDL R8, [R20]"),
    ("LDL at", f"{SAVED}; LDL R8, [R1+UR4+0x8]"),
    ("LDL at", f"{SAVED}; LDL R8, [UR4]"),
    ("LDL at", f"{SAVED}; LDL R8, [0x8]"),
    ("LDL at", f"{SAVED}; @P0 VIADD R1, R1, 0x8; LDL R8, [R1]"),
    ("LDL at", f"{SAVED}; IADD3 R12, R1, R1, RZ; LDL R8, [R12]"),
    ("LDL at", f"{SAVED}; IADD3 R12, R1, R20, RZ; LDL R8, [R12+0x8]"),
    ("LDL at", f"{SAVED}; IADD3.X R12, R1, RZ, RZ, P0, !PT; LDL R8, [R12+0x8]"),
    ("LDL at", f"{SAVED}; MOV R12, R1; FADD R12, R12, R3; LDL R8, [R12+0x8]"),
    ("LDL at", f"{SAVED}; LDC R1, c[0x0][0x20]; LDL R8, [R1+-0x8]"),
    ("LDL at", f"{FRAME}; MOV R12, 0x8; STL [R12], R8; LDL R8, [R12]"),
    ("LDL at", f"{FRAME}; STL [R1], R8; VIADD R1, R1, 0x4; @P0 BRA 0x40; LDL R8, [R1+-0x4]"),
    # a store that may have gone there
    ("STL at 0x0060, which may", f"{SAVED}; STL [R20], R3; LDL R8, [R1+0x8]"),
    ("STL at 0x0060, which may", f"{SAVED}; @P0 STL [R20], R3; LDL R8, [R1+0x8]"),
    ("LDL.LU at 0x0060, which may", f"{SAVED}; LDL.LU R9, [R20]; LDL R8, [R1+0x8]"),
    ("RED.E.ADD at 0x0060, which may", f"{SAVED}; RED.E.ADD [R20.64], R3; LDL R8, [R1+0x8]"),
]


@pytest.mark.parametrize("origin, code", WRONG_FROM_THE_STACK)
def test_wrong_bytes_from_the_stack_are_named(origin: str, code: str) -> None:
    problems = checked(WORD, code, STORE).problems
    assert problems
    assert all(", to q, comes from" in problem for problem in problems)
    assert origin in problems[0]


SPILLED = f"{FRAME}; LDC.64 R4, c[0x0][0x218]; STL.64 [R1], R4"  # the address of q


@pytest.mark.parametrize("guard", ["", "@P0 "])
def test_a_store_to_an_address_from_the_stack_is_one_to_its_argument(guard: str) -> None:
    """Also where it is another argument's on another way."""
    load = f"LDC.64 R4, c[0x0][0x228]; {guard}LDL.64 R4, [R1]"
    store = "STG.E desc[UR4][R4.64]"
    assert checked(WORD, SPILLED, load, f"{store}, R8") == Proof(4)
    problems = checked(WORD, SPILLED, load, f"{store}, R3").problems
    names = "q or sums" if guard else "q"
    assert len(problems) == 4 and all(f", to {names}, comes from R3" in line for line in problems)


@pytest.mark.parametrize(
    "between, is_known",
    [("NOP", True), ("STL [R20], R3", False), ("STL.64 [R1], R6", False)],
)
def test_an_address_of_fp32_is_known_again_unless_it_may_be_another(
    between: str, is_known: bool
) -> None:
    spilled = SPILLED.replace("0x218", "0x228")
    load = f"{between}; LDL.64 R4, [R1]; STG.E desc[UR4][R4.64], R3"
    problems = checked(spilled, load).problems
    assert (problems == []) == is_known
    assert all("to an unknown address" in problem for problem in problems)


def test_a_generic_store_to_an_unknown_address_may_go_to_the_stack() -> None:
    """Even of a conversion, which could go to any argument."""
    store = "MOV R9, R8; ST.E [R20.64], R9"
    assert checked(WORD, store, STORE).problems == []
    problems = checked(WORD, FRAME, "STL [R1], R8", store, "LDL R8, [R1]", STORE).problems
    assert len(problems) == 4 and all("ST.E at 0x0060, which may" in line for line in problems)


def test_so_may_a_generic_store_to_what_is_an_argument_on_one_way() -> None:
    store = "@P0 LDC.64 R20, c[0x0][0x228]; ST.E [R20.64], R8"
    problems = checked(WORD, FRAME, "STL [R1], R8", store, "LDL R8, [R1]", STORE).problems
    assert any("ST.E at 0x0060, which may" in line for line in problems)


# --------------------------------------------------------------------------------- subroutines

RETURN = "RET.REL.NODEC R22 0x0"


def two_calls(body: str, behind: str = "NOP", return_address: str = "0x50") -> str:
    """Code that calls a subroutine twice: with a word in R8 that is no conversion and, at 0x90,
    with one that is, which lies also at the stack's byte -4. It returns by R22 and R23, the first
    time to `return_address`. behind: an instruction after the second call."""
    return (
        "LDC R1, c[0x0][0x28]; HFMA2.MMA R23, -RZ, RZ, 0, 0; FMUL R8, R3, R3;"
        f" MOV R22, {return_address}; CALL.REL.NOINC 0xe0; {WORD}; STL [R1+-0x4], R8;"
        f" MOV R22, 0xa0; CALL.REL.NOINC 0xe0; {behind}; {STORE}; EXIT; {body}"
    )


def test_a_subroutine_returns_to_its_call() -> None:
    """The word of the first call is not taken for that of the second."""
    assert checked(two_calls(f"FMUL R20, R3, R3; {RETURN}")) == Proof(4)
    spoiled = checked(two_calls(f"FMUL R8, R3, R3; {RETURN}")).problems
    assert len(spoiled) == 4 and all("FMUL at 0x00e0" in problem for problem in spoiled)


@pytest.mark.parametrize(
    "body, behind, origin",
    [
        ("MOV R9, R8", "MOV R8, R9", ""),
        ("MOV R9, R8", "MOV R8, R10", "R10, which was never written"),
        ("MOV R9, R8; FMUL R10, R3, R3", "MOV R8, R10", "FMUL at 0x00f0"),
        ("@P0 MOV R9, R8", "MOV R8, R9", "R9, which was never written"),
        ("FMUL R8, R3, R3", "LDL R8, [R1+-0x4]", ""),
        ("FMUL R8, R3, R3", "LDL R8, [R1+-0x8]", "byte -8, never written"),
        ("STL [R1+-0x4], R3", "LDL R8, [R1+-0x4]", "R3, which was never written"),
        ("STL [R1+-0x8], R8", "LDL R8, [R1+-0x8]", ""),
        ("VIADD R1, R1, 0x4", "LDL R8, [R1+-0x4]", "byte 4, never written"),
    ],
)
def test_what_a_subroutine_leaves_is_followed(body: str, behind: str, origin: str) -> None:
    """In registers and in the stack."""
    problems = checked(two_calls(f"{body}; {RETURN}", behind)).problems
    assert len(problems) == (4 if origin else 0)
    assert origin in "".join(problems[:1])


def test_a_return_address_may_lie_in_the_stack() -> None:
    body = "STL [R1+-0x8], R22; FMUL R22, R3, R3; LDL R22, [R1+-0x8]"
    assert checked(two_calls(f"{body}; {RETURN}")) == Proof(4)
    wrong = body.replace("LDL R22, [R1+-0x8]", "LDL R22, [R1+-0xc]")
    assert "does not return" in checked(two_calls(f"{wrong}; {RETURN}")).problems[0]


def test_a_subroutine_may_call_another() -> None:
    """At 0x100, which returns by R24 and R25; the outer one's result is its own."""
    body = f"MOV R25, RZ; MOV R24, 0x110; CALL.REL.NOINC 0x120; {RETURN}"
    inner = "FMUL R20, R3, R3; RET.REL.NODEC R24 0x0"
    assert checked(two_calls(f"{body}; {inner}")) == Proof(4)
    (problem,) = checked(two_calls(f"{body}; {inner.replace('R24', 'R22')}")).problems
    assert "at 0x0130 does not return behind its call" in problem


@pytest.mark.parametrize(
    "body",
    [
        "NOP; RET.REL.NODEC R24 0x0",
        "NOP; RET.REL.NODEC R22 0x10",
        "NOP; RET.ABS.NODEC R22 0x0",
        f"MOV R23, 0x1; {RETURN}",
        f"FMUL R22, R3, R3; {RETURN}",
        f"IADD3 R22, R22, 0x10, RZ; {RETURN}",
        f"@P0 MOV R22, 0x60; {RETURN}",
    ],
)
def test_a_return_to_elsewhere_than_behind_the_call_is_a_problem(body: str) -> None:
    (problem,) = checked(two_calls(body)).problems
    assert "at 0x00f0 does not return behind its call" in problem


def test_a_call_with_a_wrong_return_address_is_a_problem() -> None:
    problems = checked(two_calls(f"NOP; {RETURN}", return_address="0xa0")).problems
    assert problems == ["RET.REL.NODEC at 0x00f0 does not return behind its call"]


def test_a_return_from_no_call_is_a_problem() -> None:
    assert checked(WORD, STORE, RETURN).problems == [
        "RET.REL.NODEC at 0x0040 does not return behind its call"
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


def compiled(form: str, size: int, warps: int, **options: int) -> Any:
    """both_layouts() for sm_90, by this Triton with its `options`."""
    from tests.helpers.both_layouts import both_layouts

    x = torch.zeros(2 * size, size)
    q, pairs = x.to(torch.uint8), torch.zeros(size, size, dtype=torch.int16)
    with compiled_for_hopper() as kernels:
        both_layouts[(1,)](x, q, pairs, SIZE=size, FORM=form, num_warps=warps, **options)
    return kernels[0]


def proof_of(form: str, size: int, warps: int, **options: int) -> Proof:
    proof = check_kernel(compiled(form, size, warps, **options), ("q", "pairs"))
    assert proof.n_bytes == 4 * size * size // (32 * warps)
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


def test_spilled_registers_are_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a kernel that is given too few registers; not where nothing is stored to the stack."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    text = disassemble(compiled("moved", 64, 4, maxnreg=24).asm["cubin"])
    stores = re.findall(r" (?:STL|STL.64) [^;]*;", text)
    assert len(stores) >= 8
    assert check_code(text, BYTES_AND_PAIRS) == Proof(128)
    # the other stores are of values that are not converted yet
    n_seen = sum(
        bool(check_code(text.replace(store, " NOP ;"), BYTES_AND_PAIRS).problems)
        for store in stores
    )
    assert n_seen >= len(stores) // 2
    assert proof_of("repaired", 64, 4, maxnreg=24).problems == []
