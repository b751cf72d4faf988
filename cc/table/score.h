// Scores: the order in which a full table evicts its rows.
//
// Each slot has a score of 32 bits. A full table evicts, of the rows near the new key's slot, one
// with the lowest score that the running batch does not use (bucket_ops.h). The table's strategy
// defines the score:
//
//   kLru, kEpochLru, kNone   the stamp of the last access (stamps.h). All lookups and writes are
//                            accesses. Epochs never decrease, so the order by epoch and last access
//                            is the order by last access.
//   kLfu                     the number of times that inserting lookups have asked for the key.
//                            A repeated key counts each time.
//   kEpochLfu                the epoch of the last inserting lookup of the key in the high 12 bits,
//                            and the number of kLfu in the low 20 bits.
//   kScore                   a number that the caller sets; 0 for a new row.
//
// Counts saturate. A row that a call other than a lookup creates has a count of 1.
//
// Epochs have numbers from 0 to 4095. When the number would exceed this, 2048 is subtracted from
// the table's epoch and from the epochs of all rows, saturating at 0: rows whose epochs are more
// than 2047 epochs old become equally old. A snapshot that is read meanwhile has rows of both
// numberings, and rows of a delta may rank below rows of its base that were used earlier.
#ifndef DYNEMB_TABLE_SCORE_H_
#define DYNEMB_TABLE_SCORE_H_

#include <cstdint>

#include "cc/table/portability.h"
#include "cc/table/stamps.h"
#include "cc/table/table_options.h"
#include "cc/table/types.h"

namespace dynemb {

// How a call changes the scores of the rows that it finds.
struct Touch {
  enum class Kind : uint8_t {
    kNothing,  // it does not change them
    kSet,      // to `value`
    kCount,    // it adds the number of times that it finds the row, and sets the other bits
  };
  Kind kind = Kind::kNothing;
  Score value = 0;       // kSet: the score; kCount: the bits above the count
  Score count_mask = 0;  // kCount: the bits of the count

  // kCount: the score after `score`, for a row that is found n times.
  DYNEMB_HD Score Counted(Score score, uint32_t n) const {
    const uint64_t count = uint64_t{score & count_mask} + n;
    return value | (count < count_mask ? static_cast<Score>(count) : count_mask);
  }
};

// The strategy of a table, and its epoch.
class Scoring {
 public:
  static constexpr uint32_t kCountBits = 20;  // of kEpochLfu
  static constexpr uint32_t kLastEpoch = (1u << (32 - kCountBits)) - 1;

  Scoring() = default;
  Scoring(EvictStrategy strategy, uint64_t epoch_steps)
      : strategy_(strategy), epoch_steps_(epoch_steps) {}

  EvictStrategy strategy() const { return strategy_; }
  // Whether scores are stamps.
  bool by_time() const {
    return strategy_ == EvictStrategy::kLru || strategy_ == EvictStrategy::kEpochLru ||
           strategy_ == EvictStrategy::kNone;
  }
  bool has_epochs() const { return strategy_ == EvictStrategy::kEpochLfu; }
  uint32_t epoch() const { return epoch_; }
  // The steps of this epoch.
  uint64_t steps() const { return steps_; }
  // Continues another table's epoch.
  void Restart(uint32_t epoch, uint64_t steps) { epoch_ = epoch, steps_ = steps; }

  // The touch of a lookup, and of a call that writes rows. `now` is the stamp of the batch.
  Touch Lookup(Stamp now, bool inserts) const {
    if (by_time()) return {Touch::Kind::kSet, now, 0};
    if (strategy_ == EvictStrategy::kScore || !inserts) return {};
    return {Touch::Kind::kCount, EpochBits(), CountMask()};
  }
  Touch Write(Stamp now) const { return Lookup(now, false); }
  // The score of a new row. If a lookup creates it, this is the score of the first time that the
  // key occurs; its other occurrences count as for any row.
  Score New(Stamp now) const {
    if (by_time()) return now;
    return strategy_ == EvictStrategy::kScore ? 0 : EpochBits() | 1;
  }
  // The order of the scores.
  StampOrder Order(const Stamps& stamps) const {
    return by_time() ? stamps.order() : StampOrder{0};
  }

  // Call when an inserting lookup begins, with its tick. Calls with one tick are one step. Returns
  // whether the epoch must advance.
  bool Step(Tick tick) {
    if (epoch_steps_ == 0 || tick == last_step_) return false;
    last_step_ = tick;
    const bool ends = steps_ == epoch_steps_;
    steps_ = ends ? 1 : steps_ + 1;
    return ends;
  }
  // Begins the next epoch. Returns whether Rebased must then be applied to all scores.
  bool Advance() {
    if (epoch_ < kLastEpoch) {
      ++epoch_;
      return false;
    }
    epoch_ -= kRebase - 1;
    return true;
  }
  DYNEMB_HD static Score Rebased(Score score) {
    const uint32_t epoch = score >> kCountBits;
    const uint32_t count = score & ((1u << kCountBits) - 1);
    return (epoch < kRebase ? 0 : epoch - kRebase) << kCountBits | count;
  }
  // Loaded rows have scores up to this one.
  void Adopt(Score score) {
    if (has_epochs() && score >> kCountBits > epoch_) epoch_ = score >> kCountBits;
  }
  // The greatest score that a row may have.
  Score Last() const { return has_epochs() ? EpochBits() | CountMask() : ~Score{0}; }

 private:
  static constexpr uint32_t kRebase = 2048;

  Score EpochBits() const { return has_epochs() ? epoch_ << kCountBits : 0; }
  Score CountMask() const { return has_epochs() ? (1u << kCountBits) - 1 : ~Score{0}; }

  EvictStrategy strategy_ = EvictStrategy::kLru;
  uint32_t epoch_ = 0;
  uint64_t epoch_steps_ = 0;  // steps per epoch; 0: epochs advance by Advance only
  uint64_t steps_ = 0;        // in this epoch
  Tick last_step_ = 0;
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_SCORE_H_
