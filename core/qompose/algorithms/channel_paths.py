# SPDX-License-Identifier: Apache-2.0
"""What is in front of a tensor and can take up the factors of its channels, so that nothing is left to do.

A normalization has a scale and a bias for each channel. A linear or a convolution has a row of its weight and
a bias for each channel of its output. What they are divided by reaches a tensor behind them through operators
that move values, and through those with `f(s x) = s f(x)` for `s > 0`: relu, pools, a product with something
else, attention, which mixes values along tokens.

Which channel comes from which row is found by sending the numbers of the rows through these operators in the
place of values. They are views in which all tokens are one, so that it takes no memory. Rows that something
else reads too, be it another part of one large weight, have no factors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import Absorbers
from qompose.algorithms.products import Operands
from qompose.program.batch_norm_folding import FOLDABLE, TRANSPOSED
from qompose.program.graph import address_of, arguments_of, behind_modules, constant_of, value_of
from qompose.spec.claim import Point
from qompose.spec.qdq import axis_of
from qompose.spec.qparams import CASTS
from qompose.spec.quantization_spec import QuantizationSpec

aten = torch.ops.aten

Rows: TypeAlias = "Tensor | tuple[Tensor, ...]"
"""The number of the row that each value comes from, in the shape of the value; of several values, of each."""


def absorbers_of(
    source: Node,
    users: Collection[str],
    dim: int,
    readers: Mapping[int, int],
    quantized: Container[Point],
) -> tuple[str, ...]:
    """Return the parameters of the normalization in front of a tensor that may take up its factors.

    Its scale may be a product of its own. There are none where others read the tensor, or the parameters.

    Args:
        users: the operators for which the channels are divided.
        dim: the dimension of the channels.
        readers: of each parameter, by address (`count_readers`).
        quantized: points that are quantized: parameters that are integers take up none.
    """
    if {user.name for user in _reading(source)} != set(users):
        return ()
    if dim != value_of(source).dim() - 1:
        return ()
    return _of_norm(source, readers, quantized)


def find_absorbers(
    found: Calibrated, source: Node, users: Collection[str], dim: int, *, with_range: bool = False
) -> Absorbers | None:
    """Return the parameters that may take up factors of a tensor's channels, None where there are none.

    Args:
        users: the operators for which the channels are divided.
        dim: the dimension of the channels.
        with_range: whether the tensor itself may be integers, as its range changes with the factors.
    """
    if {user.name for user in _reading(source)} != set(users):
        return None
    for way in _ways(source, set()):
        parameters, of_output = _parameters(found, way[0])
        inside = way[:-1] if with_range else way
        if any(_is_quantized(found, node) for node in inside):
            continue
        absorbers = parameters and _absorbing(way, parameters, of_output, dim)
        if absorbers:
            return absorbers
    return None


def _reading(value: Node) -> Iterator[Node]:
    """Yield the operators that read a value, behind observers too; those of sums read it for nobody."""
    for user in value.users:
        if user.op == "call_module":
            yield from _reading(user)
        else:
            yield user


_NORMS = (aten.layer_norm.default, aten.rms_norm.default)


def _of_norm(
    node: Node, readers: Mapping[int, int], quantized: Container[Point]
) -> tuple[str, ...]:
    """Return the parameters of a normalization over the last dimension, if nothing else reads them."""
    if node.target in _NORMS:
        given = arguments_of(node)
        found, shape = [given["weight"], given.get("bias")], given["normalized_shape"]
        fits = given["weight"] is not None and len(shape) == 1
    elif node.target is aten.mul.Tensor:
        found = [n for n in node.args if isinstance(n, Node) and constant_of(n) is not None]
        fits = len(found) == 1 and any(_is_normalized(n) for n in node.args if n not in found)
    else:
        return ()
    parameters = [parameter for parameter in found if isinstance(parameter, Node)]
    private = all(
        (constant := constant_of(parameter)) is not None
        and constant.dim() == 1
        and constant.shape[0] == value_of(node).shape[-1]
        and readers.get(address_of(constant), 0) == 1
        and Point(parameter.name, node.name) not in quantized
        for parameter in parameters
    )
    return tuple(parameter.name for parameter in parameters) if fits and private else ()


def _is_normalized(value: Any) -> bool:
    """Tell whether a value is another over the root of something, as RMS norms are written."""
    value = _behind_casts(value)
    if not isinstance(value, Node):
        return False
    if value.target is aten.mul.Tensor:
        return any(_calls(read, aten.rsqrt.default) for read in value.args)
    if value.target is aten.div.Tensor:
        return _calls(value.args[1], aten.sqrt.default)
    return False


def _calls(value: Any, target: Any) -> bool:
    value = _behind_casts(value)
    return isinstance(value, Node) and value.target is target


_CASTS = (aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout)


def _behind_casts(value: Any) -> Any:
    value = behind_modules(value)
    while isinstance(value, Node) and value.target in _CASTS:
        value = behind_modules(value.args[0])
    return value


def _parameters(found: Calibrated, maker: Node) -> tuple[tuple[str, ...], int]:
    """Return what has a row for each channel that an operator makes, and the dimension of these channels."""
    if maker.target not in FOLDABLE:
        return _of_norm(maker, found.readers, found.plan.group_of), value_of(maker).dim() - 1
    product = Operands.of(maker)
    constants = [constant_of(node) for node in (product.weight, product.bias) if node is not None]
    private = all(c is not None and found.readers.get(address_of(c), 0) == 1 for c in constants)
    if not private or not _rows_are_apart(found, product):
        return (), 0
    names = [product.weight.name]
    if product.bias is not None:
        names.append(product.bias.name)
    weight, rank = constants[0], value_of(maker).dim()
    assert weight is not None
    dim = rank - 1 if maker.target is aten.linear.default else rank - (weight.dim() - 1)
    return tuple(names), dim


def _rows_are_apart(found: Calibrated, product: Operands) -> bool:
    """Tell whether each row of a weight is quantized by itself, or none is: then factors cost nothing."""
    plan, name = found.plan, product.node.name
    if product.bias is not None and Point(product.bias.name, name) in plan.group_of:
        return False
    number = plan.group_of.get(Point(product.weight.name, name))
    if number is None or not found.is_whole(number):
        return number is None
    spec, weight = plan.groups[number].spec, constant_of(product.weight)
    assert weight is not None
    if not isinstance(spec, QuantizationSpec) or spec.dtype in CASTS:
        return False
    block = spec.block_size
    own = len(block) < weight.dim() or block[0] == 1 if block else axis_of(spec) == 0
    return own and len(plan.groups[number].points) == 1


def _absorbing(
    way: list[Node], parameters: tuple[str, ...], of_output: int, dim: int
) -> Absorbers | None:
    """Return the parameters with the row of each channel, None where factors do not come through."""
    rows, source = _sent(way, of_output), way[-1]
    last = rows.get(source)
    if not isinstance(last, Tensor):
        return None
    others = [other for other in range(last.dim()) if other != dim]
    one = _constant(last, others)
    if one is None:
        return None
    of_channels, count = one.flatten(), int(value_of(way[0]).shape[of_output])
    scaled = torch.zeros(count, dtype=torch.bool).index_fill(0, of_channels, True)
    for node, following in itertools.pairwise(way):
        if not _alone(node, following, rows, scaled):
            return None
    held = {node.name: _compact(of) for node, of in rows.items() if isinstance(of, Tensor)}
    return Absorbers(parameters, of_channels, count, held)


def _is_quantized(found: Calibrated, node: Node) -> bool:
    """Tell whether a value is integers somewhere, whose range was seen without factors."""
    quantized = found.plan.group_of
    return Point(node.name) in quantized or any(
        Point(node.name, user.name) in quantized for user in _reading(node)
    )


def _alone(node: Node, following: Node, rows: Mapping[Node, Rows], scaled: Tensor) -> bool:
    """Tell whether nothing besides the next operator, which reads it once, reads rows with factors."""
    if sum(read is node for read in _read(following)) != 1:
        return False
    for user in (user for user in _reading(node) if user is not following):
        if user.op == "output":
            return False
        if not isinstance(value_of(user), (Tensor, tuple, list)):
            continue  # a size
        moved = _handed_on(user, rows) if user.target in _MOVES else None
        parts = (moved,) if isinstance(moved, Tensor) else moved
        if parts is None or any(bool(scaled[part.flatten()].any()) for part in parts):
            return False
    return True


def _read(node: Node) -> Iterable[Any]:
    """Return all that an operator reads, as often as it does."""
    found = list[Node]()
    map_arg((node.args, node.kwargs), found.append)
    return found


def _ways(value: Node, seen: set[Node]) -> Iterator[list[Node]]:
    """Yield operators from one with parameters to a value, each of which hands on what is before it."""
    if value in seen or value.op != "call_function":
        return
    seen.add(value)
    if value.target in FOLDABLE:
        if value.target not in TRANSPOSED:
            yield [value]
        return
    if isinstance(value_of(value), Tensor):
        yield [value]  # a normalization, perhaps
    for read in (value.args[place] for place in _places(value)):
        if isinstance(read, Node):
            yield from ([*way, value] for way in _ways(read, seen))


def _sent(way: list[Node], dim: int) -> dict[Node, Rows]:
    """Return the rows that values on the way come from, up to where that cannot be said."""
    shape = _sizes(value_of(way[0]))
    numbers = torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
    found: dict[Node, Rows] = {way[0]: numbers.expand(shape)}
    for node in way[1:]:
        rows = _handed_on(node, found)
        if rows is None:
            break
        found[node] = rows
    return found


def _sizes(value: Tensor) -> list[int]:
    """Return sizes as numbers, open ones as the example has them."""
    return [_number(size) for size in value.shape]


def _number(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _handed_on(node: Node, rows: Mapping[Node, Rows]) -> Rows | None:
    """Return the rows that an operator's values come from, None where factors do not come through."""

    def argument(read: Node) -> Any:
        return rows[read] if read in rows else _number(value_of(read))

    places = [place for place in _places(node) if node.args[place] in rows]
    if len(places) != 1:
        return None
    read: Any = map_arg((node.args, node.kwargs), argument)
    args, kwargs = read
    (place,) = places
    if node.target in _MOVES:
        result: Rows = _MOVES[node.target](*args, **kwargs)
        return result
    return _mixed(node, args[place], args)


