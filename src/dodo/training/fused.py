"""Faster training arithmetic with the same numbers: LoRA in one autograd node, and cross-entropy without stored logits.

On a CPU most of a naive step is memory traffic: LoRA's scaled sum makes two more passes over every activation, and logits
over a large vocabulary are read and written many times in fp32. Both functions here run in the input's dtype (bf16 where the
processor has it) while the trained parameters stay fp32.

Shapes: N tokens, I inputs, O outputs, R rank, D width, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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
        db = (dy_NO.T @ u_NR).to(ctx.dtypes[1]) * ctx.scale
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy_NO @ weight).addmm_(du_NR, a_RI).view(ctx.x_shape)
        return dx, None, None, da, db, None, None


@contextmanager
def fused_lora(module: nn.Module) -> Iterator[None]:
    """Within it, PEFT's plain LoRA linears of `module` compute in one autograd node.

    Layers of any other kind (quantised, with dropout, DoRA) are left as they are.
    """
    layers: list[Any] = [m for m in module.modules() if isinstance(m, LoraLinear) and _is_plain(m)]
    for layer in layers:
        layer.forward = _forward_of(layer)  # on the instance: PEFT itself is not patched
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_plain(layer: LoraLinear) -> bool:
    base: Any = layer.get_base_layer()
    plain = type(base) is nn.Linear and base.weight.is_floating_point() and not any(layer.use_dora.values())
    return plain and all(isinstance(d, nn.Identity) for d in layer.lora_dropout.values())


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


class _LinearCrossEntropy(Function):
    """Sum over tokens of -log softmax(x W^T)[target], chunk by chunk; the gradient to x is made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, chunk: int) -> Any:
        losses, hits = [], []
        gradient = torch.empty_like(x_ND)
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
