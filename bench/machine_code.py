"""Prove from machine code that every byte stored as float8 comes from a float8 conversion.

ptxas 12.8 and 12.9 (Triton 3.6 to 3.8, for sm_90) may let the second use of a converted value read
a register that was not written yet, or the stack pointer: a wrong byte that depends on no input.
Counts of conversions do not tell such code from right code (tests/bench/faulty_kernel.sass has as
many as its source). check_kernel() follows every byte of a compiled kernel forward to its stores.

How: each byte of each register is a set of origins, one for each way through the code, and
instructions that move bytes (PRMT, LOP3 with masks, shifts by whole bytes, moves, selects,
shuffles, shared memory, the stack) move the sets. F2FP to E4M3 or E5M2 makes two bytes of origin
CONVERTED. A store is one of float8 by the argument that its address is computed from. Branches and
loops are followed until nothing changes.

The stack (local memory, where registers are spilled) is followed byte by byte at constant distances
from the stack pointer; a load from an address that is not such a distance, from a byte that was not
stored on every way, or behind a store to an unknown address is not proven. Subroutines are followed
for each call, and each must return behind it.

It fails where it does not know: an instruction that is not in its tables, an address that on some
way comes from no argument, a byte that was computed with. What it cannot see: what is converted,
whether a byte is the right conversion (the interpreter and a GPU show that), scales, or masks;
bytes of shared memory are not told apart, and those that are read are taken to be those written
since the last barrier but one. A minimum, LOP3 or PRMT that picks one of two addresses counts as
computed from both. Opcodes are those of sm_90."""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

# Where a byte may come from: a known value, 0 to 255, or a description in words.
Byte = frozenset[int | str]
Word = tuple[Byte, Byte, Byte, Byte]  # the bytes of a register, the lowest first

CONVERTED = "a float8 conversion"
LOADED = "a load of float8"
ZERO: Byte = frozenset({0})
ZEROS: Word = (ZERO, ZERO, ZERO, ZERO)
PARAMETERS_AT = 0x210  # in constant bank 0 on sm_90, behind values of the driver
STACK_POINTER_AT = 0x28
STACK_POINTER = f"c[0x0][{STACK_POINTER_AT:#x}]"
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}  # a load or store's bits -> bytes


@dataclass(frozen=True)
class Argument:
    """A parameter of a kernel."""

    name: str
    offset: int  # in bytes, from PARAMETERS_AT on
    size: int  # bytes
    is_pointer: bool
    is_float8: bool  # whether it points to float8
    is_output: bool  # whether float8 must be stored to it


# Stands beside the pointers of a value that on some way is computed from none.
NO_ARGUMENT = Argument("an unknown address", 0, 0, False, False, False)


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # the predicate under which it runs, such as "@!P0"; "" = always
    name: str  # such as "LDG"
    modifiers: tuple[str, ...]  # such as ("E", "128")
    operands: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return ".".join((self.name, *self.modifiers))

    @property
    def place(self) -> str:
        return f"{self.opcode} at 0x{self.address:04x}"


@dataclass(frozen=True)
class Stray:
    """A byte of a float8 store that does not come from a conversion."""

    place: str  # of the store
    byte: int  # its number among those that the instruction stores
    arguments: tuple[str, ...]  # from which the address is computed
    origins: tuple[str, ...]

    def __str__(self) -> str:
        target = " or ".join(self.arguments) or "an unknown address"
        return (
            f"byte {self.byte} of {self.place}, to {target}, comes from {', '.join(self.origins)}"
        )


@dataclass
class Proof:
    """What was found out about a kernel's float8 stores: proven if there are no problems."""

    n_bytes: int = 0  # stored float8 bytes that were followed, for one thread
    problems: list[str] = field(default_factory=list)


@contextmanager
def compiled_for_hopper() -> Iterator[list[Any]]:
    """Within the block, launching a Triton kernel compiles it for sm_90 instead of running it; the
    list receives the compiled kernels."""
    import triton
    from triton.backends.compiler import GPUTarget

    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    run = triton.runtime.jit.JITFunction.run
    kernels: list[Any] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    with (
        mock.patch.object(triton.runtime.driver, "_active", hopper),
        mock.patch.object(triton.runtime.jit.JITFunction, "run", compile_only),
    ):
        yield kernels


def check_kernel(kernel: Any, float8_arguments: Collection[str] = ()) -> Proof:
    """Check a kernel that Triton has compiled for sm_90. float8_arguments: names of arguments that
    hold float8 in another type, such as the bytes of fp8.triton_kernels."""
    arguments = arguments_of(kernel.asm["ptx"], kernel.src.signature, float8_arguments)
    if not any(argument.is_float8 for argument in arguments):
        return Proof()
    return check_code(disassemble(kernel.asm["cubin"]), arguments)


