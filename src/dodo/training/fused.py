"""Faster training arithmetic with the same numbers: LoRA in one autograd node, attention without stored weights, and
cross-entropy without stored logits.

On a CPU most of a naive step is memory traffic: LoRA's scaled sum makes two more passes over every activation, attention
weights are kept for the backward pass, masked ones too, and logits over a large vocabulary are read and written many times in
fp32. All functions here run in the input's dtype (bf16 where the processor has it) while the trained parameters stay fp32.

Shapes: N tokens, I inputs, O outputs, R rank, D width, V vocabulary; in attention B texts, G key/value heads, H query heads of
each, Q queries, S keys, D head width.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.activations import SiLUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dodo.adapters import is_plain

__all__ = ["fused_lora", "linear_cross_entropy"]


class _LoraProduct(Function):
    """y = x W^T + b + scale (share * x A^T) B^T, with gradients to x, A and B; W and b are frozen, share is 0 or 1 or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, share: Tensor | None
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        a_RI, b_OR = a.to(x.dtype), (b * scale).to(x.dtype)
        u_NR = x_NI @ a_RI.T
        if share is not None:
            u_NR *= share
        y_NO = nn.functional.linear(x_NI, weight, bias)
        y_NO.addmm_(u_NR, b_OR.T)
        ctx.save_for_backward(x_NI, weight, a_RI, b_OR, u_NR, share)
        ctx.scale, ctx.dtypes, ctx.x_shape = scale, (a.dtype, b.dtype), x.shape
        return y_NO.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, a_RI, b_OR, u_NR, share = ctx.saved_tensors
        dy_NO = grad.reshape(-1, grad.shape[-1])
        du_NR = dy_NO @ b_OR
        if share is not None:
            du_NR *= share
        da = (du_NR.T @ x_NI).to(ctx.dtypes[0])
        db = (u_NR.T @ dy_NO).T.to(ctx.dtypes[1]) * ctx.scale
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy_NO @ weight).addmm_(du_NR, a_RI).view(ctx.x_shape)
        return dx, None, None, da, db, None, None


@contextmanager
def fused_lora(module: nn.Module) -> Iterator[None]:
    """Within it, plain LoRA linears, RMS norms and gated activations of `module` compute in one autograd node each, and so
    does attention on a CPU.

    Layers of any other kind (quantised, with dropout, DoRA, attention with capped logits) are left as they are.
    """
    forwards = [(m, forward) for m in module.modules() if (forward := _fused_forward(m)) is not None]
    attentions: list[Any] = [m for m in module.modules() if _is_plain_attention(m)]
    configs = [attention.config for attention in attentions]
    AttentionInterface.register(_BLOCKWISE, _attention)
    try:
        for layer, forward in forwards:
            layer.forward = forward  # on the instance: no class is patched
        for attention in attentions:
            attention.config = copy.copy(attention.config)  # its own: the model still makes the masks of its backend
            attention.config._attn_implementation = _BLOCKWISE
        yield
    finally:
        for layer, _ in forwards:
            del layer.forward
        for attention, config in zip(attentions, configs, strict=True):
            attention.config = config


def _fused_forward(module: Any) -> Any:
    """What takes the place of a module's own forward, or None."""
    if isinstance(module, LoraLinear) and is_plain(module):
        return _forward_of(module)
    if hasattr(module, "variance_epsilon") and not module.weight.requires_grad:  # so it is called where the norm is Llama's
        return lambda x: _RmsNorm.apply(x, module.weight, module.variance_epsilon)
    if hasattr(module, "gate_proj") and isinstance(module.act_fn, nn.SiLU | SiLUActivation):
        return lambda x: module.down_proj(_GatedSilu.apply(module.gate_proj(x), module.up_proj(x)))
    return None


