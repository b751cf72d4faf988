// Route: which keys this rank asks which rank for.
//
// The ids of all features that read one table are made distinct together, and the distinct keys are
// put in the order of their owners. That order is the table's *request*: whatever travels for these
// keys later (rows to here, gradients to their owners) travels in it. `index` says for each id
// where in the request its key stands.
//
//   ids of the features      7 3 7 │ 3 9           two features of one table, two ranks
//   request                  9 7 │ 3               rank 0's, rank 1's
//   index                    1 2 1 │ 2 0
//   counts                   2, 1                  [tables, ranks]
//
// The message to a rank, in 32-bit words: for each table the number of keys, then table by table
// the keys. The message of this rank to itself, `own`, stays apart from those that travel.
//
//   Route route;
//   DYNEMB_RETURN_IF_ERROR(route.Prepare(exec, tasks, ranks, self));
//   ... allocate num_words() and num_own_words() words ...
//   route.Write(exec, words, own);
//
// Contract. As of Dedup: the result is a function of the ids; reusable scratch; one call at a time.
// What tasks point to must stay until Write returns.
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

// InvalidArgument where the owners of a task are not of so many `ranks`, or its ids are too many.
Status CheckRoute(const std::vector<RouteTask>& tasks, uint32_t ranks);
std::vector<KeyType> KeyTypesOf(const std::vector<RouteTask>& tasks);

// What is known of a request before it is written.
struct RouteSizes {
  std::vector<int64_t> counts;  // [tables, ranks]: keys of a table that a rank is asked for
  std::vector<size_t> words;    // [ranks]: of the message to each, at most 2^31 - 1; 0 for `self`
  size_t num_own_words = 0;     // of the message to `self`; 0 for kNoRank
};

// The words that so many keys make. InvalidArgument where they are too many for one message.
Status SizesOf(const std::vector<KeyType>& key_types, std::vector<int64_t> counts, uint32_t ranks,
               uint32_t self, RouteSizes* sizes);

// Words of a key in a message.
constexpr size_t WordsPerKey(KeyType type) { return SizeOf(type) / sizeof(int32_t); }

// Where the number of keys of each table for each rank goes, and the keys: fn(table, rank, header,
// keys).
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
  // Fails as CheckRoute and SizesOf do. `self` may be kNoRank: then all travels.
  Status Prepare(Exec& exec, const std::vector<RouteTask>& tasks, uint32_t ranks,
                 uint32_t self = kNoRank);
  // Keys of a table that a rank is asked for.
  size_t count(size_t table, uint32_t rank) const {
    return static_cast<size_t>(sizes_.counts[table * sizes_.words.size() + rank]);
  }
  size_t num_words(uint32_t rank) const { return sizes_.words[rank]; }
  size_t num_words() const {
    return std::accumulate(sizes_.words.begin(), sizes_.words.end(), size_t{0});
  }
  size_t num_own_words() const { return sizes_.num_own_words; }
  const RouteSizes& sizes() const { return sizes_; }
  // The messages, in the order of the ranks, and that to `self`.
  void Write(Exec& exec, int32_t* words, int32_t* own = nullptr) const;
  // Gives back what only a huge batch needs, once it is written.
  void Shrink();

 private:
  struct Prepared {
    RouteTask task;
    size_t n = 0;
    Dedup<uint64_t> dedup64;  // the one of the key's width is used
    Dedup<uint32_t> dedup32;
    std::vector<uint64_t> keys;   // of all features, where there are several; of either width
    std::vector<uint32_t> index;  // the same
  };

  Status PrepareTask(Exec& exec, Prepared* prepared);
  template <class K>
  Status PrepareKeys(Exec& exec, Prepared* prepared, Dedup<K>* dedup);

  std::vector<KeyType> key_types_;  // [tables]
  uint32_t self_ = kNoRank;
  std::deque<Prepared> prepared_;  // the first ones, one for each table, are in use
  RouteSizes sizes_;
};

// Reads the messages that `ranks` ranks sent: the reverse of Route::Write.
//
// InvalidArgument for words that no Route of as many tables has written.
class Requests {
 public:
  // Messages as they came.
  struct Received {
    const int32_t* words = nullptr;  // [num_words]: message after message
    int64_t num_words = 0;
    const int32_t* splits = nullptr;  // [ranks]: the words of each
    uint32_t ranks = 0;
    uint32_t self = kNoRank;  // whose message is not among them, but `own`
    const int32_t* own = nullptr;
    int64_t num_own_words = 0;
  };

  Status Init(const Received& received, const std::vector<KeyType>& key_types);
  // The same in two steps, where the words are in a device's memory. Of the ranks before the first
  // that cannot have sent as many words: where the numbers of keys, [tables], lie. Then what was
  // found there; nothing else is read.
  static std::vector<const int32_t*> Headers(const Received& received, size_t tables);
  Status Init(const Received& received, const std::vector<KeyType>& key_types,
              const std::vector<const int32_t*>& headers);
  // Keys of a table that a rank asks for.
  int64_t count(size_t table, uint32_t rank) const { return counts_[table * ranks_ + rank]; }
  const int64_t* counts(size_t table) const { return counts_.data() + table * ranks_; }
  // Where they are.
  const int32_t* begin(size_t table, uint32_t rank) const { return begins_[table * ranks_ + rank]; }
  int64_t num_keys(size_t table) const;
  // keys[num_keys(table)], rank after rank.
  void CopyKeys(size_t table, void* keys) const;

 private:
  uint32_t ranks_ = 0;
  std::vector<KeyType> key_types_;
  std::vector<int64_t> counts_;         // [tables, ranks]
  std::vector<const int32_t*> begins_;  // [tables, ranks]: of the keys
};

}  // namespace dynemb

#endif  // DYNEMB_LOOKUP_ROUTE_H_
