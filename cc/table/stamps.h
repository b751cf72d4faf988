// Stamps: how a table stores ticks in 32 bits, and which batch it is in.
//
// A stamp stands for a tick of the table's window: the kWindow ticks from its base. It is the tick
// modulo kWindow, plus 1, so that 0 can be "never" and stamps do not change when the base moves.
//
// The base follows the clock in steps of kStep. A step begins when the clock has passed three
// quarters of the window: the floor moves up, and no new stamp is below it. Then the table is
// swept: each batch that may write clamps as many rows and slots to the floor as the clock has
// moved on since the batch before, so that no batch pays for the whole table. When all of it has
// been swept, the base moves up to the floor.
//
// Ticks are exact for the last 2^31 batches of the process at least. A clamped stamp is later than
// the tick it was given for, never earlier: "updated since" then gives too many rows, and none is
// missed. A table that no batch wrote to while the clock passed a whole window is swept at once.
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
  // What a running sweep clamps to; otherwise the base.
  Tick floor() const { return floor_; }
  DYNEMB_HD StampOrder order() const { return {Residue(base_)}; }

  // The stamp of a tick; of the nearest tick from the floor to the end of the window, if it is
  // outside.
  DYNEMB_HD Stamp Encode(Tick tick) const {
    const Tick first = floor_ != 0 ? floor_ : 1;
    const Tick last = base_ + kWindow - 1;
    return Residue(tick < first ? first : (tick > last ? last : tick));
  }
  // The tick of a stamp other than "never".
  DYNEMB_HD Tick Decode(Stamp stamp) const { return base_ + order().Rank(stamp); }
  UpdatedAfter After(Tick since) const { return {order(), since < base_ ? 0 : since - base_ + 1}; }
  // What a stamp becomes when it is swept.
  DYNEMB_HD Stamp Clamp(Stamp stamp) const {
    return stamp != 0 && Decode(stamp) < floor_ ? Residue(floor_) : stamp;
  }

  // To be called before a batch at `tick` that may write. Gives the share of the table that must be
  // swept before it: 0 if no sweep is due, 1 if the whole is. `begins`: the sweep begins anew.
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
  // Ends a sweep: every stamp has been clamped.
  void EndSweep() { base_ = floor_; }

  // A batch that names n keys; several times with one tick add up. Returns its stamp.
  Stamp BeginBatch(Tick tick, size_t n) {
    const Stamp now = Encode(tick);
    if (now != batch_) batch_keys_ = 0;
    batch_ = now;
    batch_keys_ += n;
    return now;
  }
  Stamp batch() const { return batch_; }
  // Keys named under it: no more rows than this are as fresh.
  uint64_t batch_keys() const { return batch_keys_; }
  void ForgetBatch() { batch_ = 0; }

 private:
  static constexpr Tick kWindow = 0xFFFFFFFFu;
  static constexpr Tick kStep = Tick{1} << 30;
  // Ticks that a sweep takes. The rest of the window is for calls that only read, which may go on
  // while no batch writes.
  static constexpr Tick kSweep = kStep / 2;

  DYNEMB_HD static Stamp Residue(Tick tick) { return static_cast<Stamp>(tick % kWindow) + 1; }

  Tick base_ = 0;
  Tick floor_ = 0;   // the base, or what it becomes when the sweep ends
  Stamp batch_ = 0;  // 0: none
  uint64_t batch_keys_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_STAMPS_H_
