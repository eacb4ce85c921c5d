"""The operations of SGLang's compiled CPU kernels that EAGLE-3 drafting needs, in plain torch.

The compiled package needs AVX-512 and AMX; this one runs anywhere and is slow. Names, arguments and the tensors written in place are those
of SGLang 0.5.23's callers. Everything that decides *what* is accepted above these operations is SGLang's own: loading, tap capture, the
drafter's forward, d2t, scheduling, counting. Tried with tree width 1. Whatever is not written here says so instead of guessing.

B requests, n nodes of a draft with the root first, L committed tokens of a request, H heads, D head size.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# ---- cache slots: request r's token t lies in slot req_to_token[r, t]


def assign_req_to_token_pool_cpu(requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int) -> None:
    """Give tokens start..end of each request the next of `slots`."""
    at = 0
    for r, s, e in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[r, s:e] = slots[at : at + e - s].to(req_to_token.dtype)
        at += e - s


def assign_extend_cache_locs_cpu(requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int) -> None:
    """Read the slots of tokens start..end of each request, one request behind the other."""
    at = 0
    for r, s, e in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        slots[at : at + e - s] = req_to_token[r, s:e].to(slots.dtype)
        at += e - s


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, lengths: Tensor, slots: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Read the topk * steps slots behind each request's committed tokens."""
    width = topk * steps
    for i, (r, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        slots[i * width : (i + 1) * width] = req_to_token[r, length : length + width].to(slots.dtype)


def copy_all_layer_kv_cache_cpu(pointers: Tensor, row_bytes: Tensor, to: Tensor, source: Tensor) -> None:
    """In every buffer copy rows `source` to rows `to`; all are read before any is written."""
    for pointer, size in zip(pointers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + row * size, size) for row in source.tolist()]
        for row, content in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(pointer + row * size, content, size)


def fill_bonus_tokens_cpu(tokens: Tensor, accepted: Tensor, bonus: Tensor, stride: int) -> None:
    """The last accepted token of each request; `accepted` [B] counts the bonus token."""
    last = torch.arange(bonus.numel()) * stride + accepted.long() - 1
    bonus.copy_(tokens.flatten()[last].to(bonus.dtype))


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, kept: Tensor) -> None:
    """The slots of the accepted nodes (index -1: none), without gaps."""
    index = accept_index.flatten()
    index = index[index > -1].long()
    kept[: index.numel()] = slots[index].to(kept.dtype)