def _forward_of(layer: Any) -> Any:
    base: Any = layer.get_base_layer()

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
        if not names:
            return nn.functional.linear(x, base.weight, base.bias)
        a, b, scale, share = layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight, layer.scaling[names[0]], None
        shares: list[Any] = [getattr(layer.lora_A[name], "share", None) for name in names]
        if shares[0] is not None:  # each adapter for its own tokens: one product of the joined matrices
            a = torch.cat([layer.lora_A[name].weight for name in names])
            b = torch.cat([layer.lora_B[name].weight * layer.scaling[name] for name in names], dim=1)
            scale = 1.0
            share = torch.cat([s.expand(*s.shape[:-1], layer.r[n]) for s, n in zip(shares, names, strict=True)], dim=-1)
            share = share.reshape(-1, a.shape[0])
        y: Tensor = _LoraProduct.apply(x, base.weight, base.bias, a, b, scale, share)
        return y

    return forward


class _RmsNorm(Function):
    """y = w x / rms(x), with the gradient to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.to(torch.float32, copy=True)
        over = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # 1 / rms
        ctx.save_for_backward(x, weight, over)
        return x32.mul_(over).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, over = ctx.saved_tensors
        dy, x32 = (grad * weight).float(), x.float()  # dy is new, also in fp32
        along = (dy * x32).sum(-1, keepdim=True).mul_(over.square().div_(-x.shape[-1]))
        return dy.addcmul_(x32, along).mul_(over).to(x.dtype), None, None


class _GatedSilu(Function):
    """y = silu(gate) up; silu is made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), nn.functional.silu(gate).mul_(grad)


_BLOCKWISE = "dodo-blockwise"


