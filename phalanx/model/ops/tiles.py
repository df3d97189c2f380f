"""The Triton kernels behind `tiled.py`. Upper-case arguments are what they are compiled for.

sizes: heads that share keys, queries, keys, heads. rule: what scores are multiplied by, the soft cap, the window.
dropout: below which hash a probability is dropped, what the others are multiplied by, the first head, the first query.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

# Compiled once for all lengths and places: a slice must not compile, or load anything, in the middle of a step.
_compiled = triton.jit(
    do_not_specialize=[
        "group", "num_queries", "num_keys", "num_heads", "window", "threshold", "first_head", "first_query",
    ],
    do_not_specialize_on_alignment=["q_segments", "k_segments", "bias", "dropout_keys", "lse", "delta", "d_bias"],
)  # fmt: skip


@_compiled
def forward(
    q, q_strides, k, k_strides, v, v_strides, q_segments, k_segments, bias, bias_strides, dropout_keys,
    group, num_queries, num_keys, num_heads, scale, softcap, window, threshold, survivors, first_head, first_query,
    out, out_strides, lse,
    DIM: constexpr, WIDTH: constexpr, VALUE_DIM: constexpr, VALUE_WIDTH: constexpr, CAUSAL: constexpr,
    WINDOWED: constexpr, CAPPED: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """One tile of queries of one head."""
    sizes, rule = (group, num_queries, num_keys, num_heads), (scale, softcap, window)
    dropout = (threshold, survivors, first_head, first_query)
    head, sample = tl.program_id(1), tl.program_id(2)
    kv_head = head // sizes[0]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = _load(q, q_strides, sample, head, rows, sizes[1], DIM, WIDTH)
    ids = _segments(q_segments, sample, rows, sizes[1]) if q_segments is not None else None
    row_keys = _row_keys(dropout_keys, dropout, sample, head, rows) if dropout_keys is not None else None
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    first, last = _keys_seen(tl.program_id(0) * ROWS, ROWS, sizes, rule[2], CAUSAL, WINDOWED)
    for start in range(first // KEYS * KEYS, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        key_ids = _segments(k_segments, sample, keys, sizes[2]) if k_segments is not None else None
        relevant = _meet(ids, key_ids) if key_ids is not None else True
        if relevant:
            key = _load(k, k_strides, sample, kv_head, keys, sizes[2], DIM, WIDTH)
            scores, _ = _scores(
                query, key, rows, keys, ids, key_ids, bias, bias_strides, sample, head, sizes, rule, CAUSAL, WINDOWED,
                CAPPED,
            )  # fmt: skip
            higher = tl.maximum(highest, tl.max(scores, 1))
            reference = tl.where(higher == float("-inf"), 0.0, higher)
            probabilities = tl.exp(scores - reference[:, None])
            shrink = tl.exp(highest - reference)
            total = total * shrink + tl.sum(probabilities, 1)
            if row_keys is not None:
                probabilities = _drop(probabilities, row_keys, keys, dropout)
            value = _load(v, v_strides, sample, kv_head, keys, sizes[2], VALUE_DIM, VALUE_WIDTH)
            summed = summed * shrink[:, None] + _product(probabilities.to(value.dtype), value)
            highest = higher
    found = total > 0
    summed = summed / tl.where(found, total, 1.0)[:, None]
    _store(out, out_strides, sample, head, rows, sizes[1], VALUE_DIM, VALUE_WIDTH, summed)
    logs = tl.where(found, highest + tl.log(tl.where(found, total, 1.0)), float("-inf"))
    tl.store(_rows_of(lse, sample, head, sizes) + rows, logs, mask=rows < sizes[1])


@_compiled
def query_gradient(
    q, q_strides, k, k_strides, v, v_strides, q_segments, k_segments, bias, bias_strides, dropout_keys,
    group, num_queries, num_keys, num_heads, scale, softcap, window, threshold, survivors, first_head, first_query,
    d_out, d_out_strides, lse, delta, out, out_strides, dq, dq_strides,
    DIM: constexpr, WIDTH: constexpr, VALUE_DIM: constexpr, VALUE_WIDTH: constexpr, CAUSAL: constexpr,
    WINDOWED: constexpr, CAPPED: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Of one tile of queries; and their `delta`, the product of an output and its gradient, for the other kernels."""
    sizes, rule = (group, num_queries, num_keys, num_heads), (scale, softcap, window)
    dropout = (threshold, survivors, first_head, first_query)
    head, sample = tl.program_id(1), tl.program_id(2)
    kv_head = head // sizes[0]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = _load(q, q_strides, sample, head, rows, sizes[1], DIM, WIDTH)
    gradient = _load(d_out, d_out_strides, sample, head, rows, sizes[1], VALUE_DIM, VALUE_WIDTH)
    result = _load(out, out_strides, sample, head, rows, sizes[1], VALUE_DIM, VALUE_WIDTH)
    own = tl.sum(gradient.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(_rows_of(delta, sample, head, sizes) + rows, own, mask=rows < sizes[1])
    logs = _logs(lse, sample, head, rows, sizes)
    ids = _segments(q_segments, sample, rows, sizes[1]) if q_segments is not None else None
    row_keys = _row_keys(dropout_keys, dropout, sample, head, rows) if dropout_keys is not None else None
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    first, last = _keys_seen(tl.program_id(0) * ROWS, ROWS, sizes, rule[2], CAUSAL, WINDOWED)
    for start in range(first // KEYS * KEYS, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        key_ids = _segments(k_segments, sample, keys, sizes[2]) if k_segments is not None else None
        relevant = _meet(ids, key_ids) if key_ids is not None else True
        if relevant:
            key = _load(k, k_strides, sample, kv_head, keys, sizes[2], DIM, WIDTH)
            value = _load(v, v_strides, sample, kv_head, keys, sizes[2], VALUE_DIM, VALUE_WIDTH)
            _, d_scores, bent = _score_gradients(
                query, key, value, gradient, logs, own, row_keys, dropout, rows, keys, ids, key_ids, bias, bias_strides,
                sample, head, sizes, rule, CAUSAL, WINDOWED, CAPPED,
            )  # fmt: skip
            if CAPPED:
                d_scores = d_scores * (1 - bent * bent)
            summed += _product(d_scores.to(key.dtype), key)
    _store(dq, dq_strides, sample, head, rows, sizes[1], DIM, WIDTH, summed * rule[0])


@_compiled
def key_gradients(
    q, q_strides, k, k_strides, v, v_strides, q_segments, k_segments, bias, bias_strides, dropout_keys,
    group, num_queries, num_keys, num_heads, scale, softcap, window, threshold, survivors, first_head, first_query,
    d_out, d_out_strides, lse, delta, dk, dk_strides, dv, dv_strides,
    DIM: constexpr, WIDTH: constexpr, VALUE_DIM: constexpr, VALUE_WIDTH: constexpr, CAUSAL: constexpr,
    WINDOWED: constexpr, CAPPED: constexpr, ROWS: constexpr, KEYS: constexpr,
):  # fmt: skip
    """Of one tile of keys and values, from all heads that share them."""
    sizes, rule = (group, num_queries, num_keys, num_heads), (scale, softcap, window)
    dropout = (threshold, survivors, first_head, first_query)
    kv_head, sample = tl.program_id(1), tl.program_id(2)
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    key = _load(k, k_strides, sample, kv_head, keys, sizes[2], DIM, WIDTH)
    value = _load(v, v_strides, sample, kv_head, keys, sizes[2], VALUE_DIM, VALUE_WIDTH)
    key_ids = _segments(k_segments, sample, keys, sizes[2]) if k_segments is not None else None
    d_key = tl.zeros([KEYS, WIDTH], tl.float32)
    d_value = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    first, last = _queries_seeing(tl.program_id(0) * KEYS, KEYS, sizes, rule[2], CAUSAL, WINDOWED)
    for member in range(sizes[0]):
        head = kv_head * sizes[0] + member
        for start in range(first // ROWS * ROWS, last, ROWS):
            rows = start + tl.arange(0, ROWS)
            ids = _segments(q_segments, sample, rows, sizes[1]) if q_segments is not None else None
            relevant = _meet(ids, key_ids) if key_ids is not None else True
            if relevant:
                query = _load(q, q_strides, sample, head, rows, sizes[1], DIM, WIDTH)
                gradient = _load(d_out, d_out_strides, sample, head, rows, sizes[1], VALUE_DIM, VALUE_WIDTH)
                logs = _logs(lse, sample, head, rows, sizes)
                own = tl.load(_rows_of(delta, sample, head, sizes) + rows, mask=rows < sizes[1], other=0.0)
                row_keys = _row_keys(dropout_keys, dropout, sample, head, rows) if dropout_keys is not None else None
                dropped, d_scores, bent = _score_gradients(
                    query, key, value, gradient, logs, own, row_keys, dropout, rows, keys, ids, key_ids, bias,
                    bias_strides, sample, head, sizes, rule, CAUSAL, WINDOWED, CAPPED,
                )  # fmt: skip
                if CAPPED:
                    d_scores = d_scores * (1 - bent * bent)
                d_value += _product(tl.trans(dropped.to(gradient.dtype)), gradient)
                d_key += _product(tl.trans(d_scores.to(query.dtype)), query)
    _store(dk, dk_strides, sample, kv_head, keys, sizes[2], DIM, WIDTH, d_key * rule[0])
    _store(dv, dv_strides, sample, kv_head, keys, sizes[2], VALUE_DIM, VALUE_WIDTH, d_value)


@_compiled
def bias_gradient(
    q, q_strides, k, k_strides, v, v_strides, q_segments, k_segments, bias, bias_strides, dropout_keys,
    group, num_queries, num_keys, num_heads, scale, softcap, window, threshold, survivors, first_head, first_query,
    d_out, d_out_strides, lse, delta, d_bias, d_bias_strides, sharing,
    DIM: constexpr, WIDTH: constexpr, VALUE_DIM: constexpr, VALUE_WIDTH: constexpr, CAUSAL: constexpr,
    WINDOWED: constexpr, CAPPED: constexpr, ROWS: constexpr, KEYS: constexpr, EACH_ROW: constexpr,
):  # fmt: skip
    """Of one tile of a bias, or of one row of it that all queries share, from all samples and heads that share it."""
    sizes, rule = (group, num_queries, num_keys, num_heads), (scale, softcap, window)
    dropout = (threshold, survivors, first_head, first_query)
    key_tiles = tl.cdiv(sizes[2], KEYS)
    own_head, own_sample = tl.program_id(1), tl.program_id(2)
    keys = tl.program_id(0) % key_tiles * KEYS + tl.arange(0, KEYS)
    if EACH_ROW:
        first = tl.program_id(0) // key_tiles * ROWS
        last = first + ROWS
    else:
        first, last = 0, sizes[1]
    summed = tl.zeros([ROWS, KEYS], tl.float32)
    for number in range(sharing[0] * sharing[1]):
        sample = own_sample * sharing[0] + number // sharing[1]
        head = own_head * sharing[1] + number % sharing[1]
        key = _load(k, k_strides, sample, head // sizes[0], keys, sizes[2], DIM, WIDTH)
        value = _load(v, v_strides, sample, head // sizes[0], keys, sizes[2], VALUE_DIM, VALUE_WIDTH)
        key_ids = _segments(k_segments, sample, keys, sizes[2]) if k_segments is not None else None
        for start in range(first, last, ROWS):
            rows = start + tl.arange(0, ROWS)
            ids = _segments(q_segments, sample, rows, sizes[1]) if q_segments is not None else None
            query = _load(q, q_strides, sample, head, rows, sizes[1], DIM, WIDTH)
            gradient = _load(d_out, d_out_strides, sample, head, rows, sizes[1], VALUE_DIM, VALUE_WIDTH)
            logs = _logs(lse, sample, head, rows, sizes)
            own = tl.load(_rows_of(delta, sample, head, sizes) + rows, mask=rows < sizes[1], other=0.0)
            row_keys = _row_keys(dropout_keys, dropout, sample, head, rows) if dropout_keys is not None else None
            _, d_scores, _ = _score_gradients(
                query, key, value, gradient, logs, own, row_keys, dropout, rows, keys,
                ids, key_ids, bias, bias_strides, sample, head, sizes, rule,
                CAUSAL, WINDOWED, CAPPED,
            )  # fmt: skip
            summed += d_scores
    base = d_bias + own_sample.to(tl.int64) * d_bias_strides[0] + own_head.to(tl.int64) * d_bias_strides[1]
    if EACH_ROW:
        rows = first + tl.arange(0, ROWS)
        inside = (rows[:, None] < sizes[1]) & (keys[None, :] < sizes[2])
        tl.store(base + rows[:, None].to(tl.int64) * d_bias_strides[2] + keys[None, :], summed, mask=inside)
    else:
        tl.store(base + keys, tl.sum(summed, 0), mask=keys < sizes[2])


@triton.jit
def _scores(
    query, key, rows, keys, ids, key_ids, bias, bias_strides, sample, head, sizes, rule,
    CAUSAL: constexpr, WINDOWED: constexpr, CAPPED: constexpr,
):  # fmt: skip
    """Of a tile, minus infinity where nothing may be seen; and the hyperbolic tangent of the soft cap."""
    scores = _product(query, tl.trans(key)) * rule[0]
    bent = scores
    if CAPPED:
        bent = 1 - 2 / (tl.exp(2 * scores / rule[1]) + 1)
        scores = bent * rule[1]
    allowed = (rows[:, None] < sizes[1]) & (keys[None, :] < sizes[2])
    if bias is not None:
        base = bias + sample.to(tl.int64) * bias_strides[0] + head.to(tl.int64) * bias_strides[1]
        places = base + rows[:, None].to(tl.int64) * bias_strides[2] + keys[None, :] * bias_strides[3]
        scores += tl.load(places, mask=allowed, other=0.0).to(tl.float32)
    position = rows[:, None] + (sizes[2] - sizes[1])
    if CAUSAL:
        allowed &= keys[None, :] <= position
    if WINDOWED:
        allowed &= keys[None, :] > position - rule[2]
        if not CAUSAL:
            allowed &= keys[None, :] < position + rule[2]
    if key_ids is not None:
        allowed &= key_ids[None, :] != 0
        if ids is not None:
            allowed &= key_ids[None, :] == ids[:, None]
    return tl.where(allowed, scores, float("-inf")), bent


@triton.jit
def _score_gradients(
    query, key, value, gradient, logs, own, row_keys, dropout, rows, keys, ids, key_ids, bias, bias_strides, sample,
    head, sizes, rule, CAUSAL: constexpr, WINDOWED: constexpr, CAPPED: constexpr,
):  # fmt: skip
    """Of a tile: what the values were weighted by, the gradient of the scores behind the soft cap, and its tangent."""
    scores, bent = _scores(
        query, key, rows, keys, ids, key_ids, bias, bias_strides, sample, head, sizes, rule, CAUSAL, WINDOWED, CAPPED
    )  # fmt: skip
    probabilities = tl.exp(scores - logs[:, None])
    d_probabilities = _product(gradient, tl.trans(value))
    dropped = probabilities
    if row_keys is not None:
        dropped = _drop(probabilities, row_keys, keys, dropout)
        d_probabilities = _drop(d_probabilities, row_keys, keys, dropout)
    return dropped, probabilities * (d_probabilities - own[:, None]), bent


@triton.jit
def _product(left, right):
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _keys_seen(first_row, ROWS: constexpr, sizes, window, CAUSAL: constexpr, WINDOWED: constexpr):
    """By any of the queries from first_row on: from, to before."""
    position = first_row + sizes[2] - sizes[1]
    first, last = 0, sizes[2]
    if WINDOWED:
        first = tl.maximum(0, position - window + 1)
        if not CAUSAL:
            last = tl.minimum(last, position + ROWS - 1 + window)
    if CAUSAL:
        last = tl.minimum(last, position + ROWS)
    return first, last


@triton.jit
def _queries_seeing(first_key, KEYS: constexpr, sizes, window, CAUSAL: constexpr, WINDOWED: constexpr):
    """Any of the keys from first_key on: from, to before."""
    row = first_key - sizes[2] + sizes[1]
    first, last = 0, sizes[1]
    if WINDOWED:
        last = tl.minimum(last, row + KEYS - 1 + window)
        if not CAUSAL:
            first = tl.maximum(0, row - window + 1)
    if CAUSAL:
        first = tl.maximum(0, row)
    return first, last


@triton.jit
def _segments(segments, sample, tokens, num_tokens):
    """Of these tokens; padding beyond the last."""
    return tl.load(segments + sample * num_tokens + tokens, mask=tokens < num_tokens, other=0)


@triton.jit
def _meet(ids, key_ids):
    """Whether any of the queries may be of the same segment as any of the keys."""
    if ids is None:
        return tl.max(key_ids) != 0
    else:
        return (tl.max(key_ids) >= tl.min(ids)) & (tl.min(key_ids) <= tl.max(ids))


@triton.jit
def _row_keys(dropout_keys, dropout, sample, head, rows):
    """What decides, with the number of a key, whether a probability is dropped (random.keep_attention)."""
    key = tl.load(dropout_keys + sample).to(tl.uint32)
    of_head = _combine(tl.zeros_like(rows).to(tl.uint32) + key, tl.zeros_like(rows) + head + dropout[2])
    return _combine(of_head, rows + dropout[3])


@triton.jit
def _drop(x, row_keys, keys, dropout):
    hashes = _mix(row_keys[:, None] ^ _mix(keys.to(tl.uint32) ^ 0x1E3779B9)[None, :])
    return tl.where(hashes >= dropout[0], x * dropout[1], 0.0)


@triton.jit
def _combine(key, index):
    return _mix(key ^ _mix(index.to(tl.uint32) ^ 0x1E3779B9))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _load(x, strides, sample, head, rows, num_rows, DIM: constexpr, WIDTH: constexpr):
    """Rows of one head, wide enough for a product of tiles."""
    columns = tl.arange(0, WIDTH)
    base = x + sample.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    inside = (rows[:, None] < num_rows) & (columns[None, :] < DIM)
    return tl.load(base + rows[:, None].to(tl.int64) * strides[2] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store(x, strides, sample, head, rows, num_rows, DIM: constexpr, WIDTH: constexpr, values):
    columns = tl.arange(0, WIDTH)
    base = x + sample.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    inside = (rows[:, None] < num_rows) & (columns[None, :] < DIM)
    tl.store(
        base + rows[:, None].to(tl.int64) * strides[2] + columns[None, :], values.to(x.dtype.element_ty), mask=inside
    )


@triton.jit
def _rows_of(x, sample, head, sizes):
    """Where one head's rows of lse or delta, [batch, heads, queries], begin."""
    return x + (sample.to(tl.int64) * sizes[3] + head) * sizes[1]


@triton.jit
def _logs(lse, sample, head, rows, sizes):
    """Log-sum-exp of rows; 0 for those that see nothing, whose scores are all minus infinity."""
    found = tl.load(_rows_of(lse, sample, head, sizes) + rows, mask=rows < sizes[1], other=0.0)
    return tl.where(found == float("-inf"), 0.0, found)
