"""Labels of the search for a plan, and which of them are worth keeping: kernels.

A *closed* label stands between two stages: devices used, latency so far. An *open* label is inside a stage, whose
replicas are not counted yet: its work so far, its latency without the waits of further splits, and those waits'
batches, which the replicas multiply later.
"""

from __future__ import annotations

import numpy as np

from optimizer.compiled import compiled
from optimizer.exact.prices import Limits
from optimizer.step import FloatArray, IntArray, Labels

DEVICE, USED, PARENT, MOVE, NEXT = 0, 1, 2, 3, 4
"""Columns of `whole_LI`: device of the open stage, or CLOSED; devices of closed stages, in mixed radix; the label and
the move that led here; the next label of the same node."""
LATENCY, WORK, BATCHES = 0, 1, 2
"""Columns of `real_LF`: seconds; device seconds per input; inputs that each replica of the open stage waits for."""
CLOSED = -1
NOBODY = -1


@compiled
def write_label(
    labels: Labels, head_P: IntArray, label: int, node: int, device: int, used: int, parent: int, move: int,
    latency_s: float, work_s: float, batches: float,
) -> None:  # fmt: skip
    """Fill one label, and put it before the others of its node."""
    whole_I, real_F = labels.whole_LI[label], labels.real_LF[label]
    whole_I[DEVICE], whole_I[USED], whole_I[PARENT], whole_I[MOVE] = device, used, parent, move
    real_F[LATENCY], real_F[WORK], real_F[BATCHES] = latency_s, work_s, batches
    whole_I[NEXT], head_P[node] = head_P[node], label


@compiled
def free_devices(used: int, radix_C: IntArray, limits: Limits, free_C: IntArray) -> float:
    """Fill the devices left of each type; returns what the used ones cost."""
    usd = 0.0
    for device in range(radix_C.size - 1, -1, -1):
        taken = used // radix_C[device]
        used -= taken * radix_C[device]
        free_C[device] = limits.count_C[device] - taken
        usd += taken * limits.usd_C[device]
    return usd


@compiled
def best_labels(head: int, labels: Labels, radix_C: IntArray, limits: Limits, longest_s: float) -> IntArray:
    """The labels of one node that no other with the same devices is as good as in everything.

    One that used fewer devices could beat more, but comparing all pairs was measured to cost more than it saves.
    Where even the longest way on stays inside the limit, a label's latency no longer matters: it counts as 0.
    """
    count = 0
    label = head
    while label != NOBODY:
        count += 1
        label = labels.whole_LI[label, NEXT]
    found_L = np.empty(count, dtype=np.int64)
    group_L = np.empty(count, dtype=np.int64)
    figures_LF = np.empty((count, 3))  # as far as they matter
    most_replicas = limits.count_C.max()
    label = head
    for position in range(count):
        found_L[position] = label
        group_L[position] = labels.whole_LI[label, USED] * (radix_C.size + 1) + labels.whole_LI[label, DEVICE] + 1
        latency_s, batches = labels.real_LF[label, LATENCY], labels.real_LF[label, BATCHES]
        worst_s = latency_s + most_replicas * batches / limits.wait_rate + longest_s
        matters = 1.0 if worst_s > limits.latency_s else 0.0
        figures_LF[position, LATENCY] = matters * latency_s
        figures_LF[position, WORK] = labels.real_LF[label, WORK]
        figures_LF[position, BATCHES] = matters * batches
        label = labels.whole_LI[label, NEXT]
    # A label can be beaten by earlier ones only. Groups share the devices used and the open device.
    order_L = ordered(group_L, figures_LF[:, LATENCY], figures_LF[:, WORK])
    kept_L = np.empty(count, dtype=np.int64)
    num_kept, first_kept = 0, 0
    for place in range(count):
        position = order_L[place]
        if place == 0 or group_L[position] != group_L[order_L[place - 1]]:
            first_kept = num_kept
        beaten = False
        for other in range(first_kept, num_kept):
            if _no_worse(figures_LF, kept_L[other], position):
                beaten = True
                break
        if not beaten:
            kept_L[num_kept] = position
            num_kept += 1
    return found_L[kept_L[:num_kept]]


@compiled
def _no_worse(figures_LF: FloatArray, one: int, other: int) -> bool:
    """Whether one label is as good as another in latency, work and batches."""
    return bool(
        figures_LF[one, LATENCY] <= figures_LF[other, LATENCY]
        and figures_LF[one, WORK] <= figures_LF[other, WORK]
        and figures_LF[one, BATCHES] <= figures_LF[other, BATCHES]
    )


@compiled
def ordered(group_I: IntArray, first_I: FloatArray, second_I: FloatArray) -> IntArray:
    """Places by group, then by the first key, then by the second."""
    order_I = np.argsort(second_I, kind="mergesort")
    order_I = order_I[np.argsort(first_I[order_I], kind="mergesort")]
    return order_I[np.argsort(group_I[order_I], kind="mergesort")]