def _is_plain_attention(module: Any) -> bool:
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "num_key_value_groups"):
        return False
    return config._attn_implementation in ("sdpa", "eager") and getattr(config, "attn_logit_softcapping", None) is None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; [B, Q, G H, D] is returned."""
    mask = attention_mask
    if query.device.type != "cpu" or dropout or (mask is not None and (mask.ndim != 4 or mask.shape[1] != 1)):
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out, None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    out = _Attention.apply(query, key, value, mask, scaling)
    return out, None


class _Attention(Function):
    """softmax(scale Q K^T + mask) V, a block of queries at a time. Weights of long texts are not kept, but made again in the
    backward pass.

    Keys behind the last one that a block's queries see are left out. The mask's gradient is that of the logits, summed over
    heads; through the straight-through term in its columns it trains the scorer (Paper: Eq. 18).
    """

    BLOCK_BYTES = 512
    """Of one head's weights for one key: few enough queries that a block's weights stay in the cache of a core."""

    KEPT_BYTES = 6 * 2**20
    """Weights of one layer are kept up to this size: about what else a layer keeps of 512 tokens."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        B, G, S, D = key.shape
        H, Q = query.shape[1] // G, query.shape[2]
        k, v = key.reshape(B * G, S, D), value.reshape(B * G, S, D)
        ctx.shape, ctx.scale = (B, G, H, Q, S, D), scale
        ctx.blocks = _blocks(mask, Q, S, max(1, _Attention.BLOCK_BYTES // query.element_size()))
        out_BQGHD, kept = query.new_empty(B, Q, G, H, D), []
        size = B * G * H * query.element_size() * sum((end - begin) * seen for begin, end, seen in ctx.blocks)
        for begin, end, seen in ctx.blocks:
            q = query[:, :, begin:end].reshape(B * G, -1, D)
            weights = _weights(ctx, q, k[:, :seen], mask, begin, end)
            out_BQGHD[:, begin:end] = (weights @ v[:, :seen]).view(B, G, H, end - begin, D).permute(0, 3, 1, 2, 4)
            kept += [weights] * (size <= _Attention.KEPT_BYTES)
        ctx.save_for_backward(query, k, v, mask, *kept)
        return out_BQGHD.view(B, Q, G * H, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, k, v, mask, *kept = ctx.saved_tensors
        B, G, H, Q, S, D = ctx.shape
        dout_BGHQD = grad.view(B, Q, G, H, D).permute(0, 2, 3, 1, 4)
        dquery = query.new_empty(query.shape)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dmask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        for i, (begin, end, seen) in enumerate(ctx.blocks):
            q = query[:, :, begin:end].reshape(B * G, -1, D)
            dout = dout_BGHQD[:, :, :, begin:end].reshape(B * G, -1, D)
            weights = kept[i] if kept else _weights(ctx, q, k[:, :seen], mask, begin, end)
            dv[:, :seen].baddbmm_(weights.mT, dout)
            dlogits = torch._softmax_backward_data(dout @ v[:, :seen].mT, weights, -1, weights.dtype)
            dk[:, :seen].baddbmm_(dlogits.mT, q)
            dquery[:, :, begin:end] = (dlogits @ k[:, :seen]).view(B, G * H, end - begin, D)
            if dmask is not None:
                each = dlogits.view(B, G * H, end - begin, seen).sum(1)
                dmask[:, 0, begin:end, :seen] = each.sum_to_size(len(dmask), *each.shape[1:])
        dkey, dvalue = dk.mul_(ctx.scale).view(B, G, S, D), dv.view(B, G, S, D)
        return dquery.mul_(ctx.scale), dkey, dvalue, dmask, None


def _blocks(mask: Tensor | None, Q: int, S: int, size: int) -> list[tuple[int, int, int]]:
    """First and last (exclusive) query of each block, and how many keys from the first on they see."""

    def seen(begin: int, end: int) -> int:
        if mask is None:
            return S - Q + end
        visible = (mask[:, 0, begin:end].amax((0, 1)) > torch.finfo(mask.dtype).min / 2).nonzero()
        return int(visible[-1]) + 1 if len(visible) else 1

    ends = [(begin, min(begin + size, Q)) for begin in range(0, Q, size)]
    return [(begin, end, seen(begin, end)) for begin, end in ends]


def _weights(ctx: Any, q: Tensor, k: Tensor, mask: Tensor | None, begin: int, end: int) -> Tensor:
    """[B G, H queries, keys] of a block. Without a mask, each query sees all but the queries after it."""
    B, G, H, *_ = ctx.shape
    queries, seen = end - begin, k.shape[1]
    if mask is not None:
        bias = mask[:, :, None, begin:end, :seen]
    else:  # -inf above the diagonal that ends in the lower right corner
        bias = q.new_full((queries, seen), -torch.inf).triu_(seen - queries + 1)
    logits = bias.expand(B, G, H, queries, seen).clone(memory_format=torch.contiguous_format).view(B * G, -1, seen)
    return logits.baddbmm_(q, k.mT, alpha=ctx.scale).softmax(-1)


class _LinearCrossEntropy(Function):
    """Sum over tokens of -log softmax(x W^T)[target], chunk by chunk; the gradient to x, if any, is made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, chunk: int) -> Any:
        losses, hits = [], []
        gradient = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        for start in range(0, x_ND.shape[0], chunk):
            here = slice(start, start + chunk)
            logits = (x_ND[here] @ weight_VD.T).float()
            target = targets_N[here, None]
            top = logits.amax(-1, keepdim=True)
            wanted = logits.gather(1, target)
            hits.append((wanted >= top)[:, 0])
            exp = logits.sub_(top).exp_()
            total = exp.sum(-1, keepdim=True)
            losses.append((total.log() + top - wanted)[:, 0])
            if gradient is not None:
                exp.mul_(weights_N[here, None] / total)
                exp.scatter_add_(1, target, -weights_N[here, None])
                gradient[here] = exp.to(x_ND.dtype) @ weight_VD
        loss_N = torch.cat(losses)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(loss_N, hit_N := torch.cat(hits))
        return (loss_N * weights_N).sum(), loss_N, hit_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None


def linear_cross_entropy(
    states: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, *, chunk: int = 256
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy of a frozen language-model head, without keeping the logits.

    Args:
        states: [N, D], hidden states behind the final norm; gradients flow to them.
        weight: [V, D], the head, in the same dtype, without gradient.
        targets: int64 [N].
        weights: fp32 [N], of each token in the sum.
        chunk: tokens whose logits exist at one time.

    Returns:
        fp32 scalar, the weighted sum; fp32 [N], each token's loss; bool [N], whether the target had the highest logit.
    """
    if not torch.is_grad_enabled():
        states = states.detach()
    return _LinearCrossEntropy.apply(states, weight, targets, weights, chunk)
