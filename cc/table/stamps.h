// Stamps: the conversion between ticks and the 32-bit stamps that a table stores, and the stamp of
// the table's current batch.
//
// A stamp represents a tick in the table's window: the kWindow ticks from its base on. The stamp is
// the tick modulo kWindow, plus 1. Therefore 0 can mean "never", and stamps do not change when the
// base moves.
//
// The base follows the clock in steps of kStep. A step begins when the clock has passed three
// quarters of the window. The floor then moves up, and no new stamp is below it. From then on, the
// table is swept: each batch that may write clamps a share of the rows and slots to the floor. The
// share is proportional to the ticks since the previous such batch, so no batch pays for the whole
// table. When the whole table has been swept, the base moves up to the floor.
//
// Ticks are exact for at least the last 2^31 batches of the process. A clamped stamp is later than
// its original tick, never earlier. "Updated since" may therefore return too many rows, but misses
// none. If no batch writes to the table while it should be swept, the next one that does sweeps
// everything that is left. A table on a device is always swept as a whole.
#ifndef DYNEMB_TABLE_STAMPS_H_
#define DYNEMB_TABLE_STAMPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb {

// The order of a table's stamps: by rank, the number of ticks after the base.
struct StampOrder {
  Stamp of_base = 1;  // the stamp of the base

  DYNEMB_HD Stamp Rank(Stamp stamp) const { return stamp - of_base - (stamp < of_base ? 1 : 0); }
  DYNEMB_HD Stamp Ranked(Stamp rank) const {
    const Stamp stamp = of_base + rank;
    return stamp + (stamp < of_base ? 1 : 0);
  }
};

// Whether a row with this last update was updated after some tick (Stamps::After).
struct UpdatedAfter {
  StampOrder order;
  uint64_t least_rank;

  DYNEMB_HD bool operator()(Stamp update) const {
    return update != 0 && order.Rank(update) >= least_rank;
  }
};

class Stamps {
 public:
  Tick base() const { return base_; }
  // The tick to which a running sweep clamps stamps; the base if no sweep is running.
  Tick floor() const { return floor_; }
  DYNEMB_HD StampOrder order() const { return {Residue(base_)}; }

  // The stamp of a tick. A tick before the floor or after the end of the window gets the stamp of
  // the floor or of the end.
  DYNEMB_HD Stamp Encode(Tick tick) const {
    const Tick first = floor_ != 0 ? floor_ : 1;
    const Tick last = base_ + kWindow - 1;
    return Residue(tick < first ? first : (tick > last ? last : tick));
  }
  // The tick of a stamp other than "never".
  DYNEMB_HD Tick Decode(Stamp stamp) const { return base_ + order().Rank(stamp); }
  UpdatedAfter After(Tick since) const { return {order(), since < base_ ? 0 : since - base_ + 1}; }
  // The stamp that replaces `stamp` in a sweep.
  DYNEMB_HD Stamp Clamp(Stamp stamp) const {
    return stamp != 0 && Decode(stamp) < floor_ ? Residue(floor_) : stamp;
  }

  // Call before a batch at `tick` that may write. Returns the share of the table that must have
  // been swept before the batch: 0 if no sweep is due, 1 for the whole table. *begins: whether a
  // new sweep begins.
  double Follow(Tick tick, bool* begins) {
    *begins = false;
    if (tick < base_ + 3 * kStep) return 0;
    // Past the window, the base skips steps.
    const Tick step = tick - tick % kStep - 2 * kStep;
    const bool at_once = step > base_ + kStep;
    const Tick floor = at_once ? step : base_ + kStep;
    *begins = floor != floor_;
    floor_ = floor;
    const Tick passed = tick - (base_ + 3 * kStep) + 1;
    return at_once || passed >= kSweep ? 1 : static_cast<double>(passed) / kSweep;
  }
  // Resets, with `base`; existing stamps do not change.
  void Restart(Tick base) { *this = Stamps(), base_ = floor_ = base; }
  // Ends a sweep: every stamp has been clamped.
  void EndSweep() { base_ = floor_; }

  // Begins a batch that names n keys, and returns its stamp. The keys of several calls with one
  // tick add up.
  Stamp BeginBatch(Tick tick, size_t n) {
    const Stamp now = Encode(tick);
    if (now != batch_) batch_keys_ = 0;
    batch_ = now;
    batch_keys_ += n;
    return now;
  }
  Stamp batch() const { return batch_; }
  // The number of keys that this batch has named. At most this number of rows have its stamp.
  uint64_t batch_keys() const { return batch_keys_; }
  void ForgetBatch() { batch_ = 0; }

 private:
  static constexpr Tick kWindow = 0xFFFFFFFFu;
  static constexpr Tick kStep = Tick{1} << 30;
  // The number of ticks that a sweep takes. The rest of the window is for calls that only read,
  // which may continue while no batch writes.
  static constexpr Tick kSweep = kStep / 2;

  DYNEMB_HD static Stamp Residue(Tick tick) { return static_cast<Stamp>(tick % kWindow) + 1; }

  Tick base_ = 0;
  Tick floor_ = 0;   // the base, or its next value while a sweep is running
  Stamp batch_ = 0;  // 0: none
  uint64_t batch_keys_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_STAMPS_H_
