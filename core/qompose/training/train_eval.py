# SPDX-License-Identifier: Apache-2.0
"""train() and eval() of a prepared program, and the schedule by which training freezes parts of it.

What `prepare_qat_pt2e` returns has `train()` and `eval()` of its own. torchao's functions of these names look
for patterns that are not in it, and change nothing; those here switch programs of every stage. Batch norms
of several processes that train together have the statistics of all their batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.fx import GraphModule, Node
from torch.nn import functional

from qompose.errors import ConfigError, StageError
from qompose.observers.fake_quantize import FakeQuantizeBase, LearnableFakeQuantize
from qompose.observers.min_max import several_processes
from qompose.program.control_flow import nodes_in
from qompose.program.graph import (
    call,
    constant_of,
    holds,
    owner_of,
    reached,
    read_attribute,
    set_attribute,
    value_of,
)
from qompose.program.meta import META_KEY, MODE_KEY
from qompose.spec.qdq import is_of_quantization
from qompose.spec.qparams import along


class SwitchedOperator(nn.Module):
    """An operator with an argument that is another one in training: of a dropout, whether it drops.

    Args:
        operator: an `OpOverload`.
        position: which positional argument it is.
        in_training, in_evaluation: the argument.
    """

    def __init__(self, operator: Any, position: int, in_training: Any, in_evaluation: Any) -> None:
        super().__init__()
        self.operator_name, self.position = str(operator), position
        self.in_training, self.in_evaluation = in_training, in_evaluation

    @property
    def operator(self) -> Any:
        """Return the operator; the module has its name, which can be pickled."""
        namespace, packet, overload = self.operator_name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the operator with the arguments before and behind the one that it has itself."""
        own = self.in_training if self.training else self.in_evaluation
        before, behind = arguments[: self.position], arguments[self.position :]
        return self.operator(*before, own, *behind, **keywords)

    def extra_repr(self) -> str:
        """Return what torch prints between the parentheses."""
        return (
            f"{self.operator}, argument {self.position}: {self.in_training} or {self.in_evaluation}"
        )


class BatchNorm(nn.Module):
    """A batch norm by itself; `frozen` keeps its running statistics, and takes them in training too.

    Args:
        momentum: of the running statistics.
        eps: is added to the variance.
        synchronized: whether statistics are those of the batches of all processes that train together.
    """

    frozen = False
    operator_name: str | None = "aten.batch_norm.default"
    """Of the operator that it stands for; None where that is folded."""

    def __init__(self, momentum: float, eps: float, synchronized: bool = False) -> None:
        super().__init__()
        self.momentum, self.eps, self.synchronized = momentum, eps, synchronized

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        tracked: Tensor | None,
    ) -> Tensor:
        """Normalise `x`, shape `(N, C, ...)`; `tracked` counts batches, the others have shape `(C,)`."""
        learning = self.training and not self.frozen
        if learning and tracked is not None:
            tracked.add_(1)
        batch = learning or mean is None
        if batch and self.synchronized and several_processes():
            return batch_norm_together(x, mean, variance, scale, shift, self.momentum, self.eps)
        return functional.batch_norm(
            x, mean, variance, scale, shift, batch, self.momentum, self.eps
        )

    def extra_repr(self) -> str:
        """Return what torch prints between the parentheses."""
        named = {"momentum": self.momentum, "eps": self.eps, "frozen": self.frozen}
        named |= {"synchronized": True} if self.synchronized else {}
        return ", ".join(f"{name}={value}" for name, value in named.items())