def _mixed(node: Node, rows: Tensor, args: tuple[Any, ...]) -> Tensor | None:
    """Return the rows behind an operator that computes."""
    rank, shape = rows.dim(), _sizes(value_of(node))
    if node.target in _ATTENTION:
        one = _constant(rows, [rank - 2])
        return None if one is None else _for_each_head(one, shape).expand(shape)
    if node.target is aten.mean.dim:
        dims = [d % rank for d in args[1] or range(rank)]
        one = _constant(rows, dims)
        kept = len(args) > 2 and args[2]
        return one if one is None or kept else one.squeeze(dims)
    if node.target in _POOLS:
        spatial = 3 if "3d" in str(node.target) else 2 if "2d" in str(node.target) else 1
        one = _constant(rows, range(rank - spatial, rank))
        return None if one is None else one.expand(shape)
    return rows.expand(shape)


def _for_each_head(rows: Tensor, shape: list[int]) -> Tensor:
    """Return rows with as many heads as the product has: several queries may share values."""
    if rows.dim() < 4 or rows.shape[-3] == shape[-3]:
        return rows
    return rows.repeat_interleave(shape[-3] // rows.shape[-3], rows.dim() - 3)


def _constant(rows: Tensor, dims: Iterable[int]) -> Tensor | None:
    """Return rows with one index of some dimensions, None if others have other rows."""
    for dim in dims:
        first = rows.narrow(dim, 0, 1)
        if rows.shape[dim] > 1 and rows.stride(dim) and not bool((rows == first).all()):
            return None
        rows = first
    return rows


def _compact(rows: Tensor) -> Tensor:
    """Return rows in the fewest values that broadcast to all."""
    for dim in range(rows.dim()):
        one = _constant(rows, [dim])
        rows = rows if one is None else one
    return rows.clone()


def _same(rows: Tensor, *others: Any, **options: Any) -> Tensor:
    return rows


_MOVES: dict[Any, Callable[..., Any]] = {
    **{
        target: target
        for target in (
            operator.getitem, aten.flatten.using_ints, aten.unflatten.int, aten.transpose.int, aten.t.default,
            aten.permute.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
            aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.expand.default,
            aten.unbind.int, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default,
            aten.chunk.default, aten.movedim.int, aten.swapaxes.default, aten.repeat_interleave.self_int,
        )
    },
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default),
    aten.reshape.default: aten.reshape.default,
    **dict.fromkeys(
        (
            aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
            aten.dropout.default, *_CASTS,
        ),
        _same,
    ),
}  # fmt: skip
"""Operators that move values, and what does so with rows."""
_ATTENTION = {
    aten.scaled_dot_product_attention.default: (2,), aten.matmul.default: (1,), aten.bmm.default: (1,)
}  # fmt: skip
_POOLS = dict.fromkeys(
    (
        aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default,
        aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default,
        aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
        aten.adaptive_avg_pool3d.default,
    ),
    (0,),
)  # fmt: skip
_PLACES: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(_MOVES, (0,)),
    **_ATTENTION,
    **_POOLS,
    **dict.fromkeys(
        (
            aten.mean.dim, aten.relu.default, aten.relu_.default, aten.leaky_relu.default,
            aten.leaky_relu_.default, aten.neg.default, aten.div.Tensor,
        ),
        (0,),
    ),
    aten.mul.Tensor: (0, 1),
}  # fmt: skip


def _places(node: Node) -> tuple[int, ...]:
    """Return the arguments whose factors an operator hands on, at most one at a time."""
    return _PLACES.get(node.target, ())
