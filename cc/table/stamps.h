// Stamps: how a table stores ticks in 32 bits, and which batch it is in.
//
// A stamp is a tick less the table's base, at least 1; 0 is "never". Once in four billion batches
// the base moves on: stamps keep their order as long as they can, and the oldest become 1.
#ifndef DYNEMB_TABLE_STAMPS_H_
#define DYNEMB_TABLE_STAMPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cc/table/portability.h"
#include "cc/table/types.h"

namespace dynemb {

// What a stamp becomes when the base moves on by `move`.
DYNEMB_HD inline Stamp Earlier(Stamp stamp, Tick move) {
  return stamp > move ? static_cast<Stamp>(stamp - move) : (stamp != 0 ? 1 : 0);
}

class Stamps {
 public:
  Tick base() const { return base_; }
  DYNEMB_HD Stamp Of(Tick tick) const {
    constexpr Stamp kLast = 0xFFFFFFFFu;
    const Tick since_base = tick > base_ ? tick - base_ : 1;
    return since_base > kLast ? kLast : static_cast<Stamp>(since_base);
  }
  // Stamps greater than this one are of ticks after `since`. 1 may stand for any tick up to the
  // last move, so that it counts as later where it cannot be told.
  Stamp After(Tick since) const {
    const bool exact = since > base_ + 1 || (since == 1 && base_ == 0);
    return exact ? Of(since) : 0;
  }

  // By how much the base has to move before a batch at `tick`; 0: not at all. Every stamp becomes
  // Earlier(stamp, move), by the caller, and then Move(move). A jump past the whole range (a table
  // not used for four billion batches) makes every stamp equally old.
  Tick MoveBefore(Tick tick) const {
    return tick > base_ + kMoveAt ? std::max<Tick>(kMoveBy, tick - base_ - kMoveBy) : 0;
  }
  void Move(Tick by) { base_ += by; }

  // A batch that names n keys; several times with one tick add up. Returns its stamp.
  Stamp BeginBatch(Tick tick, size_t n) {
    const Stamp now = Of(tick);
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
  static constexpr Stamp kMoveBy = 0x80000000u;
  static constexpr Stamp kMoveAt = 0xFFFF0000u;

  Tick base_ = 0;
  Stamp batch_ = 0;  // 0: none
  uint64_t batch_keys_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_STAMPS_H_
