"""What each operator does to a split: one rule per operator, from how its arguments lie to how its result does.

A rule says which placements it needs, how its result lies, and which literals change on a rank (head counts in views,
bounds of slices). An operator without a rule gets whole arguments and gives a whole result, which is always right.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import phalanx.model.ops.attention
import phalanx.model.ops.leave
import phalanx.model.ops.operators  # noqa: F401  (define the operators named below)
from phalanx.model.shard import canonical
from phalanx.model.shard.rules import letters, pointwise, products, sections, views
from phalanx.model.shard.rules.common import otherwise
from phalanx.model.shard.rules.products import TooFewHeads
from phalanx.model.shard.walk import Place, Rule, Walk

aten, own = torch.ops.aten, torch.ops.phalanx

_BY_ELEMENT = (
    aten.tanh.default, aten.gelu.default, aten.silu.default, aten.relu.default, aten.pow.Tensor_Scalar,
    aten.rsqrt.default, aten.sqrt.default, aten.exp.default, aten.sigmoid.default, aten.to.dtype,
    aten.type_as.default, aten.where.self, aten.clamp.default, aten.abs.default, aten.square.default,
    aten.reciprocal.default, aten.leaky_relu.default, aten.softplus.default, aten.pow.Tensor_Tensor,
)  # fmt: skip

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_BY_ELEMENT, pointwise.pointwise),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.neg.default), pointwise.linear_pointwise),
    **dict.fromkeys((aten.mul.Tensor, aten.div.Tensor), pointwise.scaling),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), pointwise.reduction),
    **dict.fromkeys((own.dropout.default, own.dropout_part.default), pointwise.dropout),
    **dict.fromkeys(
        (aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten.cumsum.default), pointwise.along_dim
    ),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim), pointwise.extreme),
    aten.linalg_vector_norm.default: pointwise.vector_norm,
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), pointwise.layer_norm),
    aten.linear.default: products.linear,
    aten.mm.default: products.matmul,
    **dict.fromkeys((aten.matmul.default, aten.bmm.default), products.matmul),
    aten.baddbmm.default: products.of_values,
    own.grouped_matmul.default: products.grouped,
    aten.embedding.default: products.embedding,
    aten.einsum.default: letters.einsum,
    **dict.fromkeys((aten.conv1d.default, aten.conv2d.default), letters.convolution),
    aten.reshape.default: views.reshape,
    aten.flatten.using_ints: views.flatten,
    aten.unflatten.int: views.unflatten,
    aten.expand.default: views.expand,
    aten.repeat.default: views.repeat,
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), views.pad),
    aten.im2col.default: views.windows,
    aten.contiguous.default: views.dims_moved(lambda node, dim, rank: dim),
    aten.transpose.int: views.dims_moved(views.transposed),
    aten.permute.default: views.dims_moved(views.permuted),
    aten.unsqueeze.default: views.dims_moved(views.unsqueezed),
    aten.squeeze.dim: views.dims_moved(views.squeezed),
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), views.pairs),
    aten.cat.default: views.cat,
    aten.stack.default: views.stack,
    **dict.fromkeys(sections.SPLITS, sections.sections),
    operator.getitem: sections.item,
    aten.slice.Tensor: sections.slice_,
    aten.select.int: sections.select,
    aten.index.Tensor: sections.index,
    own.attention.default: products.attention,
    own.attention_slice.default: products.attention,
    canonical.loss_part: products.loss_part,
    canonical.loss_join: products.loss_join,
    own.leave.default: products.leave,
}


def unlisted(walk: Walk, node: fx.Node) -> Place:
    """The rule of an operator that has none of its own: PyTorch itself says which work element by element."""
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return pointwise.pointwise(walk, node)
    return otherwise(walk, node)


__all__ = ["RULES", "TooFewHeads", "unlisted"]
