"""What calls of operations have in common that make the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ._storages import Storages

if TYPE_CHECKING:
    from ._program import Step


class Calls(Storages):
    """Tells by the values that storages hold whether a call is that of a step."""

    def key(self, func: Any, draw: int | None, args: tuple, kwargs: dict, reads: list, read: list) -> tuple:
        """What calls have in common that make the same; adds the values that are read, and their tensors."""
        key = [func, draw, self._pattern(kwargs, reads, read) if kwargs else None]
        for argument in args:
            if isinstance(argument, torch.Tensor):
                known = self._tensors.get(id(argument))
                if known is None or known[0]() is not argument or known[3] != id(argument.untyped_storage()):
                    known = self._met(argument)
                number = known[1][1]
                reads.append(number)
                read.append(argument)
                key.append(number)
                key.append(known[2])
            else:
                key.append(self._pattern(argument, reads, read))
        return tuple(key)

    def are_originals(self, step: Step, args: tuple) -> bool:
        """Whether a call of the step's operation reads what the step read, and that from the known tensors."""
        if len(args) != step.count:
            return False
        if step.constants:
            if not self._are_constants(step, args):
                return False
            args = step.pick(args)
        known = self.known
        try:
            for tensor, each in zip(args, step.sees):
                if known[each]() is not tensor:
                    return False
        except KeyError:
            return False
        return True

    def _are_constants(self, step: Step, args: tuple) -> bool:
        for position, before in step.constants:
            now = args[position]
            if now is not before and self._pattern(now, [], []) != before:
                return False
        return True

    def shown(self, view: Any, args: tuple) -> torch.Tensor | None:
        """The view, if a call of its operation makes that: of the same tensor, with the same arguments."""
        source = self.known.get(view.source)
        if source is None or source() is not args[0] or args[1:] != view.rest or not view.guard.check(args[0]):
            return None
        tensor: torch.Tensor = view.call(*args)
        self.is_shown(view, tensor)
        return tensor

    def is_call_of(self, step: Step, args: tuple, kwargs: dict) -> bool:
        """Whether a call of the step's operation, which must be simple, reads the same as the step: has its key."""
        if len(args) != step.count:
            return False
        for position, number, form in step.operands:
            tensor = args[position]
            known = self._tensors.get(id(tensor))
            if known is None or known[0]() is not tensor or known[3] != id(tensor.untyped_storage()):
                if not isinstance(tensor, torch.Tensor):
                    return False
                known = self._met(tensor)
            if known[1][1] != number or known[2] != form:
                return False
        if kwargs or step.key[2] is not None:
            return self._pattern(kwargs, [], []) == step.key[2]
        return not step.constants or self._are_constants(step, args)

    def _pattern(self, argument: Any, reads: list, read: list) -> Any:
        """A call's argument with numbers for tensors, equal for calls that are the same."""
        kind = type(argument)
        if kind is int or kind is bool:
            return kind, argument
        if kind is float:
            return argument.hex()  # tells zeros apart, and a NaN is itself
        if isinstance(argument, torch.Tensor):
            known = self._met(argument)
            reads.append(known[1][1])
            read.append(argument)
            return known[1][1], known[2]
        if kind is tuple or kind is list:
            return tuple([self._pattern(item, reads, read) for item in argument])
        if kind is dict:
            return tuple([(key, self._pattern(item, reads, read)) for key, item in argument.items()])
        if kind is torch.ScriptObject:  # it can't be compared; those of collectives are made anew for each call
            name = argument._type().qualified_name()
            return name if ".c10d." in name else (name, hash(argument))
        return argument
