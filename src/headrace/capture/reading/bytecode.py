"""Python's instructions, and a stack machine that knows what each does to the stack."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any, NamedTuple

from headrace.capture.reading.known import Known, Values

# Instructions that neither take from the stack nor add to it, whatever their effect says.
_WITHOUT_EFFECT = "NOP RESUME PRECALL CACHE EXTENDED_ARG COPY_FREE_VARS MAKE_CELL JUMP_FORWARD \
JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT RETURN_GENERATOR SETUP_ANNOTATIONS \
DELETE_FAST DELETE_DEREF"
_NEUTRAL = frozenset(_WITHOUT_EFFECT.split())
# Instructions after which the next one is reached by a jump alone.
_ENDING = "RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE JUMP_FORWARD JUMP_BACKWARD \
JUMP_BACKWARD_NO_INTERRUPT"
# Beginnings of the names of instructions that take something and leave the rest of the stack alone.
_WITHOUT_RESULT = ("POP_", "STORE_", "END_", "JUMP_", "LIST_", "SET_", "MAP_", "DICT_")
_LEAVING = frozenset(_ENDING.split())


class StackMachine:
    """Goes through the instructions of some code, in their order, jumps included. A subclass has
    a method for each instruction that it knows: `_load_fast` for `LOAD_FAST`."""

    def __init__(self, code: types.CodeType) -> None:
        self._code = code
        self.stack: list[Values] = []
        self.returned: list[Known] = []
        self._at_jump: dict[int, list[Values]] = {}

    def at_line(self, line: int) -> None:
        """The next instructions are of this line."""

    def use(self, values: Values) -> None:
        """An instruction uses these, in a way that is not known."""

    def run(self) -> Values:
        reachable = True
        for one in instructions_of(self._code):
            waiting = self._at_jump.pop(one.offset, None)
            if waiting is not None:
                self.stack = _merged(self.stack, waiting) if reachable else waiting
            elif not reachable:
                self.stack = []  # where an exception goes
            reachable = True
            if one.line is not None:
                self.at_line(one.line)
            if one.target is not None:
                self._jump(one)
            handler = getattr(self, f"_{one.name.lower()}", None)
            if handler is not None:
                handler(one)
            elif one.name not in _NEUTRAL:
                self._other(one)
            reachable = one.name not in _LEAVING
        return tuple(self.returned)

    def pop(self) -> Values:
        return self.stack.pop() if self.stack else ()

    def push(self, *values: Values) -> None:
        self.stack += values

    def take(self, count: int) -> list[Values]:
        return [self.pop() for _ in range(count)][::-1]

    def _jump(self, one: Instruction) -> None:
        """Note the stack that a jump leaves where it goes."""
        if one.target is None or one.target <= one.offset:
            return
        effect = dis.stack_effect(one.opcode, one.arg, jump=True) if one.has_arg else 0
        stack = list(self.stack)
        for _ in range(-effect):
            if stack:
                stack.pop()
        stack += [()] * max(effect, 0)
        before = self._at_jump.get(one.target)
        self._at_jump[one.target] = stack if before is None else _merged(before, stack)

    def _other(self, one: Instruction) -> None:
        """An instruction that uses what it takes, and makes something unknown."""
        effect = dis.stack_effect(one.opcode, one.arg if one.has_arg else None, jump=False)
        if effect > 0:
            self.push(*[()] * effect)
            return
        for values in self.take(-effect):
            self.use(values)
        if self.stack and not one.name.startswith(_WITHOUT_RESULT):
            self.use(self.stack[-1])
            self.stack[-1] = ()

    def _copy(self, one: Instruction) -> None:
        at = one.arg
        self.push(self.stack[-at] if at <= len(self.stack) else ())

    def _swap(self, one: Instruction) -> None:
        at = one.arg
        if at <= len(self.stack):
            self.stack[-1], self.stack[-at] = self.stack[-at], self.stack[-1]

    def _pop_top(self, one: Instruction) -> None:
        self.pop()

    def _push_null(self, one: Instruction) -> None:
        self.push(())


class Instruction(NamedTuple):
    """An instruction, without what is not needed here."""

    name: str
    opcode: int
    arg: int
    has_arg: bool
    value: Any
    line: int | None
    offset: int
    target: int | None


@functools.cache
def instructions_of(code: types.CodeType) -> list[Instruction]:
    found = []
    for one in dis.get_instructions(code):
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        line = one.positions.lineno if one.positions is not None else None
        found.append(
            Instruction(
                one.opname,
                one.opcode,
                one.arg or 0,
                one.arg is not None,
                one.argval,
                line,
                one.offset,
                one.argval if jumps else None,
            )
        )
    return found


def _merged(one: list[Values], other: list[Values]) -> list[Values]:
    """Two stacks that meet where a branch ends."""
    if len(one) != len(other):
        return one if len(one) < len(other) else other
    return [a if a == b or not b else (*a, *b) if a else b for a, b in zip(one, other, strict=True)]