aten = torch.ops.aten
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_FLAGS: dict[Any, int] = {
    **{getattr(aten, name).default: 2 for name in _DROPOUTS},
    **{getattr(aten, f"{name}_").default: 2 for name in _DROPOUTS},
    aten.rrelu.default: 3,
    aten.rrelu_.default: 3,
    aten.instance_norm.default: 5,
    **{getattr(aten, name).input: 6 for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{getattr(aten, name).data: 7 for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
"""The operators that are told whether they are in training, and by which argument."""
_ATTENTION, _DROPPED = aten.scaled_dot_product_attention.default, 4
_NORM_FLAG = 5
_TRACKED = "num_batches_tracked"


@dataclass(frozen=True)
class ModeArgument:
    """An argument that is another one in training, by its position."""

    position: int
    in_training: Any
    in_evaluation: Any


@dataclass(frozen=True)
class Norm:
    """A batch norm with running statistics.

    `frozen` is one that was exported in evaluation, in a program that was in training. `counter` is the
    path and the value of what counts its batches. `synchronized` is one of an `nn.SyncBatchNorm`, which
    torch exports as a batch norm like any other.
    """

    momentum: float
    frozen: bool
    counter: tuple[str, Tensor] | None
    synchronized: bool = False


def mode_of(node: Node) -> ModeArgument | Norm | None:
    """Return what an operator does in training that it does not do now."""
    found: ModeArgument | Norm | None = node.meta.get(MODE_KEY)
    return found


def evaluation_form(program: GraphModule) -> bool:
    """Let all operators of a program be those of evaluation, in place, with a note of what they were.

    Returns:
        whether the program was exported in training, as far as its operators tell.
    """
    counters, nodes = _take_counters(program), list(nodes_in(program))
    training = any(_trains(node) for node in nodes)
    for node in nodes:
        if not training and mode_of(node) is not None:
            continue  # it was brought into evaluation before
        if _has_statistics(node):
            prefix = str(getattr(node.args[3], "target", "")).rpartition(".")[0]
            momentum, frozen = cast(float, node.args[6]), training and not _trains(node)
            counter = counters.get(prefix)
            node.meta[MODE_KEY] = Norm(momentum, frozen, counter, _is_synchronized(node))
            node.args = (*node.args[:5], False, *node.args[6:])
        elif (switch := _switch_of(node)) is not None and _trains(node) is training:
            given = _filled(node, switch.position)
            node.meta[MODE_KEY] = switch
            behind = given[switch.position + 1 :]
            node.args = (*given[: switch.position], switch.in_evaluation, *behind)
    return training


def _has_statistics(node: Node) -> bool:
    return node.target is aten.batch_norm.default and node.args[3] is not None


def _is_synchronized(node: Node) -> bool:
    kinds = [str(kind) for _, kind in node.meta.get("nn_module_stack", {}).values()]
    return bool(kinds) and "SyncBatchNorm" in kinds[-1]


def _trains(node: Node) -> bool:
    """Tell whether an operator was exported in training."""
    if _has_statistics(node):
        return bool(node.args[_NORM_FLAG])
    switch = _switch_of(node)
    return switch is not None and _filled(node, switch.position)[switch.position] != (
        switch.in_evaluation
    )


def _take_counters(program: GraphModule) -> dict[str, tuple[str, Tensor]]:
    """Remove what counts the batches of batch norms, and return path and value by the module's path."""
    found = {}
    for node in list(nodes_in(program)):
        if node.target is aten.add_.Tensor and not node.users and isinstance(node.args[0], Node):
            counter = constant_of(node.args[0])
            prefix, _, name = str(node.args[0].target).rpartition(".")
            if counter is not None and name == _TRACKED:
                found[prefix] = (str(node.args[0].target), counter)
                node.graph.erase_node(node)
    return found


def _switch_of(node: Node) -> ModeArgument | None:
    """Return which argument differs in training."""
    if node.target is aten.instance_norm.default and node.args[3] is None:
        return None  # without running statistics it is the same in both
    if node.target in _FLAGS:
        return ModeArgument(_FLAGS[node.target], True, False)
    if node.target is _ATTENTION and (probability := _filled(node, _DROPPED)[_DROPPED]):
        return ModeArgument(_DROPPED, probability, 0.0)
    return None


def _filled(node: Node, position: int) -> tuple[Any, ...]:
    """Return positional arguments up to one that may have been left at its default."""
    schema: Any = node.target
    rest = schema._schema.arguments[len(node.args) : position + 1]
    return (*node.args, *(argument.default_value for argument in rest))


def move_exported_model_to_eval(model: GraphModule) -> GraphModule:
    """Let an exported program, or what any later stage made of one, be as in evaluation, in place.

    Returns:
        `model`.

    Raises:
        StageError: `model` was not exported.
    """
    return _switched(model, training=False)


def move_exported_model_to_train(model: GraphModule) -> GraphModule:
    """Let an exported program, or what any later stage made of one, be as in training, in place.

    Batch norms that were exported in evaluation beside operators in training stay in evaluation. Those
    that conversion folded are gone.

    Returns:
        `model`.

    Raises:
        StageError: `model` was not exported.
    """
    return _switched(model, training=True)


def allow_exported_model_train_eval(model: GraphModule) -> GraphModule:
    """Let `train()` and `eval()` of an exported program, or of any later stage, switch its operators.

    What `prepare_qat_pt2e` returns does so anyway. Copies and later stages need another call.

    Returns:
        `model`.

    Raises:
        StageError: `model` was not exported.
    """
    _check_exported(model)
    if not is_trained(model):
        model.train = MethodType(_train, model)  # type: ignore[method-assign]
        model.eval = MethodType(move_exported_model_to_eval, model)  # type: ignore[method-assign]
    return model


def is_trained(model: GraphModule) -> bool:
    """Tell whether a program has a form to be trained in, which differs from the one to be deployed."""
    return any(isinstance(module, (BatchNorm, SwitchedOperator)) for module in model.modules())


def _train(model: GraphModule, mode: bool = True) -> GraphModule:
    return _switched(model, training=mode)


def _switched(model: GraphModule, *, training: bool) -> GraphModule:
    _check_exported(model)
    if not all(_is_in_mode(node, training) for node in nodes_in(model)):
        evaluation_form(model)
        if training:
            _training_operators(model)
        for module in model.modules():
            if isinstance(module, GraphModule):
                module.recompile()
    if hasattr(model, "meta") and META_KEY in model.meta:  # torch forbids it of what it exports
        nn.Module.train(model, training)
    return model


def _is_in_mode(node: Node, training: bool) -> bool:
    """Tell whether an operator needs no switching, because it was switched before or knows no modes."""
    if not _has_statistics(node) and _switch_of(node) is None:
        return mode_of(node) is None
    mode = mode_of(node)
    if isinstance(mode, Norm):
        return bool(node.args[_NORM_FLAG]) is (training and not mode.frozen)
    if mode is None:
        return False
    wanted = mode.in_training if training else mode.in_evaluation
    return bool(node.args[mode.position] == wanted)


def _training_operators(program: GraphModule) -> None:
    """Let the operators that `evaluation_form` noted be those of training again, in place."""
    for node in list(nodes_in(program)):
        mode = mode_of(node)
        if isinstance(mode, ModeArgument) and (node.target in _FLAGS or node.target is _ATTENTION):
            rest = node.args[mode.position + 1 :]
            node.args = (*node.args[: mode.position], mode.in_training, *rest)
        elif isinstance(mode, Norm) and _has_statistics(node) and not mode.frozen:
            node.args = (*node.args[:_NORM_FLAG], True, *node.args[_NORM_FLAG + 1 :])
            if mode.counter is not None:
                _count(node, *mode.counter)


def _count(norm: Node, path: str, counter: Tensor) -> None:
    """Let a batch norm count its batches in the buffer of a path."""
    owner = owner_of(norm)
    if not holds(owner, path):
        set_attribute(owner, path, counter.clone())
    with norm.graph.inserting_before(norm):
        read = read_attribute(owner, path, norm)
        call(norm.graph, aten.add_.Tensor, (read, 1), norm, value_of(read))


def _check_exported(model: Any) -> None:
    if isinstance(model, GraphModule) and any("val" in n.meta for n in model.graph.nodes):
        return
    raise StageError(
        "expected the GraphModule of an exported, prepared or converted program, got "
        f"{type(model).__name__!r}; use torch.export.export(model, ...).module()"
    )


def batch_norm_together(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise `x`, shape `(N, C, ...)`, as `functional.batch_norm` would all processes' batches at once.

    Running statistics are updated in place, and gradients are those of the sum of all processes' losses,
    as with `nn.SyncBatchNorm`. Batches may be of different size. Every process has to call this.
    """
    found, spread, count = _statistics(x.float())
    if mean is not None and variance is not None:
        with torch.no_grad():
            mean.lerp_(found.to(mean.dtype), momentum)
            unbiased = spread * (count / (count - 1))
            variance.lerp_(unbiased.to(variance.dtype), momentum)
    factor = torch.rsqrt(spread + eps)
    if scale is not None:
        factor = factor * scale
    out = (x.float() - along(found, 1, x.dim())) * along(factor, 1, x.dim())
    if shift is not None:
        out = out + along(shift, 1, x.dim())
    return out.to(x.dtype)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance by channel, `(C,)`, and the number of values that they are of, `()`."""
    rest = [dim for dim in range(x.dim()) if dim != 1]
    own = torch.full((1,), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
    total = _summed(torch.cat([x.sum(rest), own]))
    count = total[-1].detach()
    mean = total[:-1] / count
    return mean, _summed((x - along(mean, 1, x.dim())).square().sum(rest)) / count, count


def _summed(x: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """A sum over processes, through which the gradients of all of them pass."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        distributed.all_reduce(total)
        return total


def behind_quantized(program: GraphModule) -> list[str]:
    """Return the parameters that reach the outputs of a program only through operators of quantization."""
    outputs = [program.graph.output_node()]
    passing = reached(outputs, lambda n: [] if is_of_quantization(n) else n.all_input_nodes)
    stopped = reached(outputs, lambda n: n.all_input_nodes) - passing
    return sorted(
        str(node.target)
        for node in stopped
        if isinstance(value := constant_of(node), nn.Parameter) and value.requires_grad
    )


def enable_observer(module: nn.Module) -> None:
    """Let a fake quantizer estimate its range; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantizeBase):
        module.enable_observer()


def disable_observer(module: nn.Module) -> None:
    """Let a fake quantizer keep its range; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantizeBase):
        module.disable_observer()


def enable_fake_quant(module: nn.Module) -> None:
    """Let a fake quantizer round and clip; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantizeBase):
        module.enable_fake_quant()


def disable_fake_quant(module: nn.Module) -> None:
    """Let tensors pass a fake quantizer unchanged; for `model.apply`, other modules are left alone."""
    if isinstance(module, FakeQuantizeBase):
        module.disable_fake_quant()


def enable_range_learning(module: nn.Module) -> None:
    """Let a fake quantizer learn its scale and zero point; for `model.apply`, others are left alone."""
    if isinstance(module, LearnableFakeQuantize):
        module.enable_range_learning()


def disable_range_learning(module: nn.Module) -> None:
    """Let a fake quantizer keep the scale and zero point that it has learned; for `model.apply`."""
    if isinstance(module, LearnableFakeQuantize):
        module.disable_range_learning()


def freeze_batch_norm(module: nn.Module) -> None:
    """Let a batch norm keep its running statistics and go by them in training too; for `model.apply`."""
    if isinstance(module, BatchNorm):
        module.frozen = True


def unfreeze_batch_norm(module: nn.Module) -> None:
    """Let a batch norm go by its batches in training again; for `model.apply`."""
    if isinstance(module, BatchNorm):
        module.frozen = False


@dataclass(frozen=True)
class QATSchedule:
    """From which step or epoch on what is simulated or kept; None is never.

    Attributes:
        fake_quantize_from: before it, ranges are estimated and nothing is rounded.
        observers_until: from it on, ranges stay what they are.
        batch_norm_until: from it on, batch norms go by running statistics, as the deployed model will.

    Raises:
        ConfigError: a number is negative; observers would stop before anything is simulated.
    """

    fake_quantize_from: int = 0
    observers_until: int | None = None
    batch_norm_until: int | None = None

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number is not None and (isinstance(number, bool) or not number >= 0):
                raise ConfigError(f"{name} must be a non-negative step number, got {number!r}")
        if self.observers_until == 0:
            raise ConfigError("observers_until=0 leaves no steps for estimating ranges")

    def apply(self, model: nn.Module, step: int) -> None:
        """Put a prepared model into the state of a step or epoch, counted from 0, however it came there."""
        simulates = step >= self.fake_quantize_from
        model.apply(enable_fake_quant if simulates else disable_fake_quant)
        model.apply(disable_observer if _past(step, self.observers_until) else enable_observer)
        frozen = _past(step, self.batch_norm_until)
        model.apply(freeze_batch_norm if frozen else unfreeze_batch_norm)


def _past(step: int, limit: int | None) -> bool:
    return limit is not None and step >= limit
