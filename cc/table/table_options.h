// The options of a table, the state that an optimizer keeps in its rows, and its statistics.
#ifndef DYNEMB_TABLE_TABLE_OPTIONS_H_
#define DYNEMB_TABLE_TABLE_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc/table/admission.h"
#include "cc/table/cold_rows.h"
#include "cc/table/initializer.h"
#include "cc/table/types.h"

namespace dynemb {

// Which row a full table evicts to make room for a new key, of the rows near the key's slot;
// score.h has the details.
enum class EvictStrategy : uint8_t {
  kLru,       // the least recently accessed one
  kLfu,       // the one that was looked up least often
  kEpochLru,  // the least recently accessed one, too
  kEpochLfu,  // of those that were not looked up for most epochs, the one looked up least often
  kScore,     // the one with the lowest score, which the caller sets
  kNone,      // it evicts nothing; the insert fails
};

// The clock by which rows expire (expiry.h).
enum class TtlClock : uint8_t {
  kSteps,  // the number of batches that may insert
  kWall,   // the system's clock, in nanoseconds
  kData,   // the time that the user sets (Table::SetDataTime)
};

// The memory of the rows. cc/device implements the device tiers, kHbm and kHybrid.
enum class Tier : uint8_t {
  kHost,    // host memory; Table::Create
  kHbm,     // device memory
  kHybrid,  // device memory for the first max_hbm_bytes of rows, host memory for the rest
};

struct TableOptions {
  std::string name;
  KeyType key_type = KeyType::kInt64;
  DType dtype = DType::kFloat32;
  int64_t dim = 0;
  int64_t init_capacity = 1024;  // rows whose memory is committed at once
  int64_t max_capacity = 0;      // most rows; 0: limited by memory only
  double max_load_factor = 0.88;
  EvictStrategy evict_strategy = EvictStrategy::kLru;
  int64_t epoch_steps = 0;  // inserting lookups per epoch; 0: only AdvanceEpoch begins epochs
  int64_t ttl = 0;          // the age at which a row expires, by ttl_clock; 0: rows do not expire
  TtlClock ttl_clock = TtlClock::kSteps;
  bool ttl_since_access = false;  // the age since the last access, not since the last update
  int64_t ttl_min_rows = 0;       // nothing expires in a table of at most this number of rows
  AdmissionOptions admission;
  Tier tier = Tier::kHost;
  uint64_t max_hbm_bytes = 0;  // for kHybrid
  // The folder of the rows that are not in memory, and the most bytes of rows in memory; empty: all
  // rows are in memory. For kHost. The creator of the table (cc/tf) passes them on (cc/file).
  std::string file_path;
  uint64_t max_dram_bytes = 0;
  uint64_t seed = 0;
  bool stochastic_rounding = true;  // when 16-bit vectors are updated
  std::vector<ColumnInit> initializer{ColumnInit{InitKind::kConstant, 0.0f, 0.0f}};
};

// The state that an optimizer keeps in every row: for each of its variables, widths[i] floats that
// start at inits[i].
struct StateSpec {
  std::string optimizer;  // its name and its flags
  std::vector<int64_t> widths;
  std::vector<float> inits;

  int64_t width() const;  // of all variables together
  bool operator==(const StateSpec& o) const {
    return optimizer == o.optimizer && widths == o.widths && inits == o.inits;
  }
};

// The properties of a flush (Table::Flush) besides its rows.
struct FlushInfo {
  Tick tick = 0;
  int64_t utc_ns = 0;
  StateSpec state_spec{};
};

// Byte counts are for the memory in use now. Event counts begin when the table is created.
struct TableStats {
  uint64_t size = 0;   // rows held
  uint64_t slots = 0;  // size / slots is the load
  uint64_t index_bytes = 0;
  uint64_t row_bytes = 0;
  uint64_t metadata_bytes = 0;  // index, keys and times: everything except vectors and state
  uint64_t hits = 0;            // keys that were looked up and had a row
  uint64_t device_hits = 0;     // hits in device memory
  uint64_t misses = 0;          // keys that were looked up and had no row
  uint64_t inserts = 0;
  uint64_t evictions = 0;
  uint64_t erased = 0;
  uint64_t expired = 0;              // rows that were removed because they had expired
  uint64_t refused = 0;              // keys that a full table did not take
  uint64_t unadmitted = 0;           // occurrences of keys that admission refused
  uint64_t dropped_gradients = 0;    // of keys without a row, or whose row was evicted since lookup
  uint64_t nonfinite_gradients = 0;  // rows whose gradient had a NaN or Inf
  uint64_t device_rows = 0;          // row places in use in device memory
  uint64_t promotions = 0;           // rows moved to device memory
  ColdStats cold;                    // of rows that are not in memory
};

}  // namespace dynemb

#endif  // DYNEMB_TABLE_TABLE_OPTIONS_H_
