"""Log-probabilities of given tokens, and entropies, from hidden states and the language-model head.

The logits never exist as a whole. The forward keeps an online softmax (Milakov and Gimelshein 1805.02867)
over tiles of the vocabulary. The backward recomputes the tiles (as Cut Cross-Entropy does, Wijmans et al.
2411.09009) and writes the logits' gradient for a bounded run of the vocabulary at a time, which two ordinary
matrix products consume. No atomics: two runs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import FunctionCtx, once_differentiable

from rlt_kernels.logit_tiles import LogitTransform, constants, operands, tile_for, tile_logits

MOST_SPLITS = 32  # runs of the vocabulary that a forward works on side by side
GRADIENT_BYTES = 64 * 2**20  # of logit gradients that exist at a time
LEAST_RUN = 512  # vocabulary entries; shorter runs make slow matrix products


def selective_logprob_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``selective_logprob`` in plain torch and float64, with the whole logits: what the kernel is compared
    with. Both results are differentiable."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * transform.logit_scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logps = torch.log_softmax(logits / transform.temperature, dim=-1)
    entropies = -(logps.exp() * logps.clamp(min=torch.finfo(torch.float64).min)).sum(dim=-1)
    return logps.gather(1, targets.unsqueeze(1)).squeeze(1), entropies


def selective_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of the transformed logits at the target, and the entropy of each row.

    Logits are rounded to the dtype of ``hidden`` where a model in that dtype rounds them (the head's output,
    the scale, the soft-cap), so that they are the model's own; all else is float32. The gradient of the
    head's output is rounded as well; ``GRADIENT_BYTES`` of it exist at a time, or ``LEAST_RUN`` entries a
    token if that is more.

    Args:
        hidden: float32, float16 or bfloat16 ``[tokens, width]``, any strides.
        weight: ``[vocab, width]`` in the same dtype, any strides.
        bias: ``[vocab]`` in the same dtype, or ``None``; -inf forbids an entry.
        targets: int64 ``[tokens]``; one outside ``0 .. vocab`` gives NaN.
        transform: see there.

    Returns:
        log-probs float32 ``[tokens]``, differentiable once, and entropies float32 ``[tokens]`` in nats, which
        carry no gradient.

    Raises:
        ValueError: shapes or dtypes do not fit, or a temperature or soft-cap that is not positive.
    """
    _check(hidden, weight, bias, targets, transform)
    return _SelectiveLogprob.apply(hidden, weight, bias, targets, transform)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform,
) -> None:
    fits = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1] and weight.shape[0] > 0
    fits = fits and targets.shape == hidden.shape[:1] and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        shapes = [None if t is None else list(t.shape) for t in (hidden, weight, bias, targets)]
        raise ValueError(
            f"hidden, weight, bias and targets have shapes {shapes}; expected [tokens, width], "
            f"[vocab, width], [vocab] or None, and [tokens], with at least one vocabulary entry"
        )
    dtypes = [t.dtype for t in (hidden, weight, bias) if t is not None]
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16) or len(set(dtypes)) > 1:
        raise ValueError(
            f"hidden, weight and bias have dtypes {dtypes}; give one of float32, float16 and bfloat16 for all"
        )
    for name in ("temperature", "softcap"):
        value = getattr(transform, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; give a number above 0")


class _SelectiveLogprob(torch.autograd.Function):
    """See ``selective_logprob``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = targets.contiguous()
        maximum, log_total, target_logits, entropies = _forward(hidden, weight, bias, targets, transform)
        ctx.save_for_backward(hidden, weight, bias, targets, maximum, log_total)
        ctx.transform = transform
        ctx.mark_non_differentiable(entropies)
        # Not target - (maximum + log_total): with logits of thousands that sum loses the digits that matter.
        return target_logits - maximum - log_total, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, upstream: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, maximum, log_total = ctx.saved_tensors
        if not len(targets):
            return torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None, None, None, None, None
        wanted = ctx.needs_input_grad[:3]
        rows = (targets, maximum, log_total, upstream.contiguous())
        return *_backward(hidden, weight, bias, rows, ctx.transform, wanted), None, None


def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest logit, the logarithm of the sum of ``exp(logit - largest)``, the target's logit, and the
    entropy of each row, float32 ``[tokens]`` each."""
    tokens, vocab, tile = len(targets), weight.shape[0], tile_for(hidden.dtype)
    tiles = triton.cdiv(triton.cdiv(vocab, tile.columns), MOST_SPLITS)
    splits = triton.cdiv(vocab, tiles * tile.columns)
    partial = torch.empty((3, splits, tokens), dtype=torch.float32, device=hidden.device)
    # NaN stays where no split has the target.
    target_logits = torch.full((tokens,), float("nan"), dtype=torch.float32, device=hidden.device)
    if tokens:
        with torch.cuda.device_of(hidden):
            _reduce_split[(triton.cdiv(tokens, tile.rows), splits)](
                *operands(hidden, weight, bias, transform),
                targets,
                *partial,
                target_logits,
                tiles * tile.columns,
                **constants(bias, transform, tile),
            )
    largest, log_total, entropies = _join_splits(*partial)
    return largest, log_total, target_logits, entropies


def _join_splits(
    maximum: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Join what ``_reduce_split`` stored, ``[splits, tokens]`` each: each row's largest logit, the logarithm
    of its sum of ``exp(logit - largest)``, and its entropy."""
    largest = maximum.amax(dim=0)
    # A split of -inf alone has a total of 0; a row of -inf alone gets NaN from -inf minus -inf, as it should.
    drift = maximum - largest
    total = total * drift.exp()
    weighted = weighted * drift.exp() + torch.where(total > 0, total * drift, 0)
    log_total = total.sum(dim=0).log()
    return largest, log_total, log_total - weighted.sum(dim=0) / total.sum(dim=0)


def _backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: tuple[torch.Tensor, ...],
    transform: LogitTransform,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of hidden, weight and bias, ``None`` for those not wanted; ``rows`` are targets, maxima,
    logarithms of totals, and the gradient that comes in, ``[tokens]`` each."""
    tokens, vocab, tile = hidden.shape[0], weight.shape[0], tile_for(hidden.dtype)
    # Summed over runs of the vocabulary in float32.
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wanted[0] else None
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if wanted[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None
    tiles = max(LEAST_RUN // tile.columns, GRADIENT_BYTES // (tokens * hidden.element_size() * tile.columns))
    run = min(tiles, triton.cdiv(vocab, tile.columns)) * tile.columns
    scratch = torch.empty((tokens, run), dtype=hidden.dtype, device=hidden.device)
    for first in range(0, vocab, run):
        end = min(first + run, vocab)
        with torch.cuda.device_of(hidden):
            _differentiate_run[(triton.cdiv(tokens, tile.rows), triton.cdiv(end - first, tile.columns))](
                *operands(hidden, weight, bias, transform),
                *rows,
                scratch,
                first,
                scratch.stride(0),
                **constants(bias, transform, tile),
            )
        gradient = scratch[:, : end - first]
        if grad_hidden is not None:
            grad_hidden += gradient @ weight[first:end]
        if grad_weight is not None:
            torch.mm(gradient.T, hidden, out=grad_weight[first:end])
        if grad_bias is not None:
            grad_bias[first:end] = gradient.sum(dim=0, dtype=torch.float32)
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


# What changes from batch to batch must not make a new variant of a kernel, that is, a compilation in
# mid-training.
@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["targets", "maxima", "totals", "weighted"]
)
def _reduce_split(
    hidden,
    weight,
    bias,
    row_stride,
    hidden_stride,
    column_stride,
    weight_stride,
    bias_stride,
    tokens,
    width,
    vocab,
    logit_scale,
    softcap,
    temperature,
    targets,
    maxima,
    totals,
    weighted,
    target_logits,
    split_width,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: a tile of rows over one split of the vocabulary. Stores the split's largest logit, its sum
    of ``exp(logit - largest)``, and the sum of that times ``logit - largest``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    begin = split * split_width
    end = tl.minimum(begin + split_width, vocab)
    target = tl.load(targets + row, mask=row < tokens, other=-1)
    target_logit = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    moment = tl.zeros([ROWS], tl.float32)
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        logits, _ = tile_logits(
            hidden,
            weight,
            bias,
            row,
            column,
            row_stride,
            hidden_stride,
            column_stride,
            weight_stride,
            bias_stride,
            tokens,
            width,
            vocab,
            logit_scale,
            softcap,
            temperature,
            BIAS,
            SOFTCAP,
            ROWS,
            COLUMNS,
            WIDTH,
        )
        target_logit += tl.sum(tl.where(column[None, :] == target[:, None], logits, 0.0), 1)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        # A maximum of -inf cannot be subtracted: -inf minus -inf is NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        drift = tl.where(maximum == float("-inf"), 0.0, maximum - shift)
        keep = tl.exp(maximum - shift)
        centred = logits - shift[:, None]
        share = tl.exp(centred)
        moment = keep * (moment + total * drift) + tl.sum(tl.where(share > 0.0, share * centred, 0.0), 1)
        total = keep * total + tl.sum(share, 1)
        maximum = new_maximum
    place = split.to(tl.int64) * tokens + row
    tl.store(maxima + place, maximum, mask=row < tokens)
    tl.store(totals + place, total, mask=row < tokens)
    tl.store(weighted + place, moment, mask=row < tokens)
    tl.store(target_logits + row, target_logit, mask=(row < tokens) & (target >= begin) & (target < end))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["targets", "upstream"])
def _differentiate_run(
    hidden,
    weight,
    bias,
    row_stride,
    hidden_stride,
    column_stride,
    weight_stride,
    bias_stride,
    tokens,
    width,
    vocab,
    logit_scale,
    softcap,
    temperature,
    targets,
    maxima,
    log_totals,
    upstream,
    gradients,
    first,
    gradient_stride,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: the gradient of one tile of the head's output, in a run of the vocabulary that starts at
    ``first``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_run = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = first + in_run
    logits, slope = tile_logits(
        hidden,
        weight,
        bias,
        row,
        column,
        row_stride,
        hidden_stride,
        column_stride,
        weight_stride,
        bias_stride,
        tokens,
        width,
        vocab,
        logit_scale,
        softcap,
        temperature,
        BIAS,
        SOFTCAP,
        ROWS,
        COLUMNS,
        WIDTH,
    )
    in_row = row < tokens
    target = tl.load(targets + row, mask=in_row, other=-1)
    maximum = tl.load(maxima + row, mask=in_row, other=0.0)
    log_total = tl.load(log_totals + row, mask=in_row, other=0.0)
    incoming = tl.load(upstream + row, mask=in_row, other=0.0)
    probability = tl.exp(logits - maximum[:, None] - log_total[:, None])
    chosen = tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    gradient = incoming[:, None] * (chosen - probability) * slope
    tl.store(
        gradients + row.to(tl.int64)[:, None] * gradient_stride + in_run[None, :],
        gradient.to(gradients.dtype.element_ty),
        mask=in_row[:, None] & (column < vocab)[None, :],
    )