def arguments_of(
    ptx: str, signature: Mapping[str, str], float8_arguments: Collection[str]
) -> list[Argument]:
    """The arguments of a kernel. Their sizes come from its PTX, which has no names; the names from
    Triton's signature, name -> type such as "*fp8e4nv", "i32" or "constexpr" (no parameter). Triton
    adds pointers of its own."""
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    absent_names = sorted(set(float8_arguments) - set(names))
    assert not absent_names, f"no argument {absent_names}"
    entry = ptx[ptx.index(".entry") :].partition(")")[0]
    kinds = re.findall(r"\.param \.[a-z](\d+)(?: (\.ptr))?", entry)
    assert 0 <= len(kinds) - len(names) <= 2, (kinds, names)
    arguments = []
    offset = 0
    for number, (bits, pointer) in enumerate(kinds):
        size = int(bits) // 8
        offset = -(-offset // size) * size
        name = names[number] if number < len(names) else f"Triton's own pointer {number}"
        kind = signature.get(name, "")
        is_float8 = kind.startswith("*fp8") or name in float8_arguments
        is_output = name in float8_arguments or (is_float8 and "out" in name)
        arguments.append(Argument(name, offset, size, bool(pointer), is_float8, is_output))
        offset += size
    return arguments


def disassemble(cubin: bytes) -> str:
    """The machine code of a binary as text, by the disassembler in Triton's package."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        # it warns of older formats on stderr
        command = [str(tool), "--dump-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_code(text: str, arguments: Iterable[Argument]) -> Proof:
    """Check the code of one kernel, as cuobjdump prints it."""
    instructions = parse_instructions(text)
    proof = Proof()
    follower = Follower(list(arguments))
    for instruction in instructions:
        if not follower.knows(instruction):
            proof.problems.append(f"{instruction.place} is not known here: it cannot be followed")
    if proof.problems:
        return proof
    written: set[str] = set()
    for node, state in sorted(states_before(instructions, follower).items(), key=node_of):
        instruction = instructions[node[0]]
        if instruction.name == "RET" and not is_right_return(instructions, node, state):
            proof.problems.append(f"{instruction.place} does not return behind its call")
        if instruction.name in STORES:
            written |= check_store(instruction, state, follower, proof)
    for argument in follower.arguments:
        if argument.is_output and argument.name not in written:
            proof.problems.append(f"no store to {argument.name} was found")
    return proof


def check_store(
    instruction: Instruction, state: "MachineState", follower: "Follower", proof: Proof
) -> set[str]:
    """Add to the proof the bytes of a store that may write float8, and what is wrong with them.
    Returns the names of the arguments that it may write; none where it writes no float8."""
    pointers = follower.pointers_of_address(instruction, state)
    if are_known(pointers) and not any(argument.is_float8 for argument in pointers):
        return set()
    proof.n_bytes += width(instruction)
    proof.problems += [str(stray) for stray in stray_bytes(instruction, state, pointers)]
    return {argument.name for argument in pointers}


def are_known(pointers: Collection[Argument]) -> bool:
    """Whether an address is computed from an argument on every way."""
    return bool(pointers) and NO_ARGUMENT not in pointers


def node_of(item: tuple[Any, Any]) -> Any:
    return item[0]


def stray_bytes(
    instruction: Instruction, state: "MachineState", pointers: Collection[Argument]
) -> list[Stray]:
    """The bytes of a float8 store that do not come from a conversion. Zeros are accepted beside a
    masked load of float8, which puts them where it loads nothing; beside a conversion alone they
    are not."""
    names = tuple(sorted(argument.name for argument in pointers))
    strays = []
    stored = state.bytes_of(instruction.operands[-1], width(instruction))
    for number, byte in enumerate(stored):
        is_copied = LOADED in byte and byte <= {LOADED, CONVERTED, 0}
        if byte != {CONVERTED} and not is_copied:
            origins = sorted(str(origin) for origin in byte - {CONVERTED, LOADED})
            strays.append(Stray(instruction.place, number, names, tuple(origins)))
    return strays


# ------------------------------------------------------------------------------------ reading code

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", re.M)


def parse_instructions(text: str) -> list[Instruction]:
    """The instructions of one kernel, as cuobjdump prints them."""
    instructions = []
    for address, guard, opcode, operands in LINE.findall(text):
        name, *modifiers = opcode.split(".")
        # split at commas outside brackets
        parts = re.split(r",\s*(?![^\[]*\])", operands.strip()) if operands.strip() else []
        instructions.append(
            Instruction(
                address=int(address, 16),
                guard="" if guard in ("@PT", "@UPT") else guard,
                name=name,
                modifiers=tuple(modifiers),
                operands=tuple(part.strip().removesuffix(".reuse") for part in parts),
            )
        )
    return instructions


def width(instruction: Instruction) -> int:
    """Bytes that a load or store moves for one thread."""
    if instruction.name in ("LDSM", "STSM"):
        count = instruction.modifiers[-1]
        return 4 * (int(count) if count.isdigit() and int(count) <= 4 else 1)
    for modifier in reversed(instruction.modifiers):
        bits = modifier.lstrip("US")
        if bits in BYTES:
            return BYTES[bits]
    return 4


def number_of(operand: str) -> int | None:
    """The whole number that an operand is, as 32 bits; None for another operand."""
    if not re.fullmatch(r"-?0x[0-9a-f]+", operand):
        return None
    return int(operand, 16) & 0xFFFFFFFF


def is_register(operand: str) -> bool:
    return bool(re.fullmatch(r"U?R(\d+|Z)", operand))


def is_predicate(operand: str) -> bool:
    return bool(re.fullmatch(r"!?U?P(\d|T)", operand))


def has_two_registers(instruction: Instruction) -> bool:
    """Whether the result of an instruction other than a load is 64 bits wide."""
    if instruction.name == "CS2R":
        return "32" not in instruction.modifiers
    if instruction.name == "F2F":  # the format of the result comes before the operand's
        formats = [modifier for modifier in instruction.modifiers if modifier in FLOATS]
        return formats[:1] == ["F64"]
    if instruction.name == "F2I":  # the operand alone may be of F64
        return bool({"S64", "U64"} & set(instruction.modifiers))
    return instruction.name in DOUBLE or bool({"64", "WIDE", "F64"} & set(instruction.modifiers))


def split_destination(instruction: Instruction) -> tuple[str, list[str]]:
    """The register that is written ("" if none), and the operands that are read, without
    predicates."""
    operands = [operand for operand in instruction.operands if not is_predicate(operand)]
    return (operands[0], operands[1:]) if operands else ("", [])


def register_at(first: str, number: int) -> str:
    """The register `number` places behind `first`; RZ stays RZ."""
    if first.endswith("Z"):
        return first
    prefix = first.rstrip("0123456789")
    return f"{prefix}{int(first.removeprefix(prefix)) + number}"


# ------------------------------------------------------------------------------ what is known where


def word_of_number(value: int) -> Word:
    """The word of a number."""
    a, b, c, d = (frozenset({value >> shift & 0xFF}) for shift in (0, 8, 16, 24))
    return a, b, c, d


def from_origin(origin: str) -> Word:
    """The word of a register whose bytes all have one origin."""
    byte: Byte = frozenset({origin})
    return byte, byte, byte, byte


def either(a: Word, b: Word) -> Word:
    if a == b:  # most often, where ways meet: quicker
        return a
    w, x, y, z = (p | q for p, q in zip(a, b, strict=True))
    return w, x, y, z


@dataclass
class MachineState:
    """What registers and shared memory may hold before an instruction."""

    words: dict[str, Word] = field(default_factory=dict)
    # register -> the pointers that its value is computed from
    pointers: dict[str, frozenset[Argument]] = field(default_factory=dict)
    shared: Byte = frozenset()  # what is read from shared memory
    shared_new: Byte = frozenset()  # what was written to it since the last barrier
    # register -> how far its value lies behind the stack pointer at the start, modulo 2^32, in the
    # registers that are known to hold such an address
    stack_offsets: dict[str, int] = field(default_factory=dict)
    # such an offset -> what the byte there holds; local memory, which is a thread's own
    stack: dict[int, Byte] = field(default_factory=dict)
    # and the pointers that the register was computed from whose byte it is
    stack_pointers: dict[int, frozenset[Argument]] = field(default_factory=dict)

    def word(self, register: str) -> Word:
        if register.endswith("RZ"):
            return ZEROS
        return self.words.get(register) or from_origin(f"{register}, which was never written")

    def bytes_of(self, register: str, count: int) -> list[Byte]:
        """The first `count` bytes of the registers from this one on."""
        words = [self.word(register_at(register, number)) for number in range(-(-count // 4))]
        return [byte for word in words for byte in word][:count]

    def stack_byte(self, offset: int) -> Byte:
        return self.stack.get(offset) or frozenset({f"{stack_place(offset)}, never written"})

    def copy(self) -> "MachineState":
        return MachineState(
            dict(self.words),
            dict(self.pointers),
            self.shared,
            self.shared_new,
            dict(self.stack_offsets),
            dict(self.stack),
            dict(self.stack_pointers),
        )

    def joined(self, other: "MachineState") -> "MachineState":
        """The state where two ways meet: each byte may have the origins of both."""
        state = MachineState(shared=self.shared | other.shared)
        state.shared_new = self.shared_new | other.shared_new
        for register in self.words.keys() | other.words.keys():
            state.words[register] = either(self.word(register), other.word(register))
        state.pointers = all_pointers(self.pointers, other.pointers)
        state.stack_pointers = all_pointers(self.stack_pointers, other.stack_pointers)
        for offset in self.stack.keys() | other.stack.keys():
            state.stack[offset] = self.stack_byte(offset) | other.stack_byte(offset)
        for register, offset in self.stack_offsets.items():
            if other.stack_offsets.get(register) == offset:
                state.stack_offsets[register] = offset
        return state


Place = TypeVar("Place", str, int)  # a register or an offset


def all_pointers(
    a: dict[Place, frozenset[Argument]], b: dict[Place, frozenset[Argument]]
) -> dict[Place, frozenset[Argument]]:
    """The pointers of each place on either of two ways."""
    joined = {}
    for place in a.keys() | b.keys():
        of_a, of_b = a.get(place, frozenset()), b.get(place, frozenset())
        joined[place] = of_a if of_a is of_b else pointers_of_either([of_a, of_b])
    return joined


def pointers_of_either(alternatives: Collection[frozenset[Argument]]) -> frozenset[Argument]:
    """Of a value that is one of several, each with its pointers; NO_ARGUMENT is among them where
    some have none and others do."""
    pointers = frozenset().union(*alternatives)
    if pointers and not all(alternatives):
        pointers |= {NO_ARGUMENT}
    return pointers


def stack_place(offset: int) -> str:
    """The words for a byte of the stack; the stack grows downwards."""
    distance = offset - (1 << 32) if offset >> 31 else offset
    return f"the stack's byte {distance}"


# An instruction by its number, and the numbers to which the subroutines that it is in return.
Node = tuple[int, tuple[int, ...]]


def states_before(
    instructions: list[Instruction], follower: "Follower"
) -> dict[Node, MachineState]:
    """What holds before each instruction that is reached, over all ways to it; subroutines, such as
    that of a division, for each call by itself. A return to elsewhere than behind the call goes
    nowhere here: check_code() reports it."""
    successors = successors_of(instructions)
    states: dict[Node, MachineState] = {(0, ()): MachineState()}
    waiting: set[Node] = {(0, ())}
    while waiting:
        node = min(waiting)
        waiting.remove(node)
        number, returns = node
        instruction = instructions[number]
        after = follower.after(instruction, states[node])
        reached = {(successor, returns) for successor in successors[number]}
        if instruction.name == "CALL":
            assert number + 1 not in returns, "recursion"
            target = (target_number(instructions, instruction), (*returns, number + 1))
            reached.add(target)
        if instruction.name == "RET" and is_right_return(instructions, node, states[node]):
            reached.add((returns[-1], returns[:-1]))
        for successor in reached:
            held = states.get(successor)
            joined = after if held is None else held.joined(after)
            if joined != held:
                states[successor] = joined
                waiting.add(successor)
    return states


def is_right_return(instructions: list[Instruction], node: Node, state: MachineState) -> bool:
    """Whether a RET, at `node`, goes behind the call that it returns from. Calls keep no address
    themselves: the code before one puts it into a register."""
    number, returns = node
    instruction = instructions[number]
    register, _, base = instruction.operands[0].partition(" ")
    if not returns or "REL" not in instruction.modifiers or base != "0x0":
        return False
    address_behind_call = instructions[returns[-1]].address
    values = [known_value(byte) for byte in state.bytes_of(register, 8)]
    return values == list(address_behind_call.to_bytes(8, "little"))


def target_number(instructions: list[Instruction], jump: Instruction) -> int:
    return (jump_address(jump) - instructions[0].address) // 16  # bytes of an instruction


def successors_of(instructions: list[Instruction]) -> list[set[int]]:
    """The numbers of the instructions that may follow each, but for calls and returns."""
    meeting_places = meeting_places_of(instructions)
    successors = []
    for number, instruction in enumerate(instructions):
        following = set(meeting_places[number])
        if instruction.name == "BRA":
            following.add(target_number(instructions, instruction))
        if not ends_here(instruction) and number + 1 < len(instructions):
            following.add(number + 1)
        successors.append(following)
    return successors


def ends_here(instruction: Instruction) -> bool:
    """Whether the next instruction never follows."""
    is_jump = instruction.name in ("BRA", "CALL", "RET", "EXIT")
    return is_jump and not is_conditional(instruction)


def meeting_places_of(instructions: list[Instruction]) -> list[set[int]]:
    """Of each BSYNC where its threads may go on, numbers of instructions; of others none.

    BSSY puts such a place into a barrier register, which the next BSSY on the way overwrites."""
    n = len(instructions)
    places: list[set[int]] = [set() for _ in instructions]
    # register -> what it may hold before each instruction
    held: list[dict[str, set[int]]] = [defaultdict(set) for _ in instructions]
    to_visit = list(range(n))
    while to_visit:
        number = to_visit.pop()
        instruction = instructions[number]
        held_after = {register: set(values) for register, values in held[number].items()}
        following = set() if ends_here(instruction) else {number + 1} & set(range(n))
        if instruction.name == "BSSY":
            held_after[instruction.operands[0]] = {target_number(instructions, instruction)}
        elif instruction.name == "BSYNC":
            places[number] = held_after.get(instruction.operands[0], set())
            following |= places[number]
        elif instruction.name == "BRA":
            following.add(target_number(instructions, instruction))
        elif instruction.name == "CALL" and number + 1 < n:
            following.add(number + 1)  # a function keeps the registers of its caller
        for next_number in following:
            if _adds(held[next_number], held_after):
                to_visit.append(next_number)
    return places


def _adds(held: dict[str, set[int]], values: dict[str, set[int]]) -> bool:
    """Add `values` to what the registers may hold; whether that is more than before."""
    is_more = False
    for register, of_register in values.items():
        is_more |= not of_register <= held[register]
        held[register] |= of_register
    return is_more


def jump_address(instruction: Instruction) -> int:
    """The address that a branch goes to."""
    return int(instruction.operands[-1], 16)


def is_conditional(instruction: Instruction) -> bool:
    has_condition = instruction.name == "BRA" and len(instruction.operands) > 1
    return bool(instruction.guard) or has_condition


# ------------------------------------------------------------------------- what instructions do

STORES = ("STG", "ST")
# These write no register that bytes could be taken from.
WITHOUT_RESULT = (
    "BAR BRA BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ERRBAR EXIT FCHK FSETP DSETP HSETP2 ISETP"
    " LDGDEPBAR MEMBAR NOP PLOP3 R2P RED RET ST STG STL STS STSM UISETP UPLOP3 WARPSYNC YIELD"
)
LOADS = ("LDG", "LDL", "LDS", "LDSM")
# These compute a new value, of one register or of two where a modifier says so; they move no bytes.
COMPUTING = (
    "ATOMG B2R BMSK BREV DADD DFMA DMUL F2F F2I FADD FFMA FLO FMNMX FMUL FRND FSET FSWZADD HADD2"
    " HMNMX2 HMUL2 HSET2 I2F I2FP I2I IABS IDP IMNMX ISET LDC MATCH MUFU P2R POPC REDUX S2R"
    " S2UR UBMSK UBREV UFLO ULDC UP2UR UPOPC VABSDIFF VIADDMNMX VIMNMX VIMNMX3 VOTE VOTEU"
)
SELECTS = ("SEL", "USEL", "FSEL")  # the result is one of two operands
# These store through generic addresses, which may lie in local memory.
GENERIC = ("RED", "ST")
# These move an address or add numbers to it.
STACK_ARITHMETIC = ("IADD3", "IMAD.MOV.U32", "LDC", "MOV", "VIADD")
FLOATS = ("BF16", "F16", "F32", "F64")
DOUBLE = ("DADD", "DFMA", "DMUL")  # 64 bits wide without a modifier that says so


class Follower:
    """What each instruction does to a MachineState, in a kernel with these arguments."""

    def __init__(self, arguments: list[Argument]):
        self.arguments = arguments
        self.moves: dict[str, Callable[[Instruction, MachineState], Word]] = {
            "F2FP": self._convert,
            "PRMT": self._permute,
            "UPRMT": self._permute,
            "LOP3": self._combine_bits,
            "ULOP3": self._combine_bits,
            "SHF": self._shift,
            "USHF": self._shift,
            "IMAD": self._multiply_add,
            "UIMAD": self._multiply_add,
            "IADD3": self._add,
            "UIADD3": self._add,
            "VIADD": self._add,
            "LEA": self._shift_add,
            "ULEA": self._shift_add,
            "HFMA2": self._half_constants,
            "MOV": self._move,
            "UMOV": self._move,
            "R2UR": self._move,
            "SHFL": self._move,
            "CS2R": self._move,
            "SEL": self._select,
            "USEL": self._select,
            "FSEL": self._select,
            "SGXT": self._extend,
            "USGXT": self._extend,
        }

    def knows(self, instruction: Instruction) -> bool:
        name = instruction.name
        if name == "WARPSYNC" and "COLLECTIVE" in instruction.modifiers:  # a jump
            return False
        if name in LOADS or name in WITHOUT_RESULT.split():
            return True
        if "128" in instruction.modifiers:  # a result of four registers
            return False
        return name in self.moves or name in COMPUTING.split()

    def after(self, instruction: Instruction, before: MachineState) -> MachineState:
        """The state after an instruction; one with a guard may have done nothing."""
        state = before.copy()
        self._do(instruction, state)
        return before.joined(state) if instruction.guard else state

    def _do(self, instruction: Instruction, state: MachineState) -> None:
        name = instruction.name
        stack_offset = self._stack_offset_of_result(instruction, state)
        if name == "BAR" and "ARV" not in instruction.modifiers:
            if state.shared_new:
                state.shared, state.shared_new = state.shared_new, frozenset()
        elif name in ("STS", "STSM"):
            stored = state.bytes_of(instruction.operands[-1], width(instruction))
            state.shared_new = state.shared_new.union(*stored)
        elif name == "STL":
            self._store_to_stack(instruction, state)
        elif name in GENERIC and not are_known(self.pointers_of_address(instruction, state)):
            self._spoil_stack(instruction, state)
        elif name in WITHOUT_RESULT.split():
            pass
        elif name in self.moves:
            self._write(instruction, state, [self.moves[name](instruction, state)])
        elif name == "LDL":
            self._load_from_stack(instruction, state)
        elif name in LOADS:
            loaded = self._loaded_bytes(instruction, state)
            self._write(instruction, state, words_of_load(instruction, loaded))
        else:
            self._write(instruction, state, [from_origin(self._origin(instruction))])
        if stack_offset is not None:
            state.stack_offsets[instruction.operands[0]] = stack_offset

    def _write(self, instruction: Instruction, state: MachineState, words: list[Word]) -> None:
        """Write a result; the last word also to the second register of a wide result."""
        destination, sources = split_destination(instruction)
        if not is_register(destination):  # the result is a predicate
            assert instruction.name in ("VOTE", "VOTEU"), instruction
            return
        if len(words) == 1 and has_two_registers(instruction):
            words = words * 2
        pointers = self._pointers(sources, state)
        if instruction.name in SELECTS:
            pointers = pointers_of_either([self._pointers([source], state) for source in sources])
        if instruction.name in LOADS:
            pointers = frozenset()
        for number, word in enumerate(words):
            register = register_at(destination, number)
            if not register.endswith("Z"):
                state.words[register] = word
                state.pointers[register] = pointers
                state.stack_offsets.pop(register, None)

    def _origin(self, instruction: Instruction) -> str:
        if instruction.operands[-1] == STACK_POINTER:
            return f"{instruction.operands[0]}, the stack pointer"
        return instruction.place

    # ---------------------------------------------------------------------------------- pointers

    def _pointers(self, operands: Iterable[str], state: MachineState) -> frozenset[Argument]:
        """The pointers among the arguments that a value of these operands is computed from."""
        pointers: set[Argument] = set()
        for operand in operands:
            for register in re.findall(r"U?R\d+", operand):
                pointers |= state.pointers.get(register, frozenset())
            for address in re.findall(r"c\[0x0\]\[(0x[0-9a-f]+)\]", operand):
                pointers |= self._argument_at(int(address, 16))
        return frozenset(pointers)

    def _argument_at(self, address: int) -> set[Argument]:
        offset = address - PARAMETERS_AT
        return {
            argument
            for argument in self.arguments
            if argument.is_pointer and 0 <= offset - argument.offset < argument.size
        }

    def pointers_of_address(
        self, instruction: Instruction, state: MachineState
    ) -> frozenset[Argument]:
        """The pointers that a load or store may address; the last brackets hold the address."""
        addressed = [operand for operand in instruction.operands if "[" in operand][-1]
        inner = addressed.rpartition("[")[2]
        registers = re.findall(r"U?R\d+", inner)
        wide = [register_at(register, 1) for register in registers if f"{register}.64" in inner]
        return self._pointers([*registers, *wide], state)

    # --------------------------------------------------------------------------------- the stack

    def _stack_offset_of_result(self, instruction: Instruction, state: MachineState) -> int | None:
        """How far the result lies behind the stack pointer at the start, modulo 2^32: of the stack
        pointer itself, and of one such address plus numbers. None for other results."""
        if instruction.opcode not in STACK_ARITHMETIC:
            return None
        _, sources = split_destination(instruction)
        n_addresses, offset = 0, 0
        for source in sources:
            if source == STACK_POINTER:
                n_addresses += 1
                continue
            if source in state.stack_offsets:
                n_addresses += 1
                offset += state.stack_offsets[source]
                continue
            number = 0 if source == "RZ" else number_of(source)
            if number is None:
                return None
            offset += number
        return offset & 0xFFFFFFFF if n_addresses == 1 else None

    def _stack_offsets(self, instruction: Instruction, state: MachineState) -> list[int] | None:
        """Of the bytes that an LDL or STL moves; None where its address is not known."""
        (addressed,) = (operand for operand in instruction.operands if "[" in operand)
        address = re.fullmatch(r"\[(R\d+)(?:\+(-?0x[0-9a-f]+))?\]", addressed)
        if address is None or address[1] not in state.stack_offsets:
            return None
        first = state.stack_offsets[address[1]] + int(address[2] or "0", 16)
        return [(first + number) & 0xFFFFFFFF for number in range(width(instruction))]

    def _store_to_stack(self, instruction: Instruction, state: MachineState) -> None:
        offsets = self._stack_offsets(instruction, state)
        if offsets is None:
            self._spoil_stack(instruction, state)
            return
        register = instruction.operands[-1]
        stored = state.bytes_of(register, width(instruction))
        state.stack.update(zip(offsets, stored, strict=True))
        for number, offset in enumerate(offsets):
            source = register_at(register, number // 4)
            state.stack_pointers[offset] = state.pointers.get(source, frozenset())

    def _load_from_stack(self, instruction: Instruction, state: MachineState) -> None:
        """LDL; with LU it is the last load of these bytes, whose memory need not keep them."""
        is_last = "LU" in instruction.modifiers
        offsets = self._stack_offsets(instruction, state)
        if offsets is None:
            loaded: list[Byte] = [frozenset({instruction.place})] * width(instruction)
            if is_last:
                self._spoil_stack(instruction, state)
        else:
            loaded = [state.stack_byte(offset) for offset in offsets]
            if is_last:
                given_up: Byte = frozenset({f"memory that {instruction.place} gave up"})
                state.stack.update(dict.fromkeys(offsets, given_up))
        self._write(instruction, state, words_of_load(instruction, loaded))
        destination = split_destination(instruction)[0]
        if destination.endswith("Z") or offsets is None:
            return
        for number in range(0, len(offsets), 4):
            of_bytes = [
                state.stack_pointers.get(offset, frozenset())
                for offset in offsets[number : number + 4]
            ]
            register = register_at(destination, number // 4)
            state.pointers[register] = pointers_of_either(of_bytes)

    def _spoil_stack(self, instruction: Instruction, state: MachineState) -> None:
        """What a store to an unknown address does: any byte may be another one afterwards."""
        unknown: Byte = frozenset({f"{instruction.place}, which may go anywhere in the stack"})
        for offset, byte in state.stack.items():
            state.stack[offset] = byte | unknown
        state.stack_pointers.clear()

    # ------------------------------------------------------------------------------- moves of bytes

    def _word(self, operand: str, state: MachineState) -> Word:
        """The word of an operand; a negated or otherwise changed operand is a new value."""
        if is_register(operand):
            return state.word(operand)
        number = number_of(operand)
        if operand == "SRZ":
            return ZEROS
        return from_origin(f"the operand {operand}") if number is None else word_of_number(number)

    def _unknown(self, instruction: Instruction) -> Word:
        return from_origin(instruction.place)

    def _loaded_bytes(self, instruction: Instruction, state: MachineState) -> list[Byte]:
        """The bytes that a load brings from global or shared memory."""
        if instruction.name == "LDG":
            pointers = self.pointers_of_address(instruction, state)
            is_float8 = are_known(pointers) and all(argument.is_float8 for argument in pointers)
            byte: Byte = frozenset({LOADED if is_float8 else instruction.place})
        else:
            byte = state.shared | state.shared_new or frozenset({instruction.place})
        return [byte] * width(instruction)

    def _convert(self, instruction: Instruction, state: MachineState) -> Word:
        """F2FP to float8: two values become the lower half, the upper half is the third operand's
        lower half. A conversion to another format counts as a computation."""
        _, sources = split_destination(instruction)
        formats = [m for m in instruction.modifiers if m in ("E4M3", "E5M2", "F32", "F16", "BF16")]
        is_packing = any(modifier.startswith("PACK_AB") for modifier in instruction.modifiers)
        if not is_packing or formats[:1] not in (["E4M3"], ["E5M2"]):
            return self._unknown(instruction)
        byte: Byte = frozenset({CONVERTED})
        merged = ZEROS if len(sources) < 3 else self._word(sources[2], state)
        return byte, byte, merged[0], merged[1]

    def _permute(self, instruction: Instruction, state: MachineState) -> Word:
        """PRMT: four bytes, chosen by the digits of a number, of the eight of two operands. Where
        that number is a register's, any of the bytes that it may choose."""
        _, (a, selector, c) = split_destination(instruction)
        if instruction.modifiers:
            return self._unknown(instruction)
        pool = [*self._word(a, state), *self._word(c, state)]
        low, high, *_ = self._word(selector, state)
        permuted: list[Byte] = []
        for digits in (low, high):
            for shift in (0, 4):
                permuted.append(self._chosen(instruction, pool, digits, shift))
        return permuted[0], permuted[1], permuted[2], permuted[3]

    def _chosen(self, instruction: Instruction, pool: list[Byte], digits: Byte, shift: int) -> Byte:
        """The byte of `pool` that one digit of a selector chooses; with its highest bit it would
        spread a sign."""
        origins: Byte = frozenset()
        for digit in digits:
            if isinstance(digit, str) or digit >> shift & 8:
                return frozenset({instruction.place})
            origins |= pool[digit >> shift & 7]
        return origins

    def _combine_bits(self, instruction: Instruction, state: MachineState) -> Word:
        """LOP3: a function of three bits, given by its table. A byte counts as moved where the
        function gives one operand's bit for all eight bits."""
        _, (a, b, c, table) = split_destination(instruction)
        words = [self._word(operand, state) for operand in (a, b, c)]
        place: Byte = frozenset({instruction.place})
        function = number_of(table)
        assert function is not None
        w, x, y, z = (combined(operands, function, place) for operands in zip(*words, strict=True))
        return w, x, y, z

    def _shift(self, instruction: Instruction, state: MachineState) -> Word:
        """SHF: 32 bits of two words that are shifted as one, the third operand above the first."""
        _, (low, amount, high) = split_destination(instruction)
        n_bits = number_of(amount)
        if n_bits is None or n_bits % 8 or n_bits >= 64:
            return self._unknown(instruction)
        n_bytes = n_bits // 8
        is_signed = bool({"S32", "S64"} & set(instruction.modifiers))
        sign = frozenset({instruction.place}) if is_signed else ZERO
        value = [*self._word(low, state), *self._word(high, state)]
        if instruction.modifiers[0] == "L":
            value = [ZERO] * n_bytes + value
        else:
            value = value[n_bytes:] + [sign] * n_bytes
        first = 4 if "HI" in instruction.modifiers else 0
        return value[first], value[first + 1], value[first + 2], value[first + 3]

    def _multiply_add(self, instruction: Instruction, state: MachineState) -> Word:
        """IMAD a, b, c: a b + c, which is how bytes are often moved: by 1, or shifted by whole
        bytes into where c is zero."""
        _, (a, b, c) = split_destination(instruction)
        if {"WIDE", "HI", "X"} & set(instruction.modifiers):
            return self._unknown(instruction)
        factor = 0 if b in ("RZ", "URZ") or a in ("RZ", "URZ") else number_of(b)
        shifts = {0: 4, 1: 0, 1 << 8: 1, 1 << 16: 2, 1 << 24: 3}
        if factor not in shifts:
            return self._unknown(instruction)
        product = shifted_left(self._word(a, state), shifts[factor])
        return self._sum(instruction, [product, self._word(c, state)])

    def _add(self, instruction: Instruction, state: MachineState) -> Word:
        _, sources = split_destination(instruction)
        if "X" in instruction.modifiers:  # adds a carry
            return self._unknown(instruction)
        return self._sum(instruction, [self._word(source, state) for source in sources])

    def _shift_add(self, instruction: Instruction, state: MachineState) -> Word:
        """LEA a, b, n: (a << n) + b."""
        _, sources = split_destination(instruction)
        n_bits = number_of(sources[-1])
        if "HI" in instruction.modifiers or len(sources) != 3 or n_bits is None or n_bits % 8:
            return self._unknown(instruction)
        product = shifted_left(self._word(sources[0], state), n_bits // 8)
        return self._sum(instruction, [product, self._word(sources[1], state)])

    def _sum(self, instruction: Instruction, words: list[Word]) -> Word:
        """A sum moves bytes as long as at most one of them is not zero; what follows may have a
        carry."""
        total: list[Byte] = []
        for operands in zip(*words, strict=True):
            nonzero = [byte for byte in operands if byte != ZERO]
            if len(nonzero) > 1:
                total += [frozenset({instruction.place})] * (4 - len(total))
                break
            total.append(nonzero[0] if nonzero else ZERO)
        return total[0], total[1], total[2], total[3]

    def _move(self, instruction: Instruction, state: MachineState) -> Word:
        """MOV and others: one word, unchanged. SHFL takes the word of another thread, which runs
        the same code."""
        _, sources = split_destination(instruction)
        return self._word(sources[0], state)

    def _half_constants(self, instruction: Instruction, state: MachineState) -> Word:
        """HFMA2 of -0 times 0 plus two numbers in FP16, the upper first: how a constant is often
        put into a register."""
        _, sources = split_destination(instruction)
        if sources == ["-RZ", "RZ", "0", "0"]:
            return ZEROS
        return self._unknown(instruction)

    def _select(self, instruction: Instruction, state: MachineState) -> Word:
        """SEL: one of two words."""
        _, (a, b) = split_destination(instruction)
        return either(self._word(a, state), self._word(b, state))

    def _extend(self, instruction: Instruction, state: MachineState) -> Word:
        """SGXT: the lowest bits of a word; above them zeros, or copies of the highest of them."""
        _, (source, amount) = split_destination(instruction)
        n_bits = number_of(amount)
        if n_bits is None or n_bits % 8:
            return self._unknown(instruction)
        above = ZERO if "U32" in instruction.modifiers else frozenset({instruction.place})
        word = [*self._word(source, state)[: n_bits // 8], *[above] * 4]
        return word[0], word[1], word[2], word[3]


def words_of_load(instruction: Instruction, loaded: list[Byte]) -> list[Word]:
    """The words that a load writes, of the bytes that it brings; a narrow load writes a whole
    word."""
    if len(loaded) < 4:
        is_signed = any(modifier.startswith("S") for modifier in instruction.modifiers)
        # copies of the sign, which are no byte of the memory
        filler = frozenset({instruction.place}) if is_signed else ZERO
        loaded = [*loaded, *[filler] * (4 - len(loaded))]
    return [
        (loaded[first], loaded[first + 1], loaded[first + 2], loaded[first + 3])
        for first in range(0, len(loaded), 4)
    ]


def shifted_left(word: Word, n_bytes: int) -> Word:
    shifted = [ZERO] * n_bytes + list(word)
    return shifted[0], shifted[1], shifted[2], shifted[3]


def combined(operands: tuple[Byte, ...], function: int, place: Byte) -> Byte:
    """A byte by LOP3's table `function`: the operand that all of its bits are, or the number that
    they make; else `place`, computed there."""
    values = [known_value(byte) for byte in operands]
    results = [bit_of(values, bit, function) for bit in range(8)]
    kinds = set(results)
    if kinds <= {0, 1}:
        return frozenset({sum(int(result) << bit for bit, result in enumerate(results))})
    (kind,) = kinds if len(kinds) == 1 else ("mixed",)
    if kind in ("a", "b", "c"):
        return operands["abc".index(kind)]
    return place


def known_value(byte: Byte) -> int | None:
    """The number that a byte is; None where it is not known, or one of several."""
    if len(byte) != 1:
        return None
    (value,) = byte
    return value if isinstance(value, int) else None


def bit_of(values: list[int | None], bit: int, function: int) -> int | str:
    """What LOP3's table makes of one bit of three bytes, of which some are known: 0, 1, the operand
    "a", "b" or "c" whose bit it is, or "computed"."""
    outcomes: dict[tuple[int, int, int], int] = {}
    for row in range(8):
        bits = (row >> 2 & 1, row >> 1 & 1, row & 1)
        is_possible = all(
            value is None or value >> bit & 1 == bit_of_row
            for value, bit_of_row in zip(values, bits, strict=True)
        )
        if is_possible:
            outcomes[bits] = function >> row & 1
    results = set(outcomes.values())
    if len(results) == 1:
        return results.pop()
    for position, name in enumerate("abc"):
        if all(bits[position] == outcome for bits, outcome in outcomes.items()):
            return name
    return "computed"
