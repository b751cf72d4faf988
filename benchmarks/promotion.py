"""A model of promotion in a table with two tiers: the share of reads that hit the device tier.

    python -m benchmarks.promotion

The rule comes from cc/device/kernels_tiers.h, for last accesses; what differs between the lines is
which rows of the host tier are candidates. Not timed: it is about a hash table's rows, not about a
machine.
"""

from __future__ import annotations

import numpy as np

KEYS = 1 << 21
IN_DEVICE = KEYS // 10
BATCH = 104_857  # keys, by zipf(1.05)
BATCHES = 160
SHOWN = (9, 17, 25, 33, 48, 64, 96, 160)
PROMOTE_EVERY = 8  # batches
MOST = IN_DEVICE // 8  # rows that one promotion may move
PLACES_EACH = 4
HYSTERESIS = 2


def in_order(rows, reuse, entries):
    """Rows and reuse of the candidates in a list of this many entries, by reuse."""
    rows, reuse = rows[:entries], reuse[:entries]
    order = np.argsort(reuse, kind="stable")
    return _first_of_each(rows[order], reuse[order], rows[order])


def best_of_slots(rows, reuse, slots):
    """Rows and reuse of the candidates: of those that share a slot, the best; by reuse."""
    mixed = rows.astype(np.uint32) * np.uint32(0x9E3779B1)
    slot = mixed.astype(np.uint64) * np.uint64(slots) >> np.uint64(32)
    order = np.lexsort((rows, reuse))
    return _first_of_each(rows[order], reuse[order], slot[order])


def _first_of_each(rows, reuse, label):
    first = np.sort(np.unique(label, return_index=True)[1])
    return rows[first], reuse[first]


def hits(candidates_of, entries):
    """Returns the share of hits in each batch, and the number of rows that moved."""
    rng = np.random.default_rng(1)
    key_of_rank = rng.permutation(KEYS)
    row_of, key_of = np.arange(KEYS), np.arange(KEYS)
    accessed = np.ones(KEYS, np.int64)
    tick, hand, moved = 3, 0, 0
    noted_rows, noted_reuse, shares = [], [], []
    last = KEYS**-0.05
    for batch in range(BATCHES):
        if batch and batch % PROMOTE_EVERY == 0:
            noted = np.concatenate(noted_rows), np.concatenate(noted_reuse)
            rows, reuse = candidates_of(*noted, entries)
            window = min(IN_DEVICE, PLACES_EACH * MOST, PLACES_EACH * len(rows))
            places = (hand + np.arange(window)) % IN_DEVICE
            hand = (hand + window) % IN_DEVICE
            age = tick - accessed[key_of[places]]
            order = np.argsort(-age, kind="stable")
            pairs = min(len(rows), window, MOST)
            rows, reuse = rows[:pairs], reuse[:pairs]
            places, age = places[order][:pairs], age[order][:pairs]
            moves = HYSTERESIS * reuse < age
            up, down = rows[moves], places[moves]
            keys_up, keys_down = key_of[up].copy(), key_of[down].copy()
            key_of[up], key_of[down] = keys_down, keys_up
            row_of[keys_up], row_of[keys_down] = down, up
            moved += len(up)
            noted_rows, noted_reuse = [], []
        tick += 1
        rank = ((1 - rng.random(BATCH) * (1 - last)) ** -20).astype(np.int64) - 1
        keys = key_of_rank[np.minimum(rank, KEYS - 1)]
        shares.append((row_of[keys] < IN_DEVICE).mean())
        keys = np.unique(keys)
        on_host = rng.permutation(keys[row_of[keys] >= IN_DEVICE])
        noted_rows.append(row_of[on_host])
        noted_reuse.append(tick - accessed[on_host])
        accessed[keys] = tick
    return shares, moved


def main():
    print(f"{'candidates':24}" + "".join(f"{batch:>7}" for batch in SHOWN) + f"{'moved':>9}")
    for name, candidates_of, per_move in [
        ("in the order of reads", in_order, 2),
        ("best of 1 slot per move", best_of_slots, 1),
        ("best of 2 slots", best_of_slots, 2),
        ("best of 4 slots", best_of_slots, 4),
    ]:
        shares, moved = hits(candidates_of, per_move * MOST)
        print(f"{name:24}" + "".join(f"{shares[batch - 1]:7.3f}" for batch in SHOWN) + f"{moved:9}")


if __name__ == "__main__":
    main()
