// Route: the keys that this rank requests from each rank.
//
// The ids of all features that read one table are made distinct together, and the distinct keys are
// put in the order of their owners. That order is the table's *request*. Everything that is sent
// for these keys later (rows to this rank, gradients to their owners) is sent in this order.
// `index` is the position of each id's key in the request.
//
//   ids of the features      7 3 7 │ 3 9           two features of one table, two ranks
//   request                  9 7 │ 3               rank 0's, rank 1's
//   index                    1 2 1 │ 2 0
//   counts                   2, 1                  [tables, ranks]
//
// The message to a rank consists of 32-bit words: the number of keys of each table, then the keys,
// table by table. `own` is the message of this rank to itself; it is separate from the messages
// that are sent.
//
//   Route route;
//   DYNEMB_RETURN_IF_ERROR(route.Prepare(exec, tasks, ranks, self));
//   ... allocate num_words() and num_own_words() words ...
//   route.Write(exec, words, own);
//
// Contract. As for Dedup: the result is a function of the ids; a Route is reusable scratch; only
// one call at a time. Everything that a task points to must stay valid until Write returns.
#ifndef DYNEMB_LOOKUP_ROUTE_H_
#define DYNEMB_LOOKUP_ROUTE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
#include <vector>

#include "cc/lookup/dedup.h"
#include "cc/lookup/owners.h"
#include "cc/table/exec.h"
#include "cc/table/status.h"
#include "cc/table/types.h"

namespace dynemb {

// The ids of one feature.
struct RouteIds {
  const void* keys = nullptr;  // [n], of the table's key type
  size_t n = 0;
  uint32_t* index = nullptr;  // out [n]
};

struct RouteTask {
  KeyType key_type = KeyType::kInt64;
  Owners owners;
  std::vector<RouteIds> features;
};

// InvalidArgument if a task has owners for another number of ranks than `ranks`, or too many ids.
Status CheckRoute(const std::vector<RouteTask>& tasks, uint32_t ranks);
std::vector<KeyType> KeyTypesOf(const std::vector<RouteTask>& tasks);

// The sizes of requests, known before they are written.
struct RouteSizes {
  std::vector<int64_t> counts;  // [tables, ranks]: keys of a table, requested from a rank
  std::vector<size_t> words;    // [ranks]: the message to each, at most 2^31 - 1; 0 for `self`
  size_t num_own_words = 0;     // the message to `self`; 0 if `self` is kNoRank
};

// Computes the sizes of requests from these counts. InvalidArgument if the keys are too many for
// one message.
Status SizesOf(const std::vector<KeyType>& key_types, std::vector<int64_t> counts, uint32_t ranks,
               uint32_t self, RouteSizes* sizes);

// Words of a key in a message.
constexpr size_t WordsPerKey(KeyType type) { return SizeOf(type) / sizeof(int32_t); }

// Calls fn(table, rank, header, keys) for each table and rank: `header` is where the number of keys
// goes, and `keys` is where the keys go.
template <class Fn>
void ForEachSection(const std::vector<KeyType>& key_types, const RouteSizes& sizes, uint32_t self,
                    int32_t* words, int32_t* own, const Fn& fn) {
  const size_t tables = key_types.size();
  const auto ranks = static_cast<uint32_t>(sizes.words.size());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    int32_t* const message = rank == self ? own : words;
    size_t at = tables;
    for (size_t t = 0; t < tables; ++t) {
      fn(t, rank, message + t, message + at);
      at += static_cast<size_t>(sizes.counts[t * ranks + rank]) * WordsPerKey(key_types[t]);
    }
    words += sizes.words[rank];
  }
}

class Route {
 public:
  // Fails only if CheckRoute or SizesOf does. If `self` is kNoRank, all keys are sent.
  Status Prepare(Exec& exec, const std::vector<RouteTask>& tasks, uint32_t ranks,
                 uint32_t self = kNoRank);
  // The number of keys of a table that are requested from a rank.
  size_t count(size_t table, uint32_t rank) const {
    return static_cast<size_t>(sizes_.counts[table * sizes_.words.size() + rank]);
  }
  size_t num_words(uint32_t rank) const { return sizes_.words[rank]; }
  size_t num_words() const {
    return std::accumulate(sizes_.words.begin(), sizes_.words.end(), size_t{0});
  }
  size_t num_own_words() const { return sizes_.num_own_words; }
  const RouteSizes& sizes() const { return sizes_; }
  // Writes the messages, in the order of the ranks, and the message to `self`.
  void Write(Exec& exec, int32_t* words, int32_t* own = nullptr) const;
  // Frees memory that only a huge batch needs. Call it after Write.
  void Shrink();

 private:
  struct Prepared {
    RouteTask task;
    size_t n = 0;
    AnyDedup dedup;
    // The keys of all features, if there are several.
    Buffer<uint64_t> keys;  // room for either key width
    Buffer<uint32_t> index;
  };

  Status PrepareTask(Exec& exec, Prepared* prepared);
  template <class K>
  Status PrepareKeys(Exec& exec, Prepared* prepared);

  std::vector<KeyType> key_types_;  // [tables]
  uint32_t self_ = kNoRank;
  std::deque<Prepared> prepared_;  // the first ones, one per table, are in use
  RouteSizes sizes_;
};

// Reads the messages that the ranks sent: the reverse of Route::Write.
//
// Init returns InvalidArgument for words that no Route with the same number of tables can have
// written.
class Requests {
 public:
  // The messages as they were received.
  struct Received {
    const int32_t* words = nullptr;  // [num_words]: message after message
    int64_t num_words = 0;
    const int32_t* splits = nullptr;  // [ranks]: the words of each message
    uint32_t ranks = 0;
    uint32_t self = kNoRank;       // this rank, whose message is `own`, not in `words`
    const int32_t* own = nullptr;  // [num_own_words]
    int64_t num_own_words = 0;
  };

  Status Init(const Received& received, const std::vector<KeyType>& key_types);
  // The same in two steps, for words in a device's memory. Headers returns where the numbers of
  // keys, [tables], of each rank are, up to the first rank whose message cannot contain them. The
  // second Init gets copies of these numbers, and reads nothing else.
  static std::vector<const int32_t*> Headers(const Received& received, size_t tables);
  Status Init(const Received& received, const std::vector<KeyType>& key_types,
              const std::vector<const int32_t*>& headers);
  // The number of keys of a table that a rank requests.
  int64_t count(size_t table, uint32_t rank) const { return counts_[table * ranks_ + rank]; }
  const int64_t* counts(size_t table) const { return counts_.data() + table * ranks_; }
  // The address of these keys.
  const int32_t* begin(size_t table, uint32_t rank) const { return begins_[table * ranks_ + rank]; }
  int64_t num_keys(size_t table) const;
  // Writes keys[num_keys(table)], rank after rank.
  void CopyKeys(size_t table, void* keys) const;

 private:
  uint32_t ranks_ = 0;
  std::vector<KeyType> key_types_;
  std::vector<int64_t> counts_;         // [tables, ranks]
  std::vector<const int32_t*> begins_;  // [tables, ranks]: where the keys begin
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_ROUTE_H_
