"""Models of promotion in a table with two tiers, with last accesses as scores.

    python -m benchmarks.promotion

The rules come from cc/device/kernels_tiers.h. The first table is about promotion between batches:
the share of reads that hit the device tier. What differs between the lines is which rows of the
host tier are candidates. The second table compares it with lookups that promote all rows that they
read: the rows of a batch, and the time that their bytes take over PCIe. Nothing is timed: it is
about a hash table's rows, not about a machine.
"""

from __future__ import annotations

import numpy as np

KEYS = 1 << 21
BATCH = 104_857  # keys, by zipf(1.05)
BATCHES = 160
SHOWN = (9, 17, 25, 33, 48, 64, 96, 160)
PROMOTE_EVERY = 8  # batches
PLACES_EACH = 4
HYSTERESIS = 2

TABLES = 10
PCIE = 55e9  # bytes a second, in each direction
VECTOR = 512  # bytes
STATES = {"sgd": 0, "adam": 1024}


class Tiers:
    """The keys of rows; those below `in_device` are in the device tier."""

    def __init__(self, in_device):
        self.in_device = in_device
        self.rng = np.random.default_rng(1)
        self.key_of_rank = self.rng.permutation(KEYS)
        self.row_of, self.key_of = np.arange(KEYS), np.arange(KEYS)
        self.accessed = np.ones(KEYS, np.int64)
        self.tick, self.hand = 3, 0

    def draw(self):
        """The ids of the next batch."""
        self.tick += 1
        last = KEYS**-0.05
        rank = ((1 - self.rng.random(BATCH) * (1 - last)) ** -20).astype(np.int64) - 1
        return self.key_of_rank[np.minimum(rank, KEYS - 1)]

    def read(self, ids):
        """Reads a batch. Returns the number of keys, and rows and reuse of those on the host."""
        keys = np.unique(ids)
        on_host = self.rng.permutation(keys[self.row_of[keys] >= self.in_device])
        rows, reuse = self.row_of[on_host], self.tick - self.accessed[on_host]
        self.accessed[keys] = self.tick
        return len(keys), rows, reuse

    def promote(self, rows, reuse, window, most, moves):
        """Pairs candidates, the best first, with the oldest places. Returns the number of moves."""
        window = min(self.in_device, window)
        places = (self.hand + np.arange(window)) % self.in_device
        self.hand = (self.hand + window) % self.in_device
        age = self.tick - self.accessed[self.key_of[places]]
        order = np.argsort(-age, kind="stable")
        pairs = min(len(rows), window, most)
        rows, reuse = rows[:pairs], reuse[:pairs]
        places, age = places[order][:pairs], age[order][:pairs]
        moved = moves(reuse, age)
        up, down = rows[moved], places[moved]
        keys_up, keys_down = self.key_of[up].copy(), self.key_of[down].copy()
        self.key_of[up], self.key_of[down] = keys_down, keys_up
        self.row_of[keys_up], self.row_of[keys_down] = down, up
        return len(up)


def is_hotter(reuse, age):
    return HYSTERESIS * reuse < age


def was_not_read(_, age):
    return age > 0


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


def between_batches(in_device, candidates_of, slots_per_move):
    """Yields the share of hits of each batch, its keys, those in the host tier, and prior moves."""
    tiers = Tiers(in_device)
    most = in_device // 8
    noted = []
    for batch in range(BATCHES):
        moved = 0
        if batch and batch % PROMOTE_EVERY == 0:
            rows, reuse = (np.concatenate(of_all) for of_all in zip(*noted, strict=True))
            rows, reuse = candidates_of(rows, reuse, slots_per_move * most)
            window = PLACES_EACH * min(most, len(rows))
            moved = tiers.promote(rows, reuse, window, most, is_hotter)
            noted = []
        ids = tiers.draw()
        share = (tiers.row_of[ids] < in_device).mean()
        keys, rows, reuse = tiers.read(ids)
        noted.append((rows, reuse))
        yield share, keys, len(rows), moved


def in_lookups(in_device):
    """The same, of lookups that promote what they read; the moves are in the batch."""
    tiers = Tiers(in_device)
    for _ in range(BATCHES):
        ids = tiers.draw()
        share = (tiers.row_of[ids] < in_device).mean()
        keys, rows, reuse = tiers.read(ids)
        window = min(BATCH, PLACES_EACH * len(rows))
        order = np.argsort(rows)
        moved = tiers.promote(rows[order], reuse[order], window, in_device, was_not_read)
        yield share, keys, len(rows), moved


def milliseconds(state, on_host, moved_before, moved_now):
    """A step over PCIe, whose directions are used at the same time.

    A row that stays in host memory is read by the lookup (its vector) and by the step, which also
    writes it. A row that moves is read, and another one is written.
    """
    row = VECTOR + state
    moved = moved_before + moved_now
    stay = on_host - moved_now
    return 1e3 * TABLES * max(moved * row + stay * (VECTOR + row), moved * row + stay * row) / PCIE


def main():
    in_device = KEYS // 10
    print(f"{'candidates':24}" + "".join(f"{batch:>7}" for batch in SHOWN) + f"{'moved':>9}")
    for name, candidates_of, slots_per_move in [
        ("in the order of reads", in_order, 2),
        ("best of 1 slot per move", best_of_slots, 1),
        ("best of 2 slots", best_of_slots, 2),
        ("best of 4 slots", best_of_slots, 4),
    ]:
        shares, _, _, moved = zip(
            *between_batches(in_device, candidates_of, slots_per_move), strict=True
        )
        print(
            f"{name:24}"
            + "".join(f"{shares[batch - 1]:7.3f}" for batch in SHOWN)
            + f"{sum(moved):9}"
        )

    print(
        f"\n{'device tier':14}{'promotes':18}{'keys':>8}{'on host':>9}{'moved':>8}"
        f"{'sgd, ms':>9}{'adam, ms':>9}"
    )
    of_batch = len(np.unique(Tiers(1).draw()))
    for tier, rows in [
        ("batch x 1.0", of_batch),
        ("batch x 0.8", int(0.8 * of_batch)),
        ("10 %", in_device),
    ]:
        for name, batches in [
            ("between batches", between_batches(rows, best_of_slots, 4)),
            ("in lookups", in_lookups(rows)),
        ]:
            last = np.array(list(batches))[-4 * PROMOTE_EVERY :].mean(0)
            _, keys, on_host, moved = last
            before, now = (0, moved) if name == "in lookups" else (moved, 0)
            times = [milliseconds(state, on_host, before, now) for state in STATES.values()]
            print(
                f"{tier:14}{name:18}{keys:8.0f}{on_host:9.0f}{moved:8.0f}"
                + "".join(f"{ms:9.1f}" for ms in times)
            )


if __name__ == "__main__":
    main()