def rotate_input_ids_cpu(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("rotate_input_ids_cpu: multi-layer drafting is not written")


# ---- the draft as a tree, and its greedy verification


def build_tree_kernel_efficient_cpu(
    parents: Tensor, selected: Tensor, lengths: Tensor, tree_mask: Tensor, positions: Tensor,
    index: Tensor, first_child: Tensor, next_sibling: Tensor, topk: int, depth: int, n: int, mode: int,
) -> None:  # fmt: skip
    """Node 0 is the last committed token, node i draft selected[i-1], whose parent slot is selected[i-1] // topk: 0 is the root, any other
    names a draft in `parents`. Written: links, positions, and who sees whom (mode 1: among the nodes, mode 0: the committed tokens too).
    """
    if int(mode) not in (0, 1):
        raise NotImplementedError("build_tree: the packed mask is not written")
    at = 0
    for b, length in enumerate(lengths.tolist()):
        drafts, slots = selected[b].tolist()[: n - 1], parents[b].tolist()
        node_of = {draft: i + 1 for i, draft in enumerate(drafts)}
        parent = [-1] + [0 if draft // topk == 0 else node_of.get(slots[draft // topk], -1) for draft in drafts]
        index[b] = torch.arange(b * n, (b + 1) * n)
        seen = torch.zeros(n, n, dtype=torch.bool)
        latest: dict[int, int] = {}  # by parent: its last child so far
        for node in range(n):
            if parent[node] >= 0:
                if parent[node] in latest:
                    next_sibling[b, latest[parent[node]]] = node
                else:
                    first_child[b, parent[node]] = node
                latest[parent[node]] = node
            up, steps = node, 0
            while up > 0:
                seen[node, up] = True
                up, steps = max(parent[up], 0), steps + 1
            seen[node, 0] = True
            positions[b * n + node] = length + steps
        rows = seen if int(mode) == 1 else torch.cat([torch.ones(n, length, dtype=torch.bool), seen], 1)
        tree_mask[at : at + rows.numel()] = rows.flatten()
        at += rows.numel()


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """From the root on, go to the child that is the verifier's argmax at its parent; where none is, that argmax is the bonus token.

    Called by keyword, hence SGLang's own names.
    """
    wanted = target_predict.flatten().tolist()
    for b in range(len(candidates)):
        links = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
        tokens, row, child_of, sibling_of = (link[b].tolist() for link in links)
        node, accepted = 0, 0
        accept_index[b, 0] = row[0]
        while accepted + 1 < accept_index.shape[1]:
            child = child_of[node]
            while child != -1 and tokens[child] != wanted[row[node]]:
                child = sibling_of[child]
            if child == -1:
                break
            predicts[row[node]] = wanted[row[node]]
            accepted += 1
            accept_index[b, accepted] = row[child]
            node = child
        accept_token_num[b] = accepted
        predicts[row[node]] = wanted[row[node]]


# ---- attention


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, requests: Tensor, lengths: Tensor, topk: int, steps: int, pool_len: int
) -> Tensor:
    """A row of slots for each branch of each request: the committed tokens', then the branch's own drafts'."""
    rows = req_to_token[requests.long()].repeat_interleave(topk, dim=0)
    if topk > 1:
        for i, length in enumerate(lengths.tolist()):
            own = req_to_token[int(requests[i])]
            for branch in range(topk):
                count, at = min(steps, pool_len - length), length + branch * steps
                rows[i * topk + branch, length : length + count] = own[at : at + count]
    return rows


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [R, H, D], keys and values [n, G, D] -> [R, H, D]."""
    q, keys, values = (x.movedim(0, 1).unsqueeze(0) for x in (q, keys.to(q.dtype), values.to(q.dtype)))
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != keys.shape[1])
    return out.squeeze(0).movedim(0, 1)


def _refuse(logit_cap: float, is_cross: bool, window: int, encoder: Tensor | None, sinks: Tensor | None) -> None:
    if logit_cap or is_cross or window > 0 or encoder is not None or sinks is not None:
        raise NotImplementedError("attention: only plain causal self-attention is written")


def decode_attention(
    q: Tensor, key_buffer: Tensor, value_buffer: Tensor, k_scale: Any, v_scale: Any, out: Tensor, k: Tensor | None, v: Tensor | None,
    slots: Tensor, attn_logits: Tensor, req_to_token: Tensor, requests: Tensor, lengths: Tensor, scale: float,
    logit_cap: float, is_cross: bool, window: int, encoder: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """One new row a request over all its tokens."""
    _refuse(logit_cap, is_cross, window, encoder, sinks)
    if k is not None:
        key_buffer[slots] = k.view(-1, *key_buffer.shape[1:]).to(key_buffer.dtype)
        value_buffer[slots] = v.view(-1, *value_buffer.shape[1:]).to(value_buffer.dtype)
    for i, (r, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        own = req_to_token[r, :length].long()
        out[i : i + 1] = _attend(q[i : i + 1], key_buffer[own], value_buffer[own], None, scale)


def extend_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, key_buffer: Tensor, value_buffer: Tensor, k_scale: Any, v_scale: Any,
    req_to_token: Tensor, requests: Tensor, lengths: Tensor, new: Tensor, start: Tensor, longest: int, scale: float,
    logit_cap: float, is_cross: bool, window: int, encoder: Tensor | None, sinks: Tensor | None, tree_mask: Tensor | None, is_causal: bool,
) -> None:  # fmt: skip
    """The `new` last rows of each request over all its tokens; the caller has put their keys and values into the buffers."""
    _refuse(logit_cap, is_cross, window, encoder, sinks)
    for i, (r, length, rows, s) in enumerate(zip(requests.tolist(), lengths.tolist(), new.tolist(), start.tolist(), strict=True)):
        if not rows:
            continue
        own = req_to_token[r, :length].long()
        mask = torch.ones(rows, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - rows :] = tree_mask[i * rows * rows : (i + 1) * rows * rows].view(rows, rows)
        elif is_causal:
            mask = mask.tril(length - rows)
        out[s : s + rows] = _attend(q[s : s + rows], key_buffer[own], value_buffer[own], mask, scale)


torch.ops.sgl_kernel.decode_attention_cpu = decode_attention
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention
